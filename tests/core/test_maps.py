"""Kernel maps against the reference, on every builder."""

import pytest
import torch

from sparse_bridge.core import functional
from sparse_bridge.core.geometry.boxes import Box
from sparse_bridge.core.geometry.offsets import Offsets, box_offsets
from sparse_bridge.core.maps import map_builder
from sparse_bridge.core.maps.coordinate_map import CoordinateMap
from tests import oracle, reference
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


def rulebook(x_map, y_map, offsets, stride):
    """The triples that should be there, of two coordinate maps."""
    pairs = reference.find_pairs(x_map.coords, x_map.box, y_map.coords, y_map.box, offsets.values, stride)
    return oracle.pair_triples(pairs)


def neighbors(cmap, offsets):
    return oracle.pair_triples(reference.submanifold_pairs(cmap.coords, cmap.box, offsets.values))


def every_view(kmap):
    """The triples of the map must be the same through pair lists, tables and transposes."""
    direct = oracle.triples(kmap)
    assert {(v, j, i) for v, i, j in direct} == oracle.triples(kmap.transposed())
    for side in (0, 1):
        table, reverse = kmap.rulebook.table(side)
        nbr = table.nbr.flip(0) if reverse else table.nbr
        assert nbr.dtype == torch.int32
        v, row = (nbr >= 0).nonzero(as_tuple=True)
        seen = set(zip(v.tolist(), nbr[v, row].tolist(), row.tolist(), strict=True))
        assert seen == (direct if side == 0 else {(a, c, b) for a, b, c in direct})
    return direct


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_strided(map_lane, geometry):
    kernel, stride, padding, dilation, shape = geometry
    coords = cloud(shape, 2, 0.25, seed=1, device=map_lane.device)
    outer = functional.conv_shape(shape, kernel, stride=stride, padding=padding, dilation=dilation)
    offsets = box_offsets(kernel, dilation, padding)
    cmap = CoordinateMap(coords, Box.grid(2, shape))
    new, kmap = map_builder.strided(cmap, offsets, stride, Box.grid(2, outer))
    sites = reference.strided_coords(coords, cmap.box, offsets.values, stride, new.box)
    assert torch.equal(new.coords.cpu(), sites)
    assert every_view(kmap) == rulebook(cmap, new, offsets, stride)


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_generative(map_lane, geometry):
    kernel, stride, padding, dilation, shape = geometry
    coords = cloud(shape, 2, 0.1, seed=2, device=map_lane.device)
    outer = [(i - 1) * s - 2 * p + k for i, k, s, p in zip(shape, kernel, stride, padding, strict=True)]
    offsets = box_offsets(kernel, dilation, padding)
    cmap = CoordinateMap(coords, Box.grid(2, shape))
    new, kmap = map_builder.generative(cmap, offsets, stride, Box.grid(2, outer))
    sites = reference.generative_coords(coords, cmap.box, offsets.values, stride, new.box)
    assert torch.equal(new.coords.cpu(), sites)
    want = {(v, i, j) for v, j, i in rulebook(new, cmap, offsets, stride)}
    assert every_view(kmap) == want


