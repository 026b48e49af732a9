"""Points that no voxel may hold."""

from __future__ import annotations

import pytest
import torch

from sparse_bridge.errors import CoordinateError


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
