"""What user code takes from `cumm.tensorview`: a small tensor, dtype codes, an enum and timers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch

from . import _tv_dtypes
from ._tv_dtypes import CODES, TvDataTypeError, bitsize, itemsize, to_numpy_dtype
from ._tv_tensor import Tensor, TvArgumentError, cat_first_axis, from_numpy, from_torch, to_torch
from ._tv_timers import (
    CUDAKernelTimer,
    KernelTimer,
    measure_and_print,
    measure_and_print_cpu,
    measure_duration,
    measure_duration_cpu,
)

# The dtype constants, such as tv.float32.
bfloat16, bool_, float16, float32, float64 = (
    CODES[name] for name in ("bfloat16", "bool_", "float16", "float32", "float64")
)
int8, int16, int32, int64 = (CODES[name] for name in ("int8", "int16", "int32", "int64"))
uint8, uint16, uint32, uint64 = (CODES[name] for name in ("uint8", "uint16", "uint32", "uint64"))
tf32, unknown = CODES["tf32"], CODES["unknown"]
custom16, custom32, custom48, custom64, custom80, custom96, custom128 = (
    CODES[f"custom{bits}"] for bits in (16, 32, 48, 64, 80, 96, 128)
)
ALL_TV_TENSOR_DTYPES = set(CODES.values()) - {unknown}
NPDTYPE_TO_TENSOR_MAP = dict(_tv_dtypes.FROM_NUMPY)
TENSOR_TO_NPDTYPE_MAP = dict(_tv_dtypes.TO_NUMPY)

__all__ = [
    "ALL_TV_TENSOR_DTYPES",
    "NPDTYPE_TO_TENSOR_MAP",
    "TENSOR_TO_NPDTYPE_MAP",
    "Activation",
    "CUDAKernelTimer",
    "KernelTimer",
    "Tensor",
    "TvArgumentError",
    "TvDataTypeError",
    "bfloat16",
    "bool_",
    "cat_first_axis",
    "check_cuda_error",
    "custom16",
    "custom32",
    "custom48",
    "custom64",
    "custom80",
    "custom96",
    "custom128",
    "div_up",
    "empty",
    "float16",
    "float32",
    "float64",
    "from_numpy",
    "from_torch",
    "full",
    "get_compute_capability",
    "get_npdtype_from_tvdtype",
    "get_numpy_view",
    "int8",
    "int16",
    "int32",
    "int64",
    "is_cpu_only",
    "measure_and_print",
    "measure_and_print_cpu",
    "measure_duration",
    "measure_duration_cpu",
    "numpy_view",
    "tf32",
    "to_torch",
    "tvdtype_bitsize",
    "tvdtype_itemsize",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "unknown",
    "zeros",
]


class Activation:
    """The activation fused into a convolution: None_, ReLU, Sigmoid, LeakyReLU.

    Like upstream's, and unlike enum.Enum, members compare by value, and pickles that carry nothing
    but a member's number load. `Activation(1)` is the member; int() gives the number.
    """

    __members__: ClassVar[dict[str, Activation]] = {}
    None_: ClassVar[Activation]
    ReLU: ClassVar[Activation]
    Sigmoid: ClassVar[Activation]
    LeakyReLU: ClassVar[Activation]
    _value: int
    name: str

    def __new__(cls, value: int | None = None) -> Activation:
        # Without a number this is the blank object that a pickle is about to fill.
        if value is None:
            return super().__new__(cls)
        for member in cls.__members__.values():
            if member._value == value:
                return member
        raise TvArgumentError(f"{value!r} is no Activation; known: {dict(cls.__members__)}")

    @property
    def value(self) -> int:
        return self._value

    def __int__(self) -> int:
        return self._value

    __index__ = __int__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Activation) and other._value == self._value

    def __hash__(self) -> int:
        return self._value

    def __reduce__(self) -> tuple[type[Activation], tuple[int]]:
        return type(self), (self._value,)

    def __setstate__(self, state: int) -> None:
        self._value, self.name = state, type(self)(state).name

    def __str__(self) -> str:
        return f"Activation.{self.name}"

    def __repr__(self) -> str:
        return f"<{self}: {self._value}>"


def _add_members(enumeration: type[Activation]) -> type[Activation]:
    for number, name in enumerate(("None_", "ReLU", "Sigmoid", "LeakyReLU")):
        member = object.__new__(enumeration)
        member._value, member.name = number, name
        enumeration.__members__[name] = member
        setattr(enumeration, name, member)
    return enumeration


def activation_of(module: str) -> type[Activation]:
    """An `Activation` that says it is defined in `module`, so that pickles name it."""
    body = {"__module__": module, "__members__": {}}
    return _add_members(type("Activation", (Activation,), body))


_add_members(Activation)


def empty(
    shape: Sequence[int], dtype: Any = np.float32, device: int = -1, pinned: bool = False, managed: bool = False
) -> Tensor:
    return Tensor(shape, dtype, device, pinned, managed)


def zeros(
    shape: Sequence[int], dtype: Any = np.float32, device: int = -1, pinned: bool = False, managed: bool = False
) -> Tensor:
    return Tensor(shape, dtype, device, pinned, managed).zero_()


def full(
    shape: Sequence[int],
    val: int | float,
    dtype: Any = np.float32,
    device: int = -1,
    pinned: bool = False,
    managed: bool = False,
) -> Tensor:
    tensor = Tensor(shape, dtype, device, pinned, managed)
    # An integer stays one: large values do not survive a float.
    return tensor.fill_float_(val) if isinstance(val, float) else tensor.fill_int_(val)


def check_cuda_error() -> None:
    """Waits for the GPU, where there is one; raises what its work has failed with."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def get_compute_capability(index: int = -1) -> tuple[int, int]:
    """Of a GPU, torch's current one without an index; (-1, -1) without a GPU."""
    if not torch.cuda.is_available():
        return -1, -1
    return torch.cuda.get_device_capability(None if index < 0 else index)


def numpy_view(self: Tensor) -> np.ndarray[Any, Any]:
    return self.numpy_view()


def get_numpy_view(ten: Tensor) -> np.ndarray[Any, Any]:
    return ten.numpy_view()


def get_npdtype_from_tvdtype(tv_dtype: int) -> np.dtype[Any]:
    return to_numpy_dtype(tv_dtype)


def tvdtype_bitsize(dtype: int) -> int:
    return bitsize(dtype)


def tvdtype_itemsize(dtype: int) -> int:
    return itemsize(dtype)


def is_cpu_only() -> bool:
    """Whether torch has no GPU to offer."""
    return not torch.cuda.is_available()


def div_up(a: int, b: int) -> int:
    return -(-a // b)