@pytest.mark.parametrize(
    "kernel, dilation, shape",
    [
        ((5,), (2,), (50,)),
        ((3, 5), (1, 1), (9, 8)),
        ((3, 3, 3), (1, 1, 1), (6, 7, 5)),
        ((3, 3, 1), (2, 1, 1), (6, 7, 5)),
        ((3, 3, 3, 3), (1, 1, 1, 1), (4, 3, 4, 3)),
        ((5, 5, 5), (1, 1, 1), (5, 6, 4)),
    ],
)
def test_submanifold(map_lane, kernel, dilation, shape):
    coords = cloud(shape, 2, 0.2, seed=3, device=map_lane.device)
    origin = tuple(k // 2 * d for k, d in zip(kernel, dilation, strict=True))
    offsets = box_offsets(kernel, dilation, origin)
    assert offsets.symmetric and offsets.values[offsets.center] == (0,) * len(shape)
    cmap = CoordinateMap(coords, Box.grid(2, shape))
    assert every_view(map_builder.submanifold(cmap, offsets)) == neighbors(cmap, offsets)


def test_seven_cubed_kernel(map_lane):
    """343 offsets: eleven mask words."""
    coords = cloud((6, 6, 6), 1, 0.25, seed=4, device=map_lane.device)
    offsets = box_offsets((7, 7, 7), (1, 1, 1), (3, 3, 3))
    cmap = CoordinateMap(coords, Box.grid(1, (6, 6, 6)))
    assert every_view(map_builder.submanifold(cmap, offsets)) == neighbors(cmap, offsets)


def test_arbitrary_offsets(map_lane):
    """A cross without symmetry, in an order of its own."""
    offsets = Offsets.of([(2, 0), (0, 0), (0, -1), (-3, 1)])
    assert not offsets.symmetric
    coords = cloud((8, 9), 2, 0.3, seed=5, device=map_lane.device)
    cmap = CoordinateMap(coords, Box.grid(2, (8, 9)))
    assert every_view(map_builder.submanifold(cmap, offsets)) == neighbors(cmap, offsets)


def test_between_given_maps(map_lane):
    fine = cloud((8, 9), 2, 0.3, seed=6, device=map_lane.device)
    coarse = cloud((4, 5), 2, 0.5, seed=7, device=map_lane.device)
    offsets = box_offsets((3, 3), (1, 1), (1, 1))
    x_map, y_map = (CoordinateMap(fine, Box.grid(2, (8, 9))), CoordinateMap(coarse, Box.grid(2, (4, 5))))
    kmap = map_builder.between(x_map, y_map, offsets, (2, 2))
    assert every_view(kmap) == rulebook(x_map, y_map, offsets, (2, 2))


@pytest.mark.parametrize("n", [0, 1, 31, 32, 33, 63, 64, 65, 127, 128, 129])
def test_row_counts_around_the_tile(map_lane, n):
    coords = cloud((12, 13), 1, 1.0, seed=8)[:n].contiguous().to(map_lane.device)
    offsets = box_offsets((3, 3), (1, 1), (1, 1))
    cmap = CoordinateMap(coords, Box.grid(1, (12, 13)))
    assert every_view(map_builder.submanifold(cmap, offsets)) == neighbors(cmap, offsets)
    new, strided = map_builder.strided(cmap, offsets, (2, 2), Box.grid(1, (6, 7)))
    assert every_view(strided) == rulebook(cmap, new, offsets, (2, 2))


def test_dead_rows_keep_their_place(map_lane):
    """Rows outside the batch or the grid meet only themselves, and only at the centre."""
    coords = cloud((6, 7), 2, 0.5, seed=9)
    coords[3, 0] = -1
    coords[7, 0] = 2
    coords[11, 1] = 6
    coords[12, 2] = -1
    coords = coords.to(map_lane.device)
    offsets = box_offsets((3, 3), (1, 1), (1, 1))
    cmap = CoordinateMap(coords, Box.grid(2, (6, 7)))
    got, dead = every_view(map_builder.submanifold(cmap, offsets)), {3, 7, 11, 12}
    assert got == neighbors(cmap, offsets)
    assert {t for t in got if dead & {*t[1:]}} == {(4, row, row) for row in dead}
    _, strided = map_builder.strided(cmap, offsets, (2, 2), Box.grid(2, (3, 4)))
    assert not {i for _, i, _ in oracle.triples(strided)} & dead


def test_keys_beyond_32_bits(map_lane):
    """A grid of 2^40 cells, with coordinates that would meet if keys wrapped."""
    shape = (1 << 14, 1 << 14, 1 << 12)
    base = cloud((4, 4, 4), 1, 0.5, seed=10)
    far = base.clone()
    far[:, 1] += 1 << 13
    far[:, 3] += (1 << 12) - 8
    coords = torch.cat([base, far]).to(map_lane.device)
    offsets = box_offsets((3, 3, 3), (1, 1, 1), (1, 1, 1))
    cmap = CoordinateMap(coords, Box.grid(1, shape))
    assert cmap.box.key64
    assert every_view(map_builder.submanifold(cmap, offsets)) == neighbors(cmap, offsets)


def test_strides_that_leave_32_bits(map_lane):
    """Coordinate * stride is computed in 64 bits where 32 would wrap onto a live site."""
    shape, outer = (1 << 21,), (1 << 30,)
    coords = torch.tensor([[0, 5], [0, (1 << 20) + 7]], dtype=torch.int32, device=map_lane.device)
    offsets = Offsets.of([(0,), (1,)])
    cmap = CoordinateMap(coords, Box.grid(1, shape))
    new, kmap = map_builder.generative(cmap, offsets, (4096,), Box.grid(1, outer))
    assert new.coords[:, 1].tolist() == [20480, 20481]
    assert oracle.triples(kmap) == {(0, 0, 0), (1, 0, 1)}


def test_duplicates_fold(map_lane):
    coords = cloud((6, 7), 1, 0.4, seed=11)
    coords = torch.cat([coords, coords[:5], coords[2:3]]).contiguous().to(map_lane.device)
    cmap = CoordinateMap(coords, Box.grid(1, (6, 7)))
    assert not cmap.unique
    fold = cmap.duplicates()
    assert cmap.distinct_map().n_rows == fold.n_distinct == len(coords) - 6
    assert torch.equal(cmap.distinct_map().coords[fold.inverse], coords)
    assert torch.equal(fold.first, torch.arange(fold.n_distinct, device=coords.device))
    assert cmap.distinct_map().distinct_map() is cmap.distinct_map()


def test_same_order_on_every_run(map_lane):
    coords = cloud((12, 13), 2, 0.4, seed=12, device=map_lane.device)
    offsets = box_offsets((3, 3), (1, 1), (1, 1))
    runs = []
    for _ in range(3):
        new, kmap = map_builder.strided(
            CoordinateMap(coords, Box.grid(2, (12, 13))), offsets, (2, 2), Box.grid(2, (6, 7))
        )
        runs.append((new.coords.clone(), kmap.rulebook.table(0)[0].nbr.clone()))
    for coords_again, table in runs[1:]:
        assert torch.equal(runs[0][0], coords_again) and torch.equal(runs[0][1], table)
