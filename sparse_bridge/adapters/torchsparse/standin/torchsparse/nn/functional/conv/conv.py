"""The convolution."""

from sparse_bridge.adapters.torchsparse import conv
from sparse_bridge.adapters.torchsparse.signatures import conv3d_arguments
from sparse_bridge.core.arguments import expect_tensors

from . import conv_config

__all__ = ["conv3d", "conv_config"]


def conv3d(input, weight, kernel_size, bias=None, stride=1, *args, **kwargs):
    """2.1: (input, weight, kernel_size, bias=None, stride=1, padding=0, dilation=1, config=None,
    transposed=False, generative=False, training=False).  Up to 2.0: (..., stride=1, dilation=1,
    transposed=False), and epsilon, mm_thresh, kmap_mode in 2.0.
    """
    expect_tensors("conv3d", weight=weight)
    if bias is not None:
        expect_tensors("conv3d", bias=bias)
    options = conv3d_arguments(args, kwargs)
    return conv.conv3d(input, weight, kernel_size, bias, stride, **options)
