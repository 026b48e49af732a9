"""What the maps of a new scene cost the host, as far as it can be counted."""

from __future__ import annotations

import contextlib

import pytest
import torch

from tests.core.prefetch import map_time

# Network: operations of torch, launches.
LIMITS = {
    "spconv, SECOND": (28, 34),
    "spconv, U-Net": (34, 37),
    "torchsparse, U-Net": (50, 56),
    "MinkowskiEngine, U-Net": (41, 38),
}


def test_operations_and_launches():
    found = {}
    for name, net, scene in map_time.networks():
        counting = map_time.Counting()
        last = map_time.streamed(net, scene, 2, counting=counting)[-1]
        names = counting.names[-last.operations :]
        tests_own = sum("fill_" in one for one in names)  # which fill memory that is taken
        found[name] = last.operations - tests_own, last.launches
    assert found.keys() == LIMITS.keys()
    for name, (operations, launches) in found.items():
        assert operations <= LIMITS[name][0] and launches == LIMITS[name][1], found


@pytest.mark.parametrize("train", [False, True])
def test_scenes_are_prefetched(train):
    with contextlib.closing(map_time.networks()) as networks:
        name, net, scene = next(networks)
        found = map_time.streamed(net, scene, 3, train)
    assert len(found) == 3 and name == "spconv, SECOND"
    assert all(one.whole > one.seconds > 0 for one in found)
    assert torch.is_grad_enabled()
