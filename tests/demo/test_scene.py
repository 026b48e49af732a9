"""The synthetic street: repeatable, quick, and distributed like a real 64-beam scan."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sparse_bridge.tools.demo import voxels
from sparse_bridge.tools.demo.raycast import Box, Cylinder, Ellipsoid, RayImage, Surface
from sparse_bridge.tools.demo.scene import street_scan


@pytest.fixture(scope="module")
def scan() -> np.ndarray:
    return street_scan()


def test_shape_and_ranges(scan: np.ndarray) -> None:
    assert scan.dtype == np.float32 and scan.shape[1] == 4
    assert 90_000 <= len(scan) <= 128_000
    assert np.isfinite(scan).all()
    assert scan[:, 3].min() >= 0 and scan[:, 3].max() <= 1


def test_deterministic(scan: np.ndarray) -> None:
    np.testing.assert_array_equal(street_scan(0), scan)
    assert len(street_scan(1)) != len(scan)


def test_statistics_of_a_lidar(scan: np.ndarray) -> None:
    distance = np.linalg.norm(scan[:, :3], axis=1)
    elevation = np.degrees(np.arcsin(scan[:, 2] / distance))
    assert -25.2 < elevation.min() < -23.5 and 1.5 < elevation.max() < 2.5
    assert distance.min() > 2 and 80 < distance.max() < 101
    # Dense near, sparse far, and the road is the largest surface.
    assert 5 < np.median(distance) < 15
    assert 0.005 < (distance > 50).mean() < 0.1
    assert 0.35 < (np.abs(scan[:, 2] + 1.73) < 0.2).mean() < 0.9
    assert scan[:, 2].min() > -2.2
    voxels = np.unique(np.floor(scan[:, :3] / 0.1).astype(int), axis=0)
    assert 40_000 < len(voxels) < 80_000


def test_resolution_is_free() -> None:
    assert 3_000 < len(street_scan(azimuths=64)) < 4_096


def forward_ray(solid: Box | Cylinder | Ellipsoid) -> RayImage:
    image = RayImage(np.zeros(1), 4096, np.random.default_rng(0))
    image.add(solid)
    return image


@pytest.mark.parametrize(
    ("solid", "distance"),
    [
        (Box((10, 0, 0), (2, 4, 1), Surface(0.5)), 9.0),
        (Box((10, 0, 0), (2, 4, 1), Surface(0.5), yaw=np.pi / 2), 8.0),
        (Cylinder((10, 0, 0), 0.5, 2.0, Surface(0.5)), 9.5),
        (Ellipsoid((10, 0, 0), (3, 1, 1), Surface(0.5)), 7.0),
    ],
)
def test_distances_by_hand(solid: Box | Cylinder | Ellipsoid, distance: float) -> None:
    image = forward_ray(solid)
    assert image.t[0, 2048] == pytest.approx(distance, abs=1e-3)
    assert image.cosine[0, 2048] == pytest.approx(1, abs=1e-2)
    assert np.isinf(image.t[0, [0, 1024, 3072]]).all()


def test_nearer_solid_wins_behind_the_seam() -> None:
    image = forward_ray(Box((-20, 0, 0), (1, 1, 1), Surface(0.1)))
    image.add(Box((-10, 0, 0), (1, 1, 1), Surface(0.9)))
    image.add(Box((-30, 0, 0), (1, 9, 1), Surface(0.3)))
    for column in (0, 4095):
        assert image.t[0, column] == pytest.approx(9.5, abs=1e-3)
        assert image.reflectivity[0, column] == pytest.approx(0.9)
    assert np.isfinite(image.t).mean() < 0.1


def test_porous_solid_echoes_inside() -> None:
    image = forward_ray(Ellipsoid((10, 0, 0), (2, 2, 2), Surface(0.4, depth=0.5)))
    hits = image.t[np.isfinite(image.t)]
    assert hits.min() > 7.9 and hits.max() < 12 and hits.std() > 0.2


def test_a_street_of_any_size(monkeypatch):
    coords, shape, batch_size = voxels.street_voxels(5000)
    assert coords.dtype == torch.int32 and batch_size == 1
    assert len(torch.unique(coords, dim=0)) == len(coords) == 5000
    assert (coords[:, 1:] >= 0).all() and (coords[:, 1:] < torch.tensor(shape)).all()
    assert all(cells % 16 == 0 for cells in shape) and shape[0] >= 32
    few = voxels.street_voxels(500)[0]
    assert len(few) == 500

    def small(seed):
        return np.random.default_rng(seed).uniform(-5, 5, (400, 4)).astype(np.float32)

    monkeypatch.setattr(voxels, "street_scan", small)
    coords, shape, batch_size = voxels.street_voxels.__wrapped__(1000)
    assert batch_size == 3 and torch.bincount(coords[:, 0]).tolist()[2] < 400
    assert len(torch.unique(coords, dim=0)) == 1000
