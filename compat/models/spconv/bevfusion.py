"""BEVFusion's lidar encoder: basic blocks on a grid in x, y, z order, half-precision input."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .blocks import xyz
from .mmdet3d_encoder import LAYOUTS, SparseEncoder, outputs
from .mmdet3d_ops import MODELS

__all__ = ["batch", "build", "outputs"]


class BEVFusionSparseEncoder(SparseEncoder):
    """SparseEncoder whose last axis is the height, and which may see halved features."""

    def forward(self, voxel_features: torch.Tensor, coors: torch.Tensor, batch_size: int) -> Any:
        features = self.encode(voxel_features, coors, batch_size)
        spatial = self.to_bev(self.conv_out(features[-1]).dense())
        return spatial, features[1:]

    def to_bev(self, dense: torch.Tensor) -> torch.Tensor:
        n, c, h, w, d = dense.shape
        return dense.permute(0, 1, 4, 2, 3).contiguous().view(n, c * d, h, w)


MODELS._register_module(BEVFusionSparseEncoder, force=True)


def build(in_channels: int = 5, sparse_shape: Any = (1440, 1440, 41)) -> nn.Module:
    channels, _ = LAYOUTS["basicblock"]
    return MODELS.build(
        {
            "type": "BEVFusionSparseEncoder",
            "in_channels": in_channels,
            "sparse_shape": list(sparse_shape),
            "block_type": "basicblock",
            "encoder_channels": channels,
            "encoder_paddings": ((0, 0, 1), (0, 0, 1), (0, 0, (1, 1, 0)), (0, 0)),
            "last_kernel": (1, 1, 3),
            "last_stride": (1, 1, 2),
        }
    )


def batch(scene: Any, device: Any, dtype: torch.dtype) -> tuple:
    return scene.features.to(device, dtype), xyz(scene, device), scene.batch_size
