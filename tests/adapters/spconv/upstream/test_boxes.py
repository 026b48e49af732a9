"""Box overlaps against scalar polygon clipping, sampling, and the real spconv wheel."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_bridge.adapters.spconv.upstream import boxes
from sparse_bridge.adapters.spconv.upstream import tensorview as tv

SQUARE = np.array([[-0.5, -0.5], [-0.5, 0.5], [0.5, 0.5], [0.5, -0.5]])


def rotated(rng, count, spread=8.0, offset=0.0):
    """Corners [count, 4, 2] of random rectangles, clockwise."""
    angle = rng.uniform(-4, 4, count)
    turn = np.stack((np.cos(angle), -np.sin(angle), np.sin(angle), np.cos(angle)), -1)
    sized = SQUARE * rng.uniform(0.5, 5, (count, 1, 2))
    center = rng.uniform(-spread, spread, (count, 1, 2)) + offset
    return np.einsum("nij,nkj->nki", turn.reshape(-1, 2, 2), sized) + center


def upright_overlap(a, b):
    low = np.maximum(a.min(1)[:, None], b.min(1)[None])
    side = (np.minimum(a.max(1)[:, None], b.max(1)[None]) - low).clip(0)
    shared = side.prod(-1)
    areas = [np.prod(part.max(1) - part.min(1), axis=-1) for part in (a, b)]
    return shared / (areas[0][:, None] + areas[1][None] - shared)


def shoelace(points):
    x, y = zip(*points, strict=True)
    turned = zip(x, y, (*x[1:], x[0]), (*y[1:], y[0]), strict=True)
    return 0.5 * sum(x0 * y1 - x1 * y0 for x0, y0, x1, y1 in turned)


def clip_area(a, b):
    """The shared area of two convex polygons (lists of points), one half-plane at a time."""
    if shoelace(b) == 0:
        return 0.0
    b = b if shoelace(b) > 0 else b[::-1]
    for (px, py), (qx, qy) in zip(b, [*b[1:], b[0]], strict=True):
        cut = []
        sides = [(qx - px) * (y - py) - (qy - py) * (x - px) for x, y in a]
        for here, there, s, t in zip(a, [*a[1:], a[0]], sides, [*sides[1:], sides[0]], strict=True):
            if s >= 0:
                cut.append(here)
            if (s >= 0) != (t >= 0):
                cut.append(tuple(c + s / (s - t) * (d - c) for c, d in zip(here, there, strict=True)))
        a = cut
        if len(a) < 3:
            return 0.0
    return abs(shoelace(a))


def area_of(a, b):
    return clip_area([tuple(p) for p in a.tolist()], [tuple(p) for p in b.tolist()])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("offset", [0.0, 300.0])
@pytest.mark.parametrize("reverse", [False, True])
def test_overlaps_match_scalar_clipping(dtype, offset, reverse):
    rng = np.random.default_rng(3)
    a, b = (rotated(rng, n, offset=offset).astype(dtype) for n in (25, 18))
    b = b[:, ::-1] if reverse else b
    standup = upright_overlap(a, b).astype(dtype)
    shared = np.array([[area_of(p, q) for q in b] for p in a])
    union = np.array([[area_of(p, p) + area_of(q, q) for q in b] for p in a]) - shared
    got = boxes.rbbox_intersection(a, b, standup, 0.0)
    assert got.dtype == dtype
    np.testing.assert_allclose(got, shared, rtol=1e-5, atol=1e-6)
    iou = boxes.rbbox_iou(a, b, standup, 0.0)
    np.testing.assert_allclose(iou, shared / union, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(boxes.rbbox_iou_loss(a[:18], b), np.diagonal(iou), rtol=1e-6, atol=1e-7)
    skipped = boxes.rbbox_iou(a, b, standup, 0.2)
    np.testing.assert_array_equal(skipped, np.where(standup <= np.float32(0.2), 0, iou))


@settings(max_examples=150)
@given(st.lists(st.integers(-3, 3), min_size=8, max_size=8), st.integers(0, 3))
def test_touching_and_degenerate_boxes(numbers, turns):
    # Small integers make shared corners, shared edges, coinciding and empty boxes common.
    def rectangle(x, y, u, v):
        return np.array([[x, y], [x - v, y + u], [x - v + u, y + u + v], [x + u, y + v]], float)

    a, b = rectangle(*numbers[:4]), np.roll(rectangle(*numbers[4:]), turns, axis=0)
    one = np.ones((1, 1))
    got = boxes.rbbox_intersection(a[None], b[None], one, 0.0)[0, 0]
    np.testing.assert_allclose(got, area_of(a, b), atol=1e-12)
    np.testing.assert_allclose(boxes.rbbox_intersection(b[None], a[None], one, 0.0)[0, 0], got, atol=1e-12)
    own = boxes.rbbox_iou(a[None], a[None], one, 0.0)[0, 0]
    assert own == (1 if area_of(a, a) else 0)


def test_overlap_matches_sampling():
    rng = np.random.default_rng(0)
    a, b = rotated(rng, 6, spread=1), rotated(rng, 6, spread=1)
    samples = rng.uniform(-8, 8, (200000, 2))

    def inside(box):
        edge = np.roll(box, -1, axis=0) - box
        away = samples[:, None] - box
        return ((edge[:, 0] * away[..., 1] - edge[:, 1] * away[..., 0]) <= 0).all(1)

    expected = [256 * (inside(p) & inside(q)).mean() for p, q in zip(a, b, strict=True)]
    got = np.diagonal(boxes.rbbox_intersection(a, b, np.ones((6, 6)), 0.0))
    np.testing.assert_allclose(got, expected, atol=0.25)


def test_rotated_boxes_match_the_wheel():
    upstream = pytest.importorskip("spconv.utils")
    if not getattr(getattr(upstream, "BoxOps", None), "has_boost", lambda: False)():
        pytest.skip("the wheel has no rotated overlaps")
    rng = np.random.default_rng(1)
    a, b = rotated(rng, 60).astype(np.float32), rotated(rng, 50).astype(np.float32)
    standup = upright_overlap(a, b).astype(np.float32)
    for name in ("rbbox_iou", "rbbox_intersection"):
        got, expected = (getattr(m, name)(a, b, standup, 0.1) for m in (boxes, upstream))
        np.testing.assert_allclose(got, expected, atol=1e-5)
    np.testing.assert_allclose(boxes.rbbox_iou_loss(a[:50], b), upstream.rbbox_iou_loss(a[:50], b), atol=1e-5)
    order, standup = rng.permutation(60).astype(np.int32), upright_overlap(a, a).astype(np.float32)
    for thresh in (0.1, 0.5, 0.9):
        kept = boxes.rotate_non_max_suppression_cpu(a, order, standup, thresh)
        # The wheel puts as many zeros in front as there are boxes.
        expected = upstream.rotate_non_max_suppression_cpu(a, order, standup, thresh)[-len(kept) :]
        assert kept == list(expected)


def overlaps_in_place(module, ops, a, b):
    """What the box operations on tensorview tensors leave in memory that held 7."""
    as_tv, standup = module.from_numpy, upright_overlap(a, b).astype(np.float32)
    shapes, found = [(len(a), len(b)), (len(b),)], []
    for area_only in (False, True):
        pairs, aligned = (np.full(shape, 7, np.float32) for shape in shapes)
        ops.rbbox_iou(as_tv(a), as_tv(b), as_tv(standup), as_tv(pairs), 0.1, area_only)
        first = np.ascontiguousarray(a[: len(b)])
        ops.rbbox_iou_aligned(as_tv(first), as_tv(b), as_tv(aligned), area_only)
        found += [pairs, aligned]
    return found


def test_boxes_on_tensors_match_the_wheel():
    upstream = pytest.importorskip("spconv.utils").BoxOps
    real = pytest.importorskip("cumm.tensorview")
    assert upstream.has_boost() and boxes.BoxOps.has_boost()
    rng = np.random.default_rng(2)
    a, b = rotated(rng, 60).astype(np.float32), rotated(rng, 50).astype(np.float32)
    mine = overlaps_in_place(tv, boxes.BoxOps, a, b)
    theirs = overlaps_in_place(real, upstream, a, b)
    for got, expected in zip(mine, theirs, strict=True):
        assert (got == 7).any() and (got != 7).any()
        np.testing.assert_allclose(got, expected, atol=1e-5)
    order, standup = rng.permutation(60).astype(np.int32), upright_overlap(a, a).astype(np.float32)
    for thresh, eps in ((0.1, 0), (0.5, 2.0)):
        kept, expected = (
            ops.rotate_non_max_suppression_cpu(*map(m.from_numpy, (a, order, standup)), thresh, eps)
            for m, ops in ((tv, boxes.BoxOps), (real, upstream))
        )
        assert kept == list(expected)[-len(kept) :]  # zeros in front, as many as boxes


def test_boxes_on_tensors_are_the_functions():
    """The wheel's upright suppression ends the process."""
    rng = np.random.default_rng(6)
    low = rng.integers(0, 30, (80, 2))
    sides = np.concatenate((low, low + rng.integers(1, 12, (80, 2))), 1).astype(np.float32)
    order = rng.permutation(80).astype(np.int32)
    got = boxes.BoxOps.non_max_suppression_cpu(*map(tv.from_numpy, (sides, order)), 0.4, 1.0)
    assert got == boxes.non_max_suppression_cpu(sides, order, 0.4, 1.0) and len(got) < 80
    one = [tv.from_numpy(part) for part in (SQUARE[None], SQUARE[None], np.ones((1, 1)))]
    with pytest.raises(boxes.BoxCountError, match="overlaps have shape"):
        boxes.BoxOps.rbbox_iou(*one, tv.zeros([2, 1]), 0.0, False)
    with pytest.raises(RuntimeError, match="read-only"):
        boxes.BoxOps.rbbox_iou(*one, tv.zeros([1, 1]).get_readonly(), 0.0, False)


