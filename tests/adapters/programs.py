"""Random little programs over the layers of a framework, as their users write them: hooks, reads,
changes in place, sums, gradients in between.

`Program(api, seed).run(x, call)` returns all that the program saw. Programs run with fused layers
and without must see the same.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import pickle
import random

import torch
from torch import nn
from torch.nn import functional as F

CHANNELS = 6


class Spconv:
    """Features are taken out of the tensor and put back, or a layer of the framework takes it."""

    name = "spconv"

    def conv(self, bias):
        import spconv.pytorch as sp

        return sp.SubMConv3d(CHANNELS, CHANNELS, 3, bias=bias, indice_key="a")

    def norm(self):
        return nn.BatchNorm1d(CHANNELS)

    def act(self, kind, inplace):
        if kind == "sigmoid":
            return nn.Sigmoid()
        return nn.ReLU(inplace) if kind == "relu" else nn.LeakyReLU(0.1, inplace)

    def chain(self, *layers):
        import spconv.pytorch as sp

        return sp.SparseSequential(*layers)

    def call(self, layer, x):
        return x.replace_feature(layer(x.features))

    def plus(self, a, b):
        return a.replace_feature(a.features + b.features)

    def add_to(self, a, b):
        features = a.features
        features += b.features
        return a.replace_feature(features)

    def tensor(self, features, coords):
        import spconv.pytorch as sp

        return sp.SparseConvTensor(features, coords, [12, 12, 12], 2)

    def rows(self, x):
        return x.features


class Torchsparse:
    name = "torchsparse"

    @staticmethod
    def layers():
        return importlib.import_module("torchsparse.nn")

    def conv(self, bias):
        return self.layers().Conv3d(CHANNELS, CHANNELS, 3, bias=bias)

    def norm(self):
        return self.layers().BatchNorm(CHANNELS)

    def act(self, kind, inplace):
        if kind == "relu":
            return self.layers().ReLU(inplace)
        return self.layers().LeakyReLU(0.1, inplace) if kind == "leaky" else self.layers().SiLU()

    def chain(self, *layers):
        return nn.Sequential(*layers)

    def call(self, layer, x):
        return layer(x)

    def plus(self, a, b):
        return a + b

    def add_to(self, a, b):
        a.F += b.F
        return a

    def tensor(self, features, coords):
        return importlib.import_module("torchsparse").SparseTensor(features, coords)

    def rows(self, x):
        return x.F


class Minkowski(Torchsparse):
    name = "minkowski"

    @staticmethod
    def layers():
        return importlib.import_module("MinkowskiEngine")

    def conv(self, bias):
        return self.layers().MinkowskiConvolution(CHANNELS, CHANNELS, kernel_size=3, dimension=3, bias=bias)

    def norm(self):
        return self.layers().MinkowskiBatchNorm(CHANNELS)

    def act(self, kind, inplace):
        if kind == "sigmoid":
            return self.layers().MinkowskiSigmoid()
        if kind == "relu":
            return self.layers().MinkowskiReLU(inplace)
        return self.layers().MinkowskiLeakyReLU(0.1, inplace)

    def add_to(self, a, b):
        a += b
        return a

    def tensor(self, features, coords):
        return self.layers().SparseTensor(features, coordinates=coords)


class Program(nn.Module):
    """api: one of the classes above.  The same seed makes the same program and parameters."""

    def __init__(self, api, seed, length=14):
        super().__init__()
        torch.manual_seed(seed)
        chance = random.Random(seed)
        self.api, self.steps, self.made = api, [], nn.ModuleList()
        self.seen = []
        for _ in range(length):
            name = chance.choices(list(KINDS), [weight for weight, _ in KINDS.values()])[0]
            self.steps.append(KINDS[name][1](self, chance))
        for module in self.modules():
            if isinstance(module, nn.BatchNorm1d):
                nn.init.normal_(module.running_mean)
                nn.init.uniform_(module.running_var, 0.5, 2)
                nn.init.uniform_(module.weight, -1, 1)
        self.eval()

    def held(self, layer):
        self.made.append(layer)
        return layer

    def see(self, rows):
        self.seen.append(rows.detach().clone())

    def forward(self, x, looks=()):
        """looks: steps behind which somebody reads the features, too."""
        self.seen, self.saved = [], [x]
        for place, step in enumerate(self.steps):
            x = step(x)
            if place in looks:
                self.see(self.api.rows(x))
        self.see(self.api.rows(x))
        return self.seen


def _conv(program, chance):
    layer = program.held(program.api.conv(chance.random() < 0.5))
    return lambda x: layer(x)


def _norm(program, chance):
    layer = program.held(program.api.norm())
    if chance.random() < 0.15:  # somebody listens
        inner = getattr(layer, "bn", layer) if chance.random() < 0.5 else layer
        inner.register_forward_hook(lambda module, given, out: program.see(_any(program, out)))
    return lambda x: program.api.call(layer, x)


def _any(program, value):
    return value if isinstance(value, torch.Tensor) else program.api.rows(value)


def _act(program, chance):
    kind = chance.choice(["relu", "relu", "leaky", "sigmoid"])
    layer = program.held(program.api.act(kind, chance.random() < 0.5))
    return lambda x: program.api.call(layer, x)


def _unit(program, chance):
    """What most of a network is made of."""
    parts = [_conv(program, chance), _norm(program, chance)]
    if chance.random() < 0.7:
        parts.append(_act(program, chance))

    def run(x):
        for part in parts:
            x = part(x)
        return x

    return run


def _block(program, chance):
    main, last = _unit(program, chance), [_conv(program, chance), _norm(program, chance)]
    act, into, other = _act(program, chance), chance.random() < 0.4, chance.random() < 0.3
    skip = _unit(program, chance) if other else None

    def run(x):
        y = main(x)
        for part in last:
            y = part(y)
        x = x if skip is None else skip(x)
        y = program.api.add_to(y, x) if into else program.api.plus(y, x)
        return act(y)

    return run


def _chain(program, chance):
    api = program.api
    layers = [api.conv(chance.random() < 0.5), api.norm()]
    if chance.random() < 0.5:
        layers.append(api.act("relu", chance.random() < 0.5))
    return program.held(api.chain(*layers))


def _save(program, chance):
    def run(x):
        program.saved.append(x)
        return x

    return run


def _sum(program, chance):
    which, itself = chance.random(), chance.random() < 0.2
    into = chance.random() < 0.3

    def run(x):
        other = x if itself else program.saved[int(which * len(program.saved))]
        if into and program.saved[0] is not x:
            return program.api.add_to(x, other)
        return program.api.plus(x, other)

    return run


READS = {
    "values": lambda rows: rows.clone(),
    "numpy": lambda rows: torch.from_numpy(rows.detach().numpy().copy()),
    "pickle": lambda rows: pickle.loads(pickle.dumps(rows)),
    "copy": copy.deepcopy,
    "list": lambda rows: torch.tensor(rows.tolist()),
    "print": lambda rows: torch.tensor([len(repr(rows))]),
    "memory": lambda rows: torch.tensor([rows.data_ptr() != 0, rows.untyped_storage().nbytes()]),
    "rows": lambda rows: rows[2:7],
    "cat": lambda rows: torch.cat([rows, rows], 1),
    "about": lambda rows: torch.tensor([*rows.shape, rows.dim(), len(rows), rows.stride(0)]),
    "out": lambda rows: torch.add(rows, rows, out=torch.empty_like(rows)),
    "weighted": lambda rows: torch.add(rows, rows, alpha=2),
    "function": lambda rows: F.relu(rows) + F.softplus(rows),
}


def _read(program, chance):
    look = READS[chance.choice(list(READS))]
    earlier = chance.random() < 0.3

    def run(x):
        program.see(look(program.api.rows(program.saved[-1] if earlier else x)))
        return x

    return run


def _change(program, chance):
    """Features that are the program's own are changed in place."""
    what, which = chance.choice(["add", "relu", "rows"]), chance.random()

    def run(x):
        target = ([x, *program.saved[1:]])[int(which * len(program.saved))]
        rows = program.api.rows(target)
        if rows.requires_grad:
            return x
        with torch.no_grad():
            if what == "add":
                rows.add_(0.5)
            elif what == "relu":
                rows.relu_()
            else:
                rows[:3] = 1.0
        return x

    return run


