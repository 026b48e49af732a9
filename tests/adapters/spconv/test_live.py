"""The installed wheel and the bridge, turn by turn in one process; and files between both APIs."""

from __future__ import annotations

import copy
import importlib
import pickle
import sys

import pytest
import torch
from torch import nn

import sparse_bridge
from tests.quick import quick

from . import apis, random_nets

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def native():
    return apis.wheel()


def both(sp, make, build):
    """(native, bridged, native again) runs of `build()` on tensors from `make()`."""
    layer = build()
    runs = []
    for bridged in (False, True, False):
        layer.zero_grad()
        x = make()
        leaf = x.features.requires_grad_()
        if bridged:
            with sparse_bridge.enable("spconv", mode="patch") as handle:
                y = layer(x.replace_feature(leaf))
                report = handle.report()
        else:
            y = layer(x.replace_feature(leaf))
        order = random_nets.lexicographic(y.indices)
        weight = torch.linspace(-1, 1, y.features.numel()).reshape(y.features.shape)
        (y.features[order] * weight).sum().backward()
        gradients = {name: p.grad.clone() for name, p in layer.named_parameters()}
        runs.append((y, {**gradients, "input": leaf.grad}))
    return runs, report


def assert_alike(runs):
    (y, gradients), *others = runs
    for other, theirs in others:
        apis.assert_same(other, y, 1e-4)
        assert theirs.keys() == gradients.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(theirs[name], gradient, rtol=1e-4, atol=1e-4)


# name of the class -> arguments after the channels
SINGLE = {
    "SubMConv": (3,),
    "SubMConv, dilation": (3, 1, 0, 2),
    "SubMConv, unit": (1,),
    "SparseConv": (3, 2, 1),
    "SparseConv, even": (2, 2),
    "SparseConvTranspose": (3, 2, 1),
    "SparseMaxPool": (2,),
    "SparseInverseConv": (3,),
}


def single(sp, name, ndim):
    """One layer, an inverse one behind its partner; the algorithm that spconv has on the CPU."""
    native = {"algo": sp.ConvAlgo.Native}
    cls, arguments = name.partition(",")[0] + f"{ndim}d", SINGLE[name]
    if cls.startswith("SparseMaxPool"):
        return getattr(sp, cls)(*arguments, **native)
    if cls.startswith("SparseInverse"):
        down = getattr(sp, f"SparseConv{ndim}d")(4, 5, 3, 2, 1, indice_key="d", **native)
        return sp.SparseSequential(down, getattr(sp, cls)(5, 6, *arguments, "d", **native))
    return getattr(sp, cls)(4, 6, *arguments, **native)


@pytest.mark.parametrize("ndim", [1, 2, 3, 4])
@pytest.mark.parametrize("name", SINGLE)
def test_every_layer_alternates(native, name, ndim):
    shape = {1: (60,), 2: (11, 12), 3: (7, 8, 9), 4: (4, 5, 4, 5)}[ndim]
    runs, report = both(native, lambda: apis.tensor(native, shape=shape, rows=30), lambda: single(native, name, ndim))
    assert_alike(runs)
    counts = report.layers["spconv"]
    assert sum(count.bridged for count in counts.values()) >= 1
    assert not any(count.original for count in counts.values())


def network(sp):
    """Every kind of layer; the only algorithm that the CPU wheel runs."""
    native = {"algo": sp.ConvAlgo.Native}
    inner = sp.SubMConv3d(16, 16, 3, indice_key="s2", **native)
    return sp.SparseSequential(
        sp.SubMConv3d(4, 8, 3, indice_key="s1", **native),
        nn.BatchNorm1d(8),
        nn.Tanh(),
        sp.SparseConv3d(8, 16, 3, 2, 1, indice_key="d1", bias=False, **native),
        sp.SparseSequential(inner, nn.Tanh()),
        sp.SparseInverseConv3d(16, 8, 3, "d1", **native),
        sp.SubMConv3d(8, 8, 3, indice_key="s1", **native),
        sp.SparseMaxPool3d(2, 2, **native),
        sp.SubMConv3d(8, 3, 1, **native),
    )


def test_networks_alternate(native):
    runs, _ = both(native, lambda: apis.tensor(native), lambda: network(native))
    assert_alike(runs)


def test_one_forward_through_both(native):
    """Maps made by either are read by the other."""
    x = apis.tensor(native)
    net = network(native)
    first, down, inner, up = net[0], net[3], net[4], net[5]
    x = first(x)
    want = up(inner(inner(down(x))))
    with sparse_bridge.enable("spconv", mode="patch"):
        ours = inner(down(x))
    apis.assert_same(up(inner(ours)), want, 1e-4)
    theirs = inner(down(x))
    with sparse_bridge.enable("spconv", mode="patch"):
        apis.assert_same(up(inner(theirs)), want, 1e-4)


def test_copies_cross_the_border(native):
    net = network(native).requires_grad_(False).eval()
    net[0].bias = net[4][0].bias = net[5].bias = net[6].bias = None  # the wheel's eval takes none
    x = apis.tensor(native)
    want = net(x)
    frozen = pickle.dumps((net, x, net[3](net[0](x))))
    with sparse_bridge.enable("spconv", mode="patch"):
        thawed, tensor, middle = pickle.loads(frozen)
        assert isinstance(thawed[0], native.SubMConv3d) and type(tensor) is native.SparseConvTensor
        apis.assert_same(thawed(tensor), want, 1e-4)
        apis.assert_same(net[5](middle), net[5](net[3](net[0](x))), 1e-4)
        back = pickle.dumps((thawed, net[3](net[0](x))))
        clone, bridged = copy.deepcopy(net), copy.deepcopy(net[3](net[0](x)))
    again, middle = pickle.loads(back)
    apis.assert_same(again(x), want, 1e-4)
    expected = net[5](net[3](net[0](x)))
    apis.assert_same(net[5](middle), expected, 1e-4)
    apis.assert_same(net[5](bridged), expected, 1e-4)
    apis.assert_same(clone(x), want, 1e-4)
    assert isinstance(middle.indice_dict["d1"], native.core.IndiceData)


