"""Gradients of an output that another one is computed from: a program that looks at them sees those of the layers."""

from __future__ import annotations

import gc

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from sparse_bridge import settings
from sparse_bridge.core.capture import graph_regions
from sparse_bridge.refusals import Why

from . import apis
from .graph_sizes import graphs_of

pytestmark = pytest.mark.emulated

SCENES = 8  # the fifth is replayed


def by_a_hook(out, deep, loss):
    found = []
    deep.register_hook(found.append)
    loss.backward()
    return found[0]


def by_a_hook_that_writes(out, deep, loss):
    deep.register_hook(lambda gradient: gradient * 0.5)
    loss.backward()
    return None  # what is before it has another gradient


def by_retain_grad(out, deep, loss):
    deep.retain_grad()
    loss.backward()
    return deep.grad


def by_autograd(out, deep, loss):
    return torch.autograd.grad(out[:, 1].sum(), deep)[0]


def by_autograd_of_both(out, deep, loss):
    return torch.autograd.grad(loss, deep)[0]


LOOKS = [by_a_hook, by_a_hook_that_writes, by_retain_grad, by_autograd, by_autograd_of_both]


def of_the_last(out, deep, loss):
    """Of an output that nothing is computed from, and those of the parameters alone."""
    out.retain_grad()
    loss.backward(retain_graph=True)
    return out.grad


def steps(model, scene, look, first):
    """What a program sees that looks from step `first` on."""
    for seed in range(SCENES):
        model.zero_grad()
        out, deep = apis.values_of(model(scene(seed)))
        loss = out.square().sum() + deep.sum()
        seen = look(out, deep, loss) if seed >= first else loss.backward()
        yield [seen, *(p.grad for p in model.parameters())]


@pytest.fixture
def run(device, rules):
    """The function that runs steps in a mode: (what they see, the replayer)."""
    rules.hold(graphs_of(512, watched=True))

    def run_in(mode, look, first=0):
        with apis.standin("spconv") as module, settings.override(optimize=mode):
            model = apis.network(module, "spconv", device).train()
            scene = lambda seed: apis.scene(module, "spconv", seed, device, 0.3 + 0.002 * seed)  # noqa: E731
            return list(steps(model, scene, look, first)), graph_regions.summary()

    return run_in


def close(mine, theirs):
    for one, other in zip(mine, theirs, strict=True):
        assert (one is None) == (other is None)
        if other is not None:
            torch.testing.assert_close(one, other, rtol=2e-3, atol=2e-3 * (1 + float(other.abs().max())))


@pytest.mark.parametrize("look", LOOKS)
def test_such_a_program_goes_through_the_layers(run, look):
    (theirs, _), (mine, summary) = run("off", look), run("graphs", look)
    for one, other in zip(mine, theirs, strict=True):
        close(one, other)
    assert any(Why.GRAPH_INNER_GRADIENT.name in str(one.reason) for one in summary)


@pytest.mark.parametrize("look", [look for look in LOOKS if look is not by_autograd])
def test_one_that_looks_later_is_stopped(run, look):
    """Behind the first replays, where it would see a part of the gradient. (Torch itself raises of `by_autograd`.)"""
    with pytest.raises(RuntimeError, match=r"with sparse_bridge.eager\(\):"):
        run("graphs", look, first=SCENES - 2)


def test_other_gradients_are_those_of_the_graph(run):
    (theirs, _), (mine, (one,)) = run("off", of_the_last), run("graphs", of_the_last)
    for some, others in zip(mine, theirs, strict=True):
        close(some, others)
    assert one.hits and one.reason is None


def test_nothing_of_a_step_waits_for_the_garbage_collector(device, rules):
    rules.hold(graphs_of(512, watched=True))
    with apis.standin("spconv") as module, settings.override(optimize="graphs"):
        model, left = apis.network(module, "spconv", device).train(), []
        gc.collect()
        gc.disable()
        try:
            for seed in range(SCENES):
                x = apis.scene(module, "spconv", seed, device, 0.3 + 0.002 * seed)
                values = x.features.requires_grad_().exp()  # which is kept by what is before the model
                left.append(StorageWeakRef(values.untyped_storage()))
                out, deep = apis.values_of(model(x.replace_feature(values)))
                (out.sum() + deep.sum()).backward()
                del x, values, out, deep
                assert seed < 4 or left[-1].expired()  # a step that is captured may wait for it
        finally:
            gc.enable()
        (one,) = graph_regions.summary()
        assert one.hits
