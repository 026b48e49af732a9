"""The convolution."""

import sys

from sparse_bridge.adapters.torchsparse import conv
from sparse_bridge.adapters.torchsparse.signatures import conv3d_arguments
from sparse_bridge.core.arguments import expect_tensors
from sparse_bridge.errors import UnsupportedError

from . import conv_config, kmap

__all__ = ["conv3d", "conv_config"]

# The original computes by way of these, which programs replace in `nn.functional`.
STEPS = {name: getattr(kmap, name) for name in kmap.__all__ if callable(getattr(kmap, name))}


def refuse_replaced():
    """Raise UnsupportedError where a step of the original is not ours any more."""
    names = vars(sys.modules["torchsparse.nn.functional"])
    for name, step in STEPS.items():
        if names.get(name) is not step:
            raise UnsupportedError(
                f"torchsparse.nn.functional.{name} was replaced; the convolutions of this stand-in do not call it. "
                "Replace torchsparse.nn.functional.conv3d, which layers call, or put the original function back."
            )


def conv3d(input, weight, kernel_size, bias=None, stride=1, *args, **kwargs):
    """2.1: (input, weight, kernel_size, bias=None, stride=1, padding=0, dilation=1, config=None,
    transposed=False, generative=False, training=False).  Up to 2.0: (..., stride=1, dilation=1,
    transposed=False), and epsilon, mm_thresh, kmap_mode in 2.0.
    """
    refuse_replaced()
    expect_tensors("conv3d", weight=weight)
    if bias is not None:
        expect_tensors("conv3d", bias=bias)
    options = conv3d_arguments(args, kwargs)
    return conv.conv3d(input, weight, kernel_size, bias, stride, **options)
