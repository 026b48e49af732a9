"""Maps whose output rows are ordered: the rows as they are first seen, in another order."""

from __future__ import annotations

import itertools
import types

import pytest
import torch

from sparse_bridge.core.geometry.boxes import Box
from sparse_bridge.core.geometry.offsets import box_offsets
from sparse_bridge.core.maps import map_builder
from sparse_bridge.core.maps.coordinate_map import CoordinateMap
from sparse_bridge.core.maps.expansion import sorted_rows
from tests import clouds

from .sorted_sites import sorted_sites

pytestmark = [pytest.mark.emulated]

CASES = [  # kernel, stride, padding
    ((2, 2, 2), (2, 2, 2), (0, 0, 0)),
    ((3, 3, 3), (2, 2, 2), (1, 1, 1)),
    ((3, 1, 2), (2, 1, 3), (1, 0, 0)),
]
SHAPE = (9, 8, 11)


def pairs(kmap, x, y):
    """{(offset, input coordinate, output coordinate)} of a map."""
    found = set()
    for v in range(kmap.n_offsets):
        x_rows, y_rows = (rows.cpu() for rows in kmap.pair_list(v))
        for one, other in zip(x[x_rows].tolist(), y[y_rows].tolist(), strict=True):
            found.add((v, tuple(one), tuple(other)))
    return found


def scene(lane, seed, low=0):
    coords = clouds.cloud(SHAPE, share=0.1, seed=seed)
    coords[:, 1:] += low
    order = torch.randperm(len(coords), generator=torch.Generator().manual_seed(seed))
    coords = coords[order].contiguous()
    return coords, CoordinateMap(coords.to(lane.device), Box.of((0, low, low, low), (2, *SHAPE)))


def candidates(coords, kernel, stride, padding, box):
    """For every axis, from the last to the first, what rows reach, and which of it counts."""
    axes = []
    for axis in (2, 1, 0):
        k, s, pad = kernel[axis], stride[axis], padding[axis]
        moved = coords[:, 1 + axis].long().unsqueeze(1) + pad - torch.arange(k)
        cells = torch.div(moved, s, rounding_mode="floor")
        low, extent = box.lo[1 + axis], box.size[1 + axis]
        axes.append((cells, (cells * s == moved) & (cells >= low) & (cells < low + extent)))
    return axes


