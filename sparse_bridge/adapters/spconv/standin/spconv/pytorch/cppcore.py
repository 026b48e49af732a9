"""Bridges between torch and tensorview tensors."""

import torch
from cumm import tensorview as tv

from sparse_bridge.errors import UnsupportedError


def torch_tensor_to_tv(ten, dtype=None, shape=None, stride=None):
    """A tensorview of a torch tensor's memory, with another dtype, shape or stride if given."""
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
    """(major, minor) of the current GPU."""
    return torch.cuda.get_device_capability()


class TorchAllocator:
    """spconv's C++ kernels allocate through this; there are none here."""

    def __init__(self, *args, **kwargs):
        raise UnsupportedError(
            "TorchAllocator serves spconv's compiled kernels, which are not used here."
        )


class TorchSpconvMatmul(TorchAllocator):
    """See `TorchAllocator`."""
