"""What the points of the synthetic street belong to, and the boxes of its cars."""

from __future__ import annotations

import numpy as np
import pytest

from sparse_bridge.tools.demo.raycast import Box, RayImage, Surface
from sparse_bridge.tools.demo.scene import KINDS, LabelledScan, labelled_scan, street_scan


@pytest.fixture(scope="module")
def scan() -> LabelledScan:
    return labelled_scan(2, azimuths=800)


def test_points_are_those_of_the_plain_scan(scan: LabelledScan) -> None:
    np.testing.assert_array_equal(scan.points, street_scan(2, azimuths=800))
    assert scan.kinds.shape == (len(scan.points),) and scan.kinds.dtype == np.int64


def test_every_kind_is_seen_where_it_belongs(scan: LabelledScan) -> None:
    assert (np.bincount(scan.kinds, minlength=len(KINDS)) > 30).all()
    height = {kind: scan.points[scan.kinds == i, 2] + 1.73 for i, kind in enumerate(KINDS)}
    for kind in ("road", "grass"):
        assert np.abs(height[kind]).max() < 0.25
    assert 0.05 < np.median(height["pavement"]) < 0.25
    assert height["vehicle"].max() < 2.5 and height["person"].max() < 2.1
    assert height["building"].max() > 4


def test_cars_lie_where_the_points_on_cars_are(scan: LabelledScan) -> None:
    on_cars = scan.points[scan.kinds == KINDS.index("vehicle")]
    inside = np.zeros(len(on_cars), bool)
    for x, y, z, length, width, height, yaw in scan.cars:
        assert 3.7 < length < 5.4 and 1.6 < width < 2.1 and 1.3 < height < 2.5
        dx, dy = on_cars[:, 0] - x, on_cars[:, 1] - y
        ahead, left = np.cos(yaw) * dx + np.sin(yaw) * dy, np.cos(yaw) * dy - np.sin(yaw) * dx
        reach = [length / 2 + 0.15, width / 2 + 0.15, height / 2 + 0.15]
        near = np.abs(np.stack([ahead, left, on_cars[:, 2] - z], 1)) < reach
        inside |= near.all(1)
    assert inside.mean() > 0.99
    assert len(scan.cars) > 40


def test_the_nearer_solid_names_the_ray() -> None:
    image = RayImage(np.zeros(1), 512, np.random.default_rng(0))
    image.add(Box((20, 0, 0), (1, 1, 1), Surface(0.5)), 3)
    image.add(Box((10, 0, 0), (1, 1, 1), Surface(0.5)), 5)
    image.add(Box((30, 0, 0), (1, 9, 1), Surface(0.5)), 7)
    kinds = image.category[0]
    assert kinds[256] == 5 and {0, 5, 7} <= set(kinds.tolist())
    assert (kinds[~np.isfinite(image.t[0])] == 0).all()
