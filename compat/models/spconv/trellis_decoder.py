"""TRELLIS's structured-latent decoder to meshes: two subdivisions on top of token features."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .blocks import in_order
from .trellis_sparse import (
    SparseConv3d,
    SparseGroupNorm32,
    SparseLinear,
    SparseSiLU,
    SparseSubdivide,
    SparseTensor,
    convert_module_to_f16,
    latent,
    zero_module,
)


class SparseSubdivideBlock3d(nn.Module):
    """Norm and activation, subdivision, two layers at the finer resolution, skip of volume 1."""

    def __init__(self, channels: int, resolution: int, out_channels: int, num_groups: int = 32):
        super().__init__()
        key = f"res_{resolution * 2}"
        self.act_layers = nn.Sequential(SparseGroupNorm32(num_groups, channels), SparseSiLU())
        self.sub = SparseSubdivide()
        self.out_layers = nn.Sequential(
            SparseConv3d(channels, out_channels, 3, indice_key=key),
            SparseGroupNorm32(num_groups, out_channels),
            SparseSiLU(),
            zero_module(SparseConv3d(out_channels, out_channels, 3, indice_key=key)),
        )
        if out_channels == channels:
            self.skip_connection = nn.Identity()
        else:
            self.skip_connection = SparseConv3d(channels, out_channels, 1, indice_key=key)

    def forward(self, x: SparseTensor) -> SparseTensor:
        h = self.sub(self.act_layers(x))
        x = self.sub(x)
        h = self.out_layers(h)
        return h + self.skip_connection(x)


class SLatMeshDecoder(nn.Module):
    """Features of 101 values per voxel at four times the resolution of the tokens."""

    def __init__(self, resolution: int, model_channels: int, latent_channels: int, use_color: bool, use_fp16: bool):
        super().__init__()
        self.dtype = torch.float16 if use_fp16 else None
        self.input_layer = SparseLinear(latent_channels, model_channels)
        half, quarter = model_channels // 4, model_channels // 8
        self.upsample = nn.ModuleList(
            [
                SparseSubdivideBlock3d(model_channels, resolution, half),
                SparseSubdivideBlock3d(half, resolution * 2, quarter),
            ]
        )
        self.out_layer = SparseLinear(quarter, 101 if use_color else 53)
        if use_fp16:
            convert_module_to_f16(self.upsample)

    def torso(self, h: SparseTensor) -> SparseTensor:
        """What the transformer does to the tokens: nothing here."""
        return h

    def forward(self, feats: torch.Tensor, coords: torch.Tensor) -> SparseTensor:
        x = SparseTensor(feats, coords)
        h = self.input_layer(x)
        dtype = h.feats.dtype
        if self.dtype is not None:
            h = h.type(self.dtype)
        h = self.torso(h)
        for block in self.upsample:
            h = block(h)
        h = h.type(dtype)
        h = h.replace(F.layer_norm(h.feats, h.feats.shape[-1:]))
        return self.out_layer(h)


def build(
    resolution: int = 64,
    model_channels: int = 768,
    latent_channels: int = 8,
    use_color: bool = True,
    use_fp16: bool = False,
) -> nn.Module:
    return SLatMeshDecoder(resolution, model_channels, latent_channels, use_color, use_fp16)


def batch(scene: Any, device: Any, dtype: torch.dtype) -> tuple:
    return latent(scene, device, dtype)


def outputs(result: SparseTensor) -> list[torch.Tensor]:
    return [in_order(result.feats, result.coords)]
