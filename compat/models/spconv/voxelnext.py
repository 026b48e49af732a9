"""VoxelNeXt: fully sparse, the coarse stages folded onto stride 8, then a sparse 2-d head."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from .blocks import SparseBasicBlock, by_site, replace_feature
from .pcdet_utils import BatchNorm, Detector3D, MeanVFE, spconv
from .second import batch
from .voxel_res import residual_stage

__all__ = ["batch", "build", "outputs"]


class VoxelResBackBone8xVoxelNeXt(nn.Module):
    """Six stages; the last two are laid over stage 4 at their own, scaled sites."""

    def __init__(
        self,
        input_channels: int,
        grid_size: Any,
        kernel_sizes: Any = (3, 3, 3, 3),
        channels: Any = (16, 32, 64, 128, 128),
        out_channel: int = 128,
        bias: bool = True,
    ):
        super().__init__()
        self.sparse_shape = np.array(grid_size)[::-1] + [1, 0, 0]
        c1, c2, c3, c4, c5 = channels
        self.conv_input = spconv.SparseSequential(
            spconv.SubMConv3d(input_channels, c1, 3, padding=1, bias=False, indice_key="subm1"),
            BatchNorm(c1),
            nn.ReLU(),
        )
        self.conv1 = spconv.SparseSequential(SparseBasicBlock(c1, "res1", bias), SparseBasicBlock(c1, "res1", bias))
        k2, k3, k4, k5 = kernel_sizes
        self.conv2 = residual_stage(c1, c2, 2, k2 // 2, bias, k2)
        self.conv3 = residual_stage(c2, c3, 3, k3 // 2, bias, k3)
        self.conv4 = residual_stage(c3, c4, 4, k4 // 2, bias, k4)
        self.conv5 = residual_stage(c4, c5, 5, k5 // 2, bias, k5)
        self.conv6 = residual_stage(c5, c5, 6, k5 // 2, bias, k5)
        self.conv_out = spconv.SparseSequential(
            spconv.SparseConv2d(c4, out_channel, 3, stride=1, padding=1, bias=False, indice_key="spconv_down2"),
            BatchNorm(out_channel),
            nn.ReLU(),
        )
        self.shared_conv = spconv.SparseSequential(
            spconv.SubMConv2d(out_channel, out_channel, 3, stride=1, padding=1, bias=True),
            nn.BatchNorm1d(out_channel),
            nn.ReLU(True),
        )

    def bev_out(self, x: Any) -> Any:
        """The sites with their height dropped, features of equal ones summed."""
        indices, inverse = torch.unique(x.indices[:, [0, 2, 3]], dim=0, return_inverse=True)
        features = x.features.new_zeros((indices.shape[0], x.features.shape[1]))
        features.index_add_(0, inverse, x.features)
        return spconv.SparseConvTensor(
            features=features, indices=indices, spatial_shape=x.spatial_shape[1:], batch_size=x.batch_size
        )

    def forward(self, batch_dict: dict[str, Any]) -> dict[str, Any]:
        x = spconv.SparseConvTensor(
            features=batch_dict["voxel_features"],
            indices=batch_dict["voxel_coords"].int(),
            spatial_shape=self.sparse_shape,
            batch_size=batch_dict["batch_size"],
        )
        x1 = self.conv1(self.conv_input(x))
        x2 = self.conv2(x1)
        x3 = self.conv3(x2)
        x4 = self.conv4(x3)
        x5 = self.conv5(x4)
        x6 = self.conv6(x5)
        x5.indices[:, 1:] *= 2
        x6.indices[:, 1:] *= 4
        x4 = x4.replace_feature(torch.cat([x4.features, x5.features, x6.features]))
        x4.indices = torch.cat([x4.indices, x5.indices, x6.indices])
        out = self.shared_conv(self.conv_out(self.bev_out(x4)))
        batch_dict.update(encoded_spconv_tensor=out, encoded_spconv_tensor_stride=8)
        batch_dict["multi_scale_3d_features"] = {"x_conv1": x1, "x_conv2": x2, "x_conv3": x3}
        return batch_dict


class SeparateHead(nn.Module):
    """One branch of submanifold layers per quantity, each under a key of its own."""

    def __init__(self, width: int, branches: dict[str, int], kernel_size: int, bias: bool = True):
        super().__init__()
        for name, out_channels in branches.items():
            layers = spconv.SparseSequential(
                spconv.SubMConv2d(width, width, kernel_size, padding=kernel_size // 2, bias=bias, indice_key=name),
                nn.BatchNorm1d(width),
                nn.ReLU(),
            )
            last = spconv.SubMConv2d(width, out_channels, 1, bias=True, indice_key=name + "out")
            setattr(self, name, nn.Sequential(layers, last))
        self.branches = list(branches)

    def forward(self, x: Any) -> dict[str, torch.Tensor]:
        return {name: getattr(self, name)(x).features for name in self.branches}


class VoxelNeXtHead(nn.Module):
    """Predictions at every voxel of the bird's-eye view, one head per group of classes."""

    def __init__(self, width: int, groups: Any, kernel_size: int = 1):
        super().__init__()
        branches = {"center": 2, "center_z": 1, "dim": 3, "rot": 2, "vel": 2}
        self.heads_list = nn.ModuleList(
            SeparateHead(width, {**branches, "hm": classes}, kernel_size) for classes in groups
        )

    def forward(self, batch_dict: dict[str, Any]) -> dict[str, Any]:
        x = batch_dict["encoded_spconv_tensor"]
        batch_dict["pred_dicts"] = [head(x) for head in self.heads_list]
        return batch_dict


def build(
    input_channels: int = 5,
    grid_size: Any = (1440, 1440, 40),
    bias: bool = True,
    groups: Any = (1, 2, 2, 1, 2, 2),
    head_kernel: int = 1,
) -> nn.Module:
    return Detector3D(
        vfe=MeanVFE(),
        backbone_3d=VoxelResBackBone8xVoxelNeXt(input_channels, grid_size, bias=bias),
        dense_head=VoxelNeXtHead(128, groups, head_kernel),
    )


def outputs(result: dict[str, Any]) -> list[torch.Tensor]:
    x = result["encoded_spconv_tensor"]
    tasks = [value for task in result["pred_dicts"] for value in task.values()]
    return [by_site(replace_feature(x, value)) for value in [x.features, *tasks]]