def greedy(overlap, order, thresh):
    kept = []
    for row in order:
        if all(overlap[other, row] < thresh for other in kept):
            kept.append(int(row))
    return kept


@pytest.mark.parametrize("thresh", [0.05, 0.3, 0.7])
def test_rotated_suppression(thresh):
    rng = np.random.default_rng(5)
    a = rotated(rng, 70)
    standup, order = upright_overlap(a, a), rng.permutation(70)[:60]
    overlap = boxes.rbbox_iou(a, a, standup, 0.0)
    kept = boxes.rotate_non_max_suppression_cpu(a, order, standup, thresh)
    assert kept == greedy(overlap, order, thresh)
    assert boxes.rotate_non_max_suppression_cpu(a, order, np.zeros((70, 70)), thresh) == [*order]


@pytest.mark.parametrize("eps", [0.0, 1.0])
def test_upright_suppression(eps):
    rng = np.random.default_rng(6)
    low = rng.integers(0, 30, (80, 2))
    sides = np.concatenate((low, low + rng.integers(1, 12, (80, 2))), 1).astype(np.float32)
    scores = rng.permutation(80) / 80
    order = np.argsort(-scores)
    area = (sides[:, 2] - sides[:, 0] + eps) * (sides[:, 3] - sides[:, 1] + eps)
    overlap = np.zeros((80, 80))
    for i, p in enumerate(sides):
        for j, q in enumerate(sides):
            w = min(p[2], q[2]) - max(p[0], q[0]) + eps
            h = min(p[3], q[3]) - max(p[1], q[1]) + eps
            shared = max(w, 0) * max(h, 0)
            overlap[i, j] = shared / (area[i] + area[j] - shared)
    expected = greedy(overlap, order, 0.4)
    with_score = np.concatenate((sides, scores[:, None].astype(np.float32)), 1)
    assert boxes.non_max_suppression_cpu(with_score, order, 0.4, eps) == expected
    tensors = torch.from_numpy(sides), torch.from_numpy(scores)
    got = boxes.nms(*tensors, -1, -1, 0.4, eps)
    assert got.tolist() == expected and got.dtype == torch.int64
    assert boxes.nms(*tensors, -1, 3, 0.4, eps).tolist() == expected[:3]
    assert boxes.nms(*tensors, 9, 0, 0.4, eps).tolist() == greedy(overlap, order[:9], 0.4)


def test_apart_boxes_survive_any_threshold():
    apart = np.array([[0, 0, 1, 1], [5, 5, 6, 6]], np.float32)
    assert boxes.non_max_suppression_cpu(apart, np.arange(2), 0.0) == [0, 1]
    assert boxes.non_max_suppression_cpu(apart[:0], np.arange(0), 0.5) == []


def test_bad_arguments():
    good, one = SQUARE[None], np.ones((1, 1))
    for call in (
        lambda: boxes.rbbox_iou(good[0], good, one, 0.0),
        lambda: boxes.rbbox_iou(good, good, np.ones((2, 1)), 0.0),
        lambda: boxes.rbbox_iou_loss(good, good[:0]),
        lambda: boxes.non_max_suppression_cpu(np.zeros((3, 3)), np.arange(3), 0.5),
        lambda: boxes.rotate_non_max_suppression_cpu(good, np.array([1]), one, 0.5),
    ):
        with pytest.raises(boxes.BoxCountError):
            call()
    assert boxes.rbbox_iou(good[:0], good, np.ones((0, 1)), 0.0).shape == (0, 1)