def _copied(program, chance):
    how = copy.copy if chance.random() < 0.5 else _through_pickle

    def run(x):
        clone = how(x) if program.api.name == "torchsparse" else x
        program.see(program.api.rows(clone))
        return x

    return run


def _through_pickle(x):
    return pickle.loads(pickle.dumps(x))


def _mode(program, chance):
    """A layer under another mode."""
    mode = chance.choice([torch.enable_grad, torch.inference_mode, contextlib.nullcontext])
    inner = chance.choice([_norm, _act, _unit])(program, chance)

    def run(x):
        with mode():
            y = inner(x)
        if program.api.rows(y).is_inference():
            program.see(program.api.rows(y))
            return x
        return y

    return run


def _error(program, chance):
    """A layer that refuses its input; the program goes on."""
    import torch as t

    wrong = nn.BatchNorm1d(CHANNELS + 1).eval()

    def run(x):
        try:
            wrong(program.api.rows(x))
        except RuntimeError as error:
            program.see(t.tensor([len(str(error))]))
        return x

    return run


def _weights(program, chance):
    """Parameters change between a layer and what follows it."""
    layer, after = program.held(program.api.conv(True)), _norm(program, chance)
    names = [name for name, _ in layer.named_parameters()]
    name = chance.choice(names)

    def run(x):
        y = layer(x)
        with torch.no_grad():
            getattr(layer, name).mul_(1.25)
        return after(y)

    return run


KINDS = {
    "unit": (6, _unit),
    "block": (5, _block),
    "chain": (2, _chain),
    "conv": (2, _conv),
    "norm": (1, _norm),
    "act": (1, _act),
    "save": (2, _save),
    "sum": (2, _sum),
    "read": (2, _read),
    "change": (1, _change),
    "copied": (1, _copied),
    "mode": (1, _mode),
    "error": (1, _error),
    "weights": (1, _weights),
}
