"""Networks as their projects write them, with torchsparse given as an argument.

Layer stacks: usage notes S10 to S12 and S23. Widths are divided so that an fp64 oracle can follow.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

WIDTHS = [8, 8, 12, 16, 16, 16, 12, 8, 8]


def scatter_mean(src, index, n):
    """torch_scatter.scatter_mean along rows."""
    total = src.new_zeros((n, src.shape[1])).index_add(0, index, src)
    counts = src.new_zeros(n).index_add(0, index, torch.ones_like(src[:, 0]))
    return total / counts.clamp(min=1).unsqueeze(1)


class Blocks:
    """Building blocks of spvnas and mmdetection3d; `positional` is the latter's calling style."""

    def __init__(self, ts, positional):
        self.ts, self.spnn, self.positional = ts, ts.nn, positional

    def conv(self, inc, outc, ks=3, stride=1, transposed=False):
        if self.positional:
            return self.spnn.Conv3d(inc, outc, ks, stride, 1, False, transposed)
        return self.spnn.Conv3d(inc, outc, kernel_size=ks, dilation=1, stride=stride, transposed=transposed)

    def basic(self, inc, outc, ks=3, stride=1, transposed=False):
        return nn.Sequential(
            self.conv(inc, outc, ks, stride, transposed), self.spnn.BatchNorm(outc), self.spnn.ReLU(True)
        )

    def residual(self, inc, outc):
        return Residual(self, inc, outc)

    def encoder(self, inc, outc):
        return nn.Sequential(self.basic(inc, inc, 2, 2), self.residual(inc, outc), self.residual(outc, outc))

    def decoder(self, inc, skip, outc):
        return nn.ModuleList(
            [
                self.basic(inc, outc, 2, 2, transposed=True),
                nn.Sequential(self.residual(outc + skip, outc), self.residual(outc, outc)),
            ]
        )


class Residual(nn.Module):
    def __init__(self, blocks, inc, outc):
        super().__init__()
        self.net = nn.Sequential(
            blocks.conv(inc, outc),
            blocks.spnn.BatchNorm(outc),
            blocks.spnn.ReLU(True),
            blocks.conv(outc, outc),
            blocks.spnn.BatchNorm(outc),
        )
        if inc == outc:
            self.downsample = nn.Identity()
        else:
            self.downsample = nn.Sequential(blocks.conv(inc, outc, 1), blocks.spnn.BatchNorm(outc))
        self.relu = blocks.spnn.ReLU(True)

    def forward(self, x):
        return self.relu(self.net(x) + self.downsample(x))


class MinkUNet(nn.Module):
    def __init__(self, ts, positional=False, classes=5):
        super().__init__()
        self.ts, cs, blocks = ts, WIDTHS, Blocks(ts, positional)
        self.stem = nn.Sequential(blocks.basic(4, cs[0]), blocks.basic(cs[0], cs[0]))
        self.stages = nn.ModuleList([blocks.encoder(cs[i], cs[i + 1]) for i in range(4)])
        self.ups = nn.ModuleList([blocks.decoder(cs[4 + i], cs[3 - i], cs[5 + i]) for i in range(4)])
        self.classifier = nn.Linear(cs[8], classes)

    def forward(self, x):
        x = self.stem(x)
        skips = [x]
        for stage in self.stages:
            x = stage(x)
            skips.append(x)
        for i, (up, fuse) in enumerate(self.ups):
            x = fuse(self.ts.cat([up(x), skips[3 - i]]))
        return self.classifier(x.F)


class PointBranch(MinkUNet):
    """SPVCNN: points beside voxels. Subclasses say how to go from one to the other."""

    def __init__(self, ts, positional=False, classes=5):
        super().__init__(ts, positional, classes)
        cs = WIDTHS
        self.point_transforms = nn.ModuleList(
            nn.Sequential(nn.Linear(a, b), nn.BatchNorm1d(b), nn.ReLU(True))
            for a, b in ((cs[0], cs[4]), (cs[4], cs[6]), (cs[6], cs[8]))
        )
        self.dropout = nn.Dropout(0.3, True)

    def forward(self, points, feats):
        z = self.points(points, feats)
        x0 = self.stem(self.initial(z))
        z0 = self.to_points(x0, z)
        x = self.to_voxels(x0, z0)
        skips = [x]
        for stage in self.stages:
            x = stage(x)
            skips.append(x)
        z1 = self.to_points(x, z0)
        z1.F = z1.F + self.point_transforms[0](z0.F)
        y = self.to_voxels(x, z1)
        y.F = self.dropout(y.F)
        for i in (0, 1):
            up, fuse = self.ups[i]
            y = fuse(self.ts.cat([up(y), skips[3 - i]]))
        z2 = self.to_points(y, z1)
        z2.F = z2.F + self.point_transforms[1](z1.F)
        y = self.to_voxels(y, z2)
        y.F = self.dropout(y.F)
        for i in (2, 3):
            up, fuse = self.ups[i]
            y = fuse(self.ts.cat([up(y), skips[3 - i]]))
        z3 = self.to_points(y, z2)
        z3.F = z3.F + self.point_transforms[2](z2.F)
        return self.classifier(z3.F)


