"""Steps that are replayed go backward again, after others, and complain as torch does."""

from __future__ import annotations

import copy

import pytest
import torch

import sparse_bridge
from sparse_bridge.core.capture import replay_training
from tests.core.capture.graph_sizes import graphs_of

from . import apis
from .pretended import replays_on_the_cpu
from .test_replay_apis import same_gradients

pytestmark = [pytest.mark.emulated, pytest.mark.usefixtures("nothing_learnt")]


@pytest.fixture
def pair(kernel_lane, fake_gpu, rules):
    """(a model that is replayed, its double that is not, the function that makes a scene, steps that went backward
    through a graph)."""
    device = kernel_lane.device
    if device == "cpu":
        replays_on_the_cpu(fake_gpu)
    rules.hold(graphs_of(512))
    replays = []
    backward = replay_training._Run.backward
    with apis.standin("spconv") as module, pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            replay_training._Run, "backward", lambda self, *given: replays.append(self) or backward(self, *given)
        )
        plain = apis.network(module, "spconv", device).train()
        model = sparse_bridge.optimize(copy.deepcopy(plain), graphs=True)

        def scene(seed):
            return apis.scene(module, "spconv", seed, device, 0.25 + 0.002 * seed)

        for one in (model, plain):
            for seed in range(5):
                loss_of(one, scene(seed)).backward()
            one.zero_grad(set_to_none=True)
        assert replays
        replays.clear()
        yield model, plain, scene, replays


def loss_of(model, x):
    out = model(x)
    return out["out"].features.square().sum() + out["deep"].features.sum()


def test_a_second_backward_pass_after_another_step(pair):
    """The memory that it reads holds the other step's values by then; statistics move once a step."""
    model, plain, scene, replays = pair
    for one in (model, plain):
        loss = loss_of(one, scene(5))
        loss.backward(retain_graph=True)
        loss_of(one, scene(6)).backward()
        loss.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()
    same_gradients(model, plain)
    for mine, theirs in zip(model.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)
    assert len(replays) == 3 and len(set(replays)) == 2


def test_a_step_between_a_forward_pass_and_its_second_backward_pass(pair):
    """The step that is under way has to be replayed again, too."""
    model, plain, scene, replays = pair
    for one in (model, plain):
        first = loss_of(one, scene(5))
        first.backward(retain_graph=True)
        second = loss_of(one, scene(6))
        first.backward()
        second.backward()
    same_gradients(model, plain)
    assert len(replays) == 3


def test_a_weight_that_is_written_to_in_between(pair):
    model, plain, scene, _ = pair
    for one in (model, plain):
        loss = loss_of(one, scene(5))
        with torch.no_grad():
            one.stem[0].weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
