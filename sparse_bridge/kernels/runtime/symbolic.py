"""Numbers and tensors that differ from scene to scene, in host code that is traced, see
`launch_trace`."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from ...refusals import Refusal, Why


class StepRecorder(Protocol):
    """Who writes down what is done with symbols, see `launch_trace.Trace`."""

    def computed(self, opcode: str, hint: int, *operands: Any) -> Sym:
        """The result of arithmetic."""

    def compared(self, opcode: str, outcome: bool, *operands: Any) -> bool:
        """The outcome of a comparison, which becomes a guard."""

    def run(self, function: Callable[..., Any], *args: Any) -> None:
        """A call for what it does on the device."""

    def call(
        self, function: Callable[..., torch.Tensor], args: Sequence[Any], shape: Sequence[Any], dtype: torch.dtype
    ) -> torch.Tensor:
        """A call that makes a tensor of this shape and dtype."""

    def several(
        self,
        function: Callable[..., Sequence[torch.Tensor]],
        args: Sequence[Any],
        sizes: Sequence[Any],
        dtype: torch.dtype,
    ) -> list[torch.Tensor]:
        """A call that makes vectors [size] of these sizes and this dtype."""


class Sym:
    """A number that differs from scene to scene.

    name: in the trace.  hint: its value in the scene that is traced.  memory: names of the memory
    that it is an address in.
    """

    __slots__ = ("hint", "memory", "name", "trace")

    def __init__(self, trace: StepRecorder, name: str, hint: int, memory: frozenset[str] = frozenset()) -> None:
        self.trace, self.name, self.hint, self.memory = trace, name, hint, memory

    def __neg__(self) -> Any:
        return self.trace.computed("NEG", -self.hint, self)

    def bit_length(self) -> Any:
        """As of an int, as a symbol."""
        return self.trace.computed("BITS", self.hint.bit_length(), self)

    def __bool__(self) -> bool:
        return self.trace.compared("NE", self.hint != 0, self, 0)

    def __index__(self) -> int:
        self.trace.compared("EQ", True, self, self.hint)
        return self.hint

    __int__ = __index__

    def __hash__(self) -> int:
        return hash(self.__index__())


def _computing(opcode: str, function: Callable[[Any, Any], Any], swapped: bool) -> Any:
    def method(self: Sym, other: Any) -> Any:
        if type(other) not in NUMBERS:
            return NotImplemented
        a, b = (other, self) if swapped else (self, other)
        if opcode == "ADD" and type(other) is not Sym and other == 0:
            return self
        return self.trace.computed(opcode, function(hint_of(a), hint_of(b)), a, b)

    return method


def _comparing(opcode: str, function: Callable[[Any, Any], Any]) -> Any:
    def method(self: Sym, other: Any) -> Any:
        if type(other) not in NUMBERS:
            return NotImplemented
        outcome = function(self.hint, hint_of(other))
        return self.trace.compared(opcode, outcome, self, other)

    return method


NUMBERS = {int, bool, Sym}
for _name, _opcode in {
    "add": "ADD",
    "sub": "SUB",
    "mul": "MUL",
    "floordiv": "FLOORDIV",
    "mod": "MOD",
    "lshift": "SHL",
}.items():
    setattr(Sym, f"__{_name}__", _computing(_opcode, getattr(operator, _name), False))
    setattr(Sym, f"__r{_name}__", _computing(_opcode, getattr(operator, _name), True))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Sym, f"__{_name}__", _comparing(_name.upper(), getattr(operator, _name)))


def hint_of(number: Any) -> Any:
    """The value in the scene that is traced; of a plain number itself."""
    return number.hint if type(number) is Sym else number


def largest(numbers: Sequence[Any]) -> Any:
    """`max`, without a guard that says which one it is."""
    symbols = [number for number in numbers if type(number) is Sym]
    if not symbols:
        return max(numbers)
    most, *others = numbers
    for other in others:
        hint = max(hint_of(most), hint_of(other))
        most = symbols[0].trace.computed("MAX", hint, most, other)
    return most


class Memory:
    """A tensor of a scene, of `shape` and `dtype`, as far as launches and those who slice it go.

    name: in the trace, of it or of what it is part of.  item: which one of several under this name.
    length: rows that it was cut to.
    """

    def __init__(
        self,
        trace: StepRecorder,
        name: str,
        shape: tuple[Any, ...],
        dtype: torch.dtype,
        device: torch.device,
        at: Sym,
        item: int | None = None,
        length: Any = None,
    ) -> None:
        self.trace, self.name, self.shape = trace, name, shape
        self.dtype, self.device, self.at = dtype, device, at
        self.item, self.length = item, length
        self.itemsize = dtype.itemsize

    @property
    def names(self) -> frozenset[str]:
        """What it is made of."""
        length = {self.length.name} if type(self.length) is Sym else ()
        return frozenset({self.name, *length})

    def data_ptr(self) -> Sym:
        """The address, as launches ask tensors for it."""
        return self.at

    def new_empty(self, shape: Any) -> torch.Tensor:
        """New memory of this shape, of the same dtype and device, as a step of the trace."""
        return allocated(shape if isinstance(shape, tuple) else (shape,), self.dtype, self.device)

    def narrow(self, axis: int, start: Any, length: Any) -> Memory:
        """The first `length` rows. Raises Refusal for another axis or start, and for what has been cut before."""
        if axis or type(start) is not int or start or self.length is not None:
            raise Refusal(Why.TRACE_SLICE)
        return Memory(
            self.trace, self.name, (length, *self.shape[1:]), self.dtype, self.device, self.at, self.item, length
        )

    def __getitem__(self, rows: slice) -> Memory:
        if rows.start or rows.step:
            raise Refusal(Why.TRACE_SLICE)
        return self.narrow(0, 0, rows.stop)


def trace_of(*values: Any) -> StepRecorder | None:
    """The trace that one of them is of; None for numbers and tensors."""
    for value in values:
        if type(value) is Sym or type(value) is Memory:
            return value.trace
    return None


# Memory and operations of torch that traced code asks for.


def allocated(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """`torch.empty` of this shape and dtype, which a trace writes down."""
    if (trace := trace_of(*shape)) is not None:
        return trace.call(allocated, (shape, dtype, device), shape, dtype)
    return torch.empty(shape, dtype=dtype, device=device)


def filled(size: int, value: int, device: torch.device) -> torch.Tensor:
    """`torch.full` of int32 [size]."""
    if (trace := trace_of(size)) is not None:
        return trace.call(filled, (size, value, device), (size,), torch.int32)
    return torch.full((size,), value, dtype=torch.int32, device=device)


def sorted_order(keys: torch.Tensor) -> torch.Tensor:
    """int64 [n]: the places of keys [n] in ascending order; equal ones keep theirs."""
    if (trace := trace_of(keys)) is not None:
        return trace.call(sorted_order, (keys,), keys.shape, torch.int64)
    return torch.sort(keys, stable=True).indices
