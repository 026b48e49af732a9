"""Mask splits: ranges of the offsets with row orders of their own, and the products over them."""

from __future__ import annotations

import pytest
import torch

from sparse_bridge.errors import KernelError
from sparse_bridge.kernels.maps import mask_order as ordering
from sparse_bridge.kernels.maps.mask_order import mask_order
from sparse_bridge.kernels.maps.neighbor_table import NeighborTable
from sparse_bridge.kernels.maps.tile_list import TILE
from sparse_bridge.kernels.maps.tile_packing import pack_tiles
from sparse_bridge.kernels.tiles.tile import TileConfig
from tests.checks import assert_close
from tests.kernels.calls import schedules, target_of
from tests.kernels.test_gemm import random_table, run_gather
from tests.kernels.test_mask_order import table

pytestmark = [pytest.mark.interpreted, pytest.mark.emulated]

TILES = TileConfig(64, 16, 16, 4, 2)


def ranges(n_offsets, splits):
    return [range(part * n_offsets // splits, (part + 1) * n_offsets // splits) for part in range(splits)]


@pytest.mark.parametrize("n_offsets, splits", [(2, 2), (8, 3), (27, 2), (27, 4), (62, 2), (70, 2), (70, 3)])
@pytest.mark.parametrize("apart", [True, False])
def test_each_part_is_in_the_order_of_its_offsets_alone(kernel_lane, rules, n_offsets, splits, apart):
    """As if the table had no others; a sort of all parts together leaves them apart."""
    n_rows, target = 300, target_of(kernel_lane)
    rules.set(ordering, FEW_ROWS=n_rows if apart else 0)
    made = table(kernel_lane, n_offsets, n_rows, share=0.15)
    order = mask_order(made, target, splits).long().view(splits, n_rows)
    for part, inside in enumerate(ranges(n_offsets, splits)):
        alone = NeighborTable(made.nbr[inside.start : inside.stop].contiguous())
        want = mask_order(alone, target).long()
        assert torch.equal(order[part] - part * n_rows, want)


def check_tiles(tiles, order, nbr, splits):
    """Rows, entries, live lists and counts of every part."""
    n_offsets, n_rows = nbr.shape
    places, rows = tiles.pitch, tiles.rows.cpu().view(splits, -1)
    assert torch.equal(rows[:, :n_rows].long(), order.view(splits, -1))
    assert (rows[:, n_rows:] == -1).all()
    packed = tiles.packed.cpu()
    for part, inside in enumerate(ranges(n_offsets, splits)):
        want = torch.full((n_offsets, places), -1, dtype=torch.int32)
        inner = rows[part, :n_rows].long() - part * n_rows
        for v in inside:
            want[v, :n_rows] = nbr[v, inner]
            there = (want[v] >= 0).view(-1, 2 * TILE).any(1).repeat_interleave(2 * TILE)
            assert torch.equal(packed[v + part].where(there, want[v]), want[v])
            counts = (want[v] >= 0).view(-1, 2 * TILE).sum(1)
            assert torch.equal(tiles.counts[v].cpu().long(), counts)
        for block in (TILE, 2 * TILE):
            live, n_live = (one.cpu() for one in tiles.lists(block))
            for tile in range(places // block):
                column = want[:, tile * block : (tile + 1) * block]
                expected = (column >= 0).any(1).nonzero().flatten().tolist()
                at = part * (places // block) + tile
                assert live[at, : int(n_live[at])].tolist() == expected


@pytest.mark.parametrize("n_rows", [1, TILE - 1, TILE, TILE + 1, 2 * TILE + 1, 300])
@pytest.mark.parametrize("n_offsets, splits", [(2, 2), (27, 2), (27, 3), (33, 4), (70, 2)])
def test_tiles(kernel_lane, n_offsets, splits, n_rows):
    made, target = table(kernel_lane, n_offsets, n_rows), target_of(kernel_lane)
    order = mask_order(made, target, splits)
    tiles = pack_tiles(made, order, target, splits)
    assert tiles.splits == splits and tiles.memory.numel() == tiles.size(n_offsets, tiles.n_pairs, splits)
    check_tiles(tiles, order.cpu().long(), made.nbr.cpu(), splits)
    for block in (TILE, 2 * TILE):  # launches by address read the same memory
        views = (tiles.packed, tiles.rows, *tiles.lists(block))
        at = [(view.data_ptr() - tiles.memory.data_ptr()) // 4 for view in views]
        assert tuple(at) == tiles.section_starts(block)
    assert torch.equal(tiles.table().nbr, made.nbr), "tiles give the table back"


@pytest.mark.parametrize("apart", [True, False])
def test_rows_that_are_not_in_use_are_in_no_tile(kernel_lane, rules, apart):
    rules.set(ordering, FEW_ROWS=256)
    n_rows, live = (250, 90) if apart else (400, 300)
    full, target = table(kernel_lane, 27, n_rows), target_of(kernel_lane)
    full.nbr[:, live:] = -1
    count = torch.tensor([live - 1], dtype=torch.int32, device=full.nbr.device)
    made = NeighborTable(full.nbr, count=count)
    made.masks(target)
    made.mask[:, live:] = 0x5A5A5A5A
    tiles = pack_tiles(made, mask_order(made, target, 3), target, 3)
    assert (tiles.rows.view(3, -1)[:, live:] == -1).all()
    assert torch.equal(tiles.table().nbr, full.nbr)


def test_less_of_the_work_is_for_nothing(kernel_lane):
    made, target = table(kernel_lane, 27, 1024, share=0.15), target_of(kernel_lane)
    visits = []
    for splits in (1, 2, 3, 4):
        tiles = pack_tiles(made, mask_order(made, target, splits), target, splits)
        visits.append(int(tiles.lists(TILE)[1].sum()))
    assert visits == sorted(visits, reverse=True) and len(set(visits)) == 4


def test_as_many_rows_as_numbers_can_name(kernel_lane):
    nbr = torch.empty((27, 1), dtype=torch.int32).expand(27, 1 << 29)
    with pytest.raises(KernelError, match="4 orders of 536870912 rows"):
        mask_order(NeighborTable(nbr, nbr), target_of(kernel_lane), 4)


@pytest.mark.parametrize("splits", [2, 3, 4])
@pytest.mark.parametrize("n", [1, TILE - 1, TILE, TILE + 1, 2 * TILE + 1])
def test_products_around_the_tile(kernel_lane, n, splits):
    for block_m in (TILE, 2 * TILE):
        tile = TileConfig(block_m, 16, 16, 4, 2)
        y, want = run_gather(kernel_lane, tile, True, n=n, splits=splits)
        assert_close(y, want)


@pytest.mark.parametrize("n_offsets, splits", [(2, 2), (8, 4), (27, 2), (33, 3), (70, 2)])
@pytest.mark.parametrize("c_in, c_out", [(1, 1), (33, 5), (40, 70)])
def test_products_of_any_kernel_volume(kernel_lane, n_offsets, splits, c_in, c_out):
    tile = TileConfig(64, 32, 32, 4, 2)
    y, want = run_gather(kernel_lane, tile, True, n=130, n_offsets=n_offsets, splits=splits, c_in=c_in, c_out=c_out)
    assert_close(y, want)


@pytest.mark.parametrize(
    "dtype, norm, bias, activation, precision",
    [
        (torch.float32, "affine", True, "relu", "ieee"),
        (torch.float32, "none", False, None, "ieee"),
        (torch.float16, "affine", False, "leaky_relu", "ieee"),
        (torch.float16, "none", True, "relu", "half"),
        (torch.bfloat16, "statistics", True, "leaky_relu", "ieee"),
    ],
)
def test_epilogues_follow_the_whole_sum(kernel_lane, dtype, norm, bias, activation, precision):
    """Once, in every row, also in those that no range has a neighbour for."""
    if dtype == torch.bfloat16 and not target_of(kernel_lane).has_bf16:
        pytest.skip("no bf16 products here")
    nbr = random_table(9, 2 * TILE + 1, 50)
    nbr[:, ::3] = -1
    y, want = run_gather(
        kernel_lane,
        TileConfig(64, 32, 16, 4, 2),
        True,
        n=2 * TILE + 1,
        c_out=33,
        groups=2,
        nbr=nbr,
        dtype=dtype,
        activation=activation,
        bias=bias,
        norm=norm,
        residual=True,
        splits=3,
        precision=precision,
    )
    done = {None: want, "relu": want.relu(), "leaky_relu": torch.where(want > 0, want, 0.1 * want)}[activation]
    assert_close(y, done, dtype)


def test_results_repeat_bit_by_bit(kernel_lane):
    """Whatever order the programs run in."""
    found = [run_gather(kernel_lane, TILES, True, n=200, splits=3)[0] for _ in schedules(kernel_lane)]
    assert all(torch.equal(found[0], other) for other in found[1:])
