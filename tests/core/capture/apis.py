"""One little network per framework, and scenes for it: what replays are tried with in all APIs."""

from __future__ import annotations

import contextlib

import torch
from torch import nn

from sparse_bridge import settings
from sparse_bridge.adapters import protocol
from sparse_bridge.core.capture import graph_regions
from tests.adapters.standins import standin
from tests.clouds import cloud, features

SHAPE = (6, 5, 7)
NAMES = ("spconv", "torchsparse", "minkowski")


def scene(module, name, seed, device, share=0.2, batch_size=2, shape=SHAPE):
    """A sparse tensor of 4 channels; scenes of a shape and batch size have the same bounds."""
    coords = cloud(shape, batch_size, share=share, seed=seed, device=device)
    corners = [[0, 0, 0, 0], [batch_size - 1, *(extent - 1 for extent in shape)]]
    coords = torch.cat([coords.new_tensor(corners), coords]).unique(dim=0)
    return tensor(module, name, coords, features(len(coords), 4, seed=seed, device=device), shape)


def tensor(module, name, coords, values, shape=SHAPE):
    if name == "spconv":
        return module.SparseConvTensor(values, coords, list(shape), int(coords[:, 0].max()) + 1)
    return module.SparseTensor(values, coords)


def hashmap_config(torchsparse):
    """For layers of torchsparse 2.1 that are generative; the default one, which all others share, stays."""
    config = torchsparse.nn.functional.conv_config.get_default_conv_config().copy()
    config.kmap_mode = "hashmap"
    return config


class Layers:
    """The layers of a framework under one name each."""

    def __init__(self, module, name):
        self.module, self.name = module, name

    def __deepcopy__(self, memo):
        return self  # a framework has no copies

    def conv(self, n_in, n_out, key):
        if self.name == "spconv":
            return self.module.SubMConv3d(n_in, n_out, 3, bias=False, indice_key=key)
        if self.name == "torchsparse":
            return self.module.nn.Conv3d(n_in, n_out, 3)
        return self.module.MinkowskiConvolution(n_in, n_out, kernel_size=3, dimension=3)

    def down(self, n_in, n_out, key):
        if self.name == "spconv":
            return self.module.SparseConv3d(n_in, n_out, 2, 2, bias=False, indice_key=key)
        if self.name == "torchsparse":
            return self.module.nn.Conv3d(n_in, n_out, 2, stride=2)
        make = self.module.MinkowskiConvolution
        return make(n_in, n_out, kernel_size=2, stride=2, dimension=3)

    def up(self, n_in, n_out, key):
        if self.name == "spconv":
            return self.module.SparseInverseConv3d(n_in, n_out, 2, bias=False, indice_key=key)
        if self.name == "torchsparse":
            return self.module.nn.Conv3d(n_in, n_out, 2, stride=2, transposed=True)
        make = self.module.MinkowskiConvolutionTranspose
        return make(n_in, n_out, kernel_size=2, stride=2, dimension=3)

    def norm(self, width):
        if self.name == "torchsparse":
            return self.module.nn.BatchNorm(width)
        if self.name == "minkowski":
            return self.module.MinkowskiBatchNorm(width)
        return nn.BatchNorm1d(width)

    def relu(self):
        if self.name == "torchsparse":
            return self.module.nn.ReLU(True)
        return self.module.MinkowskiReLU() if self.name == "minkowski" else nn.ReLU()

    def sequence(self, *layers):
        kind = self.module.SparseSequential if self.name == "spconv" else nn.Sequential
        return kind(*layers)

    def cat(self, x, y):
        if self.name == "spconv":
            return x.replace_feature(torch.cat([x.features, y.features], 1))
        return self.module.cat([x, y]) if self.name == "torchsparse" else self.module.cat(x, y)


