"""Steps that are replayed go backward again, after others, and complain as torch does."""

from __future__ import annotations

import pytest
import torch

from sparse_bridge.core.capture import replay_training

from . import apis
from .test_replay_apis import optimized

pytestmark = pytest.mark.emulated


@pytest.fixture
def pair(device, monkeypatch):
    """(a model that is replayed, its double that is not, the function that makes a scene, steps that went backward
    through a graph)."""
    replays, backward = [], replay_training._Run.backward
    monkeypatch.setattr(
        replay_training._Run, "backward", lambda self, *given: replays.append(self) or backward(self, *given)
    )
    with apis.standin("spconv") as module:
        model, plain = optimized(module, "spconv", device, True)

        def scene(seed):
            return apis.scene(module, "spconv", seed, device, 0.25 + 0.002 * seed)

        for seed in range(5):
            apis.both(model, plain, lambda: scene(seed), True)  # noqa: B023
        for one in (model, plain):
            one.zero_grad(set_to_none=True)
        assert replays
        replays.clear()
        yield model, plain, scene, replays


def loss_of(model, x):
    return apis.loss_of(apis.values_of(model(x)))


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
    apis.same_gradients(model, plain)
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
    apis.same_gradients(model, plain)
    assert len(replays) == 3


def test_a_weight_that_is_written_to_in_between(pair):
    model, plain, scene, _ = pair
    for one in (model, plain):
        loss = loss_of(one, scene(5))
        with torch.no_grad():
            one.stem[0].weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
