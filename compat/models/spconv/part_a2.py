"""Part-A2's sparse U-Net as in OpenPCDet: UNetV2, features per voxel for the point head."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .blocks import SparseBasicBlock, by_site, columns, merge_lateral
from .pcdet_utils import Detector3D, HeightCompression, MeanVFE, post_act_block, spconv
from .second import VoxelBackBone8x, batch

__all__ = ["batch", "build", "outputs"]


class UNetV2(VoxelBackBone8x):
    """VoxelBackBone8x with a decoder back to every input voxel."""

    def __init__(
        self,
        input_channels: int,
        grid_size: Any,
        voxel_size: Any = (0.05, 0.05, 0.1),
        point_cloud_range: Any = (0, -40, -3, 70.4, 40, 1),
    ):
        super().__init__(input_channels, grid_size)
        self.voxel_size, self.point_cloud_range = voxel_size, point_cloud_range
        widths = {4: (64, 64), 3: (64, 32), 2: (32, 16)}
        for level, (width, up) in widths.items():
            subm, down = f"subm{level}", f"spconv{level}"
            setattr(self, f"conv_up_t{level}", SparseBasicBlock(width, subm, bias=False))
            merge = post_act_block(2 * width, width, 3, padding=1, indice_key=subm)
            setattr(self, f"conv_up_m{level}", merge)
            inverse = post_act_block(width, up, 3, indice_key=down, conv_type="inverseconv")
            setattr(self, f"inv_conv{level}", inverse)
        self.conv_up_t1 = SparseBasicBlock(16, "subm1", bias=False)
        self.conv_up_m1 = post_act_block(32, 16, 3, indice_key="subm1")
        self.conv5 = spconv.SparseSequential(post_act_block(16, 16, 3, padding=1, indice_key="subm1"))
        self.num_point_features = 16

    def forward(self, batch_dict: dict[str, Any]) -> dict[str, Any]:
        stages = self.encode(batch_dict)
        batch_dict["encoded_spconv_tensor"] = self.conv_out(stages[-1])
        x = stages[-1]
        for level in (4, 3, 2):
            x = merge_lateral(
                x,
                stages[level - 1],
                getattr(self, f"conv_up_t{level}"),
                getattr(self, f"conv_up_m{level}"),
                getattr(self, f"inv_conv{level}"),
            )
        x = merge_lateral(x, stages[0], self.conv_up_t1, self.conv_up_m1, self.conv5)
        batch_dict["point_features"] = x.features
        batch_dict["point_coords"] = torch.cat((x.indices[:, 0:1].float(), self.centers(x.indices[:, 1:])), dim=1)
        batch_dict["voxel_tensor"] = x
        return batch_dict

    def centers(self, coords: torch.Tensor) -> torch.Tensor:
        """Metric centres [N, 3] (x, y, z) of voxels given as (z, y, x)."""
        size = torch.tensor(self.voxel_size, device=coords.device)
        low = torch.tensor(self.point_cloud_range[0:3], device=coords.device)
        return (coords[:, [2, 1, 0]].float() + 0.5) * size + low


def build(input_channels: int = 4, grid_size: Any = (1408, 1600, 40)) -> nn.Module:
    return Detector3D(
        vfe=MeanVFE(), backbone_3d=UNetV2(input_channels, grid_size), map_to_bev_module=HeightCompression()
    )


def outputs(result: dict[str, Any]) -> list[torch.Tensor]:
    return [result["point_features"], by_site(result["encoded_spconv_tensor"]), columns(result["spatial_features"])]
