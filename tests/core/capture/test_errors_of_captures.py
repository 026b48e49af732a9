"""A capture that raises: users' models run on without it, and tests fail."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from sparse_bridge import policy
from sparse_bridge.core.capture.call_kind import CallKind
from sparse_bridge.core.capture.replay_training import TrainingReplayer
from sparse_bridge.core.geometry.data_bounds import Root

from .pretended import graphs_on_the_cpu


def broken(*_: Any) -> Any:
    raise ValueError("odd")


@pytest.fixture
def capture(fake_gpu, monkeypatch):
    """(a replayer, what captures once more: it raises)."""
    graphs_on_the_cpu(fake_gpu)
    monkeypatch.setattr(TrainingReplayer, "record_graph", broken)
    monkeypatch.setattr(TrainingReplayer, "recording", lambda *_: "recording")
    model = nn.Linear(2, 2)
    replayer = TrainingReplayer(model, lambda _: None)
    replayer.kept = model  # which nobody else keeps
    kind, key = CallKind(), SimpleNamespace(device=torch.device("cpu"))
    kind.guards = SimpleNamespace(hold=lambda: True)
    root = Root(torch.zeros(9, 4, dtype=torch.int32), None)
    return replayer, lambda: replayer.record(kind, key, None, root, None)


@pytest.mark.usefixtures("errors_survived")
def test_a_model_runs_on_and_says_why(capture):
    replayer, again = capture
    for number in range(policy.CAPTURE_FAILURES.failures):
        assert replayer.given_up() is None, number
        again()
    assert "the trial raised ValueError: odd [GRAPH_ERROR]" in replayer.why()
    assert not replayer.graphs and replayer.given_up() == replayer.why()


def test_a_test_fails(capture):
    with pytest.raises(AssertionError, match="GRAPH_ERROR") as raised:
        capture[1]()
    assert isinstance(raised.value.__context__, ValueError)
