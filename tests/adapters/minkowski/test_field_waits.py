"""Waits for the device on the way from points to voxels, and points that no voxel may hold."""

from __future__ import annotations

import pytest
import torch

from sparse_bridge.errors import CoordinateError
from tests.core.capture.test_new_shapes import Minkowski, voxels
from tests.waiting import check, fresh, ready, waits  # noqa: F401 - `fresh` is a fixture


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
    for step, mode in (
        (1, modes.UNWEIGHTED_SUM),
        (2, modes.UNWEIGHTED_AVERAGE),
        (3, modes.MAX_POOL),
    ):
        field = network.field(x, coords)
        with waits(monkeypatch) as found:
            field.sparse(step, quantization_mode=mode)
        assert len(found) == 2, found
    with waits(monkeypatch) as found:
        network.field(x, coords).splat()
    assert len(found) == 2, found


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf"), 3e9, -3e9])
@pytest.mark.parametrize("row, column", [(0, 2), (4, 0), (9, 3)])
def test_points_that_do_not_fit_are_refused(ME, wrong, row, column):
    coords = torch.arange(40, dtype=torch.float32).view(10, 4)
    coords[row, column] = wrong
    field = ME.TensorField(torch.ones(10, 2), coords)
    for merge in (field.sparse, lambda: field.sparse(3), field.splat):
        with pytest.raises(CoordinateError, match="is not finite or leaves 32-bit integers"):
            merge()
    assert not field._manager._manager.grids


def test_points_at_the_ends_of_the_range_fit(ME):
    ends = torch.iinfo(torch.int32)
    coords = torch.tensor([[0, ends.min, 0, 5], [0, ends.max, 1, 5], [1, 7, 1, 5]])
    field = ME.TensorField(torch.ones(3, 2), coords)
    assert torch.equal(field.sparse().C, coords.int())
    assert field.sparse(2).C[:, 1].tolist() == [ends.min, ends.max - 1, 6]
