"""LION's sparse parts: one literal key on unrelated tensors, and stacks of 2-d layers."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from .blocks import BatchNorm, by_site, replace_feature, zyx
from .pcdet_utils import spconv

LayerNorm = functools.partial(nn.LayerNorm, eps=1e-3)


class PatchMerging3D(nn.Module):
    """Submanifold smoothing, then cells of `down` voxels summed into one."""

    def __init__(self, dim: int, down: Any):
        super().__init__()
        self.down = down
        self.sub_conv = spconv.SparseSequential(
            spconv.SubMConv3d(dim, dim, 3, bias=False, indice_key="subm"), LayerNorm(dim), nn.GELU()
        )
        self.norm = LayerNorm(dim)

    def forward(self, x: Any) -> tuple[Any, torch.Tensor]:
        x = self.sub_conv(x)
        step = torch.tensor([1, *self.down], device=x.indices.device)
        sites, inverse = torch.unique(x.indices // step, dim=0, return_inverse=True)
        total = x.features.new_zeros(len(sites), x.features.shape[1])
        total = self.norm(total.index_add(0, inverse, x.features))
        shape = [-(-size // down) for size, down in zip(x.spatial_shape, self.down, strict=True)]
        return spconv.SparseConvTensor(total, sites.int(), shape, x.batch_size), inverse


class LIONBlock(nn.Module):
    """Down twice, up twice; a linear operator takes the place of the recurrent one."""

    def __init__(self, dim: int, downs: Any):
        super().__init__()
        self.encoder = nn.ModuleList(nn.Sequential(nn.Linear(dim, dim), nn.ReLU()) for _ in downs)
        self.downsample = nn.ModuleList(PatchMerging3D(dim, down) for down in downs)
        self.decoder = nn.ModuleList(nn.Sequential(nn.Linear(dim, dim), nn.ReLU()) for _ in downs)
        self.decoder_norm = nn.ModuleList(LayerNorm(dim) for _ in downs)

    def forward(self, x: Any) -> Any:
        skips = []
        for operator, down in zip(self.encoder, self.downsample, strict=True):
            x = replace_feature(x, x.features + operator(x.features))
            skips.append(x)
            x, inverse = down(x)
            skips.append(inverse)
        for operator, norm in zip(self.decoder, self.decoder_norm, strict=True):
            inverse, fine = skips.pop(), skips.pop()
            up = fine.features + x.features[inverse]
            x = replace_feature(fine, norm(up + operator(up)))
        return x


class SparseBasicBlock2D(spconv.SparseModule):
    """Residual block of the bird's-eye view."""

    def __init__(self, width: int, indice_key: str):
        super().__init__()
        self.conv1 = spconv.SubMConv2d(width, width, kernel_size=3, padding=1, bias=False, indice_key=indice_key)
        self.bn1 = BatchNorm(width)
        self.relu = nn.ReLU()
        self.conv2 = spconv.SubMConv2d(width, width, kernel_size=3, padding=1, bias=False, indice_key=indice_key)
        self.bn2 = BatchNorm(width)

    def forward(self, x: Any) -> Any:
        out = self.conv1(x)
        out = replace_feature(out, self.relu(self.bn1(out.features)))
        out = self.conv2(out)
        out = replace_feature(out, self.bn2(out.features))
        return replace_feature(out, self.relu(out.features + x.features))


class SparseBEVBackbone(nn.Module):
    """Stages of 2-d residual blocks, strided layers between, inverses back; all keyed."""

    def __init__(self, width: int, blocks: Any):
        super().__init__()
        self.stages, self.downs, self.ups = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        for level, count in enumerate(blocks):
            stage = [SparseBasicBlock2D(width, f"res2d_{level}") for _ in range(count)]
            self.stages.append(spconv.SparseSequential(*stage))
        for level in range(len(blocks) - 1):
            key = f"down2d_{level}"
            self.downs.append(spconv.SparseConv2d(width, width, 3, 2, padding=1, bias=False, indice_key=key))
            self.ups.append(spconv.SparseInverseConv2d(width, width, 3, indice_key=key, bias=False))

    def forward(self, x: Any) -> Any:
        levels = [self.stages[0](x)]
        for down, stage in zip(self.downs, self.stages[1:], strict=True):
            levels.append(stage(down(levels[-1])))
        x = levels.pop()
        for up in reversed(self.ups):
            x = up(x)
            x = replace_feature(x, x.features + levels.pop().features)
        return x


class LION(nn.Module):
    """Voxels to a sparse bird's-eye view."""

    def __init__(self, in_channels: int, dim: int, sparse_shape: Any, layers: int, blocks: Any):
        super().__init__()
        self.sparse_shape = list(sparse_shape)
        self.vfe = nn.Linear(in_channels, dim)
        self.layers = nn.ModuleList(LIONBlock(dim, [(2, 2, 2)] * 2) for _ in range(layers))
        self.heights = nn.ModuleList(PatchMerging3D(dim, (2, 1, 1)) for _ in range(layers))
        self.bev = SparseBEVBackbone(dim, blocks)

    def forward(self, features: torch.Tensor, coors: torch.Tensor, batch_size: int) -> Any:
        x = spconv.SparseConvTensor(self.vfe(features), coors, self.sparse_shape, batch_size)
        for layer, height in zip(self.layers, self.heights, strict=True):
            x, _ = height(layer(x))
        sites, inverse = torch.unique(x.indices[:, [0, 2, 3]], dim=0, return_inverse=True)
        pooled = x.features.new_zeros(len(sites), x.features.shape[1])
        pooled = pooled.index_add(0, inverse, x.features)
        bev = spconv.SparseConvTensor(pooled, sites, x.spatial_shape[1:], x.batch_size)
        return self.bev(bev)


def build(
    in_channels: int = 5, dim: int = 128, sparse_shape: Any = (41, 1504, 1504), layers: int = 4, blocks: Any = (5, 4, 4)
) -> nn.Module:
    return LION(in_channels, dim, sparse_shape, layers, blocks)


def batch(scene: Any, device: Any, dtype: torch.dtype) -> tuple:
    return scene.features.to(device, dtype), zyx(scene, device), scene.batch_size


def outputs(result: Any) -> list[torch.Tensor]:
    return [by_site(result)]
