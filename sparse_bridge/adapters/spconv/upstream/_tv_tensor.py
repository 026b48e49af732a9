"""The tensor of `cumm.tensorview`: a numpy array or a torch tensor under upstream's names."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from ....errors import ContractError, DeviceError, GeometryError
from ._tv_dtypes import CODES, TvDataTypeError, code_of, itemsize, to_numpy_dtype, to_torch_dtype

Array: TypeAlias = "np.ndarray[Any, Any] | torch.Tensor"


class TvArgumentError(GeometryError, TypeError):
    """An argument is not what the tv function takes; a TypeError upstream."""


class TvReadOnlyError(ContractError, RuntimeError):
    """A tensor that must not change was to be written into; a RuntimeError upstream."""


class TvDeviceError(DeviceError, ValueError):
    """The tensor lies on the wrong device; a ValueError upstream."""


def _device(code: int) -> torch.device:
    return torch.device("cpu") if code < 0 else torch.device("cuda", code)


class Tensor:
    """An array of [*shape] on one device; `Tensor(shape, dtype, device)` allocates without filling.

    dtype: int code (`tv.float32` ...).  device: -1 for the CPU, else the index of the GPU.
    """

    __slots__ = ("_array", "_code", "_fixed")

    def __init__(
        self,
        shape: Sequence[int] = (0,),
        dtype: Any = CODES["float32"],
        device: int = -1,
        pinned: bool = False,
        managed: bool = False,
    ) -> None:
        if not isinstance(shape, Sequence):
            raise TvArgumentError(f"shape is {shape!r}; pass a list of integers")
        self._code, self._fixed = code_of(dtype), False
        sizes = [int(size) for size in shape]
        self._array: Array
        if device < 0:
            self._array = np.empty(sizes, to_numpy_dtype(self._code))
        else:
            torch_dtype = to_torch_dtype(self._code)
            self._array = torch.empty(sizes, dtype=torch_dtype, device=_device(device))

    @classmethod
    def _wrap(cls, array: Array, code: int | None = None, fixed: bool = False) -> Tensor:
        tensor = cls.__new__(cls)
        tensor._array = array
        tensor._code = code_of(array.dtype) if code is None else code
        tensor._fixed = fixed or (isinstance(array, np.ndarray) and not array.flags.writeable)
        return tensor

    def _view(self, array: Array) -> Tensor:
        """Some of the tensor's memory."""
        return Tensor._wrap(array, self._code, self._fixed)

    # What it is

    @property
    def shape(self) -> list[int]:
        return list(self._array.shape)

    @property
    def dtype(self) -> int:
        return self._code

    @property
    def device(self) -> int:
        if isinstance(self._array, np.ndarray) or self._array.device.type == "cpu":
            return -1
        return self._array.device.index or 0

    @property
    def ndim(self) -> int:
        return self._array.ndim

    @property
    def size(self) -> int:
        return math.prod(self._array.shape)

    @property
    def itemsize(self) -> int:
        return itemsize(self._code)

    @property
    def stride(self) -> list[int]:
        """Elements from one index to the next, per axis."""
        if isinstance(self._array, torch.Tensor):
            return list(self._array.stride())
        return [step // self._array.itemsize for step in self._array.strides]

    def dim(self, axis: int) -> int:
        return self.shape[axis]

    def bytesize(self) -> int:
        return self.size * self.itemsize

    def empty(self) -> bool:
        return self.size == 0

    def is_contiguous(self) -> bool:
        if isinstance(self._array, torch.Tensor):
            return self._array.is_contiguous()
        return bool(self._array.flags.c_contiguous)

    def is_col_major_matrix(self) -> bool:
        """Whether a matrix lies in memory column by column, without gaps."""
        if self.ndim != 2:
            raise TvArgumentError(f"{self!r} is no matrix; is_col_major_matrix takes two axes")
        return self.stride == [1, self.shape[0]]

    def is_readonly(self) -> bool:
        return self._fixed

    def pinned(self) -> bool:
        return to_torch(self).is_pinned()

    def gpu_address(self) -> int:
        """The address of the first element of a tensor on a GPU."""
        if self.device < 0:
            raise TvDeviceError(f"{self!r} is on the CPU; its address is byte_pointer()")
        return self.byte_pointer()

    def byte_pointer(self) -> int:
        """The address of the first element."""
        if isinstance(self._array, torch.Tensor):
            return self._array.data_ptr()
        return self._array.ctypes.data

    def __repr__(self) -> str:
        return f"tv.Tensor(shape={self.shape}, dtype={self.dtype}, device={self.device})"

    # Elsewhere and elsewise

    def numpy(self) -> np.ndarray[Any, Any]:
        """A copy as a numpy array, from any device."""
        return np.array(self.cpu().numpy_view(), order="C", copy=True)

    def numpy_view(self) -> np.ndarray[Any, Any]:
        """The CPU tensor's own memory as a numpy array; DeviceError for a device tensor."""
        if isinstance(self._array, np.ndarray):
            view = self._array.view()
            view.flags.writeable = not self._fixed
            return view
        if self.device >= 0:
            raise DeviceError(f"numpy_view of a tv.Tensor on device {self.device}; use .cpu().numpy_view()")
        raise TvDataTypeError("a bfloat16 tv.Tensor has no numpy view; use tv.to_torch")

    def cpu(self) -> Tensor:
        """This tensor if it is on the CPU, else a copy there."""
        if self.device < 0:
            return self
        return from_torch(self._array.cpu())  # type: ignore[union-attr]

    def cuda(self) -> Tensor:
        """This tensor if it is on a GPU, else a copy on torch's current GPU."""
        return self if self.device >= 0 else from_torch(to_torch(self).cuda())

    def clone(self, pinned: bool = False, use_cpu_copy: bool = False) -> Tensor:
        """A contiguous copy on the same device."""
        if isinstance(self._array, torch.Tensor):
            copied = self._array.clone(memory_format=torch.contiguous_format)
            return Tensor._wrap(copied, self._code)
        return Tensor._wrap(np.array(self._array, order="C", copy=True), self._code)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        array = self.cpu().numpy_view()
        if dtype is not None and np.dtype(dtype) != array.dtype:
            return array.astype(dtype)
        return np.array(array, copy=True) if copy else array

    # Views

    def __getitem__(self, index: Any) -> Tensor:
        # A tuple, so that a full index of a numpy array stays an array and not a scalar.
        keys = index if isinstance(index, tuple) else (index,)
        if isinstance(self._array, np.ndarray) and Ellipsis not in keys:
            keys = (*keys, Ellipsis)
        return self._view(self._array[keys])

    def slice_first_axis(self, start: int, end: int) -> Tensor:
        return self[start:end]

    def slice_axis(self, dim: int, start: Any, stop: Any, step: Any = None) -> Tensor:
        return self[(slice(None),) * dim + (slice(start, stop, step),)]

    def select(self, dim: int, index: int) -> Tensor:
        return self[(slice(None),) * dim + (index,)]

    def view(self, views: Sequence[int]) -> Tensor:
        """The same elements as [*views]; one size may be -1."""
        if not self.is_contiguous():
            raise TvArgumentError(f"view of a non-contiguous tv.Tensor {self.shape}; clone it first")
        return self._view(self._array.reshape(tuple(views)))

    def type_view(self, dtype: Any, shape: Sequence[int] | None = None) -> Tensor:
        """The same memory as elements of another dtype; the last axis changes with their size."""
        code = code_of(dtype)
        row = (self.shape or [1])[-1] * self.itemsize
        if not self.is_contiguous() or row % itemsize(code):
            raise TvArgumentError(
                f"type_view of {self!r} as elements of {itemsize(code)} bytes; it must be "
                "contiguous and its last axis hold a whole number of them"
            )
        array: Array
        if isinstance(self._array, np.ndarray):
            array = self._array.view(to_numpy_dtype(code))
        else:
            array = self._array.view(to_torch_dtype(code))
        tensor = Tensor._wrap(array, code, self._fixed)
        return tensor if shape is None else tensor.view(shape)

    def unsqueeze(self, axis: int) -> Tensor:
        shape = self.shape
        shape.insert(axis, 1)
        return self._view(self._array.reshape(tuple(shape)))

    def squeeze(self, axis: int | None = None) -> Tensor:
        shape = [s for a, s in enumerate(self.shape) if s != 1 or axis not in (None, a)]
        return self._view(self._array.reshape(tuple(shape)))

    def transpose(self, dim0: int, dim1: int) -> Tensor:
        return self._view(self._array.swapaxes(dim0, dim1))

    def get_readonly(self) -> Tensor:
        """The same memory, for reading alone."""
        return Tensor._wrap(self._array, self._code, True)

    @property
    def T(self) -> Tensor:
        return self.transpose(0, 1)

    # In place

    def _for_writing(self) -> Array:
        if self._fixed:
            raise TvReadOnlyError(f"{self!r} is read-only; write into a clone()")
        return self._array

    def zero_(self) -> Tensor:
        self._for_writing()[...] = 0
        return self

    def fill_int_(self, val: int) -> Tensor:
        self._for_writing()[...] = int(val)
        return self

    def fill_float_(self, val: float) -> Tensor:
        self._for_writing()[...] = float(val)
        return self

    def copy_(self, other: Tensor) -> None:
        """Overwrite the elements with those of `other` (same shape and dtype, any device)."""
        if self.shape != other.shape or self.dtype != other.dtype:
            raise TvArgumentError(f"cannot copy {other!r} into {self!r}; shape and dtype differ")
        array = self._for_writing()
        if isinstance(array, np.ndarray):
            array[...] = other.cpu().numpy_view()
        else:
            array.copy_(to_torch(other))


def from_numpy(arr: np.ndarray[Any, Any]) -> Tensor:
    """Wrap a numpy array without a copy. Raises TvArgumentError or TvDataTypeError."""
    if not isinstance(arr, np.ndarray):
        raise TvArgumentError(f"from_numpy takes a numpy array, got {type(arr).__name__}")
    return Tensor._wrap(arr)


def from_torch(tensor: torch.Tensor) -> Tensor:
    """Wrap a torch tensor without a copy; it is detached."""
    detached = tensor.detach()
    code = code_of(detached.dtype)
    if detached.device.type == "cpu" and detached.dtype != torch.bfloat16:
        return Tensor._wrap(detached.numpy(), code)
    return Tensor._wrap(detached, code)


def cat_first_axis(tens: Sequence[Tensor]) -> Tensor:
    """The tensors one after another, which are alike but for their first axis."""
    if len({(t.dtype, t.device, *t.shape[1:]) for t in tens}) != 1 or not tens[0].ndim:
        raise TvArgumentError(
            f"cannot join {list(tens)}; expected tensors of one dtype and device whose shapes "
            "differ in the first axis alone"
        )
    arrays: list[Any] = [t._array for t in tens]
    join = np.concatenate if isinstance(arrays[0], np.ndarray) else torch.cat
    return Tensor._wrap(join(arrays), tens[0].dtype)


def to_torch(tensor: Any) -> torch.Tensor:
    """The memory of a tv.Tensor as a torch tensor; read-only arrays and views that torch cannot
    express are copied. Tensors of the real cumm are taken through their numpy copy.
    """
    if not isinstance(tensor, Tensor):
        if not all(hasattr(tensor, name) for name in ("numpy_view", "numpy", "byte_pointer")):
            raise TvArgumentError(f"expected a tv.Tensor, got {type(tensor).__name__}; wrap arrays with tv.from_numpy")
        return torch.from_numpy(tensor.numpy())
    array = tensor._array
    if isinstance(array, torch.Tensor):
        return array.clone() if tensor._fixed else array
    if tensor._fixed or any(step < 0 for step in array.strides):
        array = array.copy()
    return torch.from_numpy(array)


def output(tensor: Any) -> torch.Tensor:
    """The memory of a tv.Tensor as a torch tensor whose changes it sees. Raises TvReadOnlyError,
    and TvArgumentError where torch cannot express the view."""
    if not isinstance(tensor, Tensor):
        return to_torch(tensor)
    tensor._for_writing()
    if min(tensor.stride, default=0) < 0:
        raise TvArgumentError(f"{tensor!r} runs backwards in memory; results need another one")
    return to_torch(tensor)