class Network(nn.Module):
    """Two levels down and up again, with a skip connection."""

    def __init__(self, layers, width=8):
        super().__init__()
        torch.manual_seed(0)
        self.cat = layers.cat
        self.stem = layers.sequence(layers.conv(4, width, "a"), layers.norm(width), layers.relu())
        self.down = layers.sequence(layers.down(width, width, "d"), layers.norm(width), layers.relu())
        self.deep = layers.conv(width, width, "b")
        self.up = layers.up(width, width, "d")
        self.head = layers.sequence(layers.norm(2 * width), layers.conv(2 * width, 4, "a"))

    def forward(self, x):
        x = self.stem(x)
        y = self.deep(self.down(x))
        return {"out": self.head(self.cat(self.up(y), x)), "deep": y}


def network(module, name, device):
    made = Network(Layers(module, name)).to(device)
    for one in made.modules():
        if isinstance(one, nn.BatchNorm1d):
            nn.init.normal_(one.running_mean, std=0.1)
            nn.init.uniform_(one.running_var, 0.5, 2)
    return made


def values_of(found):
    """Features of a network's outputs."""
    return [protocol.features_of(found[key]) for key in ("out", "deep")]


def loss_of(values):
    return values[0].square().sum() + sum(one.sum() for one in values[1:])


def both(model, plain, given, trains=False, values=values_of, mode=None, rtol=1e-3, atol=1e-4):
    """[(inputs, output)] of a model that is replayed and of its double, which give the same.

    given: makes the input, or a tuple of all.  trains: with a backward pass, whose gradients are compared.
    values: of an output, those that are compared.  mode: the first one's `optimize`, where the second one's is off.
    """
    found, seen = [], []
    for one in (model, plain):
        one.zero_grad(set_to_none=True)
        x, how = given(), contextlib.nullcontext()
        x = x if isinstance(x, tuple) else (x,)
        if mode is not None:
            how = settings.override(optimize=mode if one is model else "off")
        with torch.set_grad_enabled(trains), how:
            found.append((x, one(*x)))
        seen.append(values(found[-1][1]))
        if trains:
            loss_of(seen[-1]).backward()
    for mine, theirs in zip(*seen, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=rtol, atol=atol)
    if trains:
        same_gradients(model, plain)
        for mine, theirs in zip(model.buffers(), plain.buffers(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=rtol, atol=atol)
    return found


def results_of(model, scenes, trains):
    """Features, coordinates and gradients of a network's outputs for each scene."""
    values = []
    for x in scenes:
        model.zero_grad()
        outputs = model(x)
        features = values_of(outputs)
        if trains:
            loss_of(features).backward()
        values += [*features, protocol.of(outputs["out"]).coordinates_of(outputs["out"]).clone()]
        values += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return values


def same_with_replays(name, make, trains, device, n_scenes):
    """Run what `make` makes of `Layers` over scenes without replays and with them, with the same results; summaries of
    its modules by name."""
    found = {}
    for mode in ("off", "graphs"):
        with standin(name) as module, settings.override(optimize=mode), torch.set_grad_enabled(trains):
            model = make(Layers(module, name)).to(device).train(trains)
            scenes = (scene(module, name, seed, device, 0.3 + 0.002 * seed) for seed in range(n_scenes))
            found[mode] = results_of(model, scenes, trains)
            summary = graph_regions.summary()
    for mine, theirs in zip(found["graphs"], found["off"], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-3, atol=2e-3 * float(theirs.detach().abs().max()))
    said = {one.name: one for one in summary}
    assert len(said) == len(summary), summary
    return said


def same_gradients(model, plain, limit=2e-3):
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if q.grad is not None:
            scale = float(q.grad.abs().max()) + 1
            assert float((p.grad - q.grad).abs().max()) <= limit * scale, name


def same_places(mine, theirs):
    """Two outputs of a network have the same rows, in the same extents."""
    framework = protocol.of(mine["out"])
    for key in ("out", "deep"):
        for name in ("spatial_shape", "batch_size", "stride"):
            assert getattr(mine[key], name, None) == getattr(theirs[key], name, None)
        assert torch.equal(framework.coordinates_of(mine[key]), framework.coordinates_of(theirs[key]))
