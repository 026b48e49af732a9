from __future__ import annotations

import pytest
import torch

from sparse_bridge.adapters import fusion


@pytest.fixture
def fused(monkeypatch, map_lane):
    """Every norm in training: whether a ReLU came with it. Torch stands in where no kernels are."""
    calls, original = [], fusion.batch_norm_training

    def spy(norm, x, relu):
        calls.append(relu)
        return original(norm, x, relu)

    monkeypatch.setattr(fusion, "batch_norm_training", spy)
    if not map_lane.kernels:
        monkeypatch.setattr(fusion, "serves", lambda x: None if x.dtype == torch.float64 else True)
    return calls
