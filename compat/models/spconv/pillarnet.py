"""PillarNet's 2-d backbone as in OpenPCDet: residual stages on pillars, then dense."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .blocks import BatchNorm, columns, zyx
from .lion import SparseBasicBlock2D
from .pcdet_utils import spconv


def stage(c_in: int, c_out: int, number: int) -> Any:
    """A strided 2-d layer and two residual blocks."""
    return spconv.SparseSequential(
        spconv.SparseSequential(
            spconv.SparseConv2d(c_in, c_out, 3, stride=2, padding=1, bias=False, indice_key=f"spconv{number}"),
            BatchNorm(c_out),
            nn.ReLU(),
        ),
        SparseBasicBlock2D(c_out, f"res{number}"),
        SparseBasicBlock2D(c_out, f"res{number}"),
    )


class PillarRes18BackBone8x(nn.Module):
    """Strides 1, 2, 4, 8 sparse, then 16 dense."""

    def __init__(self, input_channels: int, grid_size: Any):
        super().__init__()
        self.sparse_shape = [grid_size[1], grid_size[0]]
        self.conv1 = spconv.SparseSequential(
            SparseBasicBlock2D(input_channels, "res1"), SparseBasicBlock2D(input_channels, "res1")
        )
        self.conv2 = stage(input_channels, 64, 2)
        self.conv3 = stage(64, 128, 3)
        self.conv4 = stage(128, 256, 4)
        self.conv5 = nn.Sequential(
            nn.Conv2d(256, 256, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(256, eps=1e-3, momentum=0.01),
            nn.ReLU(),
        )

    def forward(self, features: torch.Tensor, coords: torch.Tensor, batch_size: int) -> Any:
        x = spconv.SparseConvTensor(features, coords.int(), self.sparse_shape, batch_size)
        for block in (self.conv1, self.conv2, self.conv3, self.conv4):
            x = block(x)
        dense = x.dense()
        return {"x_conv4": dense, "x_conv5": self.conv5(dense)}


class PillarNet(nn.Module):
    """Pillar features and backbone."""

    def __init__(self, in_channels: int, grid_size: Any):
        super().__init__()
        self.vfe = nn.Sequential(nn.Linear(in_channels, 32, bias=False), BatchNorm(32), nn.ReLU())
        self.backbone_2d = PillarRes18BackBone8x(32, grid_size)

    def forward(self, features: torch.Tensor, coords: torch.Tensor, batch_size: int) -> Any:
        return self.backbone_2d(self.vfe(features), coords, batch_size)


def build(in_channels: int = 5, grid_size: Any = (1440, 1440)) -> nn.Module:
    return PillarNet(in_channels, grid_size)


def batch(scene: Any, device: Any, dtype: torch.dtype) -> tuple:
    return scene.features.to(device, dtype), zyx(scene, device), scene.batch_size


def outputs(result: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    return [columns(result["x_conv4"]), result["x_conv5"]]
