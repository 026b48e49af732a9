"""The measures of the detection example, against answers by hand."""

from __future__ import annotations

import runpy
from typing import Any

import numpy as np
import pytest

import sparse_bridge

from .launch import ROOT

CAR = [0.0, 0.0, 4.0, 2.0, 0.0]


@pytest.fixture(scope="module")
def boxes() -> dict[str, Any]:
    with sparse_bridge.enable("spconv"):
        return runpy.run_path(str(ROOT / "examples" / "boxes.py"))


def found(boxes: dict[str, Any], rows: list, scores: list, cars: list, counted: list) -> Any:
    table = np.array(rows, float).reshape(-1, 5), np.array(scores, float)
    return boxes["Found"](*table, np.array(cars, float).reshape(-1, 5), np.array(counted, bool))


def moved(x: float) -> list[float]:
    return [x, *CAR[1:]]


def test_overlap_of_rectangles(boxes: dict[str, Any]) -> None:
    square, turned = [5, 5, 2, 2, 0.3], [5, 5, 2, 2, 0.3 + np.pi / 4]
    octagon = 8 * (np.sqrt(2) - 1)
    pairs = boxes["bev_iou"](np.array([square, CAR]), np.array([turned, moved(2.0), moved(40.0)]))
    expected = [[octagon / (8 - octagon), 0, 0], [0, 1 / 3, 0]]
    np.testing.assert_allclose(pairs, expected, atol=1e-9)
    assert boxes["bev_iou"](np.zeros((0, 5)), np.array([CAR])).shape == (0, 1)


def test_corners_follow_the_heading(boxes: dict[str, Any]) -> None:
    corners = boxes["corners"](np.array([[1, 2, 4, 2, np.pi / 2]]))[0]
    np.testing.assert_allclose(corners, [[0, 4], [2, 4], [2, 0], [0, 0]], atol=1e-12)


def test_average_precision_by_hand(boxes: dict[str, Any]) -> None:
    cars = [CAR, moved(10.0)]
    one = found(boxes, [CAR, moved(30.0), moved(10.0)], [0.9, 0.8, 0.7], cars, [True, True])
    # Precision 1 up to a recall of 1/2, then 2/3.
    assert boxes["average_precision"]([one], 0.5) == pytest.approx((1 + 2 / 3) / 2)
    # Over two scans scores are ranked together: right, wrong, right, right of 3 cars.
    other = found(boxes, [CAR], [0.1], [CAR], [True])
    expected = (13 * 1 + 13 * 3 / 4 + 14 * 3 / 4) / 40
    assert boxes["average_precision"]([one, other], 0.5) == pytest.approx(expected)
    assert boxes["average_precision"]([found(boxes, [], [], cars, [True] * 2)], 0.5) == 0


def test_a_shifted_box_is_right_up_to_its_overlap(boxes: dict[str, Any]) -> None:
    one = found(boxes, [moved(1.0)], [0.5], [CAR], [True])  # overlap 3/5
    found_at = [boxes["average_precision"]([one], t) for t in (0.3, 0.5, 0.7)]
    assert found_at == [1, 1, 0]


def test_a_car_is_found_once(boxes: dict[str, Any]) -> None:
    one = found(boxes, [CAR, CAR], [0.5, 0.9], [CAR, moved(10.0)], [True, True])
    assert one.matches(0.5).tolist() == [-1, 0]


def test_cars_that_do_not_count_are_no_false_alarm(boxes: dict[str, Any]) -> None:
    cars = [CAR, moved(10.0)]
    hit = found(boxes, [moved(10.0), CAR], [0.9, 0.5], cars, [True, False])
    assert boxes["average_precision"]([hit], 0.5) == 1
    missed = found(boxes, [CAR], [0.9], cars, [True, False])
    assert boxes["average_precision"]([missed], 0.5) == 1


def test_headings_turn_by_half(boxes: dict[str, Any]) -> None:
    turned = [[*CAR[:4], np.pi + 0.1], [10.0, 0.0, 4.0, 2.0, -0.2]]
    one = found(boxes, turned, [0.9, 0.8], [CAR, moved(10.0)], [True, True])
    np.testing.assert_allclose(boxes["heading_errors"]([one]), np.degrees([0.1, 0.2]), rtol=1e-9)
