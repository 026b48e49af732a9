"""SPVNAS's SPVCNN on torchsparse 2.1: own points derived from SparseTensor, the compiled hash
table, everything remembered in `_caches`. Coordinates are [batch, x, y, z].

Source: layer stack S11 of the usage notes.
"""

from __future__ import annotations

import itertools

import torch
import torchsparse
import torchsparse.backend
import torchsparse.nn.functional as F
from torch import nn
from torchsparse import SparseTensor
from torchsparse.nn.functional.devoxelize import calc_ti_weights
from torchsparse.nn.utils import *  # noqa: F403
from torchsparse.utils import *  # noqa: F403
from torchsparse.utils import make_ntuple, make_tensor
from torchsparse.utils.tensor_cache import TensorCache

from .spvnas_minkunet import MinkUNet, initialize_norms
from .spvnas_minkunet import batch as batch


class PointTensor(SparseTensor):
    """Features at float coordinates."""

    def __init__(self, feats, coords, idx_query=None, weights=None):
        super().__init__(feats=feats, coords=coords)
        self._caches.idx_query = {} if idx_query is None else idx_query
        self._caches.idx_query_devox = {}
        self._caches.weights_devox = {} if weights is None else weights


def scatter_mean(src, index, size):
    """torch_scatter.scatter_mean along rows."""
    total = src.new_zeros((size, src.shape[1])).index_add(0, index, src)
    counts = torch.bincount(index, minlength=size).clamp(min=1)
    return total / counts.unsqueeze(1).to(src.dtype)


def hash_query(references, queries, kernel_size):
    """Rows of `references` at the corners of each query, [M, kernel_size^3], -1 where empty."""
    device = queries.device
    keys = torch.zeros(2 * len(references), dtype=torch.int64, device=device)
    vals = torch.zeros(2 * len(references), dtype=torch.int32, device=device)
    table = torchsparse.backend.GPUHashTable(keys, vals)
    table.insert_coords(references[:, [1, 2, 3, 0]])
    sizes = make_tensor(make_ntuple(kernel_size, 3), torch.int32, device)
    strides = make_tensor(make_ntuple(1, 3), torch.int32, device)
    found = table.lookup_coords(queries[:, [1, 2, 3, 0]], sizes, strides, kernel_size**3)
    return found[: len(queries)] - 1


def initial_voxelize(z, init_res, after_res):
    scaled = torch.cat([z.C[:, :1], z.C[:, 1:] * init_res / after_res], dim=1)
    cells = torch.floor(scaled).int()
    coords, idx_query = torch.unique(cells, dim=0, return_inverse=True)
    x = SparseTensor(scatter_mean(z.F, idx_query, len(coords)), coords, 1)
    x._caches.cmaps.setdefault((1, 1, 1), (x.C, x.spatial_range))
    z._caches.idx_query[x.s] = idx_query
    z.C = scaled
    return x


def _scaled(z, stride):
    return torch.cat([z.C[:, :1], z.C[:, 1:] / stride[0]], dim=1)


def point_to_voxel(x, z):
    known = z._caches.idx_query
    if known.get(x.s) is None:
        cells = torch.floor(_scaled(z, x.s)).int()
        known[x.s] = hash_query(x.C, cells, 1)[:, 0].clamp(min=0).long()
    made = SparseTensor(scatter_mean(z.F, known[x.s], len(x.C)), x.C, x.s)
    made._caches = x._caches
    return made


def voxel_to_point(x, z):
    caches = z._caches
    if caches.idx_query_devox.get(x.s) is None:
        scaled = _scaled(z, x.s)
        idx_query = hash_query(x.C, torch.floor(scaled).int(), 2)
        caches.idx_query_devox[x.s] = idx_query
        caches.weights_devox[x.s] = calc_ti_weights(scaled[:, 1:], idx_query, scale=1)
    weights = caches.weights_devox[x.s].to(x.F.dtype)
    made = PointTensor(F.spdevoxelize(x.F, caches.idx_query_devox[x.s], weights), z.C)
    made._caches = caches
    return made


class SPVCNN(MinkUNet):
    def __init__(self, in_channels=4, num_classes=19, pres=0.05, vres=0.05, **widths):
        super().__init__(in_channels, num_classes, **widths)
        self.pres, self.vres = pres, vres
        cs = [
            self.stem[0].out_channels,
            self.stage4[2].net[3].out_channels,
            self.up2[1][1].net[3].out_channels,
            self.up4[1][1].net[3].out_channels,
        ]
        self.point_transforms = nn.ModuleList(
            nn.Sequential(nn.Linear(before, width), nn.BatchNorm1d(width), nn.ReLU(True))
            for before, width in itertools.pairwise(cs)
        )
        initialize_norms(self)
        self.dropout = nn.Dropout(0.3, True)

    def to_points(self, x, z, index):
        fused = voxel_to_point(x, z)
        fused.F = fused.F + self.point_transforms[index](z.F)
        return fused

    def forward(self, x):
        assert isinstance(x._caches, TensorCache)
        z = PointTensor(x.F, x.C.float())
        x0 = self.stem(initial_voxelize(z, self.pres, self.vres))
        z0 = voxel_to_point(x0, z)

        x1 = self.stage1(point_to_voxel(x0, z0))
        x2 = self.stage2(x1)
        x3 = self.stage3(x2)
        x4 = self.stage4(x3)
        z1 = self.to_points(x4, z0, 0)

        y1 = point_to_voxel(x4, z1)
        y1.F = self.dropout(y1.F)
        y2 = self.decode(self.up2, self.decode(self.up1, y1, x3), x2)
        z2 = self.to_points(y2, z1, 1)

        y3 = point_to_voxel(y2, z2)
        y3.F = self.dropout(y3.F)
        y4 = self.decode(self.up4, self.decode(self.up3, y3, x1), x0)
        z3 = self.to_points(y4, z2, 2)
        return self.classifier(z3.F)


def build(**options):
    return SPVCNN(**options)