class OldSPVCNN(PointBranch):
    """mmdetection3d and Pointcept on 1.4: hash helpers, PointTensor, cmaps and kmaps."""

    def points(self, points, feats):
        return self.ts.tensor.PointTensor(feats, points)

    def initial(self, z):
        F = self.ts.nn.functional
        cells = torch.floor(z.C)
        keys = F.sphash(cells.int())
        sparse = torch.unique(keys)
        idx = F.sphashquery(keys, sparse)
        counts = F.spcount(idx.int(), len(sparse))
        coords = torch.round(F.spvoxelize(cells, idx, counts)).int()
        x = self.ts.tensor.SparseTensor(F.spvoxelize(z.F, idx, counts), coords, 1)
        x.cmaps.setdefault(x.stride, x.coords)
        z.additional_features["idx_query"][1] = idx
        z.additional_features["counts"][1] = counts
        return x

    def _floored(self, z, s):
        xyz = torch.floor(z.C[:, :3] / s[0]).int() * s[0]
        return torch.cat([xyz, z.C[:, -1].int().view(-1, 1)], 1)

    def to_voxels(self, x, z):
        F = self.ts.nn.functional
        known = z.additional_features
        if known.get("idx_query") is None or known["idx_query"].get(x.s) is None:
            idx = F.sphashquery(F.sphash(self._floored(z, x.s)), F.sphash(x.C))
            counts = F.spcount(idx.int(), x.C.shape[0])
            known["idx_query"][x.s], known["counts"][x.s] = idx, counts
        feats = F.spvoxelize(z.F, known["idx_query"][x.s], known["counts"][x.s])
        made = self.ts.tensor.SparseTensor(feats, x.C, x.s)
        made.cmaps, made.kmaps = x.cmaps, x.kmaps
        return made

    def to_points(self, x, z, nearest=False):
        F = self.ts.nn.functional
        if z.idx_query.get(x.s) is None or z.weights.get(x.s) is None:
            off = self.ts.nn.utils.get_kernel_offsets(2, x.s, 1, device=z.F.device)
            keys = F.sphash(self._floored(z, x.s), off)
            idx = F.sphashquery(keys, F.sphash(x.C.to(z.F.device)))
            weights = F.calc_ti_weights(z.C, idx, scale=x.s[0])
            weights, idx = weights.transpose(0, 1).contiguous(), idx.transpose(0, 1).contiguous()
            if nearest:
                weights[:, 1:] = 0.0
                idx[:, 1:] = -1
            z.idx_query[x.s], z.weights[x.s] = idx, weights
        feats = F.spdevoxelize(x.F, z.idx_query[x.s], z.weights[x.s])
        made = self.ts.tensor.PointTensor(feats, z.C, z.idx_query, z.weights)
        made.additional_features = z.additional_features
        return made


