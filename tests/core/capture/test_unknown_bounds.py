"""Replayed models over scenes whose bounds the data alone has: the graph finds them on the device."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import sparse_bridge
from sparse_bridge.core.capture import graph_regions
from tests.core.prefetch.test_unknown_bounds import UNet, scattered
from tests.core.prefetch.waiting import Minkowski, Torchsparse, check, fresh, ready, voxels  # noqa: F401 - `fresh` is a fixture

from .graph_sizes import graphs_of

pytestmark = pytest.mark.emulated


class Whole(nn.Module):
    """The layers of an API's network as one model."""

    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def replayed(network, rules, rows):
    """The network with its layers replayed as one model, from graphs for so many rows; how many
    calls were."""
    rules.hold(graphs_of(rows))
    model = sparse_bridge.optimize(Whole(copy.deepcopy(network.net)).eval(), graphs=True)
    clone = copy.copy(network)
    clone.net = [model]
    return clone, lambda: graph_regions.region_of(model).replayer.hits


@pytest.mark.parametrize("api", [Torchsparse, Minkowski])
@torch.no_grad()
def test_a_replayed_model(kernel_lane, device, rules, api):
    """Its graph finds the bounds on the device, too."""
    plain = ready(api, kernel_lane)
    network, hits = replayed(plain, rules, 768)
    for turn in range(2, 8):
        check(network, voxels(turn, device), plain)
    known, (x, coords, shape) = hits(), voxels(8, device)
    assert known
    check(network, (x, coords, shape), plain)
    assert hits() == known + 1
    # Keys of these take more bits than the graph's: they run eagerly, and may make a graph that serves both.
    check(network, (x, coords * coords.new_tensor([1, 1 << 21, 1, 1]), shape), plain)
    assert hits() == known + 1
    for _ in range(6):  # a young graph that does not fit goes, and the next one waits for some calls
        check(network, (x, coords, shape), plain)
    assert hits() >= known + 2


@torch.no_grad()
def test_sparse_scenes_of_a_replayed_model(device, rules):
    """Its graph measures these levels, too."""
    plain = UNet(device)
    network, hits = replayed(plain, rules, 64)
    for turn in range(8):
        check(network, scattered(turn, device), plain)
    assert hits() >= 2
