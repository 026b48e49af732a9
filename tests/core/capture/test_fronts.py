"""What a program does in front of its sparse layers is done once in each call, and its network is replayed."""

from __future__ import annotations

import contextlib
import io
import logging

import pytest
import torch

from sparse_bridge import settings
from sparse_bridge.adapters import protocol
from sparse_bridge.core.capture import graph_regions

from . import apis, fronts
from .graph_sizes import graphs_of

pytestmark = pytest.mark.emulated

_CALLS = 22
CASES = [pytest.param("spconv", one, id=f"spconv-{one.__name__}") for one in fronts.EFFECTS]
CASES += [
    pytest.param(name, one, id=f"{name}-{one.__name__}")
    for name in apis.NAMES[1:]
    for one in (fronts.CountsByHelper, fronts.Prints)
]
MODES = pytest.mark.parametrize(
    "trains", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["inference", "training"]
)


class Counted(logging.Handler):
    """Lines of a log."""

    def __init__(self):
        super().__init__()
        self.lines = 0

    def emit(self, record):
        self.lines += 1


@pytest.fixture
def stream(device, rules):
    """A function that runs a program: (what each call left and said, its outputs, summaries by name)."""
    rules.hold(graphs_of(512, watched=True))

    def run(name, program, optimize, trains, before=lambda model, seed: None, every=0):
        fronts.reset()
        said, handler, left, values = io.StringIO(), Counted(), [], []
        log = logging.getLogger(fronts.__name__)
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        where = settings.override(optimize=optimize, compare_every=every)
        with apis.standin(name) as module, where, contextlib.redirect_stdout(said):
            model = program(module, name).to(device).train(trains)
            for seed in range(_CALLS):
                before(model, seed)
                fronts.CALL[0] = seed
                with torch.set_grad_enabled(trains):
                    out = model(*fronts.arguments(module, name, seed, device))
                    out = [out[key] if torch.is_tensor(out[key]) else protocol.features_of(out[key]) for key in out]
                if trains:
                    apis.loss_of(out).backward()
                values.append([one.detach().clone() for one in out])
                left.append((said.getvalue(), handler.lines, fronts.state(model)))
            found = {one.name: one for one in graph_regions.summary()}
        log.removeHandler(handler)
        graph_regions.remove()
        return left, values, found

    return run


def same(stream, name, program, trains, **more):
    """The summaries of a program that leaves and computes what it does without graphs."""
    theirs, expected, _ = stream(name, program, "off", trains, **more)
    mine, values, found = stream(name, program, "auto", trains, **more)
    for call, (one, other) in enumerate(zip(mine, theirs, strict=True)):
        assert one == other, f"call {call}"
    for one, other in zip(values, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
    return found


@MODES
@pytest.mark.parametrize(("name", "program"), CASES)
def test_an_effect_in_front_happens_once(stream, name, program, trains):
    found = same(stream, name, program, trains)
    outer = found[program.__name__]
    codes = "GRAPH_SIDE_EFFECT", "GRAPH_WRITES_STATE", "GRAPH_CHANGED"
    assert not outer.hits and any(code in outer.reason for code in codes), outer
    assert found["Network"].hits >= 8, found


@MODES
@pytest.mark.parametrize("name", apis.NAMES)
@pytest.mark.parametrize("program", [fronts.Plain, fronts.Looks])
def test_a_front_without_effects_is_left_in(stream, name, program, trains):
    """The whole program is replayed, as soon as one that is given its sparse tensor."""
    found = same(stream, name, program, trains)
    assert list(found) == [program.__name__] and found[program.__name__].hits >= 15


@MODES
@pytest.mark.parametrize("every", [0, 1])
def test_an_effect_that_comes_later(stream, trains, every):
    """The front is watched in the call that is captured or compared."""
    found = same(stream, "spconv", fronts.Late, trains, every=every)
    assert found["Late"].graphs == 1


@MODES
@pytest.mark.parametrize("name", apis.NAMES[:2])
@pytest.mark.parametrize("program", fronts.CHANGING)
def test_state_that_changes_with_every_call(stream, name, program, trains):
    found = same(stream, name, program, trains)
    assert "GRAPH_" in found[program.__name__].reason and found["Network"].hits >= 8, found


@MODES
@pytest.mark.parametrize("name", apis.NAMES[:2])
def test_a_number_that_the_program_sets_at_every_call(stream, name, trains):
    def schedule(model, seed):
        model.scale = 1 - 0.01 * seed

    found = same(stream, name, fronts.Scheduled, trains, before=schedule)
    assert "GRAPH_CHANGED" in found["Scheduled"].reason and "Scheduled.scale" in found["Scheduled"].reason
    assert found["Network"].hits >= 8, found


@MODES
def test_a_number_that_seldom_changes(stream, trains):
    """It is captured again each time, though not at once."""

    def schedule(model, seed):
        model.scale = 1 - 0.1 * (seed // 5)

    found = same(stream, "spconv", fronts.Scheduled, trains, before=schedule)
    assert list(found) == ["Scheduled"] and found["Scheduled"].hits >= 4
