"""Programs that change something in Python while their models are replayed compute what they do without replays."""

from __future__ import annotations

import contextlib
import io

import pytest
import torch
from torch import nn

from sparse_bridge import policy, settings
from sparse_bridge.core.capture import graph_regions
from tests.core.capture.graph_sizes import graphs_of
from tests.quick import quick

from . import apis, closed_programs
from .closed_programs import CASES
from .test_closed_world import unchanged
from .test_replay_apis import TRAINS

pytestmark = pytest.mark.emulated

_CHANGED, _SCENES = 7, 14  # the scene before which something changes; all


def parameter_replaced(model):
    model.b[0].weight = nn.Parameter(model.b[0].weight.detach() * 0.5)


def parameter_data(model):
    model.b[0].weight.data = model.b[0].weight.data * 0.5


def programs(name, numbers):
    """{name and number: (program, change)}, of changes that guards notice."""
    return {f"{name} {number}": (name, CASES[name][1][number]) for number in numbers}


CHANGES = {
    **programs("attribute", [0]),
    "parameter replaced": ("plain", parameter_replaced),
    "parameter data": ("plain", parameter_data),
    "parameter in place": ("plain", lambda model: model.b[0].weight.data.mul_(0.5)),
    "frozen": ("plain", lambda model: model.a.requires_grad_(False)),
    **programs("plain", [0, 1, 2, 5, 6, 7, 8]),  # a norm's numbers and mode, a hook, another module, forward, class
    **programs("closure", [0]),
    **programs("list in a dictionary", [0]),
    **programs("global", [0]),
}


@pytest.fixture
def stream(device, rules):
    """The function that runs a stream of scenes through a new model: (outputs and gradients by scene, what it leaves
    elsewhere, the model)."""
    rules.hold(graphs_of(512, watched=True))
    rules.set(policy, LEAST_LAYERS=2)
    with apis.standin("spconv") as module:

        def run(name, change, trains, optimize):
            torch.manual_seed(0)
            values, text = [], io.StringIO()
            with unchanged(), settings.override(optimize=optimize), contextlib.redirect_stdout(text):
                model = CASES[name][0](module).to(device).train(trains)
                for seed in range(_SCENES):
                    if seed == _CHANGED and change is not None:
                        change(model)
                    model.zero_grad(set_to_none=True)
                    x = apis.scene(module, "spconv", seed, device, 0.3 + 0.002 * seed)
                    with torch.set_grad_enabled(trains):
                        out = model(x).features
                    if trains:
                        out.square().sum().backward()
                    gradients = [p.grad for p in model.parameters()]
                    buffers = [buffer.clone() for buffer in model.buffers()]
                    values.append([out.detach().clone(), *gradients, *buffers])
                return values, (text.getvalue(), model.calls, list(closed_programs.SEEN)), model

        yield run


def check(stream, name, change, trains):
    """A stream with graphs computes and leaves what one without does; its part in the summary."""
    expected, theirs, _ = stream(name, change, trains, "off")
    found, mine, model = stream(name, change, trains, "graphs")
    assert mine == theirs
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
    (part,) = [one for one in graph_regions.summary() if one.name == type(model).__name__]
    return part


@pytest.mark.parametrize("trains", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["inference", "training"])
@pytest.mark.parametrize("name", quick(["list in a dictionary 0"], CHANGES))
def test_a_change(stream, name, trains):
    """What was captured before is not used after it; what can be is captured again."""
    hits = check(stream, *CHANGES[name], trains).hits
    # Of ten where nothing changes, two or three before the change; hooks keep the model eager afterwards.
    # What changes in place, or what inference does not look at, costs nothing.
    free = dict.fromkeys(("parameter in place", "frozen", "plain 2"), (5, 10))
    least, most = (free | {"plain 5": (2, 3)}).get(name, (5, 7))
    assert least <= hits <= most


@pytest.mark.slow
@TRAINS
@pytest.mark.parametrize("name", ["counts its calls", "appends to a global", "prints", "branch on a tensor"])
def test_a_model_whose_state_lasts(stream, name, trains):
    """It stays eager, and leaves what it leaves."""
    part = check(stream, name, None, trains)
    assert not part.hits and part.reason


@pytest.mark.parametrize(("every", "replayed"), [(1, False), (20, True)])
def test_parameters_that_move_in_memory(device, rules, every, replayed):
    """In every call, as of a program that makes them anew: nothing is captured any more. Now and then, as weights that
    are averaged are put in the place of others: a new graph serves until the next move."""
    rules.hold(graphs_of(512))
    rules.set(policy, LEAST_LAYERS=2)
    earlier, scenes = [], 160
    with apis.standin("spconv") as module, settings.override(optimize="graphs"), torch.no_grad():
        model = apis.network(module, "spconv", device).eval()
        for seed in range(scenes):
            if seed % every == 0:
                for parameter in model.parameters():
                    earlier.append(parameter.data)
                    parameter.data = parameter.data.clone()
            model(apis.scene(module, "spconv", seed % 3, device, 0.3))
        (part,) = graph_regions.summary()
        assert (part.hits > scenes / 2) == bool(part.graphs) == (part.reason is None) == replayed
        assert replayed or (part.hits == 0 and "parameters" in part.reason)
