"""Host code that queues launches, traced once over symbols and repeated in straight lines.

From scene to scene such code computes other sizes and addresses, and launches the same kernels. So
it runs once over symbols: what it computes with them becomes a step of a program, what it asks
about them a guard, memory that it takes a call, and a launch a call of the compiled kernel's
launcher. A symbol that somebody needs as a number becomes one behind a guard: code that cannot be
traced ends in steps that serve no other scene, never in wrong ones. (`torch.compile` does the same
to graphs of operations, with guards on their sizes.) The compiled helper runs the steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch

from ...refusals import Refusal, Why
from .host_program import Encoder, Steps
from .symbolic import NUMBERS, Memory, Sym
from .target import Target, device_index


class Step(NamedTuple):
    """opcode, args: see `Encoder.write`.  target: the name that it assigns, if any.  needs: the names
    that it reads.  memory: what its work reads or writes on the device.  plain: it is arithmetic,
    or a guard; early: and knows no address of memory that is taken, so that it can come first."""

    opcode: str
    args: tuple[Any, ...]
    target: str | None = None
    needs: frozenset[str] = frozenset()
    memory: frozenset[str] = frozenset()
    plain: bool = False
    early: bool = False


class Traced(NamedTuple):
    """The programs of a trace: up to where the host waits for numbers of the device, and behind
    that. keep_alive: tensors whose addresses they contain."""

    first: Steps
    second: Steps
    keep_alive: tuple[torch.Tensor, ...]


class Trace:
    """The steps of one scene, in two programs: up to where the host waits for numbers of the
    device, and behind that."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._numbers, self._tensors = ["stream"], list[str]()
        self._stream = Sym(self, "stream", 0)
        self._steps: list[Step] = []
        self._symbols: dict[Any, Sym] = {}
        self._compared: set[Any] = set()
        self._reached: dict[str, frozenset[str]] = {}  # memory that holds addresses
        self._keep_alive: dict[int, torch.Tensor] = {}

    # what a run is handed

    def number(self, hint: int) -> Sym:
        """The next number, behind the stream."""
        self._numbers.append(f"a{len(self._numbers)}")
        return Sym(self, self._numbers[-1], hint)

    def tensor(self, shape: tuple[Any, ...], dtype: torch.dtype, at: Sym) -> Memory:
        """The next tensor, of this shape and dtype, at the address that a number is."""
        self._tensors.append(f"x{len(self._tensors)}")
        return Memory(self, self._tensors[-1], shape, dtype, self.device, at)

    # what the host code does

    def computed(self, opcode: str, hint: int, *operands: Any) -> Sym:
        """The result of arithmetic, one symbol for equal operands. opcode: of `host_program.OPCODES`.  hint: its
        value in this scene."""
        key = opcode, *map(_key, operands)
        symbol = self._symbols.get(key)
        if symbol is None:
            symbols = [operand for operand in operands if type(operand) is Sym]
            memory = frozenset().union(*[operand.memory for operand in symbols])
            symbol = self._symbols[key] = Sym(self, f"t{len(self._symbols)}", hint, memory)
            needs = frozenset(operand.name for operand in symbols)
            self._steps.append(Step(opcode, operands, symbol.name, needs, plain=True, early=not memory))
        return symbol

    def compared(self, opcode: str, outcome: bool, *operands: Any) -> bool:
        """The outcome of a comparison in this scene, which becomes a guard. opcode: of `host_program.GUARDS`."""
        key = opcode, *map(_key, operands)
        if key not in self._compared:
            self._compared.add(key)
            needs, memory = _read(operands)
            args = (*operands, bool(outcome))
            self._steps.append(Step(opcode, args, None, needs, plain=True, early=not memory))
        return outcome

    def run(self, function: Callable[..., Any], *args: Any) -> None:
        """A call for what it does on the device."""
        self._steps.append(Step("CALL", (function, *args), None, *_read(args)))

    def call(
        self, function: Callable[..., torch.Tensor], args: Sequence[Any], shape: Sequence[Any], dtype: torch.dtype
    ) -> torch.Tensor:
        """A call that makes a tensor of this shape and dtype, for which `Memory` stands."""
        return self._memory(self._called(function, args), None, tuple(shape), dtype)

    def several(
        self,
        function: Callable[..., Sequence[torch.Tensor]],
        args: Sequence[Any],
        sizes: Sequence[Any],
        dtype: torch.dtype,
    ) -> list[torch.Tensor]:
        """A call that makes vectors [size] of these sizes and this dtype."""
        name = self._called(function, args)
        return [self._memory(name, item, (size,), dtype) for item, size in enumerate(sizes)]

    def _called(self, function: Callable[..., Any], args: Sequence[Any]) -> str:
        name = f"m{len(self._reached)}"
        needs, memory = _read(args)
        step = Step("CALL", (function, *args), name, needs, memory | {name})
        self._steps.append(step)
        self._reached[name] = memory
        return name

    def _memory(self, name: str, item: int | None, shape: tuple[Any, ...], dtype: torch.dtype) -> torch.Tensor:
        own = frozenset({name})
        at = Sym(self, f"{name}_at" if item is None else f"{name}_{item}_at", 0, own)
        result: Any = Memory(self, name, shape, dtype, self.device, at, item)
        self._steps.append(Step("ADDRESS", (result,), at.name, own, own, True))
        return cast("torch.Tensor", result)

    def launch(
        self, kernel: Any, grid: tuple[Any, ...], args: Sequence[Any], constants: Sequence[Any], key: Any
    ) -> None:
        """A launch of a kernel. constants: that its launcher takes. Raises Refusal where the kernel is not compiled
        for this key."""
        entry = kernel.compiled(device_index(self.device), _concrete(key))
        if entry is None:
            raise Refusal(Why.TRACE_NOT_COMPILED, kernel.name)
        call, prefix, between = entry
        values = [arg if type(arg) in NUMBERS or type(arg) is float else arg.data_ptr() for arg in args]
        self._keep_alive |= {id(arg): arg for arg in args if isinstance(arg, torch.Tensor)}
        operands = (call, *prefix, *grid, self._stream, *between, *values, *constants)
        self._steps.append(Step("LAUNCH", operands, None, *_read((grid, values))))

    def waits(self, value: Any, hints: Sequence[int]) -> list[Sym]:
        """What the first program returns; the second one is handed as many numbers."""
        self._steps.append(Step("RETURN", (value,), None, *_read((value,))))
        self._first, self._steps = self._steps, []
        self._waited = [f"w{index}" for index in range(len(hints))]
        return [Sym(self, name, hint) for name, hint in zip(self._waited, hints, strict=True)]

    def traced(self, result: Any) -> Traced:
        """Both programs; the second returns `result`. Raises Refusal where a step cannot be written."""
        self._steps.append(Step("RETURN", (result,), None, *_read((result,))))
        second = list(_needed(self._steps, set()))
        targets = {*[step.target for step in second], *self._waited}
        needed = frozenset().union(*[step.needs for step in second]) - targets
        memory = frozenset().union(*[step.memory for step in second])
        # Memory that the second program's work needs is not given back by the first one.
        first = list(_needed(self._first, set(needed)))
        first[-1] = first[-1]._replace(memory=first[-1].memory | memory)
        begun = next(index for index, step in enumerate(second) if not step.plain)
        second.insert(begun, Step("COMMIT", ()))
        head = Encoder(self._numbers, self._tensors)
        for step in _freed(first, self._reached):
            head.write(step.opcode, step.target, step.args)
        tail = Encoder(self._waited, (), head)
        tail.hold(sorted(memory - targets - set(self._tensors)))
        for step in _freed(second, self._reached):
            tail.write(step.opcode, step.target, step.args)
        return Traced(head.steps(), tail.steps(), tuple(self._keep_alive.values()))


