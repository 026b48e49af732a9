"""Boxes whose cells do not fit 64-bit keys give the same maps as small ones, shifted apart."""

from __future__ import annotations

import itertools

import pytest
import torch

from sparse_bridge.core.geometry.boxes import Box
from sparse_bridge.core.geometry.offsets import Offsets, box_offsets
from sparse_bridge.core.maps import map_builder
from sparse_bridge.core.maps.coordinate_map import CoordinateMap
from sparse_bridge.core.maps.lookup import find_rows, merge
from sparse_bridge.errors import OverflowLimitError
from tests import oracle
from tests.clouds import cloud

FAR = 1 << 30


def hull(coords, slack=0):
    lo, hi = (bound.tolist() for bound in coords.long().aminmax(dim=0))
    lo, hi = [c - slack for c in lo], [c + slack for c in hi]
    return Box.spanning(tuple(lo), tuple(h - c + 1 for c, h in zip(lo, hi, strict=True)))


def far_apart(seed=0, duplicates=False):
    """A small cloud next to a copy 2^31 away: the pairs of both are those of the small one."""
    near = cloud((5, 4, 6), 2, 0.4, seed)
    if duplicates:
        near = torch.cat([near, near[:7]])
    shift = torch.tensor([0, FAR, -FAR, FAR])
    both = torch.cat([near - shift, near + shift]).int()
    return near, both, hull(both, slack=4)


def pairs(kmap, n):
    """Triples of the first copy, and of the second with its rows counted from 0."""
    found = oracle.triples(kmap)
    first = {t for t in found if t[1] < n}
    assert all((i < n) == (j < n) for _, i, j in found)
    return first, {(v, i - n, j - n) for v, i, j in found - first}


@pytest.mark.parametrize("kernel", [(3, 3, 3), (2, 2, 2), (3, 2, 1)])
def test_submanifold(kernel):
    near, both, box = far_apart()
    assert box.oversized
    offsets = box_offsets(kernel, (1, 1, 1), tuple(k // 2 for k in kernel))
    want = oracle.triples(map_builder.submanifold(CoordinateMap(near, hull(near, 4)), offsets))
    got = pairs(map_builder.submanifold(CoordinateMap(both, box), offsets), len(near))
    assert got == (want, want)


def test_strided_and_generative():
    near, both, box = far_apart(1)
    offsets = box_offsets((2, 2, 2), (1, 1, 1), (0, 0, 0))
    for build, steps in ((map_builder.strided, (2, 2, 2)), (map_builder.generative, (1, 1, 1))):
        new, kmap = build(CoordinateMap(both, box), offsets, steps, box)
        small, want = build(CoordinateMap(near, hull(near, 4)), offsets, steps, hull(near, 20))
        n, m = len(near), small.n_rows
        assert new.n_rows == 2 * m
        found = oracle.triples(kmap)
        assert {t for t in found if t[1] < n} == oracle.triples(want)
        assert {(v, i - n, j - m) for v, i, j in found if i >= n} == oracle.triples(want)


def test_duplicates_fold_to_the_first_row():
    _, both, box = far_apart(2, duplicates=True)
    cmap = CoordinateMap(both, box)
    assert not cmap.unique
    fold = cmap.duplicates()
    seen = {}
    for row, site in enumerate(both.tolist()):
        seen.setdefault(tuple(site), row)
    assert fold.first.tolist() == list(seen.values())
    assert (cmap.distinct_map().coords[fold.inverse] == both).all()


def test_look_up_and_merge():
    near, both, box = far_apart(3)
    cmap = CoordinateMap(both, box)
    rows = torch.randperm(len(both))[:30]
    query = torch.cat([both[rows], both[rows] + 3])
    where = {tuple(site): row for row, site in enumerate(both.tolist())}
    assert find_rows(cmap, query).tolist() == [where.get(tuple(q), -1) for q in query.tolist()]
    other = CoordinateMap(near, hull(near))
    merged, (a, b) = merge([cmap, other])
    assert (merged.coords[a] == both).all() and (merged.coords[b] == near).all()
    assert merged.n_rows == len({tuple(s) for s in [*both.tolist(), *near.tolist()]})


def test_six_axes_between_two_maps():
    coords = torch.randint(-3, 3, (60, 7)).unique(dim=0).int()
    coords[:, 0] = 0
    coords = coords.unique(dim=0)
    wide = coords.clone()
    wide[::2, 1:] += FAR
    box = hull(wide, 2)
    assert box.oversized
    offsets = Offsets.of(list(itertools.product((-1, 0, 1), repeat=6)))
    kmap = map_builder.between(CoordinateMap(wide, box), CoordinateMap(wide, box), offsets, (1,) * 6)
    sites = {tuple(site): row for row, site in enumerate(wide.tolist())}
    want = set()
    for row, (b, *u) in enumerate(wide.tolist()):
        for v, o in enumerate(offsets.values):
            other = sites.get((b, *(c + d for c, d in zip(u, o, strict=True))))
            if other is not None:
                want.add((v, other, row))
    assert oracle.triples(kmap) == want


def test_keys_that_overflow_only_with_the_kernel_take_the_wide_path():
    near = cloud((4, 4, 4), 1, 0.5, seed=4)
    extent = round((2**62) ** (1 / 3)) - 8
    far = near.clone()
    far[::2, 1:] += extent - 16
    box = hull(far)
    assert not box.oversized
    reach = Offsets.of([(-200, 0, 0), (0, 0, 0), (0, 1, 0), (200, 0, 0)])
    kmap = map_builder.submanifold(CoordinateMap(far, box), reach)
    sites = {tuple(site): row for row, site in enumerate(far.tolist())}
    want = set()
    for row, (b, *u) in enumerate(far.tolist()):
        for v, o in enumerate(reach.values):
            other = sites.get((b, *(c + d for c, d in zip(u, o, strict=True))))
            if other is not None:
                want.add((v, other, row))
    assert oracle.triples(kmap) == want


def test_coordinates_beyond_32_bits_are_refused():
    with pytest.raises(OverflowLimitError, match="axis 1"):
        Box.spanning((0, 0, -(1 << 31) - 1), (1, 1, 5))
    assert Box.spanning((0, -(1 << 31)), (1, 1 << 32)).oversized
