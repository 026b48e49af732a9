"""Row order and tiles: every row exactly once, live lists complete, no pair lost."""

from __future__ import annotations

import itertools

import pytest
import torch

from sparse_bridge.kernels.maps import mask_order as ordering
from sparse_bridge.kernels.maps.mask_order import mask_order
from sparse_bridge.kernels.maps.neighbor_table import NeighborTable
from sparse_bridge.kernels.maps.tile_list import TILE
from sparse_bridge.kernels.maps.tile_packing import compact_pairs, pack_tiles
from tests.kernels.calls import target_of

pytestmark = [pytest.mark.interpreted, pytest.mark.emulated]

VOLUMES = [1, 8, 9, 15, 16, 27, 32, 33, 64, 125]
ROWS = [1, TILE - 1, TILE, TILE + 1, 2 * TILE, 2 * TILE + 1, 300]


def table(lane, n_offsets, n_rows, share=0.3, seed=0):
    """A random table; offsets differ in how often they are present, some rows have none."""
    generator = torch.Generator().manual_seed(seed)
    present = torch.rand(n_offsets, n_rows, generator=generator)
    present = present < share * (0.2 + 1.6 * torch.rand(n_offsets, 1, generator=generator))
    present[:, ::17] = False
    nbr = torch.randint(0, 1000, (n_offsets, n_rows), generator=generator)
    nbr = torch.where(present, nbr, -1).int().to(lane.device)
    return NeighborTable(nbr)


