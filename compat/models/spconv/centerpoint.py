"""CenterPoint's own backbone (det3d): SpMiddleResNetFHD."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

try:
    import spconv.pytorch as spconv
    from spconv.pytorch import SparseConv3d, SubMConv3d, ops
except ImportError:
    import spconv
    from spconv import SparseConv3d, SubMConv3d, ops

from .blocks import BatchNorm, SparseBasicBlock, by_site, columns, zyx


class SpMiddleResNetFHD(nn.Module):
    """Residual encoder; its strided layers have no keys."""

    def __init__(self, num_input_features: int = 128, bias: bool = True):
        super().__init__()
        self.conv_input = spconv.SparseSequential(
            SubMConv3d(num_input_features, 16, 3, bias=False, indice_key="res0"), BatchNorm(16), nn.ReLU(inplace=True)
        )
        self.conv1 = spconv.SparseSequential(SparseBasicBlock(16, "res0", bias), SparseBasicBlock(16, "res0", bias))
        self.conv2 = self._stage(16, 32, "res1", 1, bias)
        self.conv3 = self._stage(32, 64, "res2", 1, bias)
        self.conv4 = self._stage(64, 128, "res3", [0, 1, 1], bias)
        self.extra_conv = spconv.SparseSequential(
            SparseConv3d(128, 128, (3, 1, 1), (2, 1, 1), bias=False), BatchNorm(128), nn.ReLU()
        )

    @staticmethod
    def _stage(c_in: int, c_out: int, key: str, padding: Any, bias: bool) -> Any:
        return spconv.SparseSequential(
            SparseConv3d(c_in, c_out, 3, 2, padding=padding, bias=False),
            BatchNorm(c_out),
            nn.ReLU(inplace=True),
            SparseBasicBlock(c_out, key, bias),
            SparseBasicBlock(c_out, key, bias),
        )

    def forward(self, voxel_features: torch.Tensor, coors: torch.Tensor, batch_size: int, input_shape: Any) -> Any:
        sparse_shape = np.array(input_shape[::-1]) + [1, 0, 0]
        x = spconv.SparseConvTensor(voxel_features, coors.int(), sparse_shape, batch_size)
        x = self.conv_input(x)
        stages = []
        for stage in (self.conv1, self.conv2, self.conv3, self.conv4):
            x = stage(x)
            stages.append(x)
        # The height of the bird's-eye view is known before the last layer runs.
        height = ops.get_conv_output_size(x.spatial_shape, [3, 1, 1], [2, 1, 1], [0] * 3, [1] * 3)
        ret = self.extra_conv(x).dense()
        n, c, d, h, w = ret.shape
        assert [d, h, w] == height
        return ret.view(n, c * d, h, w), stages


def build(num_input_features: int = 5, bias: bool = True) -> nn.Module:
    return SpMiddleResNetFHD(num_input_features, bias)


def batch(scene: Any, device: Any, dtype: torch.dtype) -> tuple:
    x, y, z = scene.grid
    coors = zyx(scene, device)
    return scene.features.to(device, dtype), coors, scene.batch_size, np.array([x, y, z - 1])


def outputs(result: Any) -> list[torch.Tensor]:
    spatial, stages = result
    return [columns(spatial), *(by_site(x) for x in stages)]
