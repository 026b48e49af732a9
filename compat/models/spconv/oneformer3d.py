"""OneFormer3D's backbone: MinkowskiEngine quantises the points, spconv runs the U-Net."""

from __future__ import annotations

from typing import Any

import MinkowskiEngine as ME
import spconv.pytorch as spconv
import torch
from torch import nn

from .blocks import UBlock
from .softgroup import NORM, ResidualBlock


class SpConvUNet(nn.Module):
    """UBlock over (32, 64, 96, 128, 160) that also hands back the tensors of all levels."""

    def __init__(self, num_planes: Any, return_blocks: bool = True):
        super().__init__()
        self.return_blocks = return_blocks
        self.unet = UBlock(list(num_planes), NORM, 2, ResidualBlock, level=1, return_blocks=return_blocks)

    def forward(self, x: Any) -> Any:
        return self.unet(x)


class OneFormer3D(nn.Module):
    """Points to features per superpoint and to the features of every level."""

    def __init__(self, in_channels: int, num_channels: int, num_planes: Any, voxel_size: float):
        super().__init__()
        self.voxel_size = voxel_size
        self.unet = SpConvUNet(num_planes)
        self.input_conv = spconv.SparseSequential(
            spconv.SubMConv3d(in_channels, num_channels, kernel_size=3, padding=1, bias=False, indice_key="subm1")
        )
        self.output_layer = spconv.SparseSequential(
            torch.nn.BatchNorm1d(num_channels, eps=1e-4, momentum=0.1), torch.nn.ReLU(inplace=True)
        )

    def collate(self, points: list[torch.Tensor]) -> tuple:
        """Quantised coordinates and features, row of each point among them, grid."""
        coordinates, features = ME.utils.batch_sparse_collate(
            [
                (
                    (p[:, :3] - p[:, :3].min(0)[0]) / self.voxel_size,
                    torch.hstack((p[:, 3:], p[:, :3] - p[:, :3].mean(0))),
                )
                for p in points
            ],
            device=points[0].device,
        )
        spatial_shape = torch.clip(coordinates.max(0)[0][1:] + 1, 128)
        field = ME.TensorField(features=features, coordinates=coordinates)
        tensor = field.sparse()
        inverse_mapping = field.inverse_mapping(tensor.coordinate_map_key)
        return tensor.coordinates, tensor.features, inverse_mapping, spatial_shape

    def forward(self, points: list[torch.Tensor], superpoints: torch.Tensor) -> dict[str, Any]:
        coordinates, features, inverse_mapping, spatial_shape = self.collate(points)
        dtype = self.input_conv[0].weight.dtype
        x = spconv.SparseConvTensor(features.to(dtype), coordinates, spatial_shape, len(points))
        x = self.input_conv(x)
        x, levels = self.unet(x)
        x = self.output_layer(x)
        rows = x.features[inverse_mapping]
        total = rows.new_zeros(int(superpoints.max()) + 1, rows.shape[1])
        counts = torch.bincount(superpoints, minlength=len(total)).clamp(min=1).unsqueeze(1)
        mean = total.index_add(0, superpoints, rows) / counts.to(rows.dtype)
        return {"superpoint_features": mean, "levels": [level.features for level in levels]}


def build(
    in_channels: int = 6, num_channels: int = 32, num_planes: Any = (32, 64, 96, 128, 160), voxel_size: float = 0.02
) -> nn.Module:
    return OneFormer3D(in_channels, num_channels, num_planes, voxel_size)


def batch(scene: Any, device: Any, dtype: torch.dtype) -> tuple:
    points = torch.cat([scene.points, scene.features[:, :3]], dim=1).to(device)
    kept = [item for item in range(scene.batch_size) if (scene.coords[:, 0] == item).any()]
    items = [points[(scene.coords[:, 0] == item).to(device)] for item in kept]
    cells = torch.cat([scene.coords[:, :1], scene.coords[:, 1:] // 8], dim=1)
    superpoints = torch.unique(cells, dim=0, return_inverse=True)[1].to(device)
    return items, superpoints


def outputs(result: dict[str, Any]) -> list[torch.Tensor]:
    return [result["superpoint_features"]]
