"""What boxes seen from above are measured by: overlap, average precision, error of the heading."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from spconv.utils import rbbox_iou

RECALLS = np.arange(1, 41) / 40


def corners(boxes: np.ndarray) -> np.ndarray:
    """Corners [K, 4, 2] of rectangles [K, 5]: x, y, length, width (metres), heading (radians)."""
    unit = np.array([[1, 1], [1, -1], [-1, -1], [-1, 1]]) / 2 * boxes[:, None, 2:4]
    cos, sin = np.cos(boxes[:, 4]), np.sin(boxes[:, 4])
    turn = np.stack([np.stack([cos, sin], 1), np.stack([-sin, cos], 1)], 1)
    return unit @ turn + boxes[:, None, :2]


def bev_iou(boxes: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Intersection over union [K, M] of rectangles [K, 5] and [M, 5], seen from above."""
    if not len(boxes) or not len(others):
        return np.zeros((len(boxes), len(others)))
    centres = np.linalg.norm(boxes[:, None, :2] - others[None, :, :2], axis=-1)
    reach = [np.linalg.norm(some[:, 2:4], axis=1) / 2 for some in (boxes, others)]
    near = (centres < reach[0][:, None] + reach[1]).astype(np.float64)
    return rbbox_iou(corners(boxes), corners(others), near, 0.0)


@dataclasses.dataclass(frozen=True)
class Found:
    """What a detector says of one scan, and the truth.

    `boxes` [K, 5] and `cars` [M, 5] are rectangles as `corners` takes them, `scores` is [K], and
    `counted` [M] is False for cars that need not be found and are no false alarm either.
    """

    boxes: np.ndarray
    scores: np.ndarray
    cars: np.ndarray
    counted: np.ndarray

    def matches(self, threshold: float) -> np.ndarray:
        """The car [K] of each box, by falling score the one that it overlaps most; -1 for none.

        A car is found once, and by an overlap of `threshold` or more.
        """
        overlap = bev_iou(self.boxes, self.cars)
        car = np.full(len(self.boxes), -1)
        for row in np.argsort(-self.scores, kind="stable"):
            if overlap.shape[1] and overlap[row].max() >= threshold:
                car[row] = overlap[row].argmax()
                if self.counted[car[row]]:
                    overlap[:, car[row]] = -1
        return car


def precisions(scans: Sequence[Found], threshold: float) -> np.ndarray:
    """At each of the 40 `RECALLS` the best precision at that recall or a higher one.

    Over all scans together; a box is right where its bird's-eye-view IoU reaches `threshold`.
    """
    scores, right = [np.zeros(0)], [np.zeros(0, bool)]
    for scan in scans:
        car = scan.matches(threshold)
        taken = np.array([one < 0 or scan.counted[one] for one in car], bool)
        scores.append(scan.scores[taken])
        right.append(car[taken] >= 0)
    total = sum(int(scan.counted.sum()) for scan in scans)
    order = np.argsort(-np.concatenate(scores), kind="stable")
    hits = np.cumsum(np.concatenate(right)[order])
    precision = hits / np.arange(1, len(hits) + 1)
    best_from_here = np.append(np.maximum.accumulate(precision[::-1])[::-1], 0.0)
    return best_from_here[np.searchsorted(hits, RECALLS * max(total, 1) - 1e-9)]


def average_precision(scans: Sequence[Found], threshold: float) -> float:
    """The mean of `precisions`: KITTI's measure since 2019.

    Simonelli et al., "Disentangling Monocular 3D Object Detection", ICCV 2019, section 5.
    """
    return float(precisions(scans, threshold).mean())


def heading_errors(scans: Sequence[Found], threshold: float = 0.5) -> np.ndarray:
    """Degrees in [0, 90] between found and true headings; front and rear count as the same."""
    errors = [np.zeros(0)]
    for scan in scans:
        car = scan.matches(threshold)
        kept = car >= 0
        turn = scan.boxes[kept, 4] - scan.cars[car[kept], 4]
        errors.append(np.degrees(np.abs((turn + np.pi / 2) % np.pi - np.pi / 2)))
    return np.concatenate(errors)
