"""The order of the rows of new coordinates: ascending where spconv sorts them, its CPU code's in
patch mode on CPUs, as first seen elsewhere; the same coordinates and features in all of them."""

from __future__ import annotations

import contextlib
import itertools
import sys

import pytest
import torch
from torch import nn

import sparse_bridge
from sparse_bridge import state
from sparse_bridge.adapters.spconv.rules.row_order import row_order

from . import apis

SHAPE = (9, 8, 10)


def makers(sp):
    """Layers that make new coordinates: how, and whether their algorithm is Native."""
    conv, up = sp.SparseConv3d, sp.SparseConvTranspose3d
    native, split = sp.ConvAlgo.Native, sp.ConvAlgo.MaskSplitImplicitGemm
    return {
        "conv": (lambda **k: conv(4, 4, 3, 2, 1, **k), False),
        "conv of 2 x 2 x 2": (lambda **k: conv(4, 4, 2, 2, **k), False),
        "dilated": (lambda **k: conv(4, 4, 3, 1, 1, 2, **k), False),
        "native": (lambda **k: conv(4, 4, 3, 2, 1, algo=native, **k), True),
        "split": (lambda **k: conv(4, 4, 3, 2, 1, algo=split, **k), False),
        "125 offsets": (lambda **k: conv(4, 4, 5, 2, 2, **k), True),
        "125 offsets, fast": (lambda **k: conv(4, 4, 5, 2, 2, large_kernel_fast_algo=True, **k), False),
        "transposed": (lambda **k: up(4, 4, 3, 2, 1, **k), False),
        "transposed native": (lambda **k: up(4, 4, 2, 2, algo=native, **k), True),
        "pool": (lambda **k: sp.SparseMaxPool3d(3, 2, 1, **k), False),
        "native pool": (lambda **k: sp.SparseMaxPool3d(3, 2, 1, algo=native, **k), True),
        "average": (lambda **k: sp.SparseAvgPool3d(2, 2, **k), False),
    }


NAMES = [
    "conv",
    "conv of 2 x 2 x 2",
    "dilated",
    "native",
    "split",
    "125 offsets",
    "125 offsets, fast",
    "transposed",
    "transposed native",
    "pool",
    "native pool",
    "average",
]


@contextlib.contextmanager
def direct_table(on):
    """The switch, as programs assign it."""
    constants = sys.modules["spconv.constants"]
    before = constants.SPCONV_USE_DIRECT_TABLE
    constants.SPCONV_USE_DIRECT_TABLE = on
    try:
        yield
    finally:
        constants.SPCONV_USE_DIRECT_TABLE = before


def ascending(x):
    rows = x.indices.tolist()
    return rows == sorted(rows)


