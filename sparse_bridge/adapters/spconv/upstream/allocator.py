"""Memory that compiled code would ask for by name, as torch tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ._tv_dtypes import CODES, TvDataTypeError
from ._tv_tensor import Tensor, TvArgumentError, from_torch

TORCH_DTYPE_TO_TV = {
    torch.float32: CODES["float32"],
    torch.float64: CODES["float64"],
    torch.float16: CODES["float16"],
    torch.int32: CODES["int32"],
    torch.int64: CODES["int64"],
    torch.int8: CODES["int8"],
    torch.int16: CODES["int16"],
    torch.uint8: CODES["uint8"],
    torch.qint8: CODES["int8"],
}
# torch's unsigned types are young: a signed one of the same size holds the bits.
TORCH_UINT_WORKAROUNDS = {
    CODES["uint32"]: CODES["int32"],
    CODES["uint16"]: CODES["int16"],
    CODES["uint64"]: CODES["int64"],
}
_PLAIN = {code: dtype for dtype, code in TORCH_DTYPE_TO_TV.items() if dtype is not torch.qint8}
TV_DTYPE_TO_TORCH = {
    **_PLAIN,
    CODES["int8"]: torch.qint8,
    **{code: _PLAIN[signed] for code, signed in TORCH_UINT_WORKAROUNDS.items()},
}


class ExternalAllocator:
    """What compiled functions ask for their results' memory; subclasses define the methods."""


class TorchAllocator(ExternalAllocator):
    """Tensors by name and by address in `allocated`.

    gpudevice: the device of everything that is not asked for on the CPU (device -1).
    """

    def __init__(self, gpudevice: torch.device, is_quantized: bool = False) -> None:
        super().__init__()
        self.gpudevice = gpudevice
        self.cpudevice = torch.device("cpu")
        self.allocated: dict[str | int, torch.Tensor] = {}
        self.is_quantized = is_quantized

    def _keep(self, tensor: torch.Tensor, name: str, dtype: int, temporary: bool) -> Tensor:
        self.allocated[tensor.data_ptr()] = tensor
        if name and not temporary:
            self.allocated[name] = tensor
        stored = from_torch(tensor)
        return stored if stored.dtype == dtype else stored.type_view(dtype)

    def _where(self, dtype: int, device: int) -> dict[str, Any]:
        torch_dtype = _PLAIN.get(TORCH_UINT_WORKAROUNDS.get(dtype, dtype))
        if torch_dtype is None:
            raise TvDataTypeError(f"dtype code {dtype} has no torch counterpart")
        return {"dtype": torch_dtype, "device": self.cpudevice if device == -1 else self.gpudevice}

    def zeros(
        self,
        name: str,
        shape: list[int],
        dtype: int,
        device: int,
        stream: int = 0,
        is_temp_memory: bool = False,
        scale: float = 1.0,
    ) -> Tensor:
        tensor = torch.zeros(_sizes(shape), **self._where(dtype, device))
        return self._keep(tensor, name, dtype, is_temp_memory)

    def empty(
        self,
        name: str,
        shape: list[int],
        dtype: int,
        device: int,
        stream: int = 0,
        is_temp_memory: bool = False,
        scale: float = 1.0,
    ) -> Tensor:
        tensor = torch.empty(_sizes(shape), **self._where(dtype, device))
        return self._keep(tensor, name, dtype, is_temp_memory)

    def full_int(
        self,
        name: str,
        shape: list[int],
        value: int,
        dtype: int,
        device: int,
        stream: int = 0,
        is_temp_memory: bool = False,
    ) -> Tensor:
        tensor = torch.full(_sizes(shape), value, **self._where(dtype, device))
        return self._keep(tensor, name, dtype, is_temp_memory)

    def full_float(
        self,
        name: str,
        shape: list[int],
        value: float,
        dtype: int,
        device: int,
        stream: int = 0,
        is_temp_memory: bool = False,
    ) -> Tensor:
        tensor = torch.full(_sizes(shape), value, **self._where(dtype, device))
        return self._keep(tensor, name, dtype, is_temp_memory)

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Keep a result that exists already under `name`."""
        self.allocated[tensor.data_ptr()] = self.allocated[name] = tensor

    def get_tensor_by_name(self, name: str) -> Tensor:
        return from_torch(self.allocated[name])

    def free(self, ten: Tensor) -> None:
        """Forget a tensor by its address; its name stays. Raises ValueError for unknown ones."""
        if self.allocated.pop(ten.byte_pointer(), None) is None:
            raise ValueError("can't find your tensor in cache.")

    def free_noexcept(self, ten: Tensor) -> None:
        self.allocated.pop(ten.byte_pointer(), None)


def _sizes(shape: Sequence[int]) -> list[int]:
    return [int(size) for size in shape]


class ExternalSpconvMatmul:
    """What compiled functions multiply by; here the engine does."""


class TorchSpconvMatmul(ExternalSpconvMatmul):
    """Carries its allocator along."""

    def __init__(self, alloc: TorchAllocator) -> None:
        super().__init__()
        if not isinstance(alloc, ExternalAllocator):
            raise TvArgumentError(f"expected an allocator, got {type(alloc).__name__}")
        self.alloc = alloc
