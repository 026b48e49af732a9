"""Kernel maps against a dictionary oracle, on every builder."""

import pytest
import torch

from sparse_bridge.core import map_builder
from sparse_bridge.core.conv_spec import Box, Offsets, box_offsets
from sparse_bridge.core.coordinate_map import CoordinateMap
from tests import oracle
from tests.clouds import cloud

pytestmark = [pytest.mark.interpreted, pytest.mark.emulated]

GEOMETRIES = [
    # kernel, stride, padding, dilation, shape
    ((3,), (2,), (1,), (1,), (40,)),
    ((3, 3), (2, 1), (1, 0), (1, 2), (9, 10)),
    ((2, 2, 2), (2, 2, 2), (0, 0, 0), (1, 1, 1), (6, 7, 5)),
    ((3, 3, 3), (2, 2, 2), (1, 1, 1), (1, 1, 1), (6, 7, 5)),
    ((3, 1, 2), (3, 1, 2), (2, 0, 1), (2, 1, 1), (7, 5, 6)),
    ((1, 1, 1), (2, 2, 2), (0, 0, 0), (1, 1, 1), (5, 5, 5)),
    ((2, 2, 2, 2), (2, 2, 2, 1), (0, 0, 1, 1), (1, 1, 1, 1), (4, 5, 3, 4)),
]


def out_shape(shape, kernel, stride, padding, dilation):
    return [
        (i + 2 * p - d * (k - 1) - 1) // s + 1
        for i, k, s, p, d in zip(shape, kernel, stride, padding, dilation, strict=True)
    ]


def every_view(kmap, lane):
    """The triples of the map must be the same through pair lists, tables and transposes."""
    direct = oracle.triples(kmap)
    assert {(v, j, i) for v, i, j in direct} == oracle.triples(kmap.transposed())
    for side in (0, 1):
        table, reverse = kmap.relation.table(side)
        nbr = table.nbr.flip(0) if reverse else table.nbr
        assert nbr.dtype == torch.int32
        v, row = (nbr >= 0).nonzero(as_tuple=True)
        seen = set(zip(v.tolist(), nbr[v, row].tolist(), row.tolist(), strict=True))
        assert seen == (direct if side == 0 else {(a, c, b) for a, b, c in direct})
    return direct


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_strided(lane, geometry):
    kernel, stride, padding, dilation, shape = geometry
    coords = cloud(shape, 2, 0.25, seed=1, device=lane.device)
    outer = out_shape(shape, kernel, stride, padding, dilation)
    offsets = box_offsets(kernel, dilation, padding)
    cmap = CoordinateMap(coords, Box.grid(2, shape))
    new, kmap = map_builder.strided(cmap, offsets, stride, Box.grid(2, outer))
    sites = oracle.strided_sites(coords, 2, shape, offsets.values, stride, outer)
    assert [tuple(row) for row in new.coords.tolist()] == sites
    want = oracle.relation(coords, 2, shape, new.coords, offsets.values, stride)
    assert every_view(kmap, lane) == want


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_generative(lane, geometry):
    kernel, stride, padding, dilation, shape = geometry
    coords = cloud(shape, 2, 0.1, seed=2, device=lane.device)
    outer = [
        (i - 1) * s - 2 * p + k for i, k, s, p in zip(shape, kernel, stride, padding, strict=True)
    ]
    offsets = box_offsets(kernel, dilation, padding)
    cmap = CoordinateMap(coords, Box.grid(2, shape))
    new, kmap = map_builder.generative(cmap, offsets, stride, Box.grid(2, outer))
    seen = {}
    for row, site in enumerate(coords.tolist()):
        for v, offset in enumerate(offsets.values):
            out = tuple(c * s + o for c, s, o in zip(site[1:], stride, offset, strict=True))
            if all(0 <= c < s for c, s in zip(out, outer, strict=True)):
                seen.setdefault((site[0], *out), []).append((v, row))
    assert [tuple(row) for row in new.coords.tolist()] == list(seen)
    want = {(v, row, j) for j, pairs in enumerate(seen.values()) for v, row in pairs}
    assert every_view(kmap, lane) == want


