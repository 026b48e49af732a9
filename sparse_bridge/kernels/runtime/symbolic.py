"""Numbers and tensors that differ from scene to scene, in host code that is traced, see
`launch_trace`."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .launch_trace import Trace


class NotTracedError(Exception):
    """Host code did what straight-line code could not repeat."""


class Sym:
    """A number that differs from scene to scene.

    code: how lines name it.  hint: its value in the scene that is traced.  memory: names of the
    memory that it is an address in.
    """

    __slots__ = ("code", "hint", "memory", "trace")

    def __init__(
        self, trace: Trace, code: str, hint: int, memory: frozenset[str] = frozenset()
    ) -> None:
        self.trace, self.code, self.hint, self.memory = trace, code, hint, memory

    def __neg__(self) -> Any:
        return self.trace.computed(f"-{self.code}", -self.hint, self)

    def bit_length(self) -> Any:
        return self.trace.computed(f"{self.code}.bit_length()", self.hint.bit_length(), self)

    def __bool__(self) -> bool:
        return self.trace.asked(f"{self.code} != 0", self.hint != 0, self)

    def __index__(self) -> int:
        self.trace.asked(f"{self.code} == {self.hint}", True, self)
        return self.hint

    __int__ = __index__

    def __hash__(self) -> int:
        return hash(self.__index__())


def _computing(symbol: str, function: Callable[[Any, Any], Any], swapped: bool) -> Any:
    def method(self: Sym, other: Any) -> Any:
        if type(other) not in NUMBERS:
            return NotImplemented
        a, b = (other, self) if swapped else (self, other)
        if symbol == "+" and type(other) is not Sym and other == 0:
            return self
        code = f"({code_of(a)} {symbol} {code_of(b)})"
        return self.trace.computed(code, function(hint_of(a), hint_of(b)), a, b)

    return method


def _asking(symbol: str, function: Callable[[Any, Any], Any]) -> Any:
    def method(self: Sym, other: Any) -> Any:
        if type(other) not in NUMBERS:
            return NotImplemented
        outcome = function(self.hint, hint_of(other))
        return self.trace.asked(f"{self.code} {symbol} {code_of(other)}", outcome, self, other)

    return method


NUMBERS = {int, bool, Sym}
for _name, _symbol in {
    "add": "+", "sub": "-", "mul": "*", "floordiv": "//", "mod": "%", "lshift": "<<"
}.items():  # fmt: skip
    setattr(Sym, f"__{_name}__", _computing(_symbol, getattr(operator, _name), False))
    setattr(Sym, f"__r{_name}__", _computing(_symbol, getattr(operator, _name), True))
for _name, _symbol in {
    "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="
}.items():  # fmt: skip
    setattr(Sym, f"__{_name}__", _asking(_symbol, getattr(operator, _name)))


def hint_of(number: Any) -> Any:
    return number.hint if type(number) is Sym else number


def code_of(number: Any) -> str:
    return number.code if type(number) is Sym else repr(number)


def largest(numbers: Sequence[Any]) -> Any:
    """`max`, without a guard that says which one it is."""
    symbols = [one for one in numbers if type(one) is Sym]
    if not symbols or len(numbers) == 1:
        return max(numbers)
    code = f"max({', '.join(map(code_of, numbers))})"
    return symbols[0].trace.computed(code, max(map(hint_of, numbers)), *numbers)


class Memory:
    """A tensor of a scene, as far as launches and those who slice it go."""

    def __init__(
        self, trace: Trace, code: str, shape: tuple[Any, ...], dtype: torch.dtype,
        device: torch.device, at: Sym,
    ) -> None:  # fmt: skip
        self.trace, self.code, self.shape = trace, code, shape
        self.dtype, self.device, self.at = dtype, device, at
        self.itemsize = dtype.itemsize
        self.names = frozenset({code})  # that `code` is made of

    def data_ptr(self) -> Sym:
        return self.at

    def new_empty(self, shape: Any) -> torch.Tensor:
        return allocated(shape if isinstance(shape, tuple) else (shape,), self.dtype, self.device)

    def narrow(self, axis: int, start: Any, length: Any) -> Memory:
        """Of the first axis, from its start on."""
        if axis or type(start) is not int or start:
            raise NotTracedError("a slice that does not begin at the start")
        code, shape = f"{self.code}.narrow(0, 0, {code_of(length)})", (length, *self.shape[1:])
        made = Memory(self.trace, code, shape, self.dtype, self.device, self.at)
        made.names = self.names | ({length.code} if type(length) is Sym else set())
        return made

    def __getitem__(self, place: slice) -> Memory:
        if place.start or place.step:
            raise NotTracedError(f"a slice {place}")
        return self.narrow(0, 0, place.stop)


def trace_of(*values: Any) -> Trace | None:
    """The trace that one of them is of; None for numbers and tensors."""
    for one in values:
        if type(one) is Sym or type(one) is Memory:
            return one.trace
    return None


# Memory and operations of torch that traced code asks for.


def allocated(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """`torch.empty`."""
    if (trace := trace_of(*shape)) is not None:
        return trace.call(allocated, (shape, dtype, device), shape, dtype)
    return torch.empty(shape, dtype=dtype, device=device)


def filled(size: int, value: int, device: torch.device) -> torch.Tensor:
    """`torch.full` of int32."""
    if (trace := trace_of(size)) is not None:
        return trace.call(filled, (size, value, device), (size,), torch.int32)
    return torch.full((size,), value, dtype=torch.int32, device=device)


def sorted_order(keys: torch.Tensor) -> torch.Tensor:
    """int64: the places of keys in ascending order; equal ones keep theirs."""
    if (trace := trace_of(keys)) is not None:
        return trace.call(sorted_order, (keys,), keys.shape, torch.int64)
    return torch.sort(keys, stable=True).indices
