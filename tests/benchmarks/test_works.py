"""The weights that benchmarks give to networks."""

from __future__ import annotations

import functools

import pytest
import torch

from benchmarks import workloads
from benchmarks.peers import PEERS
from benchmarks.works import fill
from tests.adapters.standins import standin

NETWORKS = [
    ("bridge", "unet"),
    ("bridge_torchsparse", "unet"),
    ("bridge_torchsparse", "unet42"),
    ("bridge_torchsparse", "resnet21d"),
    ("bridge_minkowski", "unet"),
]


@functools.cache
def street():
    return workloads.load("street:0.25")


@pytest.mark.slow
@pytest.mark.parametrize(("peer", "name"), NETWORKS)
@torch.no_grad()
def test_values_stay_in_the_range_of_half_precision(peer, name):
    """Or every result is NaN: no two peers could be compared, and no graph be trusted."""
    interface, package, (framework, _) = PEERS[peer]
    scan = street()
    with standin(framework):
        one = interface(peer, package)
        model = one.network(name)
        fill(one, model)
        found = one.call(model.half().eval(), scan.feats.half(), scan)
    assert len(found) and found.dtype == torch.float16 and bool(found.isfinite().all())
