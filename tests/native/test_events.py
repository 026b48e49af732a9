"""Whatever happens between calls of layers, the helper does what Python does."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from sparse_bridge.native import calls as native_calls
from tests.adapters.spconv import apis as spconv_apis
from tests.native import events, layer_events  # noqa: F401 - their events
from tests.native.recording import RANDOM, WAYS, Recorder, anew, check_alike, helper, served, way
from tests.native.world import EVENTS, World
from tests.walk_apis import pretended_gpu


def told(name, chosen, bias):
    """(what was recorded, what the helper did) of an event."""
    recorder = Recorder()
    with anew(), way(chosen), recorder.recording(), spconv_apis.standin() as sp:
        with torch.no_grad():
            world = World(sp, recorder, bias)
            with pretended_gpu(), served() as by_helper:
                world(4)
                EVENTS[name](world)
        return recorder.lines, by_helper


def alike(name, ways, bias):
    helper()
    check_alike(lambda chosen: told(name, chosen, bias), ways, 20, set(native_calls.INFERENCE), 2)


@pytest.mark.parametrize("name", EVENTS)
def test_an_event(name):
    alike(name, ["on", "refused 2.0%, 1"], bias=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", EVENTS)
@pytest.mark.parametrize("bias", [False, True])
def test_an_event_with_more_refusals(name, bias):
    alike(name, [one for one in (*WAYS, *RANDOM) if one != "off"], bias)
