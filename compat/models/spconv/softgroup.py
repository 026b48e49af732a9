"""SoftGroup's backbone and tiny refinement net (spconv 2.x dialect of the UBlock family)."""

from __future__ import annotations

import functools
from typing import Any

import spconv.pytorch as spconv
import torch
from torch import nn

from .blocks import PreActBlock, UBlock, xyz

NORM = functools.partial(nn.BatchNorm1d, eps=1e-4, momentum=0.1)


class Custom1x1Subm3d(spconv.SparseConv3d):
    """A kernel of volume 1 whose weight is read as [out, in], as its shape says."""

    def forward(self, input: Any) -> Any:
        features = torch.mm(input.features, self.weight.view(self.out_channels, self.in_channels).T)
        if self.bias is not None:
            features += self.bias
        out_tensor = spconv.SparseConvTensor(features, input.indices, input.spatial_shape, input.batch_size)
        out_tensor.indice_dict = input.indice_dict
        out_tensor.grid = input.grid
        return out_tensor


class ResidualBlock(PreActBlock):
    """Pre-activation block whose projection honours the shape of its weight."""

    unit = Custom1x1Subm3d


class SoftGroup(nn.Module):
    """Point-wise branch over the scene, then a two-level U-Net over every cluster."""

    def __init__(self, in_channels: int, channels: int, num_blocks: int, classes: int):
        super().__init__()
        self.input_conv = spconv.SparseSequential(
            spconv.SubMConv3d(in_channels, channels, kernel_size=3, padding=1, bias=False, indice_key="subm1")
        )
        planes = [channels * (i + 1) for i in range(num_blocks)]
        self.unet = UBlock(planes, NORM, 2, ResidualBlock, level=1)
        self.output_layer = spconv.SparseSequential(NORM(channels), nn.ReLU())
        self.semantic_linear = nn.Linear(channels, classes)
        self.offset_linear = nn.Linear(channels, 3)
        self.tiny_unet = UBlock([channels, 2 * channels], NORM, 2, ResidualBlock, level=11)
        self.tiny_unet_outputlayer = spconv.SparseSequential(NORM(channels), nn.ReLU())
        self.cls_linear = nn.Linear(channels, classes + 1)

    def forward(
        self, feats: torch.Tensor, coords: torch.Tensor, spatial_shape: Any, batch_size: int, clusters: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        x = spconv.SparseConvTensor(feats, coords, spatial_shape, batch_size)
        x = self.output_layer(self.unet(self.input_conv(x)))
        features = x.features
        rows, sites, count = self.clusters_voxelization(coords, clusters)
        tiny = spconv.SparseConvTensor(features[rows], sites, [20] * 3, count)
        tiny = self.tiny_unet_outputlayer(self.tiny_unet(tiny))
        pooled = self.global_pool(tiny)
        return {
            "semantic_scores": self.semantic_linear(features),
            "pt_offsets": self.offset_linear(features),
            "cls_scores": self.cls_linear(pooled),
        }

    @staticmethod
    def clusters_voxelization(coords: torch.Tensor, clusters: torch.Tensor) -> tuple:
        """Rows, sites [n, 4] relative to each cluster's corner, and number of the clusters.

        Clusters of one voxel are no proposals.
        """
        count = int(clusters.max()) + 1
        low = torch.full((count, 3), 1 << 30, device=coords.device, dtype=coords.dtype)
        low = low.scatter_reduce(0, clusters[:, None].expand(-1, 3), coords[:, 1:], "amin")
        sites = torch.cat([clusters[:, None].int(), coords[:, 1:] - low[clusters]], dim=1)
        return torch.arange(len(coords), device=coords.device), sites.contiguous(), count

    @staticmethod
    def global_pool(x: Any) -> torch.Tensor:
        """Mean over the rows of each cluster."""
        rows = x.indices[:, 0].long()
        total = x.features.new_zeros(x.batch_size, x.features.shape[1])
        counts = torch.bincount(rows, minlength=x.batch_size).unsqueeze(1)
        return total.index_add(0, rows, x.features) / counts.to(total.dtype)


def build(in_channels: int = 6, channels: int = 32, num_blocks: int = 7, classes: int = 20) -> nn.Module:
    return SoftGroup(in_channels, channels, num_blocks, classes)


def batch(scene: Any, device: Any, dtype: torch.dtype) -> tuple:
    coords = xyz(scene, device)
    spatial_shape = (coords.max(0)[0][1:] + 1).clamp(min=128).cpu().numpy()
    # Cells of 20 voxels take the place of the grouping by predicted offsets.
    cells = torch.cat([coords[:, :1], coords[:, 1:] // 20], dim=1)
    clusters = torch.unique(cells, dim=0, return_inverse=True)[1]
    feats = scene.features.to(device, dtype)
    return feats, coords, spatial_shape, scene.batch_size, clusters
