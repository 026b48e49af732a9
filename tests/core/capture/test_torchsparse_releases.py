"""Models of torchsparse are replayed whichever release they are written for."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import sparse_bridge
from sparse_bridge.core.capture import graph_regions
from sparse_bridge.refusals import Why
from tests.clouds import cloud, features

from . import apis
from .graph_sizes import graphs_of

pytestmark = pytest.mark.emulated


class Net(nn.Module):
    """Two strided levels, with layers on both, and the way back."""

    def __init__(self, ts, size):
        super().__init__()
        layers = ts.nn
        self.first = nn.Sequential(layers.Conv3d(4, 8, 3), layers.BatchNorm(8), layers.ReLU(True))
        self.down = layers.Conv3d(8, 8, size, stride=2)
        self.middle = nn.Sequential(layers.Conv3d(8, 8, 3), layers.BatchNorm(8), layers.ReLU(True))
        self.down_again = layers.Conv3d(8, 8, size, stride=2)
        self.deep = nn.Sequential(layers.Conv3d(8, 8, 3), layers.Conv3d(8, 8, 3, dilation=2))
        self.up = nn.Sequential(*(layers.Conv3d(8, 8, size, stride=2, transposed=True) for _ in range(2)))

    def forward(self, x):
        deep = self.deep(self.down_again(self.middle(self.down(self.first(x)))))
        return {"deep": deep, "out": self.up(deep)}


@pytest.mark.parametrize("trains", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("profile", ["1.4", "2.0", "2.1"])
@pytest.mark.parametrize("size", [2, 3])
def test_layers_behind_strided_ones(device, rules, size, profile, trains):
    """Coordinates of 1.4 and 2.0 keep the units of the input at every level."""
    rules.hold(graphs_of(512))
    with sparse_bridge.enable("torchsparse", mode="standin", profile=profile):
        import torchsparse as ts

        torch.manual_seed(0)
        plain = Net(ts, size).to(device).train(trains)
        model = sparse_bridge.optimize(copy.deepcopy(plain), graphs=True)
        for seed in range(8):
            coords = cloud((9, 8, 7), 2, share=0.3, seed=seed, device=device)
            if profile != "2.1":  # batch last
                coords = coords[:, [1, 2, 3, 0]].contiguous()
            given = lambda coords=coords, seed=seed: ts.SparseTensor(  # noqa: E731
                features(len(coords), 4, seed=seed, device=device), coords
            )
            found = apis.both(model, plain, given, trains, values=lambda found: [found["deep"].F, found["out"].F])
            (_, mine), (_, theirs) = found
            assert torch.equal(mine["deep"].C, theirs["deep"].C)
        (one,) = graph_regions.summary()
        assert one.hits >= 4 and one.reason is None


class Down(nn.Module):
    """A strided level with layers on it."""

    def __init__(self, ts, kernel, n_in):
        super().__init__()
        layers = [ts.nn.Conv3d(n_in, 8, kernel, stride=2), *(ts.nn.Conv3d(8, 8, 3) for _ in range(3))]
        self.layers = nn.Sequential(*layers)

    def forward(self, x):
        return self.layers(x)


def _sparse_rows(seed, low, device):
    """30 rows of one batch item, so few that levels end inside their boxes."""
    rows = torch.randint(low, 39, (30, 4), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
    rows[:, 0] = 0
    return rows.unique(dim=0).to(device)


@pytest.mark.parametrize("kernel", [2, 3])
@pytest.mark.parametrize("profile", ["1.4", "2.0", "2.1"])
def test_a_part_behind_a_level_that_ends_before_its_box(device, rules, profile, kernel):
    """Which rows a strided layer makes depends on where the data ends, also where it is replayed and the level in front
    of it was made by layers, which know an upper limit alone."""
    rules.hold(graphs_of(512))
    with sparse_bridge.enable("torchsparse", mode="standin", profile=profile), torch.no_grad():
        import torchsparse as ts

        torch.manual_seed(0)
        first, plain = (Down(ts, kernel, n_in).to(device).eval() for n_in in (4, 8))
        model = sparse_bridge.optimize(copy.deepcopy(plain), graphs=True)
        for seed in range(24):
            coords = _sparse_rows(seed, -6 if seed % 3 == 0 and profile != "2.0" else 0, device)
            if profile != "2.1":  # batch last
                coords = coords[:, [1, 2, 3, 0]].contiguous()
            with sparse_bridge.eager():
                x = first(ts.SparseTensor(features(len(coords), 4, seed=seed, device=device), coords))
                theirs = plain(ts.SparseTensor(x.F, x.C.clone(), x.s))
            mine = model(x)
            assert torch.equal(mine.C, theirs.C)
            torch.testing.assert_close(mine.F, theirs.F)
        (one,) = graph_regions.summary()
        assert one.hits >= 16 and one.reason is None


class Hourglass(nn.Module):
    """Of torchsparse 2.1: `cat` forgets the range, and a strided layer comes behind it."""

    def __init__(self, ts):
        super().__init__()
        self.cat, conv = ts.cat, ts.nn.Conv3d
        self.first, self.down, self.last = conv(4, 4, 3), conv(8, 4, 3, stride=2), conv(4, 4, 3)

    def forward(self, x):
        return self.last(self.down(self.cat([x, self.first(x)])))


@pytest.mark.parametrize("limit", [None, (2, 20, 20, 20)], ids=["no range", "a range"])
def test_a_strided_layer_behind_cat(device, rules, limit):
    """It goes by the extremes of the data, of which a graph of inputs in a range knows nothing."""
    rules.hold(graphs_of(512))
    with sparse_bridge.enable("torchsparse", mode="standin", profile="2.1"), torch.no_grad():
        import torchsparse as ts

        plain = Hourglass(ts).to(device).eval()
        model = sparse_bridge.optimize(copy.deepcopy(plain), graphs=True)
        for seed, high in enumerate([12, 12, 12, 12, 9, 10, 11, 13, 7, 12]):
            coords = torch.randint(0, high, (30, 4), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
            coords[:, 0] %= 2
            coords = coords.unique(dim=0).to(device)
            values = features(len(coords), 4, device=device)
            mine, theirs = (one(ts.SparseTensor(values, coords.clone(), 1, limit)) for one in (model, plain))
            assert torch.equal(mine.C, theirs.C)
            torch.testing.assert_close(mine.F, theirs.F, rtol=1e-3, atol=1e-4)
        (part,) = graph_regions.summary()
        if limit is None:
            assert part.hits > 3
        else:
            assert part.graphs == 0 and Why.GRAPH_ROWS_ON_HOST.name in part.reason


class Grows(nn.Module):
    """Of torchsparse 2.1: a generative layer between others."""

    def __init__(self, ts):
        super().__init__()
        conv = ts.nn.Conv3d
        self.first, self.down = conv(4, 4, 3), conv(4, 4, 2, stride=2)
        config = apis.hashmap_config(ts)
        self.grow = conv(4, 4, 3, stride=2, transposed=True, generative=True, config=config)
        self.last = conv(4, 4, 3)

    def forward(self, x):
        return self.last(self.grow(self.down(self.first(x))))


def test_rows_that_are_moved_into_their_range(device, rules):
    """By a transposed layer, however many they are then: its model says why it is eager."""
    rules.hold(graphs_of(512))
    with sparse_bridge.enable("torchsparse", mode="standin", profile="2.1"), torch.no_grad():
        import torchsparse as ts

        plain = Grows(ts).to(device).eval()
        model = sparse_bridge.optimize(copy.deepcopy(plain), graphs=True)
        for seed in range(10):
            coords = cloud((8, 8, 8), 2, share=0.2, seed=seed, device=device)
            values = features(len(coords), 4, device=device)
            mine, theirs = (one(ts.SparseTensor(values, coords.clone(), 1, (2, 8, 8, 8))) for one in (model, plain))
            assert torch.equal(mine.C, theirs.C) and torch.equal(mine.F, theirs.F)
        (part,) = graph_regions.summary()
        assert part.graphs == 0 and "transposed layer" in part.reason and Why.GRAPH_ROWS_ON_HOST.name in part.reason
