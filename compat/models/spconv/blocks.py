"""What several of the projects share: index columns, results in a fixed order, common blocks."""

from __future__ import annotations

import functools
from collections import OrderedDict
from typing import Any

import numpy as np
import torch
from torch import nn

try:
    import spconv.pytorch as spconv
    from spconv.pytorch.modules import SparseModule
except ImportError:
    import spconv
    from spconv.modules import SparseModule

BatchNorm = functools.partial(nn.BatchNorm1d, eps=1e-3, momentum=0.01)


def replace_feature(x: Any, features: torch.Tensor) -> Any:
    """Features exchanged in the way of whichever major version is there."""
    if "replace_feature" in x.__dir__():
        return x.replace_feature(features)
    x.features = features
    return x


def zyx(scene: Any, device: Any) -> torch.Tensor:
    """int32 [N, 1 + D] in the order of the detection code bases: (batch, z, y, x)."""
    order = [0, *range(scene.coords.shape[1] - 1, 0, -1)]
    return scene.coords[:, order].int().contiguous().to(device)


def xyz(scene: Any, device: Any) -> torch.Tensor:
    """int32 [N, 1 + D] as (batch, x, y, z)."""
    return scene.coords.int().contiguous().to(device)


def offsets(scene: Any) -> torch.Tensor:
    """int64 [B], number of rows up to and with each batch item."""
    return torch.bincount(scene.coords[:, 0].long(), minlength=scene.batch_size).cumsum(0)


def by_site(x: Any) -> torch.Tensor:
    """Features of a sparse tensor in ascending order of its sites; equal sites keep their order.

    The order of new rows is no part of spconv's contract, so results are compared this way.
    """
    return in_order(x.features, x.indices)


def in_order(features: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Rows of features [N, C] in ascending order of integer rows [N, D]."""
    keys = indices.detach().cpu().numpy()
    order = np.lexsort(keys.T[::-1])
    return features[torch.from_numpy(order).to(features.device)]


def columns(dense: torch.Tensor) -> torch.Tensor:
    """The cells [n, C] of a dense map [B, C, *grid] that hold anything, in order.

    Most are empty, and would drown what is compared.
    """
    cells = dense.flatten(2).transpose(1, 2).flatten(0, 1)
    return cells[(cells != 0).any(dim=1)]


class SparseBasicBlock(SparseModule):
    """Residual block of two submanifold layers: Subm, norm, ReLU, Subm, norm, add, ReLU."""

    def __init__(self, width: int, indice_key: str | None, bias: bool, norm: Any = BatchNorm):
        super().__init__()
        self.conv1 = spconv.SubMConv3d(
            width, width, kernel_size=3, stride=1, padding=1, bias=bias, indice_key=indice_key
        )
        self.bn1 = norm(width)
        self.relu = nn.ReLU()
        self.conv2 = spconv.SubMConv3d(
            width, width, kernel_size=3, stride=1, padding=1, bias=bias, indice_key=indice_key
        )
        self.bn2 = norm(width)

    def forward(self, x: Any) -> Any:
        out = self.conv1(x)
        out = replace_feature(out, self.relu(self.bn1(out.features)))
        out = self.conv2(out)
        out = replace_feature(out, self.bn2(out.features))
        return replace_feature(out, self.relu(out.features + x.features))


def reduce_channels(x: Any, width: int) -> Any:
    """Features [N, C] summed in groups of neighbours to [N, width]."""
    features = x.features
    return replace_feature(x, features.view(features.shape[0], width, -1).sum(dim=2))


def merge_lateral(bottom: Any, lateral: Any, transform: Any, merge: Any, up: Any) -> Any:
    """One decoder step of the Part-A2 U-Net: lateral and bottom joined, merged, brought up."""
    x = transform(lateral)
    x = replace_feature(x, torch.cat((bottom.features, x.features), dim=1))
    merged = merge(x)
    x = reduce_channels(x, merged.features.shape[1])
    x = replace_feature(x, merged.features + x.features)
    return up(x)


class PreActBlock(SparseModule):
    """Pre-activation block of the UBlock family: {norm, ReLU, Subm} twice, plus its input.

    unit: class of the layer of kernel volume 1 that projects the input where widths differ.
    """

    unit: Any = spconv.SubMConv3d

    def __init__(self, in_channels: int, out_channels: int, norm_fn: Any, indice_key: str):
        super().__init__()
        if in_channels == out_channels:
            self.i_branch = spconv.SparseSequential(nn.Identity())
        else:
            self.i_branch = spconv.SparseSequential(self.unit(in_channels, out_channels, kernel_size=1, bias=False))
        options = {"kernel_size": 3, "padding": 1, "bias": False, "indice_key": indice_key}
        self.conv_branch = spconv.SparseSequential(
            norm_fn(in_channels),
            nn.ReLU(),
            spconv.SubMConv3d(in_channels, out_channels, **options),
            norm_fn(out_channels),
            nn.ReLU(),
            spconv.SubMConv3d(out_channels, out_channels, **options),
        )

    def forward(self, input: Any) -> Any:
        identity = spconv.SparseConvTensor(input.features, input.indices, input.spatial_shape, input.batch_size)
        output = self.conv_branch(input)
        return replace_feature(output, output.features + self.i_branch(identity).features)


class UBlock(nn.Module):
    """Recursive U-Net of PointGroup and its descendants.

    planes: widths from this level down. block: class of the residual blocks, called as
    block(in, out, norm, indice_key=). return_blocks: also hand back the features of all levels.
    """

    def __init__(
        self, planes: list[int], norm: Any, reps: int, block: Any, level: int = 1, return_blocks: bool = False
    ):
        super().__init__()
        self.planes, self.return_blocks = planes, return_blocks
        here, key = planes[0], f"subm{level}"
        self.blocks = spconv.SparseSequential(
            OrderedDict((f"block{i}", block(here, here, norm, indice_key=key)) for i in range(reps))
        )
        if len(planes) == 1:
            return
        self.conv = spconv.SparseSequential(
            norm(here),
            nn.ReLU(),
            spconv.SparseConv3d(here, planes[1], kernel_size=2, stride=2, bias=False, indice_key=f"spconv{level}"),
        )
        self.u = UBlock(planes[1:], norm, reps, block, level + 1, return_blocks)
        self.deconv = spconv.SparseSequential(
            norm(planes[1]),
            nn.ReLU(),
            spconv.SparseInverseConv3d(planes[1], here, kernel_size=2, bias=False, indice_key=f"spconv{level}"),
        )
        self.blocks_tail = spconv.SparseSequential(
            OrderedDict((f"block{i}", block(here * (2 - min(i, 1)), here, norm, indice_key=key)) for i in range(reps))
        )

    def forward(self, x: Any, previous: list[Any] | None = None) -> Any:
        out = self.blocks(x)
        identity = spconv.SparseConvTensor(out.features, out.indices, out.spatial_shape, out.batch_size)
        if len(self.planes) > 1:
            below = self.conv(out)
            below = self.u(below, previous)
            if self.return_blocks:
                below, previous = below
            up = self.deconv(below)
            out = replace_feature(up, torch.cat((identity.features, up.features), dim=1))
            out = self.blocks_tail(out)
        if self.return_blocks:
            return out, [*(previous or []), out]
        return out