def _key(operand: Any) -> Any:
    return operand.name if type(operand) is Sym else operand


def _read(values: Any) -> tuple[frozenset[str], frozenset[str]]:
    """(names, memory) that steps with these values read."""
    needs, memory = set[str](), set[str]()
    for leaf in _leaves(values):
        if type(leaf) is Sym:
            needs.add(leaf.name)
            memory |= leaf.memory
        else:
            needs |= leaf.names
            memory |= leaf.at.memory
    return frozenset(needs), frozenset(memory)


def _leaves(value: Any) -> Iterator[Any]:
    """The symbols and the memory in a value."""
    if type(value) in (Sym, Memory):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _leaves(part)
    elif type(value) is not torch.device and "__reduce__" in type(value).__dict__:
        yield from _leaves(value.__reduce__()[1])


def _concrete(key: Any) -> Any:
    """A key with numbers for symbols."""
    if type(key) is Sym:
        return key.__index__()
    return tuple(map(_concrete, key)) if type(key) is tuple else key


def _needed(steps: list[Step], needed: set[str]) -> Iterator[Step]:
    """The steps but for arithmetic whose results nobody reads. needed: names that others read."""
    needed_steps = list[Step]()
    steps = [*[other for other in steps if other.early], *[other for other in steps if not other.early]]
    for step in reversed(steps):
        if not step.plain or step.target is None or step.target in needed:
            needed |= step.needs
            needed_steps.append(step)
    return iter(needed_steps[::-1])


def _freed(steps: list[Step], reached: dict[str, frozenset[str]]) -> Iterator[Step]:
    """With memory given back behind the last step whose work needs it."""

    def all_of(names: frozenset[str]) -> set[str]:
        closure, new = set[str](), set(names)
        while new:
            closure |= new
            new = {address for name in new for address in reached.get(name, ())} - closure
        return closure

    last: dict[str, int] = {}
    for index, step in enumerate(steps):
        last.update(dict.fromkeys(all_of(step.memory), index))
    for index, step in enumerate(steps):
        yield step
        ended = sorted(name for name, end in last.items() if end == index)
        if ended and index + 1 < len(steps):
            yield Step("DROP", tuple(ended))


class TracedTarget(Target):
    """A target whose launches go to a trace."""

    trace: Trace

    @staticmethod
    def of(target: Target, trace: Trace) -> TracedTarget:
        """A copy of `target` whose launches go to `trace`, and take tensors, not addresses."""
        copy = object.__new__(TracedTarget)
        copy.__dict__.update(target.__dict__)
        copy.__dict__.update(raw=False, takes_addresses=False, trace=trace)
        return copy
