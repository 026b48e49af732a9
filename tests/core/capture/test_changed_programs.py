"""Programs that change something in Python while their models are replayed compute what they do without replays."""

from __future__ import annotations

import contextlib
import io

import pytest
import torch

from sparse_bridge import settings
from sparse_bridge.core.capture import graph_regions
from tests.core.capture.graph_sizes import graphs_of

from . import apis, changed_models
from .changed_models import CHANGES, Appends, Branches, Counts, Prints, Scaled
from .pretended import replays_on_the_cpu

pytestmark = [pytest.mark.emulated, pytest.mark.usefixtures("nothing_learnt")]

_CHANGED, _SCENES = 7, 14  # the scene before which something changes; all


@pytest.fixture
def stream(kernel_lane, fake_gpu, rules, monkeypatch):
    """The function that runs a stream of scenes through a new model: (outputs and gradients by scene, what was
    printed, the model)."""
    device = kernel_lane.device
    if device == "cpu":
        replays_on_the_cpu(fake_gpu)
    rules.hold(graphs_of(512, watched=True))
    with apis.standin("spconv") as module:

        def run(cls, change, trains, optimize):
            monkeypatch.setattr(changed_models, "ALPHA", 1.0)
            changed_models.SEEN.clear()
            cell = [2.0]
            model = changed_models.made(module, cls, cell).to(device).train(trains)
            values, text = [], io.StringIO()
            with settings.override(optimize=optimize), contextlib.redirect_stdout(text):
                for seed in range(_SCENES):
                    if seed == _CHANGED and change is not None:
                        change(model, cell)
                    model.zero_grad(set_to_none=True)
                    x = apis.scene(module, "spconv", seed, device, 0.3 + 0.002 * seed)
                    with torch.set_grad_enabled(trains):
                        out = model(x)["out"].features
                    if trains:
                        out.square().sum().backward()
                    gradients = [p.grad for p in model.parameters()]
                    buffers = [buffer.clone() for buffer in model.buffers()]
                    values.append([out.detach().clone(), *gradients, *buffers])
            return values, text.getvalue(), model

        yield run


def same(mine, theirs):
    for seed, (one, other) in enumerate(zip(mine, theirs, strict=True)):
        for actual, expected in zip(one, other, strict=True):
            assert (actual is None) == (expected is None), seed
            if actual is not None:
                torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)


def hits():
    return sum(one.hits for one in graph_regions.summary())


def changes(quick=("attribute",)):
    return [pytest.param(CHANGES[name], id=name, marks=() if name in quick else pytest.mark.slow) for name in CHANGES]


@pytest.mark.parametrize("trains", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["inference", "training"])
@pytest.mark.parametrize("change", changes())
def test_a_change(stream, change, trains):
    """What was captured before is not used after it; what can be is captured again."""
    plain, _, _ = stream(Scaled, change, trains, "off")
    mine, _, _ = stream(Scaled, change, trains, "graphs")
    same(mine, plain)
    # Two or three before the change; hooks keep the model eager afterwards.
    assert hits() >= (2 if change is CHANGES["hook"] else 5), graph_regions.summary()


@pytest.mark.slow
@pytest.mark.parametrize("trains", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("cls", [Counts, Appends, Prints, Branches])
def test_a_model_whose_state_lasts(stream, cls, trains):
    """It stays eager, and leaves what it leaves."""
    plain, printed, other = stream(cls, None, trains, "off")
    seen = list(changed_models.SEEN)
    mine, text, model = stream(cls, None, trains, "graphs")
    same(mine, plain)
    assert not hits() and (text, model.calls, changed_models.SEEN) == (printed, other.calls, seen)
    assert all(one.reason for one in graph_regions.summary())
