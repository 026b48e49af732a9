"""Bird's-eye-view layers. In 2.1, too, `dim` counts x, y, z, whatever the column of the batch."""

import math

import torch
from torch import nn

from sparse_bridge.adapters.torchsparse.operations import dense
from sparse_bridge.errors import UnsupportedError

__all__ = ["ToBEVConvolution", "ToBEVHeightCompression", "ToBEVReduction", "ToDenseBEVConvolution"]


class ToBEVReduction(nn.Module):
    """Cannot run: it fails in every release of the original."""

    def __init__(self, dim=1):
        super().__init__()
        self.dim = dim

    def extra_repr(self):
        return f"dim={self.dim}"

    def forward(self, input):
        raise UnsupportedError(
            "ToBEVReduction fails in every release of torchsparse, so its result is not defined; "
            "use ToBEVHeightCompression or ToDenseBEVConvolution."
        )


class _Kernels(nn.Module):
    def __init__(self, n_kernels, in_channels, out_channels, bias):
        super().__init__()
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.n_kernels = n_kernels
        self.kernel = nn.Parameter(torch.zeros(n_kernels, in_channels, out_channels))
        self.bias = nn.Parameter(torch.zeros(1, out_channels)) if bias else None
        self.reset_parameters()

    def reset_parameters(self):
        """Uniform in +-1 / sqrt(C_in); the bias stays 0."""
        bound = 1 / math.sqrt(self.in_channels)
        with torch.no_grad():
            self.kernel.uniform_(-bound, bound)


class ToBEVConvolution(_Kernels):
    """Cannot run: it fails in every release of the original."""

    def __init__(self, in_channels, out_channels, n_kernels, stride=1, dim=1, bias=False):
        super().__init__(n_kernels, in_channels, out_channels, bias)
        self.stride = stride
        self.dim = dim

    def extra_repr(self):
        return f"{self.in_channels}, {self.out_channels}, n_kernels={self.n_kernels}"

    def forward(self, input):
        raise UnsupportedError(
            "ToBEVConvolution fails in every release of torchsparse, so its result is not defined; "
            "use ToDenseBEVConvolution."
        )


class ToDenseBEVConvolution(_Kernels):
    """SparseTensor -> [B, C_out, S_u, S_v], with one matrix for each height along `dim`."""

    def __init__(self, in_channels, out_channels, shape, offset=(0, 0, 0), dim=1, bias=False):
        super().__init__(int(shape[dim]), in_channels, out_channels, bias)
        self.dim = dim
        self.register_buffer("offset", torch.tensor([[*offset, 0]], dtype=torch.int32))
        self.register_buffer("shape", torch.tensor(list(shape), dtype=torch.int32))

    def extra_repr(self):
        return f"{self.in_channels}, {self.out_channels}, n_kernels={self.n_kernels}"

    def forward(self, input):
        layer = self.kernel, self.bias, self.offset, self.shape, self.dim
        return dense.dense_convolution(input, *layer)


class ToBEVHeightCompression(nn.Module):
    """SparseTensor -> [B, S_dim * C, S_u, S_v]."""

    def __init__(self, channels, shape, offset=(0, 0, 0), dim=1):
        super().__init__()
        self.channels = channels
        self.dim = dim
        self.register_buffer("offset", torch.tensor([[*offset, 0]], dtype=torch.int32))
        self.register_buffer("shape", torch.tensor(list(shape), dtype=torch.int32))

    def extra_repr(self):
        return f"{self.channels}, dim={self.dim}"

    def forward(self, input):
        return dense.height_compression(input, self.offset, self.shape, self.dim)
