"""Host code that queues launches, traced once over symbols and repeated as straight-line code.

From scene to scene such code computes other sizes and addresses, and launches the same kernels. So
it runs once over symbols: what it computes with them becomes a line of Python, what it asks about
them a guard, memory that it takes a call, and a launch a call of the compiled kernel's launcher. A
symbol that somebody needs as a number becomes one behind a guard: code that cannot be traced ends
in lines that serve no other scene, never in wrong ones. (`torch.compile` does the same to graphs of
operations, with guards on their sizes.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch

from .symbolic import NUMBERS, Memory, NotTracedError, Sym, code_of
from .target import Target, device_index


class Line(NamedTuple):
    """text: a statement.  target: the name that it assigns, if any.  needs: the names that it
    reads.  memory: what its work reads or writes on the device.  plain: it is arithmetic, or a
    guard; early: and knows no address of memory that is taken, so that it can come first."""

    text: str
    target: str | None
    needs: frozenset[str]
    memory: frozenset[str]
    plain: bool = False
    early: bool = False


class Trace:
    """The lines of one scene, in two functions: up to where the host waits for numbers of the
    device, and behind that.

    space: what their names stand for; constants: of it, those of the first function but tensors,
    whose addresses it says.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.names, self.space = device, list[str](), dict[str, Any]()
        self._lines: list[Line] = []
        self._known: dict[str, Sym] = {}
        self._asked: set[str] = set()
        self._reached: dict[str, frozenset[str]] = {}  # memory that holds addresses
        self._constants: dict[int, str] = {}

    # what the function is given

    def argument(self) -> str:
        """The name of another one."""
        self.names.append(f"a{len(self.names)}")
        return self.names[-1]

    def number(self, hint: int) -> Sym:
        return Sym(self, self.argument(), hint)

    def tensor(self, name: str, shape: tuple[Any, ...], dtype: torch.dtype, at: Sym) -> Memory:
        """The tensor that the argument `name` is, at the address that another one is."""
        return Memory(self, name, shape, dtype, self.device, at)

    # what the host code does

    def computed(self, code: str, hint: int, *operands: Any) -> Sym:
        found = self._known.get(code)
        if found is None:
            symbols = [one for one in operands if type(one) is Sym]
            memory = frozenset().union(*[one.memory for one in symbols])
            found = self._known[code] = Sym(self, f"t{len(self._known)}", hint, memory)
            needs = frozenset(one.code for one in symbols)
            text = f"{found.code} = {code}"
            self._lines.append(Line(text, found.code, needs, frozenset(), True, not memory))
        return found

    def asked(self, code: str, outcome: bool, *operands: Any) -> bool:
        if code not in self._asked:
            self._asked.add(code)
            needs, memory = self._read(operands)
            text = f"if {'not ' if outcome else ''}({code}): return None"
            self._lines.append(Line(text, None, needs, frozenset(), True, not memory))
        return outcome

    def line(self, text: str, *operands: Any) -> None:
        needs, memory = self._read(operands)
        self._lines.append(Line(text, None, needs, memory))

    def call(
        self, function: Callable[..., torch.Tensor], args: Sequence[Any], shape: Sequence[Any],
        dtype: torch.dtype,
    ) -> torch.Tensor:  # fmt: skip
        """A call that makes a tensor of this shape, for which `Memory` stands."""
        name = f"m{len(self._reached)}"
        needs, memory = self._read(args)
        text = f"{name} = {self.constant(function)}({', '.join(map(self.code, args))})"
        own = frozenset({name})
        self._lines.append(Line(text, name, needs, memory | own))
        self._reached[name] = memory
        at = Sym(self, f"{name}_at", 0, own)
        self._lines.append(Line(f"{at.code} = {name}.data_ptr()", at.code, own, own, True))
        made: Any = Memory(self, name, tuple(shape), dtype, self.device, at)
        return cast("torch.Tensor", made)

    def launch(
        self, kernel: Any, grid: tuple[Any, ...], args: Sequence[Any], constants: Sequence[Any],
        key: Any,
    ) -> None:  # fmt: skip
        """A launch of a kernel that is compiled. constants: that its launcher takes."""
        entry = kernel.compiled(device_index(self.device), _concrete(key))
        if entry is None:
            raise NotTracedError(f"{kernel.name} is not compiled yet")
        call, before, between = entry
        values = [arg if type(arg) in NUMBERS or type(arg) is float else arg.data_ptr()
                  for arg in args]  # fmt: skip
        for arg in args:
            if isinstance(arg, torch.Tensor):
                self.constant(arg)  # stays where it is
        given = [
            *([f"*{self.constant(before)}"] if before else []), *map(code_of, grid), "stream",
            *([f"*{self.constant(between)}"] if between else []), *map(code_of, values),
            *map(self.code, constants),
        ]  # fmt: skip
        self.line(f"{self.constant(call)}({', '.join(given)})", *grid, *values)

    def waits(self, given: Any, hints: Sequence[int]) -> list[Sym]:
        """What the first function returns; the second one is given as many numbers."""
        self.line(f"return {self.code(given)}, locals()", given)
        self._first, self._lines = self._lines, []
        self.constants = {
            name: value for name, value in self.space.items() if not isinstance(value, torch.Tensor)
        }
        return [Sym(self, f"w{place}", hint) for place, hint in enumerate(hints)]

    # how lines say it

    def constant(self, value: Any) -> str:
        """A name for an object that lives as long as the function."""
        name = self._constants.get(id(value))
        if name is None:
            name = self._constants[id(value)] = f"k{len(self._constants)}"
            self.space[name] = value
        return name

    def code(self, value: Any) -> str:
        kind = type(value)
        if value is None or kind in NUMBERS or kind is float:
            return code_of(value)
        if kind is Memory:
            return str(value.code)
        if kind in (tuple, list):
            inside = "".join(f"{self.code(one)}, " for one in value)
            return f"({inside})" if kind is tuple else f"[{inside}]"
        if isinstance(value, (torch.dtype, torch.device)):
            return self.constant(value)
        if "__reduce__" in kind.__dict__:
            function, args = value.__reduce__()
            return f"{self.constant(function)}({', '.join(map(self.code, args))})"
        raise NotTracedError(f"{kind.__name__} in a line")

    def _read(self, values: Any) -> tuple[frozenset[str], frozenset[str]]:
        """(names, memory) that lines with these values read."""
        needs, memory = set[str](), set[str]()
        for one in _leaves(values):
            if type(one) is Sym:
                needs.add(one.code)
                memory |= one.memory
            else:
                needs |= one.names
                memory |= one.at.memory
        return frozenset(needs), frozenset(memory)

    def sources(self, result: Any, numbers: int) -> tuple[str, str]:
        """Both functions: of (stream, *arguments), which returns what `waits` was given and its
        names, and of (names, *numbers), which returns `result`. None where a guard fails."""
        self.line(f"return {self.code(result)}", result)
        second = list(_wanted(self._lines, set()))
        made = {line.target for line in second} | {f"w{place}" for place in range(numbers)}
        needed = frozenset().union(*[line.needs for line in second]) - made
        held = frozenset().union(*[line.memory for line in second])
        # Memory that the second function's work needs is not given back by the first one.
        first = list(_wanted(self._first, set(needed)))
        first[-1] = first[-1]._replace(memory=first[-1].memory | held)
        head = [line.text for line in _freed(first, self._reached)]
        names = sorted(needed | {"stream"} | (held - made))
        start = next(place for place, line in enumerate(second) if not line.plain)
        second.insert(start, Line("names.clear()", None, frozenset(), frozenset()))
        tail = [line.text for line in _freed(second, self._reached)]
        numbered = "".join(f", w{place}" for place in range(numbers))
        return (
            _source("first", ["stream", *self.names], head),
            _source(f"second(names{numbered})", [], [
                *(f"{name} = names[{name!r}]" for name in names), *tail
            ]),
        )  # fmt: skip

    def compiled(self, source: str) -> Callable[..., Any]:
        """One of them."""
        space = dict(self.space)
        exec(compile(source, "<traced launches>", "exec"), space)
        made: Callable[..., Any] = space.get("first") or space["second"]
        return made