class NewSPVCNN(PointBranch):
    """spvnas on 2.1: own points derived from SparseTensor, GPUHashTable, everything in
    `_caches`."""

    def points(self, points, feats):
        ts = self.ts

        class PointTensor(ts.SparseTensor):
            def __init__(self, feats, coords):
                super().__init__(feats, coords)
                self._caches.idx_query, self._caches.idx_query_devox = {}, {}
                self._caches.weights_devox = {}

        self.kind = PointTensor
        return PointTensor(feats, points)

    def _query(self, references, queries, kernel):
        """[M, 8 or 1] rows of `references`, -1 where there is none."""
        keys = torch.zeros(2 * len(references), dtype=torch.int64, device=references.device)
        vals = torch.zeros(2 * len(references), dtype=torch.int32, device=references.device)
        table = self.ts.backend.GPUHashTable(keys, vals)
        table.insert_coords(references[:, [1, 2, 3, 0]])
        make = self.ts.utils.make_tensor
        kernel_size = make(self.ts.utils.make_ntuple(kernel, 3), torch.int32, queries.device)
        stride = make((1, 1, 1), torch.int32, queries.device)
        volume = np.prod([kernel] * 3)
        found = table.lookup_coords(queries[:, [1, 2, 3, 0]], kernel_size, stride, volume)
        return found[: len(queries)] - 1

    def initial(self, z):
        cells = torch.floor(z.C).int()
        coords, idx = torch.unique(cells, dim=0, return_inverse=True)
        x = self.ts.SparseTensor(scatter_mean(z.F, idx, len(coords)), coords, 1)
        z._caches.idx_query[x.s] = idx
        x._caches.cmaps.setdefault(x.stride, (x.coords, None))
        return x

    def _scaled(self, z, s):
        return torch.cat([z.C[:, :1], z.C[:, 1:] / s[0]], 1)

    def to_voxels(self, x, z):
        known = z._caches.idx_query
        if x.s not in known:
            idx = self._query(x.C, torch.floor(self._scaled(z, x.s)).int(), 1)[:, 0]
            known[x.s] = idx.clamp(min=0).long()
        made = self.ts.SparseTensor(scatter_mean(z.F, known[x.s], len(x.C)), x.C, x.s)
        made._caches = x._caches
        return made

    def to_points(self, x, z):
        F, caches = self.ts.nn.functional, z._caches
        if x.s not in caches.idx_query_devox:
            scaled = self._scaled(z, x.s)
            idx = self._query(x.C, torch.floor(scaled).int(), 2)
            caches.idx_query_devox[x.s] = idx
            caches.weights_devox[x.s] = F.calc_ti_weights(scaled[:, 1:], idx, scale=1)
        idx, weights = caches.idx_query_devox[x.s], caches.weights_devox[x.s]
        made = self.kind(F.spdevoxelize(x.F, idx, weights.to(x.F.dtype)), z.C)
        made._caches = caches
        return made


class Wrapped:
    """TRELLIS's SparseTensor: one class over several libraries."""

    def __init__(self, data):
        self.data = data

    feats = property(lambda self: self.data.F)
    coords = property(lambda self: self.data.C)

    def replace(self, feats):
        kind = type(self.data)
        data = kind(
            feats=feats, coords=self.data.coords, stride=self.data.stride, spatial_range=self.data.spatial_range
        )
        data._caches = self.data._caches
        return Wrapped(data)


class WrappedConv(nn.Module):
    def __init__(self, ts, inc, outc, ks, stride=1, dilation=1, bias=True):
        super().__init__()
        self.conv = ts.nn.Conv3d(inc, outc, ks, stride, 0, dilation, bias)

    def forward(self, x):
        return Wrapped(self.conv(x.data))


class Subdivide(nn.Module):
    """Direct3D-S2's decoder block: conv, SiLU, every voxel into eight, conv."""

    def __init__(self, ts, inc, outc):
        super().__init__()
        self.ts = ts
        self.first, self.second = WrappedConv(ts, inc, outc, 3), WrappedConv(ts, outc, outc, 3)
        self.skip = nn.Identity() if inc == outc else WrappedConv(ts, inc, outc, 1)

    def split(self, x):
        n = torch.tensor([[a, b, c] for a in (0, 1) for b in (0, 1) for c in (0, 1)])
        coords = x.coords.unsqueeze(1).repeat(1, 8, 1)
        coords[:, :, 1:] = coords[:, :, 1:] * 2 + n.to(coords)
        feats = x.feats.unsqueeze(1).expand(-1, 8, -1).flatten(0, 1)
        data = self.ts.SparseTensor(feats, coords.flatten(0, 1).contiguous())
        limits = x.data.spatial_range
        data.spatial_range = None if limits is None else (limits[0], *(2 * n for n in limits[1:]))
        return Wrapped(data)

    def forward(self, x):
        h = self.first(x)
        h = h.replace(nn.functional.silu(h.feats))
        h, x = self.split(h), self.split(x)
        h = self.second(h)
        skip = x if isinstance(self.skip, nn.Identity) else self.skip(x)
        return h.replace(h.feats + skip.feats)


class Decoder(nn.Module):
    def __init__(self, ts, width=16):
        super().__init__()
        self.blocks = nn.ModuleList([Subdivide(ts, width, width // 4), Subdivide(ts, width // 4, width // 4)])
        self.out = nn.Linear(width // 4, 3)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.out(x.feats)
