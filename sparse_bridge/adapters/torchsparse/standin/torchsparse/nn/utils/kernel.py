"""Kernel offsets."""

import torch
from torchsparse.utils.utils import make_ntuple

from sparse_bridge.adapters.torchsparse.geometry import kernel_offsets

__all__ = ["get_kernel_offsets"]


def get_kernel_offsets(size, stride=1, dilation=1, device="cpu"):
    """Offsets int32 [V, 3] in weight order, times stride and dilation."""
    size, stride = make_ntuple(size, ndim=3), make_ntuple(stride, ndim=3)
    dilation = make_ntuple(dilation, ndim=3)
    scale = tuple(s * d for s, d in zip(stride, dilation, strict=True))
    return torch.tensor(kernel_offsets(size, scale), dtype=torch.int32, device=device)
