"""Layers called again: a short way through the adapter, on which what a user changes between two
calls has its effect, and nobody who watches is passed by."""

from __future__ import annotations

import collections
import copy
import pathlib
import pickle
import sys

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import sparse_bridge
from sparse_bridge.adapters.minkowski.batches import batch_rows
from tests.adapters.minkowski.scenes import scene

ADAPTERS = pathlib.Path(sparse_bridge.__file__).parent / "adapters"


def tensor(ME):
    coords, features = scene(3, channels=4, dtype=torch.float32)
    return ME.SparseTensor(features, coordinates=coords)


def walk(layer, x):
    """Files of the adapters that a steady call enters, with the number of calls."""
    layer(x)
    seen = collections.Counter()

    def listen(frame, event, argument):
        path = pathlib.Path(frame.f_code.co_filename)
        if event == "call" and ADAPTERS in path.parents:
            seen[path.name] += 1

    sys.setprofile(listen)
    try:
        layer(x)
    finally:
        sys.setprofile(None)
    return seen


LAYERS = {
    "convolution": (lambda ME: ME.MinkowskiConvolution(4, 4, kernel_size=3, dimension=3), 8),
    "strided": (lambda ME: ME.MinkowskiConvolution(4, 4, kernel_size=2, stride=2, dimension=3), 8),
    "matrix product": (lambda ME: ME.MinkowskiConvolution(4, 4, kernel_size=1, dimension=3), 5),
    "batch norm": (lambda ME: ME.MinkowskiBatchNorm(4), 6),
    "activation": (lambda ME: ME.MinkowskiReLU(), 3),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_steady_layer_takes_few_steps(ME, name):
    make, most = LAYERS[name]
    layer, x = make(ME).eval(), tensor(ME)
    with torch.no_grad():
        seen = walk(layer, x)
    assert 2 <= len(seen) <= seen.total() <= most, seen


def test_rows_of_batch_items_are_looked_up_once(ME):
    """The host waits for them."""
    x = tensor(ME)
    registry, key = x.coordinate_manager._manager, x.coordinate_map_key.key
    pooled = ME.MinkowskiGlobalSumPooling()(x)
    rows = batch_rows(registry, key, pooled.coordinate_map_key.key)
    assert torch.equal(rows, x.C[:, 0].long())
    assert batch_rows(registry, key, pooled.coordinate_map_key.key) is rows


def test_a_steady_layer_looks_up_its_map_once(ME):
    x = tensor(ME)
    layer = ME.MinkowskiConvolution(4, 4, kernel_size=3, dimension=3)
    registry, key = x.coordinate_manager._manager, x.coordinate_map_key.key
    spec = layer.kernel_generator.spec()
    first = registry.layer_map(key, spec)
    layer(x)
    assert registry.layer_map(key, spec) is first
    other = ME.MinkowskiConvolution(4, 7, kernel_size=3, dimension=3)
    assert registry.layer_map(key, other.kernel_generator.spec()) is first


CHANGES = {
    "size": lambda g: setattr(g, "kernel_size", [1, 3, 3]),
    "size in place": lambda g: g.kernel_size.__setitem__(0, 1),
    "dilation": lambda g: setattr(g, "kernel_dilation", [2, 2, 2]),
    "stride in place": lambda g: g.kernel_stride.__setitem__(1, 2),
    "expansion": lambda g: setattr(g, "expand_coordinates", True),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_kernel_generator_may_be_changed(ME, name):
    generator = ME.KernelGenerator(3, dimension=3)
    before = generator.spec()
    assert generator.spec() is before
    CHANGES[name](generator)
    assert generator.spec() is not before
    assert generator.spec(True).transposed and not generator.spec().transposed


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_of_a_layer_find_the_same_map(ME, copied):
    layer, x = ME.MinkowskiConvolution(4, 5, kernel_size=3, dimension=3), tensor(ME)
    y = layer(x)
    clone = copied(layer)
    assert clone.kernel_generator.spec() is layer.kernel_generator.spec()
    assert torch.equal(clone(x).F, y.F)


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


@pytest.mark.parametrize("name", ["kernel", "bias"])
def test_parameters_may_be_computed(ME, name):
    x = tensor(ME)
    layer = ME.MinkowskiConvolution(4, 5, kernel_size=3, bias=True, dimension=3)
    plain = layer(x).F
    with torch.no_grad():
        clone = copy.deepcopy(layer)
        getattr(clone, name).mul_(2)
    parametrize.register_parametrization(layer, name, Doubled())
    assert torch.equal(layer(x).F, clone(x).F)
    assert not torch.equal(layer(x).F, plain)


def test_parameters_may_be_replaced(ME):
    x = tensor(ME)
    layer = ME.MinkowskiConvolution(4, 5, kernel_size=3, bias=True, dimension=3)
    before = layer(x).F - layer.bias
    layer.kernel, layer.bias = nn.Parameter(2 * layer.kernel), None
    torch.testing.assert_close(layer(x).F, 2 * before)


def test_a_norm_in_eval_mode_is_torchs(ME):
    x, norm = tensor(ME), ME.MinkowskiBatchNorm(4)
    norm(x)
    norm.eval()
    with torch.no_grad():
        assert torch.equal(norm(x).F, norm.bn(x.F))
    assert norm(x).F.requires_grad


def watched(norm, calls):
    norm.bn.register_forward_hook(lambda *_: calls.append("hook"))


def replaced(norm, calls):
    forward = norm.bn.forward
    norm.bn.forward = lambda x: calls.append("forward") or forward(x)


def subclassed(norm, calls):
    class Own(nn.BatchNorm1d):
        def forward(self, x):
            calls.append("class")
            return super().forward(x)

    norm.bn.__class__ = Own


@pytest.mark.parametrize("change", [watched, replaced, subclassed])
def test_who_watches_a_norm_is_not_passed_by(ME, change):
    x, norm, calls = tensor(ME), ME.MinkowskiBatchNorm(4).eval(), []
    want = norm(x).F
    change(norm, calls)
    assert torch.equal(norm(x).F, want)
    assert len(calls) == 1


def test_a_batch_norm_without_statistics_is_torchs(ME):
    x, norm = tensor(ME), ME.MinkowskiBatchNorm(4, track_running_stats=False).eval()
    want = nn.functional.batch_norm(x.F, None, None, norm.bn.weight, norm.bn.bias, True)
    torch.testing.assert_close(norm(x).F, want)
