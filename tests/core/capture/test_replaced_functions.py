"""Functions of torch that a program replaces are called as often, and with the same results, as without fusion."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sparse_bridge import settings
from sparse_bridge.core.capture import graph_regions
from tests.rules import layers_deferred

from . import apis
from .graph_sizes import graphs_of

PLACES = [(F, "batch_norm"), (F, "relu"), (torch, "batch_norm"), (torch, "relu"), (torch, "relu_")]
PLACES += [(torch.Tensor, name) for name in ("relu", "sigmoid", "add", "__add__", "add_", "__iadd__")]
PLACES += [(torch._C._nn, "leaky_relu"), (torch._C._nn, "leaky_relu_")]
PLACES += [(nn.Module, "__call__"), (nn.Module, "_call_impl"), (nn.BatchNorm1d, "_check_input_dim")]


IN_PLACE = ("relu_", "leaky_relu_", "__iadd__", "add_")  # which return what they were given


def activation(layers, kind, **options):
    """An activation of torch, as the framework has it."""
    if layers.name == "minkowski":
        return getattr(layers.module, f"Minkowski{kind}")(**options)
    return getattr(nn if layers.name == "spconv" else layers.module.nn, kind)(**options)


class Program(nn.Module):
    """A residual block, layer by layer, sums in place, and a container behind it."""

    def __init__(self, layers):
        super().__init__()
        torch.manual_seed(0)
        self.spconv = layers.name == "spconv"
        self.first, self.second = layers.conv(4, 8, "a"), layers.conv(8, 8, "a")
        self.norms = nn.ModuleList([layers.norm(8), layers.norm(8)])
        self.relu = layers.relu()
        self.last = layers.sequence(layers.conv(8, 8, "a"), layers.norm(8), layers.relu())
        self.gate = layers.conv(8, 8, "a")
        self.leaky, self.leaky_ = activation(layers, "LeakyReLU"), activation(layers, "LeakyReLU", inplace=True)

    def on(self, layer, x):
        return x.replace_feature(layer(x.features)) if self.spconv else layer(x)

    def forward(self, x):
        x = self.on(self.relu, self.on(self.norms[0], self.first(x)))
        y = self.on(self.norms[1], self.second(x))
        y = y.replace_feature(y.features + x.features) if self.spconv else y + x
        y = self.last(self.on(self.relu, y))
        y = self.on(self.leaky_, self.gate(self.on(self.leaky, self.gate(y))))
        z = self.gate(y)
        if self.spconv:
            features = z.features
            features += y.features
            y = z.replace_feature(features)
        else:
            z += y
            y = z
        if self.spconv:
            z = self.gate(y)
            y = z.replace_feature(z.features.relu().add(y.features).sigmoid())
        return {"out": y, "deep": x}


class Gated(nn.Module):
    """Activations that are not fused, or that methods of tensors compute, and a sum."""

    def __init__(self, layers):
        super().__init__()
        torch.manual_seed(0)
        self.convs = nn.ModuleList([layers.conv(4 if i == 0 else 8, 8, "a") for i in range(4)])
        self.activations = nn.ModuleList([activation(layers, kind) for kind in ("SiLU", "LeakyReLU", "SiLU")])
        self.spconv = layers.name == "spconv"

    def forward(self, x):
        first = self.convs[0](x)
        x = first
        for conv, act in zip(self.convs[1:], self.activations, strict=True):
            y = conv(x)
            x = y.replace_feature(act(y.features)) if self.spconv else act(y)
        x = x.replace_feature(x.features + first.features) if self.spconv else x + first
        features = x.features if self.spconv else x.F
        features.relu_()
        return {"out": x, "deep": first}


def results(name, optimize, place, attribute):
    """Of calls before, while and after `place` has another function, and how often that was called."""
    heard, own = [], getattr(place, attribute)

    @functools.wraps(own)
    def counted(*args, **kwargs):
        heard.append(attribute)
        out = own(*args, **kwargs)
        return out * 1.5 if isinstance(out, torch.Tensor) and attribute not in IN_PLACE else out

    def call(seed):
        return [value.clone() for value in apis.values_of(model(apis.scene(module, name, seed, "cpu", 0.3)))]

    with apis.standin(name) as module, settings.override(optimize=optimize), torch.no_grad():
        model = Program(apis.Layers(module, name)).eval()
        found = [call(seed) for seed in range(4)]
        with mock.patch.object(place, attribute, counted):
            found += [call(seed) for seed in range(4, 6)]
        return [*found, call(6)], len(heard)


@pytest.mark.parametrize("name", apis.NAMES)
@pytest.mark.parametrize(("place", "attribute"), PLACES)
def test_while_it_is_replaced(rules, name, place, attribute):
    rules.hold(layers_deferred())
    (want, often), (found, heard) = (results(name, optimize, place, attribute) for optimize in ("off", "fuse"))
    torch.testing.assert_close(found, want, rtol=1e-3, atol=1e-4)
    assert heard == often


@pytest.mark.emulated
@pytest.mark.parametrize("name", apis.NAMES)
@pytest.mark.parametrize(
    ("place", "attribute"),
    [(torch._C._nn, "leaky_relu"), (torch._C._nn, "silu"), (torch.Tensor, "__add__"), (torch.Tensor, "relu_")],
)
def test_no_replay_while_it_is_replaced(device, rules, name, place, attribute):
    rules.hold(graphs_of(512, watched=True))
    own = getattr(place, attribute)

    def replaced(*args):
        heard.append(attribute)
        return own(*args)

    with apis.standin(name) as module, settings.override(optimize="graphs"), torch.no_grad():
        model, heard = Gated(apis.Layers(module, name)).to(device).eval(), []

        def hits(seeds):
            for seed in seeds:
                model(apis.scene(module, name, seed, device, 0.3 + 0.002 * seed))
            return sum(one.hits for one in graph_regions.summary())

        before = hits(range(8))
        assert before, graph_regions.summary()
        with mock.patch.object(place, attribute, replaced):
            assert hits(range(8, 11)) == before and heard


# A process for each, which need not import torch.
_BEFORE = """
import functools, os, torch
import torch.nn.functional as F
for place, name in (F, "relu"), (torch.nn.BatchNorm1d, "forward"), (torch, "relu"), (None, ""):
    child = os.fork()
    if not child:
        if place:
            own = getattr(place, name)
            setattr(place, name, functools.wraps(own)(lambda *args, **options: own(*args, **options)))
        from sparse_bridge import hooks
        os._exit(0 if bool(hooks.torch_replaced()) is bool(place) else 1)
    print(name, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_before_this_package_is_imported():
    ended = subprocess.run([sys.executable, "-c", _BEFORE], capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines() == ["relu 0", "forward 0", "relu 0", " 0"], ended.stderr
