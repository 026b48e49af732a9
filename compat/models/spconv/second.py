"""SECOND's sparse backbone as in OpenPCDet (also PV-RCNN, Voxel R-CNN): VoxelBackBone8x."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from .blocks import BatchNorm, by_site, columns
from .pcdet_utils import Detector3D, HeightCompression, MeanVFE, post_act_block, spconv, voxel_batch


class VoxelBackBone8x(nn.Module):
    """Three strided stages and a last one along z; strides 1, 2, 4, 8."""

    def __init__(self, input_channels: int, grid_size: Any, last_pad: Any = 0):
        super().__init__()
        self.sparse_shape = np.array(grid_size)[::-1] + [1, 0, 0]
        self.conv_input = spconv.SparseSequential(
            spconv.SubMConv3d(input_channels, 16, 3, padding=1, bias=False, indice_key="subm1"),
            BatchNorm(16),
            nn.ReLU(),
        )
        block = post_act_block
        self.conv1 = spconv.SparseSequential(block(16, 16, 3, padding=1, indice_key="subm1"))
        self.conv2 = self._stage(16, 32, 2, 1)
        self.conv3 = self._stage(32, 64, 3, 1)
        self.conv4 = self._stage(64, 64, 4, (0, 1, 1))
        self.conv_out = spconv.SparseSequential(
            spconv.SparseConv3d(
                64, 128, (3, 1, 1), stride=(2, 1, 1), padding=last_pad, bias=False, indice_key="spconv_down2"
            ),
            BatchNorm(128),
            nn.ReLU(),
        )
        self.num_point_features = 128

    @staticmethod
    def _stage(c_in: int, c_out: int, number: int, padding: Any) -> Any:
        down, subm = f"spconv{number}", f"subm{number}"
        return spconv.SparseSequential(
            post_act_block(c_in, c_out, 3, stride=2, padding=padding, indice_key=down, conv_type="spconv"),
            post_act_block(c_out, c_out, 3, padding=1, indice_key=subm),
            post_act_block(c_out, c_out, 3, padding=1, indice_key=subm),
        )

    def encode(self, batch_dict: dict[str, Any]) -> list[Any]:
        """Sparse tensors after each of the four stages."""
        x = spconv.SparseConvTensor(
            features=batch_dict["voxel_features"],
            indices=batch_dict["voxel_coords"].int(),
            spatial_shape=self.sparse_shape,
            batch_size=batch_dict["batch_size"],
        )
        x = self.conv_input(x)
        stages = []
        for stage in (self.conv1, self.conv2, self.conv3, self.conv4):
            x = stage(x)
            stages.append(x)
        return stages

    def forward(self, batch_dict: dict[str, Any]) -> dict[str, Any]:
        stages = self.encode(batch_dict)
        names = ("x_conv1", "x_conv2", "x_conv3", "x_conv4")
        batch_dict.update(
            encoded_spconv_tensor=self.conv_out(stages[-1]),
            encoded_spconv_tensor_stride=8,
            multi_scale_3d_features=dict(zip(names, stages, strict=True)),
        )
        return batch_dict


def build(input_channels: int = 4, grid_size: Any = (1408, 1600, 40)) -> nn.Module:
    return Detector3D(
        vfe=MeanVFE(), backbone_3d=VoxelBackBone8x(input_channels, grid_size), map_to_bev_module=HeightCompression()
    )


def batch(scene: Any, device: Any, dtype: torch.dtype) -> tuple:
    return (voxel_batch(scene, device, dtype),)


def outputs(result: dict[str, Any]) -> list[torch.Tensor]:
    scales = result["multi_scale_3d_features"].values()
    return [columns(result["spatial_features"]), *(by_site(x) for x in scales)]
