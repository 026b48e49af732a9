"""Layers that keep PyG's forward and change a step of it: PyG itself runs them, and the report says why."""

from __future__ import annotations

import pytest
import torch

import sparse_bridge
from sparse_bridge.adapters.steps import Steps
from sparse_bridge.errors import UnsupportedError

from .test_patch import graph, pyg

KINDS = "RGCNConv", "FastRGCNConv"
# Steps of either layer, and how their result is changed.
STEPS = {"message": lambda y: 2 * y, "aggregate": lambda y: y + 1, "update": lambda y: -y, "propagate": lambda y: 3 * y}


def _called_by(layer, edges):
    x = torch.randn(20, 8, generator=torch.Generator().manual_seed(1))
    return layer(x, *edges).detach()


def _counts(handle, layer):
    return handle.report().layers["torch_geometric"][type(layer).__name__]


def _runs_in_pyg(make, reason, edges, change=lambda layer: None):
    """The layer of `make`, changed before or after it is bridged, gives what PyG gives."""
    layer = make()
    change(layer)
    want = _called_by(layer, edges)
    with sparse_bridge.enable("torch_geometric") as handle:
        assert torch.equal(_called_by(layer, edges), want)
        counts = _counts(handle, layer)
        assert counts.bridged == 0 and reason in next(iter(counts.original))
    with sparse_bridge.enable("torch_geometric", strict=True), pytest.raises(UnsupportedError, match=reason):
        _called_by(layer, edges)
    return want


class Message(pyg.RGCNConv):
    def message(self, x_j, edge_type_ptr):
        return 2 * super().message(x_j, edge_type_ptr)


class Aggregate(pyg.RGCNConv):
    def aggregate(self, inputs, index, ptr=None, dim_size=None):
        return super().aggregate(inputs, index, ptr, dim_size) + 1


class Update(pyg.RGCNConv):
    def update(self, inputs):
        return -super().update(inputs)


class FastMessage(pyg.FastRGCNConv):
    def message(self, x_j, edge_type, edge_index_j):
        return 2 * super().message(x_j, edge_type, edge_index_j)


class FastAggregate(pyg.FastRGCNConv):
    def aggregate(self, inputs, edge_type, index, dim_size=None):
        return super().aggregate(inputs, edge_type, index, dim_size) + 1


class FastUpdate(pyg.FastRGCNConv):
    def update(self, inputs):
        return -super().update(inputs)


@pytest.mark.parametrize("derived", (Message, Aggregate, Update, FastMessage, FastAggregate, FastUpdate))
def test_a_step_of_a_subclass(derived):
    torch.manual_seed(0)
    layer, plain = derived(8, 4, 3), derived.__base__(8, 4, 3)
    plain.load_state_dict(layer.state_dict())
    step = derived.__name__.removeprefix("Fast").lower()
    got = _runs_in_pyg(lambda: layer, f"{step} is overridden", graph())
    assert not torch.allclose(got, _called_by(plain, graph()), atol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("on_class", (False, True))
def test_a_step_that_is_replaced(kind, step, on_class, monkeypatch):
    """On an object, or on PyG's class while it is bridged; until it is put back."""
    changed = STEPS[step]
    torch.manual_seed(0)
    layer = getattr(pyg, kind)(8, 4, 3)
    want, place = _called_by(layer, graph()), getattr(pyg, kind) if on_class else layer
    plain = getattr(place, step)
    with sparse_bridge.enable("torch_geometric") as handle:
        _called_by(layer, graph())
        with monkeypatch.context() as patch:
            patch.setattr(place, step, lambda *args, **more: changed(plain(*args, **more)))
            got = _called_by(layer, graph())
        counts = _counts(handle, layer)
        assert (counts.bridged, counts.original) == (1, {f"{step} is overridden": 1})
        assert not torch.allclose(got, want, atol=1e-3)
        if on_class:
            assert torch.allclose(_called_by(layer, graph()), want, atol=1e-5)
            assert _counts(handle, layer).bridged == 2


class Named(pyg.RGCNConv):
    def extra(self):
        return 1


class FastNamed(pyg.FastRGCNConv):
    def reset_parameters(self):
        super().reset_parameters()


@pytest.mark.parametrize("derived", (Named, FastNamed))
def test_a_subclass_that_changes_no_step_is_bridged(derived):
    layer = derived(8, 4, 3)
    want = _called_by(layer, graph())
    with sparse_bridge.enable("torch_geometric") as handle:
        torch.testing.assert_close(_called_by(layer, graph()), want)
        fresh = derived(8, 4, 3)  # for which PyG may write code now
        _called_by(fresh, graph())
        assert _counts(handle, layer).bridged == 2


def _exchanged(layer):
    layer.aggr_module = pyg.aggr.MaxAggregation()


def _derived(layer):
    class Doubled(pyg.aggr.MeanAggregation):
        def forward(self, *args, **more):
            return 2 * super().forward(*args, **more)

    layer.aggr_module = Doubled()


def _on_the_module(layer):
    plain = layer.aggr_module.forward
    layer.aggr_module.forward = lambda *args, **more: 2 * plain(*args, **more)


def _reduced(layer):
    plain = layer.aggr_module.reduce
    layer.aggr_module.reduce = lambda *args, **more: 2 * plain(*args, **more)


def _hooked(layer):
    layer.aggr_module.register_forward_hook(lambda module, args, y: 2 * y)


@pytest.mark.parametrize("change", (_exchanged, _derived, _on_the_module, _reduced, _hooked))
def test_the_aggregation_is_exchanged(change):
    torch.manual_seed(0)
    layer = pyg.RGCNConv(8, 4, 3)
    plain = _called_by(layer, graph())
    reason = "reduce is overridden" if change is _reduced else "aggr_module"
    assert not torch.equal(_runs_in_pyg(lambda: layer, reason, graph(), change), plain)


def test_equal_aggregations_are_bridged():
    layer = pyg.RGCNConv(8, 4, 3)
    layer.aggr_module = pyg.aggr.MeanAggregation()
    with sparse_bridge.enable("torch_geometric") as handle:
        _called_by(layer, graph())
        assert _counts(handle, layer).bridged == 1


def test_a_step_that_was_replaced_before(monkeypatch):
    layer, plain = pyg.RGCNConv(8, 4, 3), pyg.RGCNConv.message
    monkeypatch.setattr(pyg.RGCNConv, "message", lambda self, x_j, edge_type_ptr: 2 * plain(self, x_j, edge_type_ptr))
    _runs_in_pyg(lambda: layer, "message is overridden", graph())


def test_which_steps_there_are():
    """Found in the compiled code of the original, whatever the release."""
    for kind in KINDS:
        names = {name for name, _ in Steps(getattr(pyg, kind), "forward")._made}
        assert {"propagate", "message", "aggregate", "update", "message_and_aggregate"} <= names
