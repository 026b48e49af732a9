"""Direct3D-S2's SDF decoder on torchsparse 2.1: voxels split into eight, three times.

Source: layer stack S23 of the usage notes. The library's tensor is wrapped in a class of the
project, as in the TRELLIS family; transformer blocks before the upsampling are left out.
"""

from __future__ import annotations

import importlib
import itertools

import torch
from torch import nn


class SparseTensor:
    """The project's tensor over the library's: `.data` is a torchsparse.SparseTensor."""

    def __init__(self, data=None, feats=None, coords=None):
        kind = importlib.import_module("torchsparse").SparseTensor
        self.data = kind(feats=feats, coords=coords.int()) if data is None else data
        self._spatial_cache = {}

    @property
    def feats(self):
        return self.data.F

    @property
    def coords(self):
        return self.data.C

    def replace(self, feats, coords=None):
        data = type(self.data)(
            feats=feats,
            coords=self.data.coords if coords is None else coords,
            stride=self.data.stride,
            spatial_range=self.data.spatial_range,
        )
        if coords is None:
            data._caches = self.data._caches
        made = SparseTensor(data)
        made._spatial_cache = self._spatial_cache
        return made


class SparseConv3d(nn.Module):
    """The project's convolution over the library's; same signature for every backend."""

    def __init__(self, in_channels, out_channels, kernel_size, stride=1, dilation=1, bias=True):
        super().__init__()
        import torchsparse

        self.conv = torchsparse.nn.Conv3d(in_channels, out_channels, kernel_size, stride, 0, dilation, bias)

    def forward(self, x):
        made = SparseTensor(self.conv(x.data))
        made._spatial_cache = x._spatial_cache
        return made


class SparseActivation(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return x.replace(self.function(x.feats))


class SparseLinear(nn.Linear):
    def forward(self, x):
        return x.replace(super().forward(x.feats))


class SparseSubdivide(nn.Module):
    """Eight children per voxel, with the features of their parent."""

    def forward(self, x):
        corners = torch.stack(torch.meshgrid(*[torch.arange(2)] * 3, indexing="ij"), -1)
        corners = corners.reshape(8, 3).to(x.coords)
        children = x.coords.unsqueeze(1).repeat(1, 8, 1)
        children[:, :, 1:] = children[:, :, 1:] * 2 + corners
        feats = x.feats.unsqueeze(1).expand(-1, 8, -1).flatten(0, 1)
        out = x.replace(feats, children.flatten(0, 1).contiguous())
        if x.data.spatial_range is not None:
            first, *rest = x.data.spatial_range
            out.data.spatial_range = (first, *(2 * extent for extent in rest[:3]))
        return out


class SparseSubdivideBlock3d(nn.Module):
    def __init__(self, channels, out_channels):
        super().__init__()
        self.act_layers = nn.Sequential(SparseConv3d(channels, out_channels, 3), SparseActivation(nn.SiLU()))
        self.sub = SparseSubdivide()
        self.out_layers = nn.Sequential(SparseConv3d(out_channels, out_channels, 3), SparseActivation(nn.SiLU()))

    def forward(self, x):
        return self.out_layers(self.sub(self.act_layers(x)))


class SparseSDFVAE(nn.Module):
    """The decoder: latents on a coarse grid to signed distances eight times as fine."""

    def __init__(self, latent_channels=16, model_channels=512, out_channels=1):
        super().__init__()
        self.input_layer = SparseLinear(latent_channels, model_channels)
        widths = [model_channels, model_channels // 4, model_channels // 8, model_channels // 16]
        self.upsample = nn.ModuleList(
            SparseSubdivideBlock3d(before, width) for before, width in itertools.pairwise(widths)
        )
        self.out_layer = SparseLinear(widths[-1], out_channels)

    def forward(self, latents, coords):
        x = self.input_layer(SparseTensor(feats=latents, coords=coords))
        for block in self.upsample:
            x = block(x)
        return self.out_layer(x)


def build(**options):
    return SparseSDFVAE(**options)


def batch(scene, device, dtype):
    """Latents on the grid eight times as coarse as the scene's; one per occupied cell."""
    cells = scene.coords.clone()
    cells[:, 1:] //= 8
    coords, inverse = torch.unique(cells, dim=0, return_inverse=True)
    latents = scene.features.new_zeros((len(coords), scene.features.shape[1]))
    latents = latents.index_reduce(0, inverse, scene.features, "amax", include_self=False)
    return latents.to(device, dtype), coords.to(device)


def outputs(result):
    return [result.feats]
