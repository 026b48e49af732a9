"""Look-ups on the host by tables and by sorted keys, in lots of any size: the same lists."""

from __future__ import annotations

import pytest
import torch

from sparse_bridge.core.geometry import host_cells, host_moves
from sparse_bridge.core.geometry.boxes import Box
from sparse_bridge.core.geometry.offsets import Offsets, box_offsets
from sparse_bridge.core.maps import host_index, map_builder
from sparse_bridge.core.maps.coordinate_map import CoordinateMap
from tests import oracle, reference
from tests.clouds import cloud

SHAPE = (9, 8, 7)
BOX = Box.of((0, -3, 2, 0), (2, *SHAPE))
DEAD = Box.of((0, -1, 3, 0), (2, 6, 5, 7))  # that some of the rows are outside of
CUBE = box_offsets((3, 3, 3), (1, 1, 1), (1, 1, 1))
OFFSETS = {
    "cube": CUBE,
    "corner": box_offsets((2, 2, 2), (1, 1, 1), (0, 0, 0)),
    "dilated": box_offsets((3, 3, 3), (2, 1, 3), (2, 1, 3)),
    "without zero": Offsets.of([(1, 0, 0), (0, 0, 1), (0, 0, 2), (-1, 0, -6), (0, 0, -1)]),
}


def by_table(rules):
    rules.set(host_index, _FEW=1 << 20)


def by_search(rules):
    rules.set(host_index, _CELLS=0)


def lot_by_lot(rules):
    rules.set(host_index, _LOOKED_UP=500, _MET=500)
    rules.set(host_moves, _TOGETHER=500)


WAYS = {
    "table": [by_table],
    "search": [by_search],
    "table in lots": [by_table, lot_by_lot],
    "search in lots": [by_search, lot_by_lot],
}


def scene(rows):
    coords = cloud(SHAPE, 2, 0.4)[:rows] + torch.tensor([0, -3, 2, 0], dtype=torch.int32)
    return coords.contiguous()


def lists(kmap):
    found = kmap.rulebook.lists()
    return found.in_rows.tolist(), found.out_rows.tolist(), found.starts


def maps(coords, box, offsets):
    """Lists of every kind of map, and the coordinates that were made."""
    found = [lists(map_builder.submanifold(CoordinateMap(coords, box), offsets))]
    for stride in ((1, 1, 1), (2, 2, 2), (3, 1, 2)):
        out = Box.of((0, -9, -9, -9), (2, 40, 40, 40))
        for build in (map_builder.strided, map_builder.generative):
            new, kmap = build(CoordinateMap(coords, box), offsets, stride, out)
            found += [lists(kmap), new.coords.tolist()]
        reached = map_builder.between(CoordinateMap(coords, box), new, offsets, stride)
        found.append(lists(reached))
    return found


@pytest.mark.parametrize("rows", [0, 1, 150])
@pytest.mark.parametrize("box", [BOX, DEAD], ids=["live", "dead"])
@pytest.mark.parametrize("name", OFFSETS)
def test_every_way_gives_the_same_lists(name, box, rows, rules):
    offsets, want = OFFSETS[name], None
    for changes in WAYS.values():
        for change in changes:
            change(rules)
        got = maps(scene(rows), box, offsets)
        rules.over()
        want = want or got
        assert got == want


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", OFFSETS)
def test_against_the_reference(name, way, rules):
    for change in WAYS[way]:
        change(rules)
    cmap, offsets = CoordinateMap(scene(150), BOX), OFFSETS[name]
    want = reference.submanifold_pairs(cmap.coords, BOX, offsets.values)
    assert oracle.triples(map_builder.submanifold(cmap, offsets)) == oracle.pair_triples(want)


def test_queries_beyond_the_ends_of_a_table_find_nothing(rules):
    by_table(rules)
    corners = torch.tensor([[0, 0, 0, 0], [1, 8, 7, 6]], dtype=torch.int32)
    cmap = CoordinateMap(corners, Box.grid(2, SHAPE))
    far = Offsets.of([(-2, -2, -2), (0, 0, 0), (2, 2, 2)])
    around = torch.tensor(
        [[0, -1, -1, -1], [1, 9, 8, 7], [0, -2, 0, 0], [1, 8, 9, 6], [0, 1, 1, 1], [1, 6, 5, 4]]
    ).int()
    queries = CoordinateMap(around, Box.of((0, -9, -9, -9), (2, 40, 40, 40)))
    kmap = map_builder.between(cmap, queries, far, (1, 1, 1))
    assert oracle.triples(kmap) == {(2, 1, 5)}


def test_keys_of_boxes_far_from_zero():
    low = (1 << 31) - 40
    columns = host_cells.columns_of(torch.tensor([[3, low, -low, low + 7]], dtype=torch.int32))
    sizes = (4, 1 << 20, 1 << 20, 1 << 20)
    hull = host_cells.Hull((3, low - 1, -low - 1, low), sizes)
    digits, extents = (1, 1 + 1, 7 + 3), (sizes[2] + 2, sizes[3] + 6)  # 1 and 3 cells of halo
    want = (digits[0] * extents[0] + digits[1]) * extents[1] + digits[2]
    assert host_cells.keys_of(columns, hull, (0, 1, 3)).tolist() == [want]


@pytest.mark.parametrize("kernel", [2, 3])
def test_new_cells_in_a_box_of_more_cells_than_keys_have_room_for(kernel):
    offsets = box_offsets((kernel,) * 3, (1, 1, 1), (kernel - 2,) * 3)
    vast = Box.of((0, -(1 << 19), -(1 << 19), -(1 << 19)), (2, 1 << 20, 1 << 20, 1 << 20))
    assert vast.volume >= host_moves.MOST_CELLS and not vast.oversized
    near = Box.of((0, -9, -9, -9), (2, 40, 40, 40))
    (new, kmap), (want, known) = (
        map_builder.strided(CoordinateMap(scene(150), BOX), offsets, (2, 2, 2), box) for box in (vast, near)
    )
    assert new.coords.tolist() == want.coords.tolist()
    assert lists(kmap) == lists(known)
