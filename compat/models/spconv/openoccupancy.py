"""OpenOccupancy's lidar encoder: residual stages, a kernel of volume 1, dense at stride 8."""

from __future__ import annotations

from typing import Any

import spconv.pytorch as spconv
import torch
from spconv.pytorch import functional as Fsp  # noqa: F401 (the project imports it, unused)
from torch import nn

from .blocks import BatchNorm, SparseBasicBlock, by_site, columns, zyx
from .pcdet_utils import post_act_block


class SparseLiDAREnc8x(nn.Module):
    """Strides 1, 2, 4, 8; dense output as [B, C, X, Y, Z]."""

    def __init__(self, input_channel: int, base_channel: int, out_channel: int, sparse_shape_xyz: Any, bias: bool):
        super().__init__()
        self.sparse_shape_xyz = list(sparse_shape_xyz)
        base = base_channel
        self.conv_input = spconv.SparseSequential(
            spconv.SubMConv3d(input_channel, base, 3), BatchNorm(base), nn.ReLU(inplace=True)
        )
        self.conv1 = self._stage(None, base, 1, bias)
        self.conv2 = self._stage(base, 2 * base, 2, bias)
        self.conv3 = self._stage(2 * base, 4 * base, 3, bias)
        self.conv4 = self._stage(4 * base, 8 * base, 4, bias)
        self.conv_out = spconv.SparseSequential(
            spconv.SubMConv3d(8 * base, out_channel, 1, bias=False), BatchNorm(out_channel), nn.ReLU(inplace=True)
        )

    @staticmethod
    def _stage(c_in: int | None, width: int, number: int, bias: bool) -> Any:
        layers = [SparseBasicBlock(width, f"res{number}", bias) for _ in range(2)]
        if c_in is not None:
            down = post_act_block(c_in, width, 3, stride=2, padding=1, indice_key=f"spconv{number}", conv_type="spconv")
            layers.insert(0, down)
        return spconv.SparseSequential(*layers)

    def forward(self, voxel_features: torch.Tensor, coors: torch.Tensor, batch_size: int) -> Any:
        x = spconv.SparseConvTensor(voxel_features, coors.int(), self.sparse_shape_xyz[::-1], batch_size)
        x = self.conv_input(x)
        stages = []
        for stage in (self.conv1, self.conv2, self.conv3, self.conv4):
            x = stage(x)
            stages.append(x)
        x = self.conv_out(x)
        return {"x": x.dense().permute(0, 1, 4, 3, 2), "pts_feats": stages}


def build(
    input_channel: int = 5,
    base_channel: int = 16,
    out_channel: int = 80,
    sparse_shape_xyz: Any = (1440, 1440, 41),
    bias: bool = True,
) -> nn.Module:
    return SparseLiDAREnc8x(input_channel, base_channel, out_channel, sparse_shape_xyz, bias)


def batch(scene: Any, device: Any, dtype: torch.dtype) -> tuple:
    return scene.features.to(device, dtype), zyx(scene, device), scene.batch_size


def outputs(result: dict[str, Any]) -> list[torch.Tensor]:
    return [columns(result["x"]), *(by_site(x) for x in result["pts_feats"])]
