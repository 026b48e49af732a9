"""Operators of torch that round by how many rows there are: products in fp32, and batch norms of torch in training."""

from __future__ import annotations

import types

import pytest
import torch
from torch import nn

from sparse_bridge import hooks, settings
from sparse_bridge.core.capture import graph_regions
from sparse_bridge.core.capture.calls import counted_norms, exact_operators
from sparse_bridge.core.maps import rows
from sparse_bridge.core.maps.rows import Rows
from sparse_bridge.refusals import Why

from . import apis
from .graph_sizes import graphs_of
from .test_replay_apis import TRAINS, optimized

pytestmark = pytest.mark.emulated
WIDTH = 8


# Each value of x [N, C] is off by a share of it that depends on N. In a module that nobody follows, as torch's own.
_OPERATOR = """
def rounded(x, share):
    return x * (1 + share * (x.shape[0] % 7 + 1))

def keep(ctx, inputs, output):
    ctx.share = inputs[1]

def backward(ctx, g):
    return torch.ops.sparse_bridge_tests.rounded(g, ctx.share), None
"""
_made = {"__name__": "torch.rounded", "torch": torch}
exec(_OPERATOR, _made)
_library = torch.library.Library("sparse_bridge_tests", "DEF")
_library.define("rounded(Tensor x, float share) -> Tensor")
for _key in ("CPU", "CUDA"):
    _library.impl("rounded", _made["rounded"], _key)
torch.library.register_autograd(
    "sparse_bridge_tests::rounded", _made["backward"], setup_context=_made["keep"], lib=_library
)
rounded = torch.ops.sparse_bridge_tests.rounded


@pytest.fixture
def known(monkeypatch):
    """The operator above is one whose rounding is known."""
    monkeypatch.setitem(exact_operators._ROWS_AT, torch.ops.sparse_bridge_tests.rounded.default, 0)


class Between(nn.Module):
    """A function of features between layers."""

    def __init__(self, network, function):
        super().__init__()
        self.network, self.function, self.linear = network, function, nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        return self.network(x.replace_feature(self.function(self, x.features)))


def slightly(model, features):
    return rounded(features, 2**-21)


def product(model, features):
    return model.linear(features)


def norm(model, features):
    return model.norm(nn.functional.leaky_relu(features))


def mixed(model, features):
    """What mixes rows besides is still found."""
    return rounded(features, 2**-21) + features.mean()


def grossly(model, features):
    """No rounding."""
    return rounded(features, 0.25)


def calls(device, trains, function, n_calls=9, tolerance=1e-3):
    with apis.standin("spconv") as module:
        model, plain = optimized(module, "spconv", device, trains, lambda network: Between(network, function))
        for seed in range(n_calls):
            given = lambda seed=seed: apis.scene(module, "spconv", seed, device, 0.25 + 0.002 * seed)  # noqa: E731
            apis.both(model, plain, given, trains, rtol=tolerance, atol=tolerance / 10)
        (found,) = graph_regions.summary()
        return found.hits, str(found.reason)


@TRAINS
@pytest.mark.parametrize("function", [slightly, product, norm], ids=lambda function: function.__name__)
def test_they_are_replayed(device, rules, known, trains, function):
    rules.hold(graphs_of(512, watched=True))
    hits, reason = calls(device, trains, function)
    assert hits >= 2, reason


@TRAINS
def test_whatever_else_differs_is_refused(device, rules, known, trains):
    rules.hold(graphs_of(512, watched=True))
    hits, reason = calls(device, trains, mixed)
    assert hits == 0 and ("GRAPH_MIXED" in reason or "GRAPH_OTHER_BITS" in reason or "GRAPH_NAN" in reason)


def test_an_operator_that_nobody_knows_is_refused(device, rules):
    rules.hold(graphs_of(512, watched=True))
    hits, reason = calls(device, False, slightly)
    assert hits == 0 and Why.GRAPH_OTHER_BITS.name in reason


def test_no_more_than_rounding_is_allowed(device, rules, known):
    rules.hold(graphs_of(512, watched=True))
    hits, reason = calls(device, False, grossly)
    assert hits == 0 and Why.GRAPH_MIXED_GRADIENTS.name in reason


def test_comparisons_allow_for_rounding(device, rules, known):
    rules.hold(graphs_of(512, watched=True))
    with settings.override(compare_every=1):
        hits, reason = calls(device, False, slightly)
        assert hits == 0 and reason == "None"  # each call is compared
    with settings.override(compare_every=2):
        assert calls(device, False, slightly, 12)[0] > 1


class Tensors:
    def is_norm(self, module):
        return isinstance(module, nn.BatchNorm1d)


@pytest.mark.parametrize("ours", [False, True])
def test_norms_that_kernels_compute_are_left_to_them(monkeypatch, ours):
    """In a trial such as of the layers: a norm of ours counts rows, and gives the bits of the layers' own."""
    norm, seen = nn.BatchNorm1d(3).train(), []

    def forward(self, x):
        seen.append(("own", len(x)))
        return nn.BatchNorm1d.forward(self, x)

    def kernels(norm, x, relu):
        seen.append(("kernels", len(x)))
        return x

    if ours:
        setattr(forward, hooks.IN_PLACE_OF, nn.BatchNorm1d.forward)
    norm.forward = types.MethodType(forward, norm)
    monkeypatch.setattr(counted_norms, "batch_norm_training", kernels)
    scope = {8: Rows(None, torch.tensor([4], dtype=torch.int32), 8, 3.0, 5)}
    with counted_norms.counted_norms(nn.Sequential(norm), Tensors()), rows.scope(scope):
        norm(torch.randn(8, 3))
        with exact_operators.ExactOperators():
            assert norm(torch.randn(8, 3)).shape == (8, 3)
    assert seen == [("kernels", 8), ("kernels", 8) if ours else ("own", 5)]


def test_rows_in_use_alone():
    x = torch.randn(8, 3)
    x[5:] = float("nan")
    count = torch.tensor([4], dtype=torch.int32)
    with rows.scope({8: Rows(None, count, 8, float("nan"), 5)}):
        assert exact_operators.of_rows_in_use(len, x) == 8 and not exact_operators.exact()
        with exact_operators.ExactOperators() as mode:
            assert exact_operators.exact() and not mode.used
            for made in (x @ torch.eye(3), nn.functional.linear(x, torch.eye(3), torch.zeros(3))):
                assert torch.equal(made[:5], x[:5]) and made[5:].isnan().all() and mode.used
            other = torch.randn(7, 3)
            assert torch.equal(other @ torch.eye(3), other)
        assert not exact_operators.exact()