def snapshot():
    """Every attribute of the wheel's modules and classes, as their dictionaries hold it."""
    found = {}
    for name, module in sorted(sys.modules.items()):
        if name.partition(".")[0] not in ("spconv", "cumm"):
            continue
        for key, value in vars(module).items():
            if key == "__warningregistry__":
                continue
            found[name, key] = value
            if isinstance(value, type) and value.__module__ == name:
                found.update({(name, key, inner): it for inner, it in vars(value).items()})
    return found


def test_disabling_restores_every_attribute(native):
    importlib.import_module("spconv.pytorch.utils")  # as patching does
    network(native)(apis.tensor(native))
    before = snapshot()
    with sparse_bridge.enable("spconv", mode="patch"):
        changed = {key for key, value in snapshot().items() if before.get(key) is not value}
        network(native)(apis.tensor(native)).dense()
    after = snapshot()
    assert after.keys() == before.keys()
    assert [key for key in before if after[key] is not before[key]] == []
    assert {key[-1] for key in changed} == {
        "__add__",
        "__call__",
        "__iadd__",
        "__init__",
        "_conv_forward",
        "_load_weight_different_layout",
        "dense",
        "features",
        "forward",
        "from_dense",
        "generate_voxel_with_id",
        "point_to_voxel_empty_mean",
        "select_by_index",
        "sparse_add",
        "sparse_add_hash_based",
    }


def test_live_objects_keep_their_classes(native):
    net, x = network(native), apis.tensor(native)
    kinds = [type(layer) for layer in net]
    with sparse_bridge.enable("spconv", mode="patch"):
        assert [type(layer) for layer in net] == kinds
        y = net(x)
        assert type(y) is native.SparseConvTensor
        assert all(isinstance(r, native.core.IndiceData) for r in y.indice_dict.values())
        assert isinstance(network(native)[0], native.conv.SparseConvolution)


def test_sums_with_unsorted_rows_keep_their_maps(native):
    """The wheel attaches maps in another row order than the rows; here they follow."""
    x = apis.tensor(native)
    down = native.SparseConv3d(4, 4, 3, 2, 1, indice_key="d")
    up = native.SparseInverseConv3d(4, 4, 3, "d")
    with sparse_bridge.enable("spconv", mode="patch"):
        y = down(x)
        zero = y.replace_feature(torch.zeros_like(y.features))
        total = native.functional.sparse_add(y, zero)
        assert not torch.equal(total.indices, y.indices)
        apis.assert_same(up(total), up(y), 1e-5)


SAVE = """
import sys, torch, spconv.pytorch as sp
sys.path.insert(0, "")
from tests.adapters.spconv import apis, test_live
torch.set_num_threads(1)
torch.manual_seed(3)
net = test_live.network(sp)
x = apis.tensor(sp)
y = net(x)
torch.save({"state": net.state_dict(), "indices": y.indices, "features": y.features.detach()},
           sys.argv[1])
"""
LOAD = """
import sys, torch, spconv.pytorch as sp
sys.path.insert(0, "")
from tests.adapters.spconv import apis, test_live
torch.set_num_threads(1)
saved = torch.load(sys.argv[1])
net = test_live.network(sp)
net.load_state_dict(saved["state"])
for layer in net.modules():
    if isinstance(layer, torch.nn.BatchNorm1d):
        layer.reset_running_stats()
x = apis.tensor(sp)
want = x.replace_feature(saved["features"])
y = net(x)
want.indices, want.spatial_shape = saved["indices"], y.spatial_shape
apis.assert_same(y, want, 1e-4)
assert list(saved["state"]) == list(net.state_dict())
"""
STANDIN = "import sparse_bridge; sparse_bridge.enable('spconv', mode='standin')\n"


@pytest.mark.parametrize("first", quick(["native"], ["native", "standin"]))
@pytest.mark.slow
def test_state_dicts_both_ways(native, tmp_path, first):
    file = str(tmp_path / "net.pt")
    apis.python((STANDIN if first == "standin" else "") + SAVE, file)
    apis.python((STANDIN if first == "native" else "") + LOAD, file)


MODELS = """
import pickle, sys, torch, spconv.pytorch as sp
sys.path.insert(0, "")
from tests.adapters.spconv import apis, test_live
torch.set_num_threads(1)
x = apis.tensor(sp)
if sys.argv[1] == "save":
    net = test_live.network(sp).requires_grad_(False)
    y = net[3](net[0](x))
    pickle.dump((net, y, net(x)), open(sys.argv[2], "wb"))
else:
    net, y, want = pickle.load(open(sys.argv[2], "rb"))
    assert type(net[0]) is sp.SubMConv3d and type(want) is sp.SparseConvTensor
    apis.assert_same(net(x), want, 1e-4)
    apis.assert_same(net[5](y), net[5](net[3](net[0](x))), 1e-4)
"""


@pytest.mark.slow
@pytest.mark.parametrize("first", quick(["standin"], ["native", "standin"]))
def test_pickled_models_and_tensors_both_ways(native, tmp_path, first):
    file = str(tmp_path / "net.pkl")
    apis.python((STANDIN if first == "standin" else "") + MODELS, "save", file)
    apis.python((STANDIN if first == "native" else "") + MODELS, "load", file)