def _leaves(value: Any) -> Iterator[Any]:
    """The symbols and the memory in a value."""
    if type(value) in (Sym, Memory):
        yield value
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from _leaves(one)
    elif type(value) is not torch.device and "__reduce__" in type(value).__dict__:
        yield from _leaves(value.__reduce__()[1])


def _concrete(key: Any) -> Any:
    """A key with numbers for symbols."""
    if type(key) is Sym:
        return key.__index__()
    return tuple(map(_concrete, key)) if type(key) is tuple else key


def _source(name: str, arguments: Sequence[str], lines: Sequence[str]) -> str:
    head = name if name.endswith(")") else f"{name}({', '.join(arguments)})"
    return f"def {head}:\n    " + "\n    ".join(lines)


def _wanted(lines: list[Line], needed: set[str]) -> Iterator[Line]:
    """Without arithmetic whose results nobody reads. needed: names that others read."""
    kept = list[Line]()
    lines = [*[one for one in lines if one.early], *[one for one in lines if not one.early]]
    for line in reversed(lines):
        if not line.plain or line.target is None or line.target in needed:
            needed |= line.needs
            kept.append(line)
    return reversed(kept)


def _freed(lines: list[Line], reached: dict[str, frozenset[str]]) -> Iterator[Line]:
    """With memory given back behind the last line whose work needs it."""

    def all_of(names: frozenset[str]) -> set[str]:
        found, new = set[str](), set(names)
        while new:
            found |= new
            new = {one for name in new for one in reached.get(name, ())} - found
        return found

    last: dict[str, int] = {}
    for place, line in enumerate(lines):
        last.update(dict.fromkeys(all_of(line.memory), place))
    for place, line in enumerate(lines):
        yield line
        ended = sorted(name for name, end in last.items() if end == place)
        if ended and place + 1 < len(lines):
            text = f"{' = '.join(ended)} = None"
            yield Line(text, None, frozenset(), frozenset())


class TracedTarget(Target):
    """A target whose launches go to a trace."""

    trace: Trace

    @staticmethod
    def of(target: Target, trace: Trace) -> TracedTarget:
        made = object.__new__(TracedTarget)
        made.__dict__.update(target.__dict__)
        made.__dict__.update(raw=False, takes_addresses=False, trace=trace)
        return made
