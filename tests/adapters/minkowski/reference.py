"""MinkowskiEngine's rules in dictionaries and float64, as an oracle for whole networks.

The same class names, attributes and state dictionaries as the real package, so that one network
definition runs on both. Maps are ordered lists of coordinate tuples; nothing is shared with the
engine under test.
"""

from __future__ import annotations

import itertools
import types

import torch
from torch import nn
from torch.nn import functional as F

__all__ = ["Manager", "SparseTensor", "namespace"]


def per_axis(value, dimension):
    return (value,) * dimension if isinstance(value, int) else tuple(value)


def offsets_of(kernel_size):
    """Offsets with axis 1 fastest, odd sizes centred."""
    axes = [range(-(k // 2), k // 2 + 1) if k % 2 else range(k) for k in kernel_size]
    return [tuple(reversed(offset)) for offset in itertools.product(*reversed(axes))]


class Manager:
    def __init__(self):
        self.maps = {}
        self.made = 0
        self.pruned = set()
        self.coarser = {}

    def add(self, stride, sites, name=""):
        while (stride, name) in self.maps:
            self.made += 1
            name = f"{name}#{self.made}"
        self.maps[stride, name] = {site: row for row, site in enumerate(dict.fromkeys(sites))}
        return stride, name

    def strided(self, key, steps):
        stride, name = key
        coarse = tuple(t * s for t, s in zip(stride, steps, strict=True))
        found = self.coarser.get((key, coarse), (coarse, name))
        if found not in self.maps or found in self.pruned:
            cells = [(b, *(c // t * t for c, t in zip(u, coarse, strict=True))) for b, *u in self.maps[key]]
            found = self.add(coarse, cells, name)
        self.coarser[key, coarse] = found
        return found

    def pairs(self, fine, coarse, kernel, stride):
        """(rows of fine, rows of coarse) per offset: fine site = coarse site + offset * stride."""
        found = []
        for offset in kernel:
            rows = []
            for (b, *u), row in self.maps[coarse].items():
                site = (b, *(c + o * t for c, o, t in zip(u, offset, stride, strict=True)))
                if site in self.maps[fine]:
                    rows.append((self.maps[fine][site], row))
            found.append(torch.tensor(rows, dtype=torch.int64).reshape(-1, 2))
        return found


class SparseTensor:
    def __init__(self, features, coordinates=None, coordinate_map_key=None, coordinate_manager=None):
        self.coordinate_manager = coordinate_manager or Manager()
        if coordinates is not None:
            sites = [tuple(site) for site in coordinates.tolist()]
            stride = (1,) * (len(sites[0]) - 1)
            coordinate_map_key = self.coordinate_manager.add(stride, sites)
        self.coordinate_map_key = coordinate_map_key
        self.F = features

    def new(self, features, key=None):
        return SparseTensor(
            features, coordinate_map_key=key or self.coordinate_map_key, coordinate_manager=self.coordinate_manager
        )

    @property
    def sites(self):
        return self.coordinate_manager.maps[self.coordinate_map_key]

    @property
    def C(self):
        columns = 1 + len(self.coordinate_map_key[0])
        return torch.tensor(list(self.sites), dtype=torch.int32).reshape(-1, columns)

    @property
    def features(self):
        return self.F

    @property
    def tensor_stride(self):
        return list(self.coordinate_map_key[0])

    def __len__(self):
        return len(self.F)

    def __add__(self, other):
        if self.coordinate_map_key == other.coordinate_map_key:
            return self.new(self.F + other.F)
        manager = self.coordinate_manager
        joined = dict.fromkeys([*self.sites, *other.sites])
        low = tuple(map(min, self.coordinate_map_key[0], other.coordinate_map_key[0]))
        key = manager.add(low, joined, "merge")
        place = manager.maps[key]
        rows = [torch.tensor([place[s] for s in x.sites], dtype=torch.int64) for x in (self, other)]
        zero = self.F.new_zeros(len(joined), self.F.shape[1])
        return self.new(zero.index_add(0, rows[0], self.F).index_add(0, rows[1], other.F), key)

    __iadd__ = __add__

    def features_at_coordinates(self, query):
        stride, rows = self.coordinate_map_key[0], []
        for batch, *position in query.tolist():
            value = self.F.new_zeros(self.F.shape[1])
            low = [int(p // t) * t for p, t in zip(position, stride, strict=True)]
            for up in itertools.product((0, 1), repeat=len(stride)):
                site = [c + u * t for c, u, t in zip(low, up, stride, strict=True)]
                weight = 1.0
                for p, c, t in zip(position, site, stride, strict=True):
                    weight *= 1 - abs(p - c) / t
                row = self.sites.get((round(batch), *site))
                if row is not None:
                    value = value + weight * self.F[row]
            rows.append(value)
        return torch.stack(rows)

    @property
    def decomposition_permutations(self):
        batch = self.C[:, 0]
        return [(batch == b).nonzero()[:, 0] for b in range(int(batch.max()) + 1)]


class _Conv(nn.Module):
    transposed = generative = False

    def __init__(
        self,
        in_channels,
        out_channels,
        kernel_size=-1,
        stride=1,
        dilation=1,
        bias=False,
        kernel_generator=None,
        dimension=None,
        expand_coordinates=False,
    ):
        super().__init__()
        if kernel_generator is not None:
            kernel_size, stride, dilation = kernel_generator
        self.stride = per_axis(stride, dimension)
        self.dilation = per_axis(dilation, dimension)
        self.offsets = offsets_of(per_axis(kernel_size, dimension))
        self.expand = expand_coordinates or self.generative
        shape = (in_channels, out_channels)
        self.plain = len(self.offsets) == 1 and all(s == 1 for s in self.stride)
        if not self.plain:
            shape = (len(self.offsets), *shape)
        self.kernel = nn.Parameter(torch.empty(shape, dtype=torch.float64))
        self.bias = nn.Parameter(torch.empty(1, out_channels, dtype=torch.float64)) if bias else None

    def forward(self, x):
        out, key = (x.F @ self.kernel, None) if self.plain else self.run(x)
        return x.new(out if self.bias is None else out + self.bias, key)

    def run(self, x):
        manager, key = x.coordinate_manager, x.coordinate_map_key
        out_key = self.target(manager, key)
        fine, coarse = (out_key, key) if self.transposed else (key, out_key)
        step = [t * d for t, d in zip(fine[0], self.dilation, strict=True)]
        out = x.F.new_zeros(len(manager.maps[out_key]), self.kernel.shape[2])
        for rows, w in zip(manager.pairs(fine, coarse, self.offsets, step), self.kernel, strict=True):
            there, here = rows.t() if not self.transposed else rows.flip(1).t()
            out = out.index_add(0, here, x.F[there] @ w)
        return out, out_key

    def target(self, manager, key):
        if not self.transposed:
            return key if all(s == 1 for s in self.stride) else manager.strided(key, self.stride)
        fine = tuple(t // s for t, s in zip(key[0], self.stride, strict=True))
        if not self.expand and (fine, "") in manager.maps:
            return fine, ""
        step = [t * d for t, d in zip(fine, self.dilation, strict=True)]
        sites = [
            (b, *(c + o * t for c, o, t in zip(u, offset, step, strict=True)))
            for b, *u in manager.maps[key]
            for offset in self.offsets
        ]
        return manager.add(fine, sites)


class _Transpose(_Conv):
    transposed = True


class _Generative(_Conv):
    transposed = generative = True


class _BatchNorm(nn.Module):
    def __init__(self, num_features, eps=1e-5, momentum=0.1):
        super().__init__()
        self.bn = nn.BatchNorm1d(num_features, eps=eps, momentum=momentum, dtype=torch.float64)

    def forward(self, x):
        return x.new(self.bn(x.F))


class _InstanceNorm(nn.Module):
    def __init__(self, num_features):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, num_features, dtype=torch.float64))
        self.bias = nn.Parameter(torch.zeros(1, num_features, dtype=torch.float64))

    def forward(self, x):
        out = torch.empty_like(x.F)
        for rows in x.decomposition_permutations:
            part = x.F[rows]
            centred = part - part.mean(0)
            scale = (centred.square().mean(0) + 1e-8).rsqrt()
            out = out.index_copy(0, rows, centred * scale)
        return x.new(out * self.weight + self.bias)


class _Pool(nn.Module):
    """Cells of the stride (kernel size = stride only)."""

    def __init__(self, kernel_size, stride=1, dimension=None):
        super().__init__()
        assert kernel_size == stride
        self.stride = per_axis(stride, dimension)

    def forward(self, x):
        key = x.coordinate_manager.strided(x.coordinate_map_key, self.stride)
        cells = x.coordinate_manager.maps[key]
        members = [[] for _ in cells]
        for (b, *u), row in x.sites.items():
            site = (b, *(c // t * t for c, t in zip(u, key[0], strict=True)))
            members[cells[site]].append(row)
        return x.new(torch.stack([self.reduce(x.F[rows]) for rows in members]), key)


class _MaxPool(_Pool):
    def reduce(self, part):
        return part.max(0).values


class _AvgPool(_Pool):
    def reduce(self, part):
        return part.mean(0)


class _Pruning(nn.Module):
    def forward(self, x, mask):
        manager = x.coordinate_manager
        kept = [site for site, keep in zip(x.sites, mask.tolist(), strict=True) if keep]
        key = manager.add(x.coordinate_map_key[0], kept, "pruned")
        manager.pruned.add(key)
        return x.new(x.F[mask], key)


def _activation(function):
    class Activation(nn.Module):
        def __init__(self, inplace=False):
            super().__init__()

        def forward(self, x):
            return x.new(function(x.F))

    return Activation


def _cat(*tensors):
    assert len({x.coordinate_map_key for x in tensors}) == 1
    return tensors[0].new(torch.cat([x.F for x in tensors], 1))


def _generator(kernel_size, stride=1, dilation=1, dimension=None, **_):
    return kernel_size, stride, dilation


def namespace():
    """What a network definition calls `ME`."""
    return types.SimpleNamespace(
        SparseTensor=SparseTensor,
        KernelGenerator=_generator,
        RegionType=types.SimpleNamespace(HYPER_CUBE=0),
        MinkowskiConvolution=_Conv,
        MinkowskiConvolutionTranspose=_Transpose,
        MinkowskiGenerativeConvolutionTranspose=_Generative,
        MinkowskiBatchNorm=_BatchNorm,
        MinkowskiInstanceNorm=_InstanceNorm,
        MinkowskiReLU=_activation(torch.relu),
        MinkowskiELU=_activation(F.elu),
        MinkowskiMaxPooling=_MaxPool,
        MinkowskiAvgPooling=_AvgPool,
        MinkowskiPruning=_Pruning,
        cat=_cat,
    )
