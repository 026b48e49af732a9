"""Waits for the device on the way from points to voxels."""

from __future__ import annotations

import pytest
import torch

from .test_new_shapes import Minkowski, voxels
from .waiting import check, fresh, ready, waits  # noqa: F401 - `fresh` is a fixture


class Points(Minkowski):
    """MinkowskiEngine where points come first."""

    def field(self, x, coords):
        points = coords + 0.25 * torch.arange(4, device=coords.device)
        return self.me.TensorField(x, points)

    def __call__(self, x, coords, shape):
        out = self.field(x, coords).sparse()
        for layer in self.net:
            out = layer(out)
        return out.C, out.F


@pytest.mark.emulated
@torch.no_grad()
def test_one_wait_for_points(kernel_lane, monkeypatch):
    """Whether points fit into integers is seen from the bounds of their voxels, which are read with
    the sizes of the levels."""
    network = ready(Points, kernel_lane)
    for turn in (2, 3):
        scene = voxels(turn, kernel_lane.device)
        with waits(monkeypatch) as found:
            network(*scene)
        assert len(found) == 1, found
        check(network, scene)


@pytest.mark.emulated
@torch.no_grad()
def test_two_waits_for_voxels_alone(kernel_lane, monkeypatch):
    """Their bounds, and how many are distinct; nothing to add features up."""
    network = Points()
    modes = network.me.SparseTensorQuantizationMode
    x, coords, _ = voxels(0, kernel_lane.device)
    for step, mode in ((1, modes.UNWEIGHTED_SUM), (2, modes.UNWEIGHTED_AVERAGE), (3, modes.MAX_POOL)):
        field = network.field(x, coords)
        with waits(monkeypatch) as found:
            field.sparse(step, quantization_mode=mode)
        assert len(found) == 2, found
    with waits(monkeypatch) as found:
        network.field(x, coords).splat()
    assert len(found) == 2, found
