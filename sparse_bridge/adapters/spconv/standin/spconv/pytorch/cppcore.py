"""Bridges between torch and tensorview tensors."""

import torch
from cumm import tensorview as tv
from spconv.constants import AllocKeys as AllocKeys
from spconv.core_cc.csrc.sparse.alloc import ExternalAllocator as ExternalAllocator
from spconv.core_cc.csrc.sparse.convops import ExternalSpconvMatmul as ExternalSpconvMatmul
from spconv.core_cc.cumm.common import CompileInfo as CompileInfo
from spconv.cppconstants import COMPILED_CUDA_ARCHS as COMPILED_CUDA_ARCHS

from sparse_bridge.adapters.spconv.upstream.allocator import TORCH_DTYPE_TO_TV as _TORCH_DTYPE_TO_TV
from sparse_bridge.adapters.spconv.upstream.allocator import TORCH_UINT_WORKAROUNDS as _TORCH_UINT_WORKAROUNDS
from sparse_bridge.adapters.spconv.upstream.allocator import TV_DTYPE_TO_TORCH as _TV_DTYPE_TO_TORCH
from sparse_bridge.adapters.spconv.upstream.allocator import TorchAllocator as TorchAllocator
from sparse_bridge.adapters.spconv.upstream.allocator import TorchSpconvMatmul as TorchSpconvMatmul

_TV_DTYPE_TO_TORCHQ = dict(_TV_DTYPE_TO_TORCH)
_TH_QTYPES = {torch.qint8}
_ALL_INTS = {code for code, dtype in _TV_DTYPE_TO_TORCH.items() if not dtype.is_floating_point}
__all__ = [
    "_ALL_INTS",
    "_TH_QTYPES",
    "_TORCH_DTYPE_TO_TV",
    "_TORCH_UINT_WORKAROUNDS",
    "_TV_DTYPE_TO_TORCH",
    "_TV_DTYPE_TO_TORCHQ",
    "TorchAllocator",
    "TorchSpconvMatmul",
    "get_arch",
    "get_current_stream",
    "torch_tensor_to_tv",
    "torch_tensors_to_tv",
]


def torch_tensor_to_tv(ten, dtype=None, shape=None, stride=None):
    """A tensorview of a torch tensor's memory, with another dtype, shape or stride if given."""
    if ten.dtype in _TH_QTYPES:  # the same memory, as integers
        memory = ten.detach()
        ten = torch.empty(0, dtype=torch.int8, device=ten.device)
        ten.set_(memory.untyped_storage(), memory.storage_offset(), memory.shape, memory.stride())
    if shape is not None:
        ten = ten.as_strided(shape, stride) if stride is not None else ten.view(shape)
    view = tv.from_torch(ten)
    return view if dtype is None else view.type_view(dtype)


def torch_tensors_to_tv(*tens):
    return (*(torch_tensor_to_tv(ten) for ten in tens),)


def get_current_stream():
    """Raw handle of torch's current stream, 0 on machines without a GPU."""
    return torch.cuda.current_stream().cuda_stream if torch.cuda.is_available() else 0


def get_arch():
    """(major, minor) of the current GPU, (0, 0) on machines without one."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
