"""Levels that end inside their boxes, where the bounds of those below start: torchsparse's strided
layers leave out the last plane of an odd extent. Found on the device, queued with the rest."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sparse_bridge.core.prefetch import prefetch

from .waiting import Torchsparse, check, fresh, voxels, waited  # noqa: F401 - `fresh` is a fixture

pytestmark = pytest.mark.emulated


class UNet(Torchsparse):
    """Three levels down by 2 x 2 x 2 and up again."""

    def __init__(self, device):
        super().__init__()
        conv = type(self.net[0])
        down = [layer for _ in range(3) for layer in (conv(8, 8, 2, 2), conv(8, 8, 3))]
        up = [conv(8, 8, 2, 2, transposed=True) for _ in range(3)]
        self.net = nn.ModuleList([conv(4, 8, 3), *down, *up]).to(device).eval()


def scattered(turn, device, rows=24):
    """(features, coordinates, shape) of rows far from each other in an odd box of its own."""
    random = torch.Generator().manual_seed(turn)
    shape = torch.randint(15, 60, (3,), generator=random) * 2 + 1
    places = [torch.randint(int(n), (rows,), generator=random) for n in shape]
    items = torch.arange(rows) * 2 // rows
    coords = torch.unique(torch.stack([items, *places], 1), dim=0).int().to(device)
    x = torch.rand(len(coords), 4, generator=random).to(device)
    return x, coords, tuple(shape.tolist())


@torch.no_grad()
def test_sparse_scenes(kernel_lane, monkeypatch):
    """Every scene of another shape, whose levels end anywhere: one wait."""
    network, counts = UNet(kernel_lane.device), []
    for turn in range(6):
        counts.append(len(waited(monkeypatch, network, scattered(turn, kernel_lane.device))))
    assert counts[0] > 4 and counts[2:] == [1] * 4, counts
    assert prefetch.counts()["requeued"] == 0


@torch.no_grad()
def test_levels_without_rows(kernel_lane):
    """Where the last plane was all there was: nothing follows, and nothing is lost."""
    network = UNet(kernel_lane.device)
    for turn in range(6):
        x, coords, shape = scattered(turn, kernel_lane.device)
        if turn in (3, 4):
            x, coords = x[:1], coords[:1] * 0
        check(network, (x, coords.contiguous(), shape))


@torch.no_grad()
def test_levels_that_end_where_their_rows_do(kernel_lane, monkeypatch):
    """A kernel of 2 leaves out the last plane of an odd extent: where the rows behind it end, the
    next level asks."""
    network = Torchsparse()
    conv = type(network.net[0])
    network.net = nn.ModuleList([conv(4, 8, 3), *(conv(8, 8, 2, 2) for _ in range(3))])
    network.net.to(kernel_lane.device).eval()
    counts = []
    for turn in range(7):
        x, coords, shape = voxels(turn, kernel_lane.device)
        if turn == 6:  # a row far from the others
            coords[-1, 1:] += 60
        counts.append(len(waited(monkeypatch, network, (x, coords, shape))))
    assert counts[0] > 4 and counts[1:6] == [1] * 5, counts
