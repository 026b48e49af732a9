"""Scenes keep their promises: distinct voxels in the grid, ordered items, surfaces."""

from __future__ import annotations

import itertools

import pytest
import torch

from compat import scenes
from tests.quick import quick

# Scans of many points, of which a part is taken.
LARGE = {"waymo", "nuscenes075", "semantickitti", "scannet02"}


def neighbours(scene):
    """Mean number of active voxels in the 3^D box around each, itself included."""
    grid = [scene.batch_size, *(extent + 2 for extent in scene.grid)]
    strides = torch.tensor([1, *grid[:0:-1]]).cumprod(0).flip(0)
    shift = torch.tensor([0] + [1] * len(scene.grid))
    keys = ((scene.coords.long() + shift) * strides).sum(1)
    steps = [
        (torch.tensor((0, *offset)) * strides).sum() for offset in itertools.product((-1, 0, 1), repeat=len(scene.grid))
    ]
    return sum(torch.isin(keys + step, keys).float().mean().item() for step in steps)


def check(scene, channels):
    coords, dimension = scene.coords, len(scene.grid)
    assert coords.dtype == torch.int32 and coords.shape[1] == 1 + dimension
    assert scene.features.shape == (len(coords), channels)
    assert scene.features.dtype == scene.points.dtype == torch.float32
    assert (coords[:, 1:] >= 0).all() and (coords[:, 1:] < torch.tensor(scene.grid)).all()
    assert (coords[1:, 0] >= coords[:-1, 0]).all() and coords[:, 0].max() < scene.batch_size
    assert len(torch.unique(coords, dim=0)) == len(coords)
    assert len(scene.voxel_size) == dimension
    size = torch.tensor(scene.voxel_size, dtype=torch.float64)
    inside = scene.points.double() / size - coords[:, 1:]
    assert (inside > -1e-3).all() and (inside < 1.001).all()


@pytest.mark.parametrize("preset", quick([one for one in scenes.PRESETS if one not in LARGE], scenes.PRESETS))
def test_small_scenes_are_surfaces_of_a_size_for_cpus(preset):
    scene = scenes.make(preset, "small", 5)
    check(scene, 5)
    assert 1500 <= len(scene.coords) <= 3000
    assert scene.grid == scenes.PRESETS[preset].grid
    assert neighbours(scene) > 3.5  # scattered voxels have 1, a plane has 9
    sparse = scene.features.abs().mean()
    assert 0.2 < sparse < 2


@pytest.mark.parametrize("dimension", [2, 3, 4, 6])
@pytest.mark.parametrize("preset", ["kitti", "scannet02", "codec", "tiny"])
def test_tiny_scenes_have_an_empty_item(preset, dimension):
    scene = scenes.make(preset, "tiny", 3, dimension)
    check(scene, 3)
    assert 2 <= len(scene.coords) <= 50
    rows = torch.bincount(scene.coords[:, 0], minlength=scene.batch_size)
    assert scene.batch_size == 3 and rows[1] == 0 and rows[0] >= 2 and rows[2] >= 2


@pytest.mark.parametrize("dimension", [2, 4, 6])
def test_other_dimensions(dimension):
    scene = scenes.make("kitti", "small", 4, dimension)
    check(scene, 4)
    assert 1000 <= len(scene.coords) <= 3000 and len(scene.grid) == dimension
    if dimension == 4:
        assert set(scene.coords[:, 4].tolist()) == set(range(scene.grid[3]))


@pytest.mark.parametrize(
    ("preset", "low", "high"), [("kitti", 16e3, 50e3), ("slat", 15e3, 25e3), ("fcaf01", 6e4, 1e5), ("lartpc", 3e4, 1e5)]
)
def test_full_scenes_have_the_counts_of_their_data_sets(preset, low, high):
    scene = scenes.make(preset, "full", 4, batch_size=1)
    check(scene, 4)
    assert low <= len(scene.coords) <= high


def test_equal_arguments_give_equal_scenes():
    one, same, other = (scenes.make("slat", "small", 4, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(one.coords, same.coords) and torch.equal(one.features, same.features)
    assert torch.equal(one.points, same.points)
    assert len(one.coords) != len(other.coords) or not torch.equal(one.coords, other.coords)


@pytest.mark.parametrize("wrong", [{"preset": "x"}, {"size": "huge"}, {"dimension": 5}])
def test_unknown_names_are_refused(wrong):
    with pytest.raises(ValueError, match=r"expected one of .*kitti"):
        scenes.make(**{"preset": "kitti", **wrong})
