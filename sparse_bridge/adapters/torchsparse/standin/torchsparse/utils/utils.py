"""Small conversions."""

import functools
import math

import torch

from sparse_bridge.errors import ContractError

__all__ = ["make_divisible", "make_ntuple", "make_tensor"]


def make_ntuple(x, ndim):
    """A tuple of `ndim` Python numbers from a number, a sequence or a tensor."""
    if isinstance(x, int):
        x = (x,) * ndim
    elif isinstance(x, list):
        x = tuple(x)
    elif isinstance(x, torch.Tensor):
        x = tuple(x.view(-1).cpu().numpy().tolist())
    if not isinstance(x, tuple) or len(x) != ndim:
        raise ContractError(
            f"expected an int, or a list, tuple or tensor of {ndim} numbers; got {x!r} ({type(x).__name__})."
        )
    return x


@functools.cache
def make_tensor(x, dtype, device):
    """A tuple as a tensor; the same object every time, so it must not be written to."""
    return torch.tensor(x, dtype=dtype, device=device)


def make_divisible(x, divisor):
    """`x` rounded up to a multiple of `divisor`."""
    return math.ceil(x / divisor) * divisor
