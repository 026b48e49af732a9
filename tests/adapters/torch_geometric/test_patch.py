"""PyG's relational layers, patched and not, side by side."""

from __future__ import annotations

import copy
import gc

import pytest
import torch

import sparse_bridge
from sparse_bridge.core.functional import RelationalConv
from sparse_bridge.errors import CoordinateError, DataTypeError, LifecycleError, ShapeError, UnsupportedError
from tests.checks import assert_close, assert_error

pyg = pytest.importorskip("torch_geometric.nn")
FORMS = [
    {},
    {"num_bases": 2},
    {"num_blocks": 4},
    {"aggr": "add"},
    {"aggr": "sum", "num_bases": 3},
    {"root_weight": False},
    {"bias": False},
    {"root_weight": False, "bias": False},
    {"flow": "target_to_source"},
]


@pytest.fixture
def patched():
    with sparse_bridge.enable("torch_geometric") as handle:
        yield handle


def graph(n_in=20, n_out=20, n_edges=150, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ends = [torch.randint(0, n, (n_edges,), generator=generator) for n in (n_in, n_out)]
    return torch.stack(ends), torch.randint(0, 3, (n_edges,), generator=generator)


def run(layer, x, *edges):
    """(result, gradients of the parameters)."""
    layer.zero_grad()
    y = layer(x, *edges)
    y.square().sum().backward()
    return y.detach(), [parameter.grad for parameter in layer.parameters()]


def agree(one, two):
    for a, b in zip((one[0], *one[1]), (two[0], *two[1]), strict=True):
        assert_close(a, b.double(), torch.float32)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("kind", ["RGCNConv", "FastRGCNConv"])
def test_features(kind, form):
    torch.manual_seed(0)
    layer, x = getattr(pyg, kind)(8, 4, 3, **form), torch.randn(20, 8)
    want = run(layer, x, *graph())
    with sparse_bridge.enable("torch_geometric") as handle:
        agree(run(layer, x, *graph()), want)
        counted = handle.report().layers["torch_geometric"][kind]
    assert (counted.bridged, counted.original) == (1, {})


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_the_layer_without_pyg(form):
    """The same state dict, the same results."""
    torch.manual_seed(0)
    layer, ours, x = (pyg.RGCNConv(8, 4, 3, **form), RelationalConv(8, 4, 3, **form), torch.randn(20, 8))
    ours.load_state_dict(layer.state_dict())
    agree(run(ours, x, *graph()), run(layer, x, *graph()))


def test_how_parameters_begin():
    """Glorot's bounds, a bias of zeros."""
    torch.manual_seed(0)
    ours, layer = RelationalConv(64, 32, 5, num_bases=4), pyg.RGCNConv(64, 32, 5, num_bases=4)
    for (name, a), (_, b) in zip(ours.named_parameters(), layer.named_parameters(), strict=True):
        assert a.shape == b.shape and abs(a.std() - b.std()) < 0.15 * (b.std() + 1e-9), name


@pytest.mark.parametrize("numbers", [None, "permuted"])
@pytest.mark.parametrize("form", FORMS[:2] + FORMS[3:6], ids=str)
def test_nodes_without_features(form, numbers):
    torch.manual_seed(0)
    layer = pyg.RGCNConv(20, 4, 3, **form)
    x = None if numbers is None else torch.randperm(20)
    want = run(layer, x, *graph())
    with sparse_bridge.enable("torch_geometric"):
        agree(run(layer, x, *graph()), want)


def test_two_kinds_of_nodes():
    torch.manual_seed(0)
    layer, x = pyg.RGCNConv((8, 6), 4, 3), (torch.randn(20, 8), torch.randn(9, 6))
    edges = graph(n_out=9)
    want = run(layer, x, *edges)
    with sparse_bridge.enable("torch_geometric"):
        agree(run(layer, x, *edges), want)


def test_what_is_left_to_pyg(patched):
    torch.manual_seed(0)
    layer, fast = pyg.RGCNConv(20, 4, 3, aggr="max"), pyg.FastRGCNConv(20, 4, 3)
    layer(torch.randn(20, 20), *graph())
    fast(torch.arange(20), *graph())
    counted = patched.report().layers["torch_geometric"]
    assert counted["RGCNConv"].original == {"aggr='max'": 1}
    assert counted["FastRGCNConv"].original == {"numbers of nodes": 1}


@pytest.mark.parametrize(
    "reason, form, x, change",
    [
        ("nodes of 3 axes", {}, torch.ones(20, 20, 8), {}),
        ("numbers of nodes counted from the end", {}, torch.arange(20) % 8 - 1, {}),
        ("nodes of torch.bool", {"root_weight": False}, torch.ones(8).bool(), {"n_in": 8, "n_out": 8}),
        ("edge_type of torch.uint8", {"num_blocks": 4}, torch.ones(20, 8), {"kinds": torch.uint8}),
        ("edges of no relation", {"num_blocks": 4}, torch.ones(20, 8), {"add": 1}),
    ],
)
def test_what_only_pyg_takes(patched, reason, form, x, change):
    """Its answer is the same as without the bridge."""
    torch.manual_seed(0)
    layer = pyg.RGCNConv(8, 4, 3, **form)
    edge_index, kinds = graph(**{key: n for key, n in change.items() if key.startswith("n_")})
    kinds = (kinds + change.get("add", 0)).to(change.get("kinds", torch.int64))
    got = layer(x, edge_index, kinds)
    assert patched.report().layers["torch_geometric"]["RGCNConv"].original == {reason: 1}
    patched.disable()
    assert torch.equal(got, layer(x, edge_index, kinds))


def test_a_layer_without_relations_is_pygs(patched):
    layer = pyg.RGCNConv(8, 4, 0, num_blocks=4)
    edges = graph(n_edges=0)
    x = torch.randn(20, 8)
    assert torch.equal(layer(x, *edges), x @ layer.root + layer.bias)
    assert patched.report().layers["torch_geometric"]["RGCNConv"].bridged == 0


def test_what_pyg_does_not_take_is_refused_in_our_words(patched):
    layer = pyg.RGCNConv(8, 4, 3)
    assert_error(lambda: layer(torch.ones(20, 7), *graph()), ShapeError, ["7 channels", "expects 8"])
    assert_error(lambda: layer(torch.ones(20, 8).half(), *graph()), DataTypeError, ["float16", "float32"])
    assert_error(lambda: layer(torch.arange(20), *graph()), CoordinateError, ["node 19", "< 8"])


def test_graphs_are_grouped_once_and_let_go(patched, calls_of):
    from sparse_bridge.adapters.torch_geometric import patch

    made = calls_of(patch, "relation_map")
    layer, x, edges = pyg.RGCNConv(8, 4, 3), torch.randn(20, 8), graph()
    first = layer(x, *edges)
    assert torch.equal(layer(x, *edges), first) and len(made) == 1
    edges[1].fill_(0)  # seen
    assert not torch.equal(layer(x, *edges), first) and len(made) == 2
    with torch.inference_mode():
        layer(x, *(tensor.clone() for tensor in edges))
    assert len(made) == 3
    made.clear()
    gc.collect()  # what other tests have left
    before = len(patch.graphs)
    del edges
    gc.collect()
    assert len(patch.graphs) == before - 1


def test_disable_restores(patched):
    layer = copy.deepcopy(pyg.RGCNConv(8, 4, 3))
    forward = pyg.RGCNConv.forward
    patched.disable()
    assert pyg.RGCNConv.forward is not forward and "torch_geometric" not in sparse_bridge.status()
    assert layer(torch.randn(20, 8), *graph()).shape == (20, 4)


def test_it_is_bridged_only_where_it_is_named():
    with sparse_bridge.enable():
        assert "torch_geometric" not in sparse_bridge.status()
    assert_error(lambda: sparse_bridge.enable("torch_geometric", mode="standin"), LifecycleError, ["torch_geometric"])


def test_constructor_refusals():
    with pytest.raises(ValueError, match="one of them"):
        RelationalConv(8, 4, 3, num_bases=2, num_blocks=2)
    with pytest.raises(ValueError, match="do not divide"):
        RelationalConv(8, 6, 3, num_blocks=4)
    assert_error(lambda: RelationalConv(8, 4, 3, aggr="max"), UnsupportedError, ["'max'"])


class Network(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer, self.head = layer, torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, edges: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(x, edges, kinds)).relu()


@pytest.mark.parametrize("form", [*FORMS[:4], *FORMS[5:]], ids=str)
@pytest.mark.parametrize("kind", ["RGCNConv", "FastRGCNConv"])
def test_scripts_are_of_the_original(patched, kind, form):
    """TorchScript compiles what PyG wrote; eager calls before and after are bridged."""
    torch.manual_seed(0)
    layer, x, edges = getattr(pyg, kind)(8, 4, 3, **form), torch.randn(20, 8), graph()
    for model in (layer, Network(layer)):
        want = model(x, *edges)
        scripted = torch.jit.script(model)
        assert_close(scripted(x, *edges), want.double())
        grads = torch.autograd.grad(scripted(x, *edges).square().sum(), scripted.parameters())
        expected = torch.autograd.grad(model(x, *edges).square().sum(), model.parameters())
        for got, one in zip(grads, expected, strict=True):
            assert_close(got, one.double())
    before = patched.report().layers["torch_geometric"][kind]
    layer(x, *edges)
    after = patched.report().layers["torch_geometric"][kind]
    assert after.bridged == before.bridged + 1 and not after.original
    with sparse_bridge.override_settings(strict=True):
        layer(x, *edges)
    patched.disable()
    assert_close(torch.jit.script(layer)(x, *edges), layer(x, *edges).double())


def test_the_patched_forward_shows_itself_as_the_original():
    before = pyg.RGCNConv.forward
    with sparse_bridge.enable("torch_geometric"):
        forward = pyg.RGCNConv.forward
        assert forward is not before and forward.__wrapped__ is before
        assert forward.__defaults__ == before.__defaults__ and forward.__doc__ == before.__doc__
        assert forward.__globals__ is before.__globals__
    assert pyg.RGCNConv.forward is before