def sides(present, edge):
    """Whether a row has offsets on the low and on the high side of each axis, last axis first."""
    at = torch.cartesian_prod(*[torch.arange(edge)] * 3)
    for axis in (2, 1, 0):
        yield present[at[:, axis] < edge // 2].any(0)
        yield present[at[:, axis] > edge // 2].any(0)


def expected(nbr, edge=0):
    """Stable order by rank in the Gray code of what `gray_rank` says, with exact frequencies."""
    present = nbr.cpu() >= 0
    bits = list(sides(present, edge)) if edge else []
    telling = [row for row in present if not row.all()]
    telling.sort(key=lambda row: int(row.sum()))
    room = min(ordering.KEY_BITS - len(bits), len(telling))
    shared = [torch.zeros(present.shape[1], dtype=torch.bool) for _ in range(room)]
    for rank, row in enumerate(telling):
        if len(present) > 32:
            place = rank * room // len(telling)
        else:
            place = max(rank // 2, rank - (len(telling) - room))
        shared[place] |= row
    rank = torch.zeros(present.shape[1], dtype=torch.int64)
    for bit in [*bits, *shared]:
        rank = 2 * rank + (bit.long() ^ (rank & 1))
    return rank.argsort(stable=True)


@pytest.mark.parametrize("few", [True, False])
@pytest.mark.parametrize("n_offsets, edge", [(1, 0), (8, 0), (24, 0), (25, 0), (27, 3), (32, 0), (33, 0), (125, 5)])
def test_the_order_is_that_of_the_rank(kernel_lane, rules, n_offsets, edge, few):
    """All rows are sampled, so frequencies are exact; one offset is in all of them."""
    if not few:
        rules.set(ordering, FEW_ROWS=0)
    made = table(kernel_lane, n_offsets, 250, share=0.15)
    if n_offsets > 8:
        made.nbr[n_offsets // 2] = 7
    order = mask_order(made, target_of(kernel_lane))
    assert order.tolist() == expected(made.nbr, edge).tolist()


@pytest.mark.parametrize("n_offsets", VOLUMES)
def test_the_order_holds_every_row_once_and_groups_equal_masks(kernel_lane, n_offsets):
    made = table(kernel_lane, n_offsets, 300, share=0.15)
    order = mask_order(made, target_of(kernel_lane)).tolist()
    assert sorted(order) == list(range(300))
    masks = [tuple(column) for column in (made.nbr.t() >= 0).tolist()]
    runs = [masks[order[0]]]
    for before, row in itertools.pairwise(order):
        if masks[row] != masks[before]:
            runs.append(masks[row])
        else:
            assert before < row, "rows with equal masks keep their order"
    if n_offsets <= 16:  # above, offsets share bits of the rank
        assert len(runs) == len(set(runs)), "equal masks are neighbours"


@pytest.mark.parametrize("n_rows", [1, 63, 65, 127, 128, 129, 300])
@pytest.mark.parametrize("n_offsets", [8, 27, 64])
def test_few_rows_are_sorted_as_many_are(kernel_lane, n_offsets, n_rows, rules):
    made, target = table(kernel_lane, n_offsets, n_rows), target_of(kernel_lane)
    few = mask_order(made, target).long().cpu()
    rules.set(ordering, FEW_ROWS=0)
    assert torch.equal(mask_order(made, target).cpu(), few)


@pytest.mark.parametrize("n_offsets", [3, 9, 27, 33])
@pytest.mark.parametrize("live", [1, 200, 256, 257, 400])
def test_memory_for_more_rows_does_not_change_the_order(kernel_lane, rules, n_offsets, live):
    """Places of few rows are counted, however many there is memory for."""
    rules.set(ordering, FEW_ROWS=256)
    made, target = table(kernel_lane, n_offsets, 400, share=0.15), target_of(kernel_lane)
    alone = mask_order(NeighborTable(made.nbr[:, :live].contiguous()), target)
    made.masks(target)
    made.mask[:, live:] = 0x5A5A5A5A
    count = torch.full((1,), live - 1, dtype=torch.int32, device=made.nbr.device)
    made = NeighborTable(made.nbr, made.mask, count)
    assert torch.equal(mask_order(made, target)[:live].long(), alone.long())


@pytest.mark.parametrize("n_offsets", [4, 9, 27])
def test_neighbours_in_the_order_differ_little(kernel_lane, n_offsets):
    """What the order is for: fewer offsets live per tile than in rows as they come."""
    made = table(kernel_lane, n_offsets, 1024, share=0.25)
    target = target_of(kernel_lane)
    plain = torch.arange(1024, device=made.nbr.device)
    ordered = pack_tiles(made, mask_order(made, target), target)
    plain = pack_tiles(made, plain, target)
    assert ordered.lists(TILE)[1].sum() < plain.lists(TILE)[1].sum()


@pytest.mark.parametrize("n_rows", ROWS)
@pytest.mark.parametrize("n_offsets", [1, 27, 33, 65])
def test_tiles(kernel_lane, n_offsets, n_rows):
    made, target = table(kernel_lane, n_offsets, n_rows), target_of(kernel_lane)
    order = mask_order(made, target)
    tiles = pack_tiles(made, order, target)
    rows, nbr = tiles.rows.cpu(), made.nbr.cpu()
    n_places = rows.shape[0]
    assert n_places % (2 * TILE) == 0 and n_rows <= n_places < n_rows + 2 * TILE
    assert rows[:n_rows].tolist() == order.tolist() and (rows[n_rows:] == -1).all()
    want = torch.full((n_offsets, n_places), -1, dtype=torch.int32)
    want[:, :n_rows] = nbr[:, rows[:n_rows].long()]
    there = (want >= 0).view(n_offsets, -1, 2 * TILE).any(2).repeat_interleave(2 * TILE, 1)
    assert torch.equal(tiles.packed.cpu().where(there, want), want)
    for block in (TILE, 2 * TILE):
        live, n_live = tiles.lists(block)
        assert live.shape == (n_places // block, n_offsets)
        for tile in range(n_places // block):
            part = want[:, tile * block : (tile + 1) * block]
            expected = (part >= 0).any(1).nonzero().flatten().tolist()
            assert live[tile, : int(n_live[tile])].tolist() == expected
    counts = (want >= 0).view(n_offsets, -1, 2 * TILE).sum(2)
    assert torch.equal(tiles.counts.cpu().long(), counts)
    assert torch.equal(tiles.table().nbr.cpu(), nbr), "tiles give the table back"


@pytest.mark.parametrize("n_rows", ROWS)
@pytest.mark.parametrize("n_offsets, n_lists", [(1, 1), (27, 14), (27, 27), (65, 65)])
def test_pair_lists(kernel_lane, n_offsets, n_lists, n_rows):
    """Each entry of the first offsets once, in the right list."""
    made, target = table(kernel_lane, n_offsets, n_rows), target_of(kernel_lane)
    tiles = pack_tiles(made, mask_order(made, target), target)
    entries, rows, starts = compact_pairs(tiles, n_lists, target)
    bounds = starts.tolist()
    assert len(bounds) == n_lists + 1 and bounds[0] == 0 and bounds[-1] == len(entries)
    nbr = made.nbr.cpu()
    for v in range(n_lists):
        part = slice(bounds[v], bounds[v + 1])
        got = sorted(zip(rows[part].tolist(), entries[part].tolist(), strict=True))
        here = (nbr[v] >= 0).nonzero().flatten()
        assert got == list(zip(here.tolist(), nbr[v, here].tolist(), strict=True))


def test_a_table_with_room_for_more_rows_comes_back(kernel_lane):
    """Rows behind those in use are in no tile, and absent in the table that tiles give back."""
    full, target = table(kernel_lane, 27, 150), target_of(kernel_lane)
    full.nbr[:, 90:] = -1
    count = torch.tensor([89], dtype=torch.int32, device=full.nbr.device)
    made = NeighborTable(full.nbr, count=count)
    tiles = pack_tiles(made, mask_order(made, target), target)
    assert (tiles.rows[90:] == -1).all()
    assert torch.equal(tiles.table().nbr, full.nbr)


def test_a_table_without_entries(kernel_lane):
    empty = torch.full((9, 100), -1, dtype=torch.int32, device=kernel_lane.device)
    made, target = NeighborTable(empty), target_of(kernel_lane)
    order = mask_order(made, target)
    assert order.tolist() == list(range(100))
    tiles = pack_tiles(made, order, target)
    assert not any(tiles.lists(block)[1].any() for block in (TILE, 2 * TILE))
    entries, rows, starts = compact_pairs(tiles, 9, target)
    assert len(entries) == len(rows) == 0 and starts.tolist() == [0] * 10
