"""Networks of the proof: no ReLU reads a value near 0, so that wrong gradients show."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

import sparse_bridge
from sparse_bridge.tools.acceptance import kinks, models
from sparse_bridge.tools.acceptance.setup import FAILED, Setup
from sparse_bridge.tools.demo.voxels import street_voxels

CPU = Setup(torch.device("cpu"), None, False)


def test_middles_of_the_widest_gaps():
    """Of the middle half: the gap of the first column's ends does not count."""
    x = torch.tensor([[-90.0, 1.0], [-2, 2], [-1, 3], [3, 4], [4, 4.5], [90, 9]])
    assert kinks.middles(x[torch.randperm(6)]).tolist() == [1, 2.5]
    assert kinks.middles(torch.full((1, 2), 5.0)).tolist() == [4.5, 4.5]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", models.RUN)
def test_values_that_relus_read(name, seed):
    scan = street_voxels(300)
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(len(scan[0]), 4, generator=generator).double()
    read = []
    with sparse_bridge.enable(name):
        model = models.make(name).double()
        run = functools.partial(models.RUN[name], model, features, scan)
        kinks.away_from_kinks(model, run)
        for one in model.modules():
            if isinstance(one, nn.ReLU):
                one.register_forward_pre_hook(lambda _, args: read.append(kinks.values_of(args[0]).detach().clone()))
        run()
    assert len(read) >= 15
    for values in read:
        assert float(values.abs().min()) > 1e-4
        assert bool(((values > 0).double().mean(0) - 0.5).abs().le(0.45).all()) or len(values) < 4


@pytest.mark.parametrize("name", models.RUN)
def test_a_gradient_that_is_wrong_by_a_hundredth_is_seen(monkeypatch, name):
    monkeypatch.setattr(Setup, "rows", lambda self, gpu, cpu, emulated: 300)
    monkeypatch.setattr(models, "RUN", {name: models.RUN[name]})
    real = models.step_of

    def wrong(*args):
        *found, last = real(*args)
        return [*found, last * 1.01 if last.dtype == torch.float32 else last]

    monkeypatch.setattr(models, "step_of", wrong)
    assert [outcome.status for outcome in models.networks(CPU)] == [FAILED]