def discovered(coords, kernel, stride, padding, box):
    """Output coordinates by the first offset that reaches them, then by input row."""
    found = {}
    for offset in itertools.product(*map(range, kernel)):
        for b, *site in coords.tolist():
            moved = [c + pad - o for c, o, pad in zip(site, offset, padding, strict=True)]
            cell = (b, *(c // s for c, s in zip(moved, stride, strict=True)))
            whole = not any(c % s for c, s in zip(moved, stride, strict=True))
            spans = zip(cell, box.lo, box.size, strict=True)
            if whole and all(low <= c < low + size for c, low, size in spans):
                found[cell] = None
    return torch.tensor(list(found), dtype=torch.int32)


def ordered(new, order):
    """Coordinates as lists, sorted as `order` says."""
    turn = -1 if order == "sorted" else 1
    return sorted(new.tolist(), key=lambda row: (row[0], *row[1:][::turn]))


@pytest.mark.parametrize("order", ["ascending", "by_offset"])
@pytest.mark.parametrize("low", [0, -4])
@pytest.mark.parametrize(("kernel", "stride", "padding"), CASES)
def test_other_orders(map_lane, kernel, stride, padding, low, order):
    """The same coordinates and pairs as first seen, in the order that was asked for; look-ups and
    maps over them follow."""
    coords, cmap = scene(map_lane, seed=sum(kernel), low=low)
    offsets = box_offsets(kernel, (1, 1, 1), padding)
    box = Box.of((0, *(-3 if low else 0,) * 3), (2, 9, 8, 7))
    new, kmap = map_builder.strided(cmap, offsets, stride, box, order)
    plain, other = map_builder.strided(cmap, offsets, stride, box)
    want = discovered(coords, kernel, stride, padding, box)
    if order == "ascending":
        want = torch.tensor(ordered(plain.coords, order), dtype=torch.int32)
    assert torch.equal(new.coords.cpu(), want)
    assert pairs(kmap, coords, want) == pairs(other, coords, plain.coords.cpu())
    near_by = box_offsets((3, 1, 1), (1, 1, 1), (1, 0, 0))
    near = map_builder.submanifold(new, near_by)
    again = map_builder.submanifold(CoordinateMap(new.coords.clone(), new.box), near_by)
    assert pairs(near, want, want) == pairs(again, want, want)


@pytest.mark.parametrize("order", ["sorted", "ascending"])
def test_rows_of_a_box_without_keys(order):
    """Whole coordinates are compared where a box holds too many cells, or lies too far out."""
    far = 1 << 29
    for box in (
        Box.of((0, -8, -8), (7, 16, 16)),
        Box.of((0, -far, far), (7, 2 * far, far)),
        Box.spanning((0, -2 * far, -4 * far), (7, 4 * far, 8 * far)),
    ):
        draw = torch.Generator().manual_seed(1)
        rows = torch.randint(0, 7, (60, 3), generator=draw) + torch.tensor(box.lo)
        got = rows[sorted_rows(rows.int(), box, order)]
        assert got.tolist() == ordered(rows, order)


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("low", [0, -4])
@pytest.mark.parametrize(("kernel", "stride", "padding"), CASES)
def test_strided_rows(map_lane, kernel, stride, padding, low, many, rules):
    if many:
        if not map_lane.kernels:
            pytest.skip("torch does not tell few rows from many")
        from sparse_bridge.kernels.maps import row_ranks

        rules.set(row_ranks, FEW_ROWS=0)
    coords, cmap = scene(map_lane, seed=sum(kernel), low=low)
    offsets = box_offsets(kernel, (1, 1, 1), padding)
    box = Box.of((0, *(-3 if low else 0,) * 3), (2, 9, 8, 7))
    new, kmap = map_builder.strided(cmap, offsets, stride, box, "sorted")
    mirrored = Box.of((0, *box.lo[:0:-1]), (2, *box.size[:0:-1]))
    want = sorted_sites(coords[:, 0], candidates(coords, kernel, stride, padding, box), mirrored)
    assert torch.equal(new.coords.cpu()[:, [0, 3, 2, 1]], want)
    plain, other = map_builder.strided(CoordinateMap(cmap.coords.clone(), cmap.box), offsets, stride, box)
    assert pairs(kmap, coords, new.coords.cpu()) == pairs(other, coords, plain.coords.cpu())
    # What looks up these coordinates later finds their rows.
    near = map_builder.submanifold(new, box_offsets((3, 1, 1), (1, 1, 1), (1, 0, 0)))
    again = map_builder.submanifold(
        CoordinateMap(new.coords.clone(), new.box), box_offsets((3, 1, 1), (1, 1, 1), (1, 0, 0))
    )
    made = new.coords.cpu()
    assert pairs(near, made, made) == pairs(again, made, made)


@pytest.mark.parametrize("order", ["sorted", "ascending"])
def test_generative_rows(map_lane, order):
    coords, cmap = scene(map_lane, seed=4)
    offsets, box = box_offsets((3, 2, 3), (1, 1, 1), (1, 0, 1)), Box.grid(2, (18, 16, 22))
    new, kmap = map_builder.generative(cmap, offsets, (2, 2, 2), box, order)
    plain, other = map_builder.generative(cmap, offsets, (2, 2, 2), box)
    made, rows = new.coords.cpu(), plain.coords.cpu()
    assert made.tolist() == ordered(rows, order)
    assert pairs(kmap, coords, made) == pairs(other, coords, rows)


def test_distinct_rows(map_lane):
    coords = torch.cat([scene(map_lane, 5)[0], scene(map_lane, 5)[0][::3]]).to(map_lane.device)
    found = map_builder.distinct(coords.contiguous(), Box.grid(2, SHAPE)).coords.cpu().tolist()
    rows = {tuple(row) for row in coords.tolist()}
    assert [tuple(row) for row in found] == sorted(rows, key=lambda row: (row[0], *row[:0:-1]))


def test_no_rows(map_lane):
    _, cmap = scene(map_lane, 7)
    offsets, far = box_offsets((2, 2, 2), (1, 1, 1), (0, 0, 0)), Box.of((0, 9, 9, 9), (2, 5, 5, 5))
    new, kmap = map_builder.strided(cmap, offsets, (2, 2, 2), far, "sorted")
    assert new.coords.shape == (0, 4) and (kmap.n_in, kmap.n_out) == (cmap.n_rows, 0)


def test_a_side_that_nobody_left(map_lane):
    """The table of one side of a map between given rows comes from the other one's."""
    _, cmap = scene(map_lane, seed=6)
    offsets = box_offsets((3, 3, 3), (1, 1, 1), (1, 1, 1))
    coarse, _ = map_builder.strided(
        cmap, box_offsets((2, 2, 2), (1, 1, 1), (0, 0, 0)), (2, 2, 2), Box.grid(2, (5, 4, 6))
    )
    kmap = map_builder.between(cmap, coarse, offsets, (2, 2, 2))
    rulebook = kmap.rulebook
    for side in (1, 0):
        nbr = rulebook.table(side)[0].nbr.cpu()
        found = {
            (v, *((int(nbr[v, row]), row) if side == 0 else (row, int(nbr[v, row]))))
            for v, row in (nbr >= 0).nonzero().tolist()
        }
        listed = {
            (v, *pair)
            for v in range(len(offsets))
            for pair in torch.stack([rows.cpu() for rows in kmap.pair_list(v)], 1).tolist()
        }
        assert found == {(v, x, y) for v, x, y in listed}


@pytest.mark.parametrize("order", ["sorted", "ascending", "by_offset"])
@pytest.mark.parametrize("oversized", [False, True])
def test_boxes_that_are_searched_by_whole_coordinates(order, oversized):
    coords, cmap = scene(types.SimpleNamespace(device="cpu"), seed=2)
    far = 1 << (30 if oversized else 19)
    box = Box.spanning((0, *(-far,) * 3), (2, *(2 * far,) * 3))
    assert box.oversized is oversized and box.volume >= 1 << 59
    offsets, small = (box_offsets((3,) * 3, (1,) * 3, (1,) * 3), Box.of((0, *(-9,) * 3), (2, 40, 40, 40)))
    new, kmap = map_builder.strided(cmap, offsets, (2, 2, 2), box, order)
    want, other = map_builder.strided(cmap, offsets, (2, 2, 2), small, order)
    assert torch.equal(new.coords, want.coords)
    assert pairs(kmap, coords, new.coords) == pairs(other, coords, want.coords)
