"""Maps of a manager: one expansion makes a coarser map."""

from __future__ import annotations

import pytest
import torch

from sparse_bridge.adapters.minkowski.grid import Grid
from tests.adapters.minkowski.scenes import scene


def grid(low, high, axes=3):
    coords = torch.tensor([[0, *[low] * axes], [1, *[high] * axes]], dtype=torch.int32)
    return Grid.around(coords, (1,) * axes, "inserted")


BOUNDS = [
    (0, 0),
    (-1, 0),
    (-3, 4),
    (5, 6),
    (7, 8),
    (-900, -100),
    (0, 1499),
    (-(1 << 31), (1 << 31) - 1),
    ((1 << 31) - 9, (1 << 31) - 1),
    (-(1 << 31), -(1 << 31) + 3),
    (0, 1023),
    (-200, 823),
    (1, 1025),
    (0, (1 << 20) + 1),
]


@pytest.mark.parametrize(("low", "high"), BOUNDS)
@pytest.mark.parametrize("axes", [1, 3, 6])
def test_bounds_are_those_of_the_coordinates(low, high, axes):
    found = grid(low, high, axes)
    box, extent = found.box(found.unit), high - low + 1
    for first, size in zip(box.lo[1:], box.size[1:], strict=True):
        assert (first, size) == (low, extent)
    keys = 2 * extent**axes
    assert box.key64 == (keys >= 1 << 31)
    assert box.oversized == (keys >= 1 << 62 or extent >= 1 << 31)


@pytest.mark.parametrize("size", [(2, 2, 2), (3, 3, 3), (2, 1, 4), (5, 5, 5), (9, 8, 7)])
def test_a_coarser_map_by_its_first_rows(ME, size):
    """By one expansion up to 64 cells, by folding above; either way in the same order."""
    coords, features = scene(3, channels=2, dtype=torch.float32)
    x = ME.SparseTensor(features, coordinates=coords)
    manager = x.coordinate_manager
    key = manager.stride(x.coordinate_map_key, list(size))
    step = torch.tensor([1, *size])
    cells = (torch.div(coords, step, rounding_mode="floor") * step).tolist()
    want = list(dict.fromkeys(map(tuple, cells)))
    assert [tuple(row) for row in manager.get_coordinates(key).tolist()] == want
    rows, parents = manager.stride_map(x.coordinate_map_key, key)
    assert torch.equal(rows, torch.arange(len(coords)))
    assert parents.tolist() == [want.index(tuple(cell)) for cell in cells]


def test_a_kernel_as_large_as_its_stride_comes_with_the_map(ME, built):
    coords, features = scene(3, channels=4, dtype=torch.float32)
    down = ME.MinkowskiConvolution(4, 4, kernel_size=2, stride=2, dimension=3)
    up = ME.MinkowskiConvolutionTranspose(4, 4, kernel_size=2, stride=2, dimension=3)
    y = up(down(ME.SparseTensor(features, coordinates=coords)))
    assert built == ["strided"]
    assert torch.equal(y.C, coords)