@pytest.mark.parametrize("kernel, dilation, shape", [
    ((5,), (2,), (50,)), ((3, 5), (1, 1), (9, 8)), ((3, 3, 3), (1, 1, 1), (6, 7, 5)), ((3, 3, 1), (2, 1, 1), (6, 7, 5)),
    ((3, 3, 3, 3), (1, 1, 1, 1), (4, 3, 4, 3)), ((5, 5, 5), (1, 1, 1), (5, 6, 4)),
])  # fmt: skip
def test_submanifold(lane, kernel, dilation, shape):
    coords = cloud(shape, 2, 0.2, seed=3, device=lane.device)
    origin = tuple(k // 2 * d for k, d in zip(kernel, dilation, strict=True))
    offsets = box_offsets(kernel, dilation, origin)
    assert offsets.symmetric and offsets.values[offsets.center] == (0,) * len(shape)
    cmap = CoordinateMap(coords, Box.grid(2, shape))
    kmap = map_builder.submanifold(cmap, offsets)
    want = oracle.relation(coords, 2, shape, coords, offsets.values, (1,) * len(shape))
    assert every_view(kmap, lane) == want


def test_seven_cubed_kernel(lane):
    """343 offsets: eleven mask words."""
    if lane.slow:
        pytest.skip("eleven mask words of look-ups take minutes here; 125 offsets are covered")
    coords = cloud((9, 9, 9), 1, 0.1, seed=4, device=lane.device)
    offsets = box_offsets((7, 7, 7), (1, 1, 1), (3, 3, 3))
    kmap = map_builder.submanifold(CoordinateMap(coords, Box.grid(1, (9, 9, 9))), offsets)
    assert every_view(kmap, lane) == oracle.relation(
        coords, 1, (9, 9, 9), coords, offsets.values, (1, 1, 1)
    )


def test_arbitrary_offsets(lane):
    """A cross without symmetry, in an order of its own."""
    offsets = Offsets.of([(2, 0), (0, 0), (0, -1), (-3, 1)])
    assert not offsets.symmetric
    coords = cloud((8, 9), 2, 0.3, seed=5, device=lane.device)
    kmap = map_builder.submanifold(CoordinateMap(coords, Box.grid(2, (8, 9))), offsets)
    assert every_view(kmap, lane) == oracle.relation(
        coords, 2, (8, 9), coords, offsets.values, (1, 1)
    )


def test_between_given_maps(lane):
    fine = cloud((8, 9), 2, 0.3, seed=6, device=lane.device)
    coarse = cloud((4, 5), 2, 0.5, seed=7, device=lane.device)
    offsets = box_offsets((3, 3), (1, 1), (1, 1))
    kmap = map_builder.between(
        CoordinateMap(fine, Box.grid(2, (8, 9))),
        CoordinateMap(coarse, Box.grid(2, (4, 5))),
        offsets,
        (2, 2),
    )
    assert every_view(kmap, lane) == oracle.relation(
        fine, 2, (8, 9), coarse, offsets.values, (2, 2)
    )


@pytest.mark.parametrize("n", [0, 1, 31, 32, 33, 63, 64, 65, 127, 128, 129])
def test_row_counts_around_the_tile(lane, n):
    coords = cloud((12, 13), 1, 1.0, seed=8)[:n].contiguous().to(lane.device)
    offsets = box_offsets((3, 3), (1, 1), (1, 1))
    cmap = CoordinateMap(coords, Box.grid(1, (12, 13)))
    kmap = map_builder.submanifold(cmap, offsets)
    assert every_view(kmap, lane) == oracle.relation(
        coords, 1, (12, 13), coords, offsets.values, (1, 1)
    )
    new, strided = map_builder.strided(cmap, offsets, (2, 2), Box.grid(1, (6, 7)))
    assert every_view(strided, lane) == oracle.relation(
        coords, 1, (12, 13), new.coords, offsets.values, (2, 2)
    )


def test_dead_rows_keep_their_place(lane):
    """Rows outside the batch or the grid meet only themselves, and only at the centre."""
    coords = cloud((6, 7), 2, 0.5, seed=9)
    coords[3, 0] = -1
    coords[7, 0] = 2
    coords[11, 1] = 6
    coords[12, 2] = -1
    coords = coords.to(lane.device)
    offsets = box_offsets((3, 3), (1, 1), (1, 1))
    cmap = CoordinateMap(coords, Box.grid(2, (6, 7)))
    got = every_view(map_builder.submanifold(cmap, offsets), lane)
    want = oracle.relation(coords, 2, (6, 7), coords, offsets.values, (1, 1))
    dead = {3, 7, 11, 12}
    want = {(v, i, j) for v, i, j in want if j not in dead} | {(4, row, row) for row in dead}
    assert got == want
    new, strided = map_builder.strided(cmap, offsets, (2, 2), Box.grid(2, (3, 4)))
    assert not {i for _, i, _ in oracle.triples(strided)} & dead


def test_keys_beyond_32_bits(lane):
    """A grid of 2^40 cells, with coordinates that would meet if keys wrapped."""
    shape = (1 << 14, 1 << 14, 1 << 12)
    base = cloud((4, 4, 4), 1, 0.5, seed=10)
    far = base.clone()
    far[:, 1] += 1 << 13
    far[:, 3] += (1 << 12) - 8
    coords = torch.cat([base, far]).to(lane.device)
    offsets = box_offsets((3, 3, 3), (1, 1, 1), (1, 1, 1))
    box = Box.grid(1, shape)
    assert box.key64
    kmap = map_builder.submanifold(CoordinateMap(coords, box), offsets)
    assert every_view(kmap, lane) == oracle.relation(
        coords, 1, shape, coords, offsets.values, (1, 1, 1)
    )


def test_strides_that_leave_32_bits(lane):
    """Coordinate * stride is computed in 64 bits where 32 would wrap onto a live site."""
    shape, outer = (1 << 20,), (1 << 30,)
    coords = torch.tensor([[0, 5], [0, (1 << 20) - 1]], dtype=torch.int32, device=lane.device)
    offsets = Offsets.of([(0,), (1,)])
    cmap = CoordinateMap(coords, Box.grid(1, shape))
    new, kmap = map_builder.generative(cmap, offsets, (4096,), Box.grid(1, outer))
    assert new.coords[:, 1].tolist() == [20480, 20481]
    assert oracle.triples(kmap) == {(0, 0, 0), (1, 0, 1)}


def test_duplicates_fold(lane):
    coords = cloud((6, 7), 1, 0.4, seed=11)
    coords = torch.cat([coords, coords[:5], coords[2:3]]).contiguous().to(lane.device)
    cmap = CoordinateMap(coords, Box.grid(1, (6, 7)))
    assert not cmap.unique
    fold = cmap.duplicates()
    assert fold.map.n_rows == len(coords) - 6
    assert torch.equal(fold.map.coords[fold.inverse], coords)
    assert torch.equal(fold.first, torch.arange(fold.map.n_rows, device=coords.device))


def test_same_order_on_every_run(lane):
    coords = cloud((12, 13), 2, 0.4, seed=12, device=lane.device)
    offsets = box_offsets((3, 3), (1, 1), (1, 1))
    runs = []
    for _ in range(3):
        new, kmap = map_builder.strided(
            CoordinateMap(coords, Box.grid(2, (12, 13))), offsets, (2, 2), Box.grid(2, (6, 7))
        )
        runs.append((new.coords.clone(), kmap.relation.table(0)[0].nbr.clone()))
    for coords_again, table in runs[1:]:
        assert torch.equal(runs[0][0], coords_again) and torch.equal(runs[0][1], table)
