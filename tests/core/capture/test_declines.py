"""Calls that models are not replayed for, without a trial: the reason is in the log and in the report."""

from __future__ import annotations

import logging
import types

import pytest
import torch
from torch import nn

from sparse_bridge import log, memory, settings
from sparse_bridge.adapters import protocol
from sparse_bridge.core.capture import graph_key, graphed_module, padded, replay
from sparse_bridge.core.capture.replay_training import TrainingReplayer
from sparse_bridge.core.geometry.boxes import Box
from sparse_bridge.core.geometry.data_bounds import Root
from sparse_bridge.refusals import Why
from tests.adapters.spconv import apis

ON_A_GPU = types.SimpleNamespace(is_cuda=True)


def test_where_launches_cannot_be_captured(fake_gpu, monkeypatch):
    fake_gpu.has(capturing=False)
    assert graph_key.why_not_capturable(ON_A_GPU) is None
    assert graph_key.why_not_capturable(torch.zeros(2, 4)) is Why.GRAPH_DEVICE
    with memory.memory_limit("8GiB"):
        assert graph_key.why_not_capturable(ON_A_GPU) is Why.GRAPH_MEMORY
    with monkeypatch.context() as patched:
        patched.setattr(padded, "current", lambda: object())
        assert graph_key.why_not_capturable(ON_A_GPU) is Why.GRAPH_NESTED
    fake_gpu.has(capturing=True)
    assert graph_key.why_not_capturable(ON_A_GPU) is Why.GRAPH_NESTED


@pytest.mark.parametrize("capture, replayed", [("prefetch", False), ("always", True)])
def test_models_are_replayed_on_rocm_only_if_the_settings_say_so(fake_gpu, caplog, capture, replayed):
    """There replayed graphs have given wrong data."""
    fake_gpu.has(capturing=False)
    log.reset()
    with settings.override(capture=capture), caplog.at_level(logging.INFO, "sparse_bridge"):
        assert graph_key.why_not_capturable(ON_A_GPU) is None
        fake_gpu.has(hip="7.2.1")
        for _ in range(2):
            assert graph_key.why_not_capturable(ON_A_GPU) is (None if replayed else Why.GRAPH_ROCM)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == (not replayed) and all("SPARSE_BRIDGE_CAPTURE=always" in s for s in said)


class Framework:
    """features, and coordinates or None."""

    def __init__(self, features, coords, dtype=torch.int32):
        self.features, self.dtype = features, dtype
        self.root = None if coords is None else Root(torch.zeros(coords, dtype=dtype), Box.grid(2, (5, 5, 5)))

    def features_of(self, x):
        return self.features

    def capture_root(self, x):
        return self.root

    def coordinates_of(self, x):
        return torch.zeros(2, 4, dtype=self.dtype)


TWO = torch.zeros(2, 4)


@pytest.mark.parametrize(
    "framework, why",
    [
        (Framework(None, (2, 4)), Why.GRAPH_FEATURES),
        (Framework(torch.zeros(2, 4, 1), (2, 4)), Why.GRAPH_FEATURES),
        (Framework(TWO, None), Why.GRAPH_HAS_MAPS),
        (Framework(TWO, None, torch.float32), Why.GRAPH_COORDINATES),
        (Framework(TWO, (2, 4), torch.int64), Why.GRAPH_COORDINATES),
        (Framework(TWO, (2, 5)), Why.GRAPH_COORDINATES),
        (Framework(TWO, (3, 4)), Why.GRAPH_ROWS),
        (Framework(TWO[:0], (0, 4)), Why.GRAPH_ROWS),
        (Framework(TWO, (2, 4)), None),
    ],
)
def test_sparse_tensors_that_no_graph_is_for(monkeypatch, framework, why):
    monkeypatch.setattr(graph_key, "why_not_capturable", lambda features: None)
    found = graph_key.root_of(framework, object(), framework.features_of(object()))
    assert found is (why or framework.root)


class Model(nn.Module):
    def forward(self, x):
        return x


def replayer():
    model = Model().eval()
    found = replay.Replayer(TrainingReplayer(model, protocol.of))
    found.kept = model  # which nobody else keeps
    return found


@pytest.mark.parametrize("capturable", [False, True])
def test_the_reason_is_said_once_and_kept(monkeypatch, caplog, capturable):
    if capturable:
        monkeypatch.setattr(graph_key, "why_not_capturable", lambda features: None)
    one, hook = replayer(), lambda *_: None
    log.reset()
    with apis.standin() as sp, caplog.at_level(logging.INFO, "sparse_bridge"), torch.no_grad():
        x, handle = apis.tensor(sp), one.model.register_forward_hook(hook)
        for _ in range(3):
            one(x)
        first = one.why()
        handle.remove()
        one(3)
    assert first == (Why.GRAPH_HOOKS if capturable else Why.GRAPH_DEVICE).says()
    assert one.why() == Why.GRAPH_NO_TENSOR.says()
    assert [record.getMessage() for record in caplog.records] == [
        f"Model is not replayed from a graph: {reason}" for reason in (first, one.why())
    ]


@pytest.mark.parametrize("asked, looks", [(False, 4), (True, 400)])
def test_modules_whose_inputs_have_maps_are_left_to_their_parts(rules, asked, looks):
    """After a few looks; but not where the program wants this one."""
    seen = []

    def root_of(*_):
        seen.append(Why.GRAPH_HAS_MAPS)
        return seen[-1]

    rules.set(graphed_module, root_of=root_of)
    model = Model().eval()
    one = replay.Replayer(TrainingReplayer(model, protocol.of, asked), asked)
    with apis.standin() as sp, torch.no_grad():
        x = apis.tensor(sp)
        for _ in range(400):
            assert one(x) is x
    assert len(seen) == looks and one.why() == Why.GRAPH_HAS_MAPS.says()
    assert (one.given_up() is not None) != asked