def first_seen(x, y):
    """Whether rows of y, which a layer of 2 x 2 x 2 made, come by the first row of x that reaches
    them."""
    want = dict.fromkeys((b, *(c // 2 for c in site)) for b, *site in x.indices.tolist())
    inside = [row for row in want if all(c < size for c, size in zip(row[1:], y.spatial_shape, strict=True))]
    return [tuple(row) for row in y.indices.tolist()] == inside


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("table", [False, True])
def test_the_rule(native, table):
    algo = 0 if native else 1
    for device in ("cpu", "cuda"):
        want = "ascending" if native or not table else "first_seen"
        assert row_order(algo, table, device) == want
    assert row_order(algo, table, "cpu", original=True) == "by_offset"
    assert row_order(algo, table, "cuda", original=True) == want


@pytest.mark.emulated
@pytest.mark.parametrize("name", NAMES)
def test_every_layer_in_the_order_that_is_asked_for(standin, lane, name):
    torch.manual_seed(0)
    make, native = makers(standin)[name]
    layer = make(indice_key="k").to(lane.device)
    answers = {}
    for on in (True, False):
        x = apis.tensor(standin, SHAPE, rows=90)
        x = standin.SparseConvTensor(x.features.to(lane.device), x.indices.to(lane.device), list(SHAPE), 2)
        for training in (True, False):
            with direct_table(on), torch.set_grad_enabled(training):
                y, again = layer.train(training)(x), layer(x)
            assert torch.equal(y.indices, again.indices)
            assert ascending(y) is (native or not on)
        answers[on] = y
        back = standin.SparseInverseConv3d(4, 3, layer.kernel_size, "k", algo=layer.algo)
        assert torch.equal(back.to(lane.device)(y).indices, x.indices)
    apis.assert_same(answers[False], answers[True])


def test_rows_as_they_are_first_seen(standin):
    x = apis.tensor(standin, SHAPE, rows=90)
    assert first_seen(x, standin.SparseConv3d(4, 4, 2, 2)(x))


@pytest.mark.emulated
def test_a_network_behind_the_switch(standin, lane):
    """Keys, inverse layers and submanifold layers follow; features do not change."""
    torch.manual_seed(0)
    net = unet(standin).to(lane.device).eval()
    x = on(apis.tensor(standin, SHAPE, rows=120), lane)
    with torch.no_grad():
        want = net(x)
        with direct_table(False):
            got = net(on(apis.tensor(standin, SHAPE, rows=120), lane))
    assert torch.equal(got["out"].indices, x.indices)
    torch.testing.assert_close(got["out"].features, want["out"].features, atol=1e-4, rtol=1e-4)
    for name in ("half", "quarter"):
        assert ascending(got[name]) and not ascending(want[name])
        apis.assert_same(got[name], want[name], 1e-4)


def on(x, lane):
    x.indices = x.indices.to(lane.device)
    return x.replace_feature(x.features.to(lane.device))


class UNet(nn.Module):
    def __init__(self, sp):
        super().__init__()
        self.stem = sp.SubMConv3d(4, 8, 3, indice_key="a")
        self.down = sp.SparseConv3d(8, 8, 3, 2, 1, indice_key="d")
        self.norm = sp.SparseSequential(nn.BatchNorm1d(8), nn.ReLU())
        self.deep = sp.SubMConv3d(8, 8, 3, indice_key="b")
        self.pool = sp.SparseMaxPool3d(2, 2, indice_key="p")
        self.unpool = sp.SparseInverseConv3d(8, 8, 2, "p")
        self.up = sp.SparseInverseConv3d(8, 8, 3, "d")

    def forward(self, x):
        x = self.stem(x)
        half = self.deep(self.norm(self.down(x)))
        quarter = self.pool(half)
        return {"out": self.up(self.unpool(quarter)), "half": half, "quarter": quarter}


def unet(sp):
    return UNet(sp)


@pytest.mark.emulated
def test_scenes_whose_maps_are_prepared_together(standin, lane):
    """From the third scene on, where kernels run."""
    torch.manual_seed(0)
    net = unet(standin).to(lane.device).eval()
    state.reset()
    with direct_table(False), torch.no_grad():
        for seed in range(5):
            x = on(apis.tensor(standin, SHAPE, rows=100 + 7 * seed, seed=seed), lane)
            got = net(x)
            assert ascending(got["half"]) and ascending(got["quarter"])
            assert torch.equal(got["out"].indices, x.indices)
            with direct_table(True):
                want = net(on(apis.tensor(standin, SHAPE, rows=100 + 7 * seed, seed=seed), lane))
            torch.testing.assert_close(got["out"].features, want["out"].features, atol=1e-4, rtol=1e-4)
    state.reset()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_compiled_and_exported_networks(standin):
    torch.manual_seed(0)
    net = unet(standin).eval()

    class Flat(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, features, indices):
            y = self.net(standin.SparseConvTensor(features, indices, list(SHAPE), 2))["half"]
            return y.features, y.indices

    x, flat = apis.tensor(standin, SHAPE, rows=90), Flat()
    compiled = torch.compile(flat, fullgraph=True, backend="eager")
    with torch.no_grad():
        for table in (True, False, True):
            with direct_table(table):
                got, want = compiled(x.features, x.indices), flat(x.features, x.indices)
            assert torch.equal(got[1], want[1])
            torch.testing.assert_close(got[0], want[0], atol=1e-5, rtol=1e-5)
        with direct_table(False):
            program = torch.export.export(flat, (x.features, x.indices))
            want = flat(x.features, x.indices)
        features, indices = program.module()(x.features, x.indices)  # with the switch on again
    assert torch.equal(indices, want[1])
    torch.testing.assert_close(features, want[0], atol=1e-5, rtol=1e-5)


def test_optimized_networks(standin):
    torch.manual_seed(0)
    net = unet(standin).eval()
    with direct_table(False), torch.no_grad():
        want = net(apis.tensor(standin, SHAPE, rows=90))["half"]
        sparse_bridge.optimize(net)
        for _ in range(3):
            got = net(apis.tensor(standin, SHAPE, rows=90))["half"]
            assert torch.equal(got.indices, want.indices)
            torch.testing.assert_close(got.features, want.features, atol=1e-4, rtol=1e-4)


def test_functions_say_by_argument(standin):
    x = apis.tensor(standin, SHAPE, rows=90)
    rule = [3] * 3, [2] * 3, [1] * 3, [1] * 3, [0] * 3
    place = x.indices, 2, list(SHAPE), standin.ConvAlgo.MaskImplicitGemm
    rows = standin.ops.get_indice_pairs(*place[:3], standin.ConvAlgo.Native, *rule)[0].tolist()
    assert rows == sorted(rows)
    for argument, switch in itertools.product((None, True, False), (True, False)):
        with direct_table(switch):
            tables = standin.ops.get_indice_pairs_implicit_gemm(*place, *rule, direct_table=argument)
        found = tables[0].tolist()
        assert sorted(found) == rows
        assert (found == rows) is not (switch if argument is None else argument)


BEFORE_THE_IMPORT = """
import sys, torch, sparse_bridge
sparse_bridge.enable("spconv", mode="standin")
import spconv
{before}
import spconv.pytorch as sp
{after}
rows = torch.tensor([[0, 6, 6, 6], [0, 0, 0, 0]], dtype=torch.int32)
y = sp.SparseConv3d(1, 1, 2, 2)(sp.SparseConvTensor(torch.ones(2, 1), rows, [8] * 3, 1))
print(spconv.constants.SPCONV_USE_DIRECT_TABLE, y.indices[0].tolist())
"""


@pytest.mark.sample(0)
@pytest.mark.parametrize(
    ("before", "after", "variable", "want"),
    [
        ("", "", "", "True [0, 3, 3, 3]"),
        ("spconv.constants.SPCONV_USE_DIRECT_TABLE = False", "", "", "False [0, 0, 0, 0]"),
        ("", "spconv.constants.SPCONV_USE_DIRECT_TABLE = False", "", "False [0, 0, 0, 0]"),
        ("", "", "0", "False [0, 0, 0, 0]"),
        ("", "", "1", "True [0, 3, 3, 3]"),
        # spconv has read it by then
        (
            "spconv.constants.SPCONV_USE_DIRECT_TABLE = False",
            "spconv.constants.SPCONV_USE_DIRECT_TABLE = True",
            "",
            "True [0, 0, 0, 0]",
        ),
    ],
)
def test_when_the_switch_is_read(before, after, variable, want):
    environment = {"SPCONV_USE_DIRECT_TABLE": variable} if variable else {}
    code = BEFORE_THE_IMPORT.format(before=before, after=after)
    assert apis.python(code, **environment).strip() == want


@pytest.mark.parametrize("table", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_patched_layers_order_rows_as_spconv_does_on_a_cpu(name, table, one_thread):
    sp = apis.wheel()
    make, _ = makers(sp)[name]
    if name == "split" or "fast" in name:
        pytest.skip("the wheel for CPUs has one algorithm")
    torch.manual_seed(0)
    layer = make().train()
    for x in (apis.tensor(sp, SHAPE, rows=90), repeated(sp)):
        with direct_table(table):
            if name != "average":  # no CPU has it
                want = layer(x)
            with sparse_bridge.enable("spconv", mode="patch"):
                got = layer(x)
        if name == "average":
            with sparse_bridge.enable("spconv", mode="patch"):
                want = sp.SparseMaxPool3d(2, 2)(x)
            assert torch.equal(got.indices, want.indices)
            continue
        assert torch.equal(got.indices, want.indices)
        torch.testing.assert_close(got.features, want.features, atol=1e-5, rtol=1e-5)


def repeated(sp):
    """With equal coordinates, and a row of no batch item."""
    x = apis.tensor(sp, SHAPE, rows=40)
    dead = torch.tensor([[-1, 2, 2, 2]], dtype=torch.int32)
    indices = torch.cat([x.indices[:20], x.indices[5:9], dead, x.indices[20:]])
    return sp.SparseConvTensor(torch.rand(len(indices), 4), indices, list(SHAPE), 2)
