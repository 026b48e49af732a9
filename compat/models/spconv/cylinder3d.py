"""Cylinder3D's asymmetric U-Net, written for spconv 1.x: kernels of other shapes share keys."""

from __future__ import annotations

from typing import Any

import spconv

if not hasattr(spconv, "SubMConv3d"):  # 2.x keeps the same names one level down
    import spconv.pytorch as spconv
import numpy as np
import torch
from torch import nn

SHAPES = {"1x3": (1, 3, 3), "3x1": (3, 1, 3), "3x3": (3, 3, 3)}
LINES = ((3, 1, 1), (1, 3, 1), (1, 1, 3))


class Dialect:
    """How maps are named and features exchanged.

    modern: as ports to spconv 2.x do it, a key per kernel shape and `replace_feature`; else as
    published, one key for several shapes and features assigned.
    """

    def __init__(self, modern: bool):
        self.modern = modern

    def conv(self, c_in: int, c_out: int, kernel: tuple[int, ...], key: str) -> Any:
        """A submanifold layer without bias."""
        return spconv.SubMConv3d(
            c_in,
            c_out,
            kernel_size=kernel,
            stride=1,
            padding=tuple(k // 2 for k in kernel),
            bias=False,
            indice_key="_".join([key, *map(str, kernel)]) if self.modern else key,
        )

    def put(self, x: Any, features: torch.Tensor) -> Any:
        """x with other features."""
        if self.modern:
            return x.replace_feature(features)
        x.features = features
        return x

    def after(self, x: Any, *modules: nn.Module) -> Any:
        """Plain modules on the features, one exchange each."""
        for module in modules:
            x = self.put(x, module(x.features))
        return x


class ResContextBlock(nn.Module):
    """Two branches of asymmetric kernels in both orders, summed."""

    order = ("1x3", "3x1", "3x1", "1x3")

    def __init__(self, in_filters: int, out_filters: int, indice_key: str, dialect: Dialect):
        super().__init__()
        self.dialect = dialect
        key = indice_key + "bef"
        shapes = [SHAPES[name] for name in self.order]
        self.conv1 = dialect.conv(in_filters, out_filters, shapes[0], key)
        self.bn0 = nn.BatchNorm1d(out_filters)
        self.act1 = nn.LeakyReLU()
        self.conv1_2 = dialect.conv(out_filters, out_filters, shapes[1], key)
        self.bn0_2 = nn.BatchNorm1d(out_filters)
        self.act1_2 = nn.LeakyReLU()
        self.conv2 = dialect.conv(in_filters, out_filters, shapes[2], key)
        self.act2 = nn.LeakyReLU()
        self.bn1 = nn.BatchNorm1d(out_filters)
        self.conv3 = dialect.conv(out_filters, out_filters, shapes[3], key)
        self.act3 = nn.LeakyReLU()
        self.bn2 = nn.BatchNorm1d(out_filters)

    def forward(self, x: Any) -> Any:
        shortcut = self.dialect.after(self.conv1(x), self.act1, self.bn0)
        shortcut = self.dialect.after(self.conv1_2(shortcut), self.act1_2, self.bn0_2)
        res = self.dialect.after(self.conv2(x), self.act2, self.bn1)
        res = self.dialect.after(self.conv3(res), self.act3, self.bn2)
        return self.dialect.put(res, res.features + shortcut.features)


class ResBlock(ResContextBlock):
    """The branches in the other order, then a strided layer."""

    order = ("3x1", "1x3", "1x3", "3x1")

    def __init__(self, in_filters: int, out_filters: int, height_pooling: bool, indice_key: str, dialect: Dialect):
        super().__init__(in_filters, out_filters, indice_key, dialect)
        self.pool = spconv.SparseConv3d(
            out_filters,
            out_filters,
            kernel_size=3,
            stride=2 if height_pooling else (2, 2, 1),
            padding=1,
            indice_key=indice_key,
            bias=False,
        )

    def forward(self, x: Any) -> Any:
        res = super().forward(x)
        return self.pool(res), res


class UpBlock(nn.Module):
    """Submanifold layer, inverse of a pool, skip added, three kernels under one key."""

    def __init__(self, in_filters: int, out_filters: int, indice_key: str, up_key: str, dialect: Dialect):
        super().__init__()
        self.dialect = dialect
        self.trans_dilao = dialect.conv(in_filters, out_filters, SHAPES["3x3"], indice_key + "new_up")
        self.trans_act = nn.LeakyReLU()
        self.trans_bn = nn.BatchNorm1d(out_filters)
        self.conv1 = dialect.conv(out_filters, out_filters, SHAPES["1x3"], indice_key)
        self.act1 = nn.LeakyReLU()
        self.bn1 = nn.BatchNorm1d(out_filters)
        self.conv2 = dialect.conv(out_filters, out_filters, SHAPES["3x1"], indice_key)
        self.act2 = nn.LeakyReLU()
        self.bn2 = nn.BatchNorm1d(out_filters)
        self.conv3 = dialect.conv(out_filters, out_filters, SHAPES["3x3"], indice_key)
        self.act3 = nn.LeakyReLU()
        self.bn3 = nn.BatchNorm1d(out_filters)
        self.up_subm = spconv.SparseInverseConv3d(
            out_filters, out_filters, kernel_size=3, indice_key=up_key, bias=False
        )

    def forward(self, x: Any, skip: Any) -> Any:
        up = self.dialect.after(self.trans_dilao(x), self.trans_act, self.trans_bn)
        up = self.up_subm(up)
        up = self.dialect.put(up, up.features + skip.features)
        up = self.dialect.after(self.conv1(up), self.act1, self.bn1)
        up = self.dialect.after(self.conv2(up), self.act2, self.bn2)
        return self.dialect.after(self.conv3(up), self.act3, self.bn3)


class ReconBlock(nn.Module):
    """Three line kernels, each through a sigmoid; their sum weighs the input."""

    def __init__(self, in_filters: int, out_filters: int, indice_key: str, dialect: Dialect):
        super().__init__()
        self.dialect = dialect
        for name, kernel in zip(("", "_2", "_3"), LINES, strict=True):
            layer = dialect.conv(in_filters, out_filters, kernel, indice_key + "bef")
            self.add_module(f"conv1{name}", layer)
            self.add_module(f"bn0{name}", nn.BatchNorm1d(out_filters))
            self.add_module(f"act1{name}", nn.Sigmoid())

    def forward(self, x: Any) -> Any:
        first = self.dialect.after(self.conv1(x), self.bn0, self.act1)
        second = self.dialect.after(self.conv1_2(x), self.bn0_2, self.act1_2)
        third = self.dialect.after(self.conv1_3(x), self.bn0_3, self.act1_3)
        total = first.features + second.features + third.features
        first = self.dialect.put(first, total)
        return self.dialect.put(first, first.features * x.features)


class Asymm3dSpconv(nn.Module):
    """Dense class scores [B, classes, 480, 360, 32] of a cylindrical grid, as published."""

    def __init__(self, output_shape: Any, num_input_features: int, nclasses: int, init_size: int, modern: bool):
        super().__init__()
        self.dialect, size = Dialect(modern), init_size
        dialect = self.dialect
        self.sparse_shape = np.array(output_shape)
        self.downCntx = ResContextBlock(num_input_features, size, "pre", dialect)
        for level in range(2, 6):
            width = 2 ** (level - 2) * size
            block = ResBlock(width, 2 * width, level < 4, f"down{level}", dialect)
            self.add_module(f"resBlock{level}", block)
        widths = (16, 16, 8, 4)
        for i, width in enumerate(widths):
            out = 2 ** (4 - i) * size
            block = UpBlock(width * size, out, f"up{i}", f"down{5 - i}", dialect)
            self.add_module(f"upBlock{i}", block)
        self.ReconNet = ReconBlock(2 * size, 2 * size, "recon", dialect)
        self.logits = spconv.SubMConv3d(
            4 * size, nclasses, indice_key="logit", kernel_size=3, stride=1, padding=1, bias=True
        )

    def forward(self, voxel_features: torch.Tensor, coors: torch.Tensor, batch_size: int) -> torch.Tensor:
        ret = spconv.SparseConvTensor(voxel_features, coors.int(), self.sparse_shape, batch_size)
        x = self.downCntx(ret)
        skips = []
        for level in range(2, 6):
            x, skip = getattr(self, f"resBlock{level}")(x)
            skips.append(skip)
        for i in range(4):
            x = getattr(self, f"upBlock{i}")(x, skips.pop())
        x0 = self.ReconNet(x)
        x0 = self.dialect.put(x0, torch.cat((x0.features, x.features), 1))
        scores: torch.Tensor = self.logits(x0).dense()
        return scores


def build(
    output_shape: Any = (480, 360, 32),
    num_input_features: int = 16,
    nclasses: int = 20,
    init_size: int = 32,
    modern: bool = False,
) -> nn.Module:
    return Asymm3dSpconv(output_shape, num_input_features, nclasses, init_size, modern)


def batch(scene: Any, device: Any, dtype: torch.dtype) -> tuple:
    """The scene seen in cylindrical cells; features of equal cells keep their maximum."""
    middle = torch.tensor(scene.grid[:2]) * torch.tensor(scene.voxel_size[:2]) / 2
    plane = scene.points[:, :2] - middle
    radius = plane.norm(dim=1) / (middle.norm() * 1.001)
    angle = torch.atan2(plane[:, 1], plane[:, 0]) / (2 * torch.pi) + 0.5
    height = scene.coords[:, 3] / scene.grid[2]
    unit = torch.stack([radius, angle, height], dim=1)
    limit = torch.tensor([480, 360, 32])
    cells = (unit * limit).long().clamp(max=limit - 1)
    cells = torch.cat([scene.coords[:, :1].long(), cells], dim=1)
    sites, inverse = torch.unique(cells, dim=0, return_inverse=True)
    pooled = scene.features.new_zeros(len(sites), scene.features.shape[1]).scatter_reduce(
        0, inverse[:, None].expand_as(scene.features), scene.features, "amax", include_self=False
    )
    return pooled.to(device, dtype), sites.int().to(device), scene.batch_size


def outputs(result: torch.Tensor) -> list[torch.Tensor]:
    """Scores [N, classes] of the cells that are not empty."""
    return [result.movedim(1, -1)[(result != 0).any(1)]]
