"""Steps of traced host code as the compiled helper runs them: `HostProgram` in
`native/host_program.c`."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ... import native
from ...refusals import Refusal, Why
from .symbolic import NUMBERS, Memory, Sym

# In the order of the helper.
OPCODES = (
    "ADD",
    "SUB",
    "MUL",
    "FLOORDIV",
    "MOD",
    "SHL",
    "MAX",
    "NEG",
    "BITS",
    "EQ",
    "NE",
    "LT",
    "LE",
    "GT",
    "GE",
    "INT",
    "TUPLE",
    "LIST",
    "CALL",
    "ITEM",
    "ADDRESS",
    "LAUNCH",
    "DROP",
    "COMMIT",
    "RETURN",
)
_NUMBER_OF = {opcode: number for number, opcode in enumerate(OPCODES)}
GUARDS = frozenset({"EQ", "NE", "LT", "LE", "GT", "GE"})


class Steps(NamedTuple):
    """What a `HostProgram` is made of: `words` and `carried` are of int32, `numbers` of int64."""

    words: bytes
    numbers: bytes
    objects: tuple[Any, ...]
    carried: bytes

    def same(self, other: Steps) -> bool:
        """Whether both do the same with the same objects."""
        if self[:2] != other[:2] or self.carried != other.carried:
            return False
        return len(self.objects) == len(other.objects) and all(map(_same, self.objects, other.objects))

    def loaded(self) -> Any:
        """The program. Raises Refusal where there is no compiled helper."""
        helper = native.module()
        if helper is None:
            raise Refusal(Why.TRACE_NO_HELPER)
        return helper.HostProgram(*self)


def _same(a: Any, b: Any) -> bool:
    if type(a) is float and type(b) is float:
        return a.hex() == b.hex()  # 0.0 is not -0.0
    return a is b or (type(a) is type(b) and not isinstance(a, torch.Tensor) and bool(a == b))


class Encoder:
    """Writes steps. numbers, objects: names of what a run is handed, which come first.  earlier:
    who wrote the program whose state a run goes on from."""

    def __init__(self, numbers: Sequence[str], objects: Sequence[str], earlier: Encoder | None = None) -> None:
        self._words, self._carried = array("i"), array("i")
        self._initial = array("q", [0] * len(numbers))
        self._objects: list[Any] = [None] * len(objects)
        self._numbers: dict[Any, int] = {name: index for index, name in enumerate(numbers)}
        self._indices: dict[Any, int] = {name: index for index, name in enumerate(objects)}
        self._passing: list[int] = []  # objects that one step needs
        self._free: list[int] = []  # indices of such objects
        self._earlier = earlier

    def steps(self) -> Steps:
        """What has been written so far."""
        return Steps(self._words.tobytes(), self._initial.tobytes(), tuple(self._objects), self._carried.tobytes())

    def step(self, opcode: str, *words: int) -> None:
        """Write a step. words: its operands, int32."""
        self._words.append(_NUMBER_OF[opcode] | len(words) << 8)
        self._words.extend(words)

    def write(self, opcode: str, target: str | None, args: Sequence[Any]) -> None:
        """A step of a trace, see `launch_trace.Step`. Raises Refusal where it reads what nobody has written, or an
        object that steps cannot hold."""
        if opcode in GUARDS:
            self.step(opcode, *map(self.number, args[:2]), int(args[2]))
        elif opcode == "LAUNCH":
            self.step(opcode, self._constant(args[0]), *map(self._argument, args[1:]))
        elif opcode == "CALL":
            operands = [self._constant(args[0]), *[self.object(value) for value in args[1:]]]
            self.step(opcode, -1 if target is None else self._object_index(target), *operands)
        elif opcode == "ADDRESS":
            operand = self.object(args[0])
            self.step(opcode, self._new_number(target), operand)
        elif opcode == "RETURN":
            self.step(opcode, self.object(args[0]))
            self._passing.clear()
        elif opcode in ("DROP", "COMMIT"):
            self.step(opcode, *[self._known_object(name) for name in args])
        else:
            operands = [self.number(value) for value in args]
            self.step(opcode, self._new_number(target), *operands)
        if self._passing:
            self.step("DROP", *self._passing)
            self._free += self._passing
            self._passing.clear()

    def hold(self, names: Sequence[str]) -> None:
        """Carry over what no step reads by name, but work on the device. Raises Refusal for an unknown name."""
        for name in names:
            self._known_object(name)

    def number(self, value: Any) -> int:
        """The index of a number. Raises Refusal for a symbol that nobody has written."""
        if type(value) is not Sym:
            return self._new_number(("literal", int(value)), int(value))
        index = self._numbers.get(value.name)
        return self.known_number(value.name) if index is None else index

    def known_number(self, name: str) -> int:
        """The index of a number that was written before, or by `earlier`. Raises Refusal for any other."""
        if name not in self._numbers:
            if self._earlier is None:
                raise Refusal(Why.TRACE_UNKNOWN, name)
            earlier_index = self._earlier.known_number(name)
            self._carried.extend((0, earlier_index, self._new_number(name)))
        return self._numbers[name]

    def object(self, value: Any) -> int:
        """The index of an object; one that is made for it lives as long as the step. Raises Refusal for one that is
        neither plain nor memory of the trace."""
        cls = type(value)
        if cls is Memory:
            return self._memory(value)
        if cls is Sym:
            return self._new_object("INT", self.number(value))
        if cls in (tuple, list):
            return self._new_object(cls.__name__.upper(), *[self.object(part) for part in value])
        if "__reduce__" in cls.__dict__ and not isinstance(value, torch.device | torch.dtype):
            function, args = value.__reduce__()
            indices = [self.object(part) for part in args]
            return self._new_object("CALL", self._constant(function), *indices)
        if not (value is None or cls in NUMBERS or cls in _PLAIN):
            raise Refusal(Why.TRACE_VALUE, cls.__name__)
        return self._constant(value)

    def _memory(self, value: Memory) -> int:
        index = self._known_object(value.name)
        if value.item is not None:
            temporary = self._temporary()
            self.step("ITEM", temporary, index, value.item)
            index = temporary
        if value.length is None:
            return index
        narrow = self._constant(torch.Tensor.narrow)
        start, length = self.object(0), self.object(value.length)
        return self._new_object("CALL", narrow, index, start, start, length)

    def _new_object(self, opcode: str, *operands: int) -> int:
        index = self._temporary()
        self.step(opcode, index, *operands)
        return index

    def _argument(self, value: Any) -> int:
        """Of a launch: a number, or an object as -1 - its index."""
        cls = type(value)
        if cls in NUMBERS and cls is not bool:
            return self.number(value)
        return -1 - self.object(value)

    def _known_object(self, name: str) -> int:
        if name not in self._indices:
            if self._earlier is None:
                raise Refusal(Why.TRACE_UNKNOWN, name)
            earlier_index = self._earlier._known_object(name)
            self._carried.extend((1, earlier_index, self._object_index(name)))
        return self._indices[name]

    def _constant(self, value: Any) -> int:
        key: Any = type(value), value if type(value) in _VALUES else id(value)
        if type(value) is float:
            key = float, value.hex()
        if key not in self._indices:
            self._indices[key] = len(self._objects)
            self._objects.append(value)
        return self._indices[key]

    def _object_index(self, name: str) -> int:
        if name not in self._indices:
            self._indices[name] = len(self._objects)
            self._objects.append(None)
        return self._indices[name]

    def _temporary(self) -> int:
        if not self._free:
            self._free.append(len(self._objects))
            self._objects.append(None)
        self._passing.append(self._free.pop())
        return self._passing[-1]

    def _new_number(self, name: Any, value: int = 0) -> int:
        if name not in self._numbers:
            self._numbers[name] = len(self._initial)
            self._initial.append(value)
        return self._numbers[name]


_VALUES = (int, bool, str)
_PLAIN = (float, str, torch.dtype, torch.device)
