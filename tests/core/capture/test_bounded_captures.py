"""Streams in which every scene has another shape: how much is captured, and what it may cost."""

from __future__ import annotations

import functools
import gc
import weakref

import pytest
import torch
from torch import nn

import sparse_bridge
from sparse_bridge import policy
from sparse_bridge.core.capture import graph_regions
from sparse_bridge.core.capture.call_kind import CallKind
from sparse_bridge.core.capture.replay_training import TrainingReplayer

from . import apis
from .graph_sizes import graphs_of
from .pretended import graphs_on_the_cpu
from .test_replay_apis import optimized, replayer_of


def test_ever_new_kinds_are_not_looked_at_any_more(fake_gpu):
    graphs_on_the_cpu(fake_gpu)
    model = nn.Linear(2, 2)
    trainer = TrainingReplayer(model, lambda _: None)
    assert trainer.may_replay()
    for number in range(policy.CALL_KINDS):
        trainer.kinds[number] = CallKind()
    assert "ever new kinds" in trainer.given_up()
    trainer.inner = None  # nor are its modules
    assert not trainer.may_replay() and trainer.inner is None


class Reads(nn.Module):
    """A number of a tensor decides, which no replay would ask again."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        out = self.inner(x)["out"]
        return out if float(out.features.sum()) < 1e30 else x


@pytest.mark.emulated
def test_a_call_that_is_watched_and_refused_is_not_kept(device, rules):
    """Nor are its tensors until garbage is collected."""
    rules.hold(graphs_of(512, watched=True))
    with apis.standin("spconv") as module:
        model = Reads(apis.network(module, "spconv", device)).eval()
        model = sparse_bridge.optimize(model, graphs=True)
        gc.collect()
        gc.disable()
        try:
            with torch.no_grad():
                for seed in range(4):
                    kept = weakref.ref(model(apis.scene(module, "spconv", seed, device)).features)
                    assert kept() is None, seed
        finally:
            gc.enable()
        assert "GRAPH_HOST_READ" in graph_regions.summary()[0].reason


@pytest.mark.gpu  # what pretends to be a graph keeps it, to run again
@pytest.mark.parametrize("trains", [False, True])
def test_a_graph_does_not_keep_the_input_that_it_was_captured_with(device, trains):
    """Whose maps are as large as the graph's own."""
    with apis.standin("spconv") as module:
        model, _ = optimized(module, "spconv", device, trains)
        given = []
        for seed in range(6):
            x = apis.scene(module, "spconv", seed, device, 0.25)
            given += map(weakref.ref, (x, x.features, x.indices))
            with torch.set_grad_enabled(trains):
                values = apis.values_of(model(x))
            if trains:
                apis.loss_of(values).backward()
            del x, values
        gc.collect()
        assert replayer_of(model).hits and [one() for one in given].count(None) == len(given)


@pytest.mark.emulated
def test_training_over_twenty_shapes(device):
    """No shape comes back: one graph serves them all, and everything is what it is without."""
    with apis.standin("spconv") as module:
        model, plain = optimized(module, "spconv", device, True)
        for seed in range(20):
            shape = (4 + seed % 5, 4 + seed // 5, 6)
            apis.both(model, plain, functools.partial(apis.scene, module, "spconv", seed, device, 0.2, 1, shape), True)
        training = replayer_of(model)
        assert len(training.graphs) == 1 and training.hits >= 14 and training.reason is None


@pytest.mark.emulated
def test_a_parameter_that_is_not_used(device):
    """No hook of it runs, as those that wait for gradients of other ranks, and asking for its gradient is an error."""

    def around(network):
        network.spare = nn.Linear(2, 2)
        return network

    with apis.standin("spconv") as module:
        model, plain = optimized(module, "spconv", device, True, around)
        told, nodes = [], []
        for one in (model, plain):
            told.append(set())
            for name, parameter in one.named_parameters():
                nodes.append(parameter.expand_as(parameter).grad_fn.next_functions[0][0])  # as DDP does
                nodes[-1].register_hook(functools.partial(_add, told[-1], name))
        for seed in range(8):
            apis.both(model, plain, functools.partial(apis.scene, module, "spconv", seed, device, 0.2), True)
            assert told[0] == told[1] and "spare.weight" not in told[0]
        assert replayer_of(model).hits >= 4
        for one in (model, plain):
            loss = apis.loss_of(apis.values_of(one(apis.scene(module, "spconv", 9, device, 0.2))))
            with pytest.raises(RuntimeError, match="appears to not have been used in the graph"):
                torch.autograd.grad(loss, [one.spare.weight])


def _add(names, name, *_):
    names.add(name)
