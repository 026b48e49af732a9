"""What a run of the compatibility matrix says of replays, on a network of its kind."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sparse_bridge.core.capture import captured_model
from sparse_bridge.refusals import Refusal, Why

from . import apis

replays = pytest.importorskip("compat.replays")
pytestmark = pytest.mark.emulated


class Counting(nn.Module):
    """Counts its calls, which no replay would."""

    def __init__(self, body):
        super().__init__()
        self.body, self.calls = body, 0

    def forward(self, x):
        self.calls += 1
        return self.body(x)


class Subject:
    """As much of a subject of the matrix as is asked for."""

    def __init__(self, module, device):
        self.module, self.device = module, device

    def network(self):
        return Counting(apis.network(self.module, "spconv", self.device))

    def scene(self, seed):
        return apis.scene(self.module, "spconv", seed, self.device, 0.25)

    def run(self, network, scene):
        return network(scene)

    def loss(self, result):
        return apis.loss_of(apis.values_of(result))


@pytest.mark.parametrize("trains", [False, True])
def test_the_modules_that_were_replayed(device, trains):
    with apis.standin("spconv") as module:
        outer, inner = replays.parts_of(Subject(module, torch.device(device)), trains, replays.GpuSearch())
    assert outer.path == "" and "[GRAPH_" in outer.why
    assert (inner.path, inner.kind, inner.why) == ("body", "Network", "")


@pytest.mark.parametrize(("trial", "code"), [(True, "GRAPH_OTHER_BITS"), (False, "GRAPH_DIFFERS")])
def test_a_module_whose_outputs_differ_is_none_of_them(device, monkeypatch, trial, code):
    """In a trial, or later, when it is a warning."""
    own, compared = captured_model.compare, []

    def differs(*given):
        compared.append(given[0])
        if trial or compared.count(given[0]) > 3:  # the trial, and comparisons after which it is trusted
            raise Refusal(Why.GRAPH_OTHER_BITS, given[0], 1.0, 1)
        own(*given)

    monkeypatch.setattr(captured_model, "compare", differs)
    with apis.standin("spconv") as module:
        parts = replays.parts_of(Subject(module, torch.device(device)), True, replays.GpuSearch())
    (inner,) = [part for part in parts if part.path == "body"]
    assert f"[{code}]" in inner.why and ("GRAPH_DIFFERS" in inner.why) != trial
