"""Labelled voxels, their classes, and a network that learns them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import sparse_bridge
from sparse_bridge.tools.demo.scene import KINDS, labelled_scan
from sparse_bridge.tools.demo.segmentation import (
    CLASS_OF_KIND,
    CLASSES,
    REACH,
    Segmenter,
    class_iou,
    class_weights,
    sample,
)


def test_intersection_over_union_by_hand() -> None:
    truth, found = np.array([0, 0, 0, 1, 1, 2]), np.array([0, 0, 1, 1, 1, 0])
    np.testing.assert_allclose(class_iou(found, truth, 4), [2 / 4, 2 / 3, 0, np.nan])
    np.testing.assert_allclose(class_iou(truth, truth, 3), 1)


def test_every_kind_has_one_class() -> None:
    assert sorted(kind for kinds in CLASSES.values() for kind in kinds) == sorted(KINDS)
    names = list(CLASSES)
    assert names[CLASS_OF_KIND[KINDS.index("vehicle")]] == "vehicle"
    assert names[CLASS_OF_KIND[KINDS.index("person")]] == "pole, person"


def test_rare_classes_weigh_more() -> None:
    weight = class_weights(np.array([0] * 100 + [1] * 10 + [2]), 4)
    assert (weight.diff()[:2] > 0).all() and weight.mean() == pytest.approx(1)


def test_a_sample_is_the_voxels_near_the_sensor() -> None:
    points = np.array(
        [[1.1, 1.1, -1.7, 0.5], [1.2, 1.2, -1.7, 0.9], [2.1, 1.1, 0.3, 0.1], [30, 0, 0, 0], [1, 1, 9, 0]], np.float32
    )
    kinds = np.array([0, 0, KINDS.index("vehicle"), 3, 3])
    one = sample(points, kinds, 0.5)
    assert one.cells.tolist() == [[0, 0, 0], [2, 0, 4]] and one.cells.dtype == np.int32
    np.testing.assert_allclose(one.features, [[1, 0, 0.5], [1, 2, 0.1]], atol=1e-6)
    assert one.labels is not None and one.labels.tolist() == [0, 4]
    turned = sample(points, None, 0.5, np.pi / 2)
    assert turned.labels is None and turned.cells.max(0).tolist() == [0, 2, 4]
    assert len(sample(points + [2 * REACH, 0, 0, 0], None, 0.5).cells) == 0


@pytest.mark.slow
def test_the_network_learns_streets() -> None:
    street = labelled_scan(0, 700)
    with sparse_bridge.enable("spconv"):
        segmenter = Segmenter(torch.device("cpu"), [1001])
        segmenter.voxel_size = 0.6
        one = sample(street.points, street.kinds, segmenter.voxel_size)
        segmenter.train(25)
        labelled = segmenter.label(one)
    assert segmenter.losses[-1] < 0.5 * segmenter.losses[0]
    assert labelled.classes.shape == (len(one.cells),)
    assert (labelled.classes == one.labels).mean() > 0.6
    iou = labelled.iou()
    assert iou is not None and np.nanmean(iou) > 0.3
