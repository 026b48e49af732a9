"""Initialisation of kernels."""

import math

import torch
from torch.nn.init import calculate_gain

from sparse_bridge.adapters.minkowski.errors import ArgumentValueError

__all__ = ["kaiming_normal_"]


def _fans(tensor):
    if tensor.ndim < 2:
        raise ArgumentValueError(f"a tensor of {tensor.ndim} axes has no fan in and fan out.")
    if tensor.ndim == 2:  # read as a Linear weight, though kernels are [C_in, C_out]
        return tensor.shape[1], tensor.shape[0]
    return tensor.shape[0] * tensor.shape[1], tensor.shape[0] * tensor.shape[2]


def kaiming_normal_(tensor, a=0, mode="fan_in", nonlinearity="leaky_relu"):
    """Fill a kernel [V, C_in, C_out] with N(0, gain^2 / fan); fan counts channels times V.

    A 2-D tensor counts as torch's Linear weight, as upstream: fan_in is its second axis.
    """
    mode = mode.lower()
    if mode not in ("fan_in", "fan_out"):
        raise ArgumentValueError(f"mode is {mode!r}; expected 'fan_in' or 'fan_out'.")
    fan = _fans(tensor)[mode == "fan_out"]
    with torch.no_grad():
        return tensor.normal_(0, calculate_gain(nonlinearity, a) / math.sqrt(fan))
