"""GaussianFormer's sparse convolution over Gaussians: many share a voxel, some lie outside."""

from __future__ import annotations

from functools import partial
from typing import Any

import spconv.pytorch as spconv
import torch
from torch import nn


class SparseConv3DBlock(spconv.SparseModule):
    """Layers of kernel 5 with layer norms inside the container."""

    def __init__(self, in_channels: int, embed_dims: int, kernel_size: int, layers: int):
        super().__init__()
        steps: list[nn.Module] = []
        for i in range(layers):
            steps += [
                spconv.SubMConv3d(
                    in_channels if i == 0 else embed_dims, embed_dims, kernel_size, padding=kernel_size // 2, bias=False
                ),
                nn.LayerNorm(embed_dims),
                nn.ReLU(True),
            ]
        self.layer = spconv.SparseSequential(*steps)
        self.output_proj = nn.Linear(embed_dims, embed_dims)

    def forward(self, x: Any) -> torch.Tensor:
        return self.output_proj(self.layer(x).features)


class GaussianLifter(nn.Module):
    """Features [B, G, C] of Gaussians at metric positions, updated by their neighbours."""

    def __init__(self, embed_dims: int, kernel_size: int, pc_range: Any, grid_size: Any):
        super().__init__()
        tensor = partial(torch.tensor, dtype=torch.float32)
        self.register_buffer("pc_range", tensor(pc_range))
        self.register_buffer("grid_size", tensor(grid_size))
        self.block = SparseConv3DBlock(embed_dims, embed_dims, kernel_size, 1)

    def forward(self, instance_feature: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        bs, g, _ = instance_feature.shape
        low, high = self.pc_range[:3].to(anchor.dtype), self.pc_range[3:].to(anchor.dtype)
        grid = self.grid_size.to(anchor.dtype)
        indices = ((anchor - low) / grid).to(torch.int32)
        batched = torch.cat(
            [torch.arange(bs, device=anchor.device).int().reshape(bs, 1, 1).expand(-1, g, -1), indices], dim=-1
        )
        # A Gaussian at the very border falls one cell outside.
        spatial_shape = ((high - low) / grid).to(torch.int32)
        x = spconv.SparseConvTensor(
            instance_feature.flatten(0, 1), indices=batched.flatten(0, 1), spatial_shape=spatial_shape, batch_size=bs
        )
        return self.block(x).unflatten(0, (bs, g))


def build(
    embed_dims: int = 128,
    kernel_size: int = 5,
    pc_range: Any = (0.0, 0.0, 0.0, 100.0, 100.0, 8.0),
    grid_size: Any = (0.5, 0.5, 0.5),
) -> nn.Module:
    return GaussianLifter(embed_dims, kernel_size, pc_range, grid_size)


def batch(scene: Any, device: Any, dtype: torch.dtype) -> tuple:
    """As many Gaussians in every batch item, drawn from the voxels with repetition."""
    rng = torch.Generator().manual_seed(0)
    counts = torch.bincount(scene.coords[:, 0].long(), minlength=scene.batch_size)
    many = int(counts.max())
    low = scene.points.min(0).values
    scale = torch.tensor([100.0, 100.0, 8.0]) / (scene.points.max(0).values - low)
    features, anchors = [], []
    for item in range(scene.batch_size):
        rows = (scene.coords[:, 0] == item).nonzero().flatten()
        if len(rows) == 0:
            rows = torch.arange(len(scene.coords))
        rows = rows[torch.randint(len(rows), (many,), generator=rng)]
        features.append(scene.features[rows])
        anchors.append((scene.points[rows] - low) * scale)
    return torch.stack(features).to(device, dtype), torch.stack(anchors).to(device)
