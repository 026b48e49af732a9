"""Activations."""

from torch.nn import functional as F
from torchsparse.nn.utils.apply import fapply

__all__ = ["leaky_relu", "relu", "silu"]


def relu(input, inplace=True):
    return fapply(input, F.relu, inplace=inplace)


def silu(input, inplace=True):
    return fapply(input, F.silu, inplace=inplace)


def leaky_relu(input, negative_slope=0.1, inplace=True):
    return fapply(input, F.leaky_relu, negative_slope=negative_slope, inplace=inplace)
