"""Overlaps and suppression of boxes as legacy spconv offers them, on numpy arrays.

Rotated boxes are four corners in either turning direction. Geometry is computed in float64 relative
to the boxes, so that far-away boxes lose nothing; results have the dtype of the input.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import torch

from ....core.arguments import expect_tensors
from ....errors import ContractError, ShapeError
from ._tv_tensor import Tensor, output

Array: TypeAlias = "np.ndarray[Any, Any]"

# Pairs clipped at a time; a pair needs less than 1 KiB.
_CHUNK = 16384


class BoxCountError(ShapeError, ContractError, RuntimeError):
    """Box arrays of unequal or wrong shape; a RuntimeError upstream."""


def rbbox_iou(box_corners: Array, qbox_corners: Array, standup_iou: Array, standup_thresh: float) -> Array:
    """Intersection over union of rotated boxes.

    Args:
        box_corners, qbox_corners: [N, 4, 2] and [K, 4, 2], corners in order around each box.
        standup_iou: [N, K], the overlap of the upright bounding boxes.
        standup_thresh: pairs with standup_iou <= standup_thresh are skipped and stay 0.

    Returns:
        [N, K] in the dtype of `box_corners`.
    """
    return _pairwise(box_corners, qbox_corners, standup_iou, standup_thresh, False)


def rbbox_intersection(box_corners: Array, qbox_corners: Array, standup_iou: Array, standup_thresh: float) -> Array:
    """As `rbbox_iou`, but the area of the intersection."""
    return _pairwise(box_corners, qbox_corners, standup_iou, standup_thresh, True)


def rbbox_iou_loss(box_corners: Array, qbox_corners: Array) -> Array:
    """Intersection over union [N] of box i with box i, both [N, 4, 2]."""
    return _aligned(box_corners, qbox_corners, False)


def _aligned(box_corners: Array, qbox_corners: Array, area_only: bool) -> Array:
    boxes, others = _corners(box_corners), _corners(qbox_corners)
    if len(boxes) != len(others):
        raise BoxCountError(f"got {len(boxes)} and {len(others)} boxes; the aligned overlap pairs them one to one")
    measure = _intersection if area_only else _iou
    return measure(boxes, others).astype(_result_dtype(box_corners))


def non_max_suppression_cpu(boxes: Array, order: Array, thresh: float, eps: float = 0.0) -> list[int]:
    """Greedy suppression of upright boxes.

    Args:
        boxes: [N, >= 4], columns x1, y1, x2, y2.
        order: rows by falling score; only these take part.
        thresh: a box goes when its overlap with a kept one is >= thresh.
        eps: added to every side length (1 for inclusive pixel corners).

    Returns:
        The kept rows in the order of `order`.
    """
    corners = np.asarray(boxes)
    if corners.ndim != 2 or corners.shape[1] < 4:
        raise BoxCountError(f"boxes have shape {list(corners.shape)}; expected [N, 4] or wider")
    sides = corners[:, :4].astype(np.float64)
    low, high = sides[:, :2], sides[:, 2:]
    areas = np.prod(high - low + eps, axis=1)

    def overlap(row: int, others: Array) -> Array:
        side = np.minimum(high[row], high[others]) - np.maximum(low[row], low[others]) + eps
        shared = np.prod(np.maximum(side, 0), axis=1)
        return _ratio(shared, areas[row] + areas[others] - shared)

    return _greedy(order, len(sides), thresh, overlap)


def rotate_non_max_suppression_cpu(boxes: Array, order: Array, standup_iou: Array, thresh: float) -> list[int]:
    """Greedy suppression of rotated boxes.

    Args:
        boxes: [N, 4, 2], corners in order around each box.
        order: rows by falling score; only these take part.
        standup_iou: [N, N], the overlap of the upright bounding boxes; none at <= 0.
        thresh: a box goes when its overlap with a kept one is >= thresh.

    Returns:
        The kept rows in the order of `order`.
    """
    corners = _corners(boxes)
    standup = _standup(standup_iou, len(corners), len(corners))

    def overlap(row: int, others: Array) -> Array:
        result = np.zeros(len(others))
        near = np.flatnonzero(~(standup[row, others] <= 0))
        result[near] = _iou(corners[row : row + 1].repeat(len(near), axis=0), corners[others[near]])
        return result

    return _greedy(order, len(corners), thresh, overlap)


class BoxOps:
    """The same on tv.Tensors. Overlaps are written where there are any; all else stays as it is."""

    @staticmethod
    def has_boost() -> bool:
        """Rotated boxes work."""
        return True

    @staticmethod
    def non_max_suppression_cpu(boxes: Tensor, order: Tensor, thresh: float, eps: float = 0) -> list[int]:
        return non_max_suppression_cpu(np.asarray(boxes), np.asarray(order), thresh, eps)

    @staticmethod
    def rotate_non_max_suppression_cpu(
        box_corners: Tensor, order: Tensor, standup_iou: Tensor, thresh: float, eps: float = 0
    ) -> list[int]:
        """eps: changes nothing, as upstream."""
        boxes, rows, near = map(np.asarray, (box_corners, order, standup_iou))
        return rotate_non_max_suppression_cpu(boxes, rows, near, thresh)

    @staticmethod
    def rbbox_iou(
        box_corners: Tensor,
        qbox_corners: Tensor,
        standup_iou: Tensor,
        overlaps: Tensor,
        standup_thresh: float,
        inter_only: bool,
    ) -> None:
        """inter_only: areas shared in place of ratios."""
        boxes, others, near = map(np.asarray, (box_corners, qbox_corners, standup_iou))
        _put_overlaps(overlaps, _pairwise(boxes, others, near, standup_thresh, inter_only))

    @staticmethod
    def rbbox_iou_aligned(box_corners: Tensor, qbox_corners: Tensor, overlaps: Tensor, inter_only: bool) -> None:
        arrays = np.asarray(box_corners), np.asarray(qbox_corners)
        _put_overlaps(overlaps, _aligned(*arrays, inter_only))


def _put_overlaps(overlaps: Tensor, values: Array) -> None:
    if overlaps.shape != list(values.shape):
        raise BoxCountError(f"overlaps have shape {overlaps.shape}; expected {list(values.shape)}")
    np.copyto(output(overlaps).numpy(), values, where=values > 0)


def nms(
    boxes: torch.Tensor, scores: torch.Tensor, pre_max_size: int, post_max_size: int, thresh: float, eps: float
) -> torch.Tensor:
    """`spconv.ops.nms` of 1.x: suppression of upright boxes by score.

    Args:
        boxes, scores: [N, 4] (x1, y1, x2, y2) and [N].
        pre_max_size: candidates by score, all if not positive.
        post_max_size: results at most, all if not positive.
        thresh, eps: as in `non_max_suppression_cpu`.

    Returns:
        The kept rows by falling score, int64 on the device of `boxes`.
    """
    expect_tensors("nms", boxes=boxes, scores=scores)
    order = torch.argsort(scores.detach(), descending=True, stable=True)
    order = order[:pre_max_size] if pre_max_size > 0 else order
    rows = boxes.detach().double().cpu().numpy()
    selected = non_max_suppression_cpu(rows, order.cpu().numpy(), thresh, eps)
    selected = selected[:post_max_size] if post_max_size > 0 else selected
    return torch.tensor(selected, dtype=torch.int64, device=boxes.device)


def _greedy(order: Array, count: int, thresh: float, overlap: Any) -> list[int]:
    others = np.asarray(order, dtype=np.int64).reshape(-1)
    if others.size and (others.min() < 0 or others.max() >= count):
        raise BoxCountError(f"order runs from {others.min()} to {others.max()}; there are {count} boxes")
    selected = []
    while others.size:
        selected.append(int(others[0]))
        row, others = others[0], others[1:]
        shared = overlap(row, others)
        # Boxes that do not overlap do not suppress each other, whatever the threshold.
        others = others[~((shared >= thresh) & (shared > 0))]
    return selected


def _pairwise(box_corners: Array, qbox_corners: Array, standup_iou: Array, thresh: float, area_only: bool) -> Array:
    boxes, others = _corners(box_corners), _corners(qbox_corners)
    standup = _standup(standup_iou, len(boxes), len(others))
    result = np.zeros((len(boxes), len(others)), dtype=_result_dtype(box_corners))
    # Written so that a NaN overlap counts as unknown, not as small.
    rows, columns = np.nonzero(~(standup <= thresh))
    measure = _intersection if area_only else _iou
    result[rows, columns] = measure(boxes[rows], others[columns])
    return result


def _corners(boxes: Array) -> Array:
    corners = np.asarray(boxes)
    if corners.ndim != 3 or corners.shape[1:] != (4, 2):
        raise BoxCountError(f"boxes have shape {list(corners.shape)}; expected [N, 4, 2] corners")
    return corners.astype(np.float64)


def _standup(standup_iou: Array, rows: int, columns: int) -> Array:
    overlaps = np.asarray(standup_iou)
    if overlaps.shape != (rows, columns):
        raise BoxCountError(f"standup_iou has shape {list(overlaps.shape)}; expected [{rows}, {columns}]")
    return overlaps


def _result_dtype(boxes: Array) -> Any:
    dtype = np.asarray(boxes).dtype
    return dtype if dtype.kind == "f" else np.dtype(np.float64)


def _ratio(shared: Array, union: Array) -> Array:
    """shared / union, 0 where there is no area at all."""
    return np.divide(shared, union, out=np.zeros_like(shared), where=union > 0)


def _cross(a: Array, b: Array) -> Array:
    return a[..., 0] * b[..., 1] - a[..., 1] * b[..., 0]


def _area(polygons: Array) -> Array:
    """Signed areas [P] of [P, V, 2], counter-clockwise positive; repeated corners do no harm."""
    spokes = polygons - polygons[:, :1]
    return 0.5 * _cross(spokes[:, :-1], spokes[:, 1:]).sum(1)


def _iou(boxes: Array, others: Array) -> Array:
    shared = _intersection(boxes, others)
    return _ratio(shared, np.abs(_area(boxes)) + np.abs(_area(others)) - shared)


def _intersection(boxes: Array, others: Array) -> Array:
    """Areas [P] shared by boxes [P, 4, 2] and others [P, 4, 2]."""
    parts = [
        _clipped_area(boxes[start : start + _CHUNK], others[start : start + _CHUNK])
        for start in range(0, len(boxes), _CHUNK)
    ]
    return np.concatenate(parts) if parts else np.zeros(0)


def _clipped_area(boxes: Array, others: Array) -> Array:
    origin = boxes[:, :1]
    polygon, window = boxes - origin, others - origin
    most = np.abs(_area(polygon))
    turn = _area(window)
    clockwise = turn < 0
    window[clockwise] = window[clockwise, ::-1]
    for corner in range(4):
        start, end = window[:, corner], window[:, (corner + 1) % 4]
        polygon = _clip(polygon, start[:, None], (end - start)[:, None])
    # A box without area has no left sides, so that nothing was clipped.
    return np.minimum(np.abs(_area(polygon)), np.minimum(most, np.abs(turn)))


def _clip(polygon: Array, start: Array, edge: Array) -> Array:
    """The part of convex polygons [P, V, 2] on the left of lines: [P, V + 1, 2].

    start, edge: [P, 1, 2], a point and the direction of each line. Unused slots repeat a corner;
    of a polygon that vanishes only one point is left.
    """
    following = np.roll(polygon, -1, axis=1)
    side = _cross(edge, polygon - start)
    next_side = np.roll(side, -1, axis=1)
    inside = side >= 0
    crosses = inside != (next_side >= 0)
    # Where an edge crosses, the two sides differ in sign, so that the divisor is not 0.
    part = np.divide(side, side - next_side, out=np.zeros_like(side), where=crosses)
    crossing = polygon + part[..., None] * (following - polygon)
    # Each corner that stays, then the crossing on the edge behind it, in turning order.
    count, corners = side.shape
    points = np.stack((polygon, crossing), axis=2).reshape(count, 2 * corners, 2)
    valid = np.stack((inside, crosses), axis=2).reshape(count, 2 * corners)
    # A line cuts a convex polygon at most twice, so at most one corner is gained.
    columns = np.argsort(~valid, axis=1, kind="stable")[:, : corners + 1]
    valid_slots = np.take_along_axis(valid, columns, axis=1)
    clipped = np.take_along_axis(points, columns[..., None], axis=1)
    return np.where(valid_slots[..., None], clipped, clipped[:, :1])
