"""Whatever happens between calls of layers, the helper does what Python does."""

from __future__ import annotations

import contextlib

import pytest
import torch

pytest.importorskip("triton")

from sparse_bridge.adapters.spconv import conv
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
    functions = set(native_calls.INFERENCE) - {"known_call"}
    check_alike(lambda chosen: told(name, chosen, bias), ways, 20, functions, 2)


@pytest.mark.parametrize("name", EVENTS)
def test_an_event(name):
    alike(name, ["on", "refused 2.0%, 1"], bias=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", EVENTS)
@pytest.mark.parametrize("bias", [False, True])
def test_an_event_with_more_refusals(name, bias):
    alike(name, [one for one in (*WAYS, *RANDOM) if one != "off"], bias)


@pytest.mark.parametrize("chosen", WAYS)
@pytest.mark.parametrize("option", conv.LONG_WAY_OPTIONS)
def test_options_of_the_long_way_are_seen_when_they_are_set_later(monkeypatch, option, chosen):
    """By the short way in Python as by the helper; nothing else would show that one was passed over."""
    real, checked, long_way = conv.check_input, [], []
    monkeypatch.setattr(conv, "check_input", lambda *operands: checked.append(1) or real(*operands))
    with anew(), way(chosen), spconv_apis.standin() as sp, torch.no_grad():
        world = World(sp, Recorder(), bias=True)
        with pretended_gpu(), served() as by_helper:
            for value in (False, True, None, 1):
                setattr(world.net.conv1, option, False)
                world(4)
                setattr(world.net.conv1, option, value)
                before = by_helper["spconv_known"]
                checked.clear()
                with contextlib.suppress(RuntimeError):  # its weight is not one matrix
                    world.net.conv1(world.x)
                long_way.append(len(checked))
                assert by_helper["spconv_known"] - before == (chosen == "on" and not value)
    assert long_way == [0, 1, 0, 1]
