"""Random layers of each framework over a sparse tensor, as its program would choose them."""

from __future__ import annotations

import torch
from torch import nn

from .. import apis

SIZES = (3, 3, 3, 1, 5, (3, 1, 3), (1, 3, 1))
STEPS = ((2, 2), (2, 2), (3, 2), (3, 3), ((1, 2, 2), (1, 2, 2)), ((3, 1, 3), (2, 1, 2)))


class Spconv:
    """downs: key and kernel of each layer that another one can go back by.  keys: those of submanifold layers."""

    groups = True  # by a setting of the bridge

    def __init__(self, module, choose):
        self.module, self.choose, self.downs, self.keys = module, choose, [], []

    def key(self, size, dilation):
        """One that may have been used before, by a layer of the same sizes."""
        same = [key for key, sizes in self.keys if sizes == (size, dilation)]
        if same and self.choose.random() < 0.5:
            return self.choose.choice(same)
        self.keys.append((f"conv{len(self.keys)}", (size, dilation)))
        return self.choose.choice([None, self.keys[-1][0]])

    def conv(self, x, width, out, bias):
        size, dilation = self.choose.choice(SIZES), self.choose.choice([1, 1, 1, 2])
        groups = self.choose.choice([n for n in (1, 1, 2, 3, 4) if width % n == 0 == out % n])
        key = self.key(size, dilation)
        return self.module.SubMConv3d(
            width, out, size, dilation=dilation, groups=groups, bias=bias, indice_key=key
        ), "groups" if groups > 1 else "conv"

    def down(self, x, width, out, bias):
        (size, step), padding = self.choose.choice(STEPS), self.choose.choice([0, 0, 1])
        key = f"down{len(self.downs)}"
        self.downs.append((key, size))
        return self.module.SparseConv3d(width, out, size, step, padding, bias=bias, indice_key=key), "down"

    def up(self, x, width, out, bias):
        if not self.downs or self.choose.random() < 0.15:
            return self.module.SparseConvTranspose3d(width, out, 2, 2, bias=bias), "transposed"
        key, size = self.downs[-1] if self.choose.random() < 0.7 else self.choose.choice(self.downs)
        return self.module.SparseInverseConv3d(width, out, size, key, bias=bias), "inverse"

    def pool(self, x, width, out, bias):
        kind = self.choose.choice([self.module.SparseMaxPool3d, self.module.SparseAvgPool3d])
        size, step = self.choose.choice([(2, 2), (3, 2), (3, 1)])
        if self.choose.random() < 0.6:
            return kind(size, step, size // 2), "pool"
        key = f"down{len(self.downs)}"
        self.downs.append((key, size))
        return kind(size, step, indice_key=key), "pool with a key"

    def norm(self, width):
        return nn.BatchNorm1d(width)

    def activation(self):
        return self.choose.choice([nn.ReLU(), nn.ReLU(True), nn.GELU(), nn.LeakyReLU(0.1)])

    def sequence(self, *layers):
        return self.module.SparseSequential(*layers)

    def special(self, x, width, out, bias):
        return self.sequence(nn.Linear(width, out), nn.ReLU()), "linear"


class Torchsparse:
    def __init__(self, module, choose, release):
        self.module, self.choose, self.release, self.downs = module, choose, release, []

    def conv(self, x, width, out, bias):
        sizes = SIZES if self.release != "1.4" else (3, 3, 1, 5)
        dilation = self.choose.choice([1, 1, 1, 2])
        return self.module.nn.Conv3d(width, out, self.choose.choice([*sizes, 2]), dilation=dilation, bias=bias), "conv"

    def down(self, x, width, out, bias):
        size, step = self.choose.choice(STEPS if self.release != "1.4" else STEPS[:4])
        self.downs.append((size, step))
        return self.module.nn.Conv3d(width, out, size, stride=step, bias=bias), "down"

    def up(self, x, width, out, bias):
        size, step = self.choose.choice(self.downs[-2:] or [(2, 2)])
        return self.module.nn.Conv3d(width, out, size, stride=step, bias=bias, transposed=True), "up"

    def pool(self, x, width, out, bias):
        return self.down(x, width, out, bias)

    def norm(self, width):
        return self.module.nn.BatchNorm(width)

    def activation(self):
        made = self.module.nn
        return self.choose.choice([made.ReLU(), made.ReLU(True), made.LeakyReLU(0.1), made.SiLU()])

    def sequence(self, *layers):
        return nn.Sequential(*layers)

    def special(self, x, width, out, bias):
        """Layers that make rows, and the ranges of 2.1 that a program sets itself."""
        if self.release != "2.1":
            return self.sequence(self.activation(), self.conv(x, width, out, bias)[0]), "conv"
        if self.choose.random() < 0.5:
            low = x.C.amax(0).tolist()
            extents = [int(low[axis]) + self.choose.choice([1, 3, 30]) for axis in (1, 2, 3)]
            return Range(self.module, (3, *extents)), "range behind a layer"
        config = apis.hashmap_config(self.module)
        made = {"stride": 2, "transposed": True, "generative": True, "config": config}
        return self.module.nn.Conv3d(width, out, 2, bias=bias, **made), "generative"


class Range(nn.Module):
    """The same tensor with a range of its own."""

    def __init__(self, module, extents):
        super().__init__()
        self.make, self.extents = module.SparseTensor, extents

    def forward(self, x):
        y = self.make(x.F, x.C, x.s, self.extents)
        y._caches = x._caches
        return y


class Minkowski:
    def __init__(self, module, choose):
        self.module, self.choose = module, choose

    def kernel(self, size, **others):
        cross = others.get("stride", 1) == 1 and isinstance(size, int) and size % 2 and self.choose.random() < 0.2
        if not cross:
            return {"kernel_size": size, "dimension": 3, **others}
        region = self.module.RegionType.HYPER_CROSS
        made = self.module.KernelGenerator(size, region_type=region, dimension=3, **others)
        return {"kernel_generator": made, "dimension": 3}

    def conv(self, x, width, out, bias):
        size, dilation = self.choose.choice([*SIZES, 2]), self.choose.choice([1, 1, 1, 2])
        if width == out and self.choose.random() < 0.25:
            kind = self.module.MinkowskiChannelwiseConvolution
            return kind(width, bias=bias, **self.kernel(size, dilation=dilation)), "groups"
        expands = self.choose.random() < 0.07
        made = {"kernel_size": 3, "dimension": 3, "expand_coordinates": True}
        made = made if expands else self.kernel(size, dilation=dilation)
        return self.module.MinkowskiConvolution(width, out, bias=bias, **made), "expands" if expands else "conv"

    def down(self, x, width, out, bias):
        size, step = self.choose.choice(STEPS)
        expands = self.choose.random() < 0.15
        make = self.module.MinkowskiConvolution
        return make(
            width, out, size, step, bias=bias, expand_coordinates=expands, dimension=3
        ), "expands" if expands else "down"

    def up(self, x, width, out, bias):
        if min(x.tensor_stride) < 2 and self.choose.random() < 0.95:
            return self.down(x, width, out, bias)
        ways = ["up"] * 4 + ["generative", "pool up", "pool up", "expands"]
        way, size = self.choose.choice(ways), self.choose.choice([2, 2, 3])
        made = {"kernel_size": size, "stride": 2, "dimension": 3}
        if way == "pool up":
            return self.module.MinkowskiPoolingTranspose(**made), way
        if way == "generative":
            return self.module.MinkowskiGenerativeConvolutionTranspose(width, out, bias=bias, **made), way
        make = self.module.MinkowskiConvolutionTranspose
        return make(width, out, bias=bias, expand_coordinates=way == "expands", **made), way

    def pool(self, x, width, out, bias):
        kinds = [self.module.MinkowskiMaxPooling, self.module.MinkowskiAvgPooling, self.module.MinkowskiSumPooling]
        size, step = self.choose.choice([(2, 2), (3, 2), (3, 1)])
        return self.choose.choice(kinds)(kernel_size=size, stride=step, dimension=3), "pool"

    def norm(self, width):
        return self.module.MinkowskiBatchNorm(width)

    def activation(self):
        me = self.module
        return self.choose.choice([me.MinkowskiReLU(), me.MinkowskiReLU(True), me.MinkowskiELU(), me.MinkowskiGELU()])

    def sequence(self, *layers):
        return nn.Sequential(*layers)

    def special(self, x, width, out, bias):
        ways = ["linear"] * 2 + ["prune", "prune", "union", "union", "global", "instance norm"]
        way = self.choose.choice(ways)
        if way == "linear":
            return self.module.MinkowskiLinear(width, out, bias=bias), way
        if way == "prune":
            return Prune(self.module, self.choose.choice(["features", "places"])), way
        if way == "union":
            first = self.sequence(self.down(x, width, width, False)[0], self.up(x, width, width, False)[0])
            return Union(self.module, first), way
        if way == "instance norm":
            return self.module.MinkowskiInstanceNorm(width), way
        return Global(self.module), "global pool"


class Prune(nn.Module):
    """Rows by their features, or by their coordinates."""

    def __init__(self, module, way):
        super().__init__()
        self.prune, self.way = module.MinkowskiPruning(), way

    def forward(self, x):
        kept = x.F[:, 0] > 0 if self.way == "features" else x.C[:, 1:].sum(1) % 2 == 0
        return self.prune(x, kept)


class Union(nn.Module):
    """A tensor and what layers make of it, on the rows of both."""

    def __init__(self, module, layer):
        super().__init__()
        self.union, self.layer = module.MinkowskiUnion(), layer

    def forward(self, x):
        return self.union(x, self.layer(x))


class Global(nn.Module):
    """Rows and the mean of their batch item."""

    def __init__(self, module):
        super().__init__()
        self.pool, self.add = module.MinkowskiGlobalAvgPooling(), module.MinkowskiBroadcastAddition()

    def forward(self, x):
        return self.add(x, self.pool(x))


def layers_of(module, name, choose):
    if name == "spconv":
        return Spconv(module, choose)
    return Minkowski(module, choose) if name == "minkowski" else Torchsparse(module, choose, name.split()[1])


def layer(layers, kind, x, width, choose):
    """A layer over `x`, often with a norm and an activation behind it, and a word for what it is."""
    out = choose.choice([width, width, 6, 6, 8, 5])
    behind = choose.choice(["", "", "norm", "activation", "both", "both"])
    bias = behind in ("", "activation") and choose.random() < 0.4  # in front of a norm its gradient is rounding
    made, word = getattr(layers, kind)(x, width, out, bias)
    if behind == "" or kind == "special":
        return made, word
    out = out if any(isinstance(value, torch.Tensor) and value.ndim > 1 for value in made.parameters()) else width
    out = width if word in ("pool", "pool with a key", "pool up") else out
    more = [layers.norm(out)] if behind in ("norm", "both") else []
    more += [layers.activation()] if behind in ("activation", "both") else []
    return layers.sequence(made, *more), word
