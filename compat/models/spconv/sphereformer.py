"""SphereFormer's U-Net: positions follow the strided layers through their pair lists."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import spconv.pytorch as spconv
import torch
from spconv.core import ConvAlgo
from spconv.pytorch.utils import PointToVoxel
from torch import nn

from .blocks import PreActBlock
from .softgroup import NORM


def get_downsample_info(xyz: torch.Tensor, batch: torch.Tensor, pairs: torch.Tensor) -> tuple:
    """Positions [M, 3] and batch indices [M] of strided rows, means over `indice_pairs`."""
    pair_in, pair_out = pairs[0], pairs[1]
    valid = pair_in != -1
    rows_in, rows_out = pair_in[valid].long(), pair_out[valid].long()
    size = int(rows_out.max()) + 1
    total = xyz.new_zeros(size, 3).index_add(0, rows_out, xyz[rows_in])
    count = torch.bincount(rows_out, minlength=size).unsqueeze(1)
    batch_next = batch.new_zeros(size).scatter(0, rows_out, batch[rows_in])
    return total / count.to(xyz.dtype), batch_next


class PositionEncoding(nn.Module):
    """Takes the place of the spherical attention: features shifted by an MLP of the position."""

    def __init__(self, width: int):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, width))

    def forward(self, feats: torch.Tensor, xyz: torch.Tensor) -> torch.Tensor:
        return feats + self.mlp(xyz.to(feats.dtype))


class UBlock(nn.Module):
    """One level: blocks, positions, the level below, blocks over the joined features."""

    def __init__(self, planes: list[int], norm_fn: Any, reps: int, level: int = 1):
        super().__init__()
        self.planes, self.level = planes, level
        here, key = planes[0], f"subm{level}"
        self.blocks = spconv.SparseSequential(
            OrderedDict((f"block{i}", PreActBlock(here, here, norm_fn, key)) for i in range(reps))
        )
        self.transformer_block = PositionEncoding(here)
        if len(planes) == 1:
            return
        shared = {"kernel_size": 2, "bias": False, "indice_key": f"spconv{level}", "algo": ConvAlgo.Native}
        self.conv = spconv.SparseSequential(
            norm_fn(here), nn.ReLU(), spconv.SparseConv3d(here, planes[1], stride=2, **shared)
        )
        self.u = UBlock(planes[1:], norm_fn, reps, level + 1)
        self.deconv = spconv.SparseSequential(
            norm_fn(planes[1]), nn.ReLU(), spconv.SparseInverseConv3d(planes[1], here, **shared)
        )
        self.blocks_tail = spconv.SparseSequential(
            OrderedDict((f"block{i}", PreActBlock(here * (2 - min(i, 1)), here, norm_fn, key)) for i in range(reps))
        )

    def forward(self, inp: Any, xyz: torch.Tensor, batch: torch.Tensor) -> Any:
        assert inp.features.shape[0] == xyz.shape[0] == batch.shape[0]
        output = self.blocks(inp)
        output = output.replace_feature(self.transformer_block(output.features, xyz))
        if len(self.planes) == 1:
            return output
        identity = spconv.SparseConvTensor(output.features, output.indices, output.spatial_shape, output.batch_size)
        below = self.conv(output)
        pairs = below.indice_dict[f"spconv{self.level}"].indice_pairs
        xyz_next, batch_next = get_downsample_info(xyz, batch, pairs)
        assert torch.equal(batch_next, below.indices[:, 0].long())
        below = self.u(below, xyz_next, batch_next)
        up = self.deconv(below)
        up = up.replace_feature(torch.cat((identity.features, up.features), dim=1))
        return self.blocks_tail(up)


class SphereFormer(nn.Module):
    """Five levels, linear classifier per voxel."""

    def __init__(self, input_c: int, planes: Any, classes: int):
        super().__init__()
        self.input_conv = spconv.SparseSequential(
            spconv.SubMConv3d(input_c, planes[0], kernel_size=3, padding=1, bias=False, indice_key="subm1")
        )
        self.unet = UBlock(list(planes), NORM, 2)
        self.output_layer = spconv.SparseSequential(NORM(planes[0]), nn.ReLU())
        self.linear = nn.Linear(planes[0], classes)

    def forward(
        self, feats: torch.Tensor, coords: torch.Tensor, spatial_shape: Any, xyz: torch.Tensor, ids: torch.Tensor
    ) -> torch.Tensor:
        batch = coords[:, 0].long()
        x = spconv.SparseConvTensor(feats, coords, spatial_shape, int(batch[-1]) + 1)
        x = self.unet(self.input_conv(x), xyz, batch)
        return self.linear(self.output_layer(x).features)[ids]


def build(input_c: int = 4, planes: Any = (32, 64, 128, 256, 256), classes: int = 20) -> nn.Module:
    return SphereFormer(input_c, planes, classes)


def batch(scene: Any, device: Any, dtype: torch.dtype) -> tuple:
    """Voxels (z, y, x) with one point each, by the voxelizer that also numbers the points."""
    high = [extent * edge for extent, edge in zip(scene.grid, scene.voxel_size, strict=True)]
    points = torch.cat([scene.points, scene.features], dim=1)
    voxelizer = PointToVoxel(
        vsize_xyz=list(scene.voxel_size),
        coors_range_xyz=[0, 0, 0, *high],
        num_point_features=points.shape[1],
        max_num_voxels=len(points),
        max_num_points_per_voxel=1,
    )
    coords, feats, positions, ids, voxels_so_far = [], [], [], [], 0
    for item in range(scene.batch_size):
        rows = scene.coords[:, 0] == item
        if not rows.any():
            continue
        voxels, sites, _, pc_voxel_id = voxelizer.generate_voxel_with_id(points[rows])
        kept = pc_voxel_id[pc_voxel_id != -1]
        coords.append(nn.functional.pad(sites.clone(), (1, 0), value=item))
        feats.append(voxels[:, 0, 3:].clone())
        positions.append(voxels[:, 0, :3].clone())
        ids.append(kept + voxels_so_far)
        voxels_so_far += len(sites)
    shape = list(scene.grid)[::-1]
    return (
        torch.cat(feats).to(device, dtype),
        torch.cat(coords).int().to(device),
        shape,
        torch.cat(positions).to(device),
        torch.cat(ids).to(device),
    )
