"""Tiles of several tables in one launch each: bit for bit those of each table by itself."""

from __future__ import annotations

import pytest
import torch

from sparse_bridge.kernels.maps import mask_order as ordering
from sparse_bridge.kernels.maps.mask_order import mask_order
from sparse_bridge.kernels.maps.neighbor_table import NeighborTable
from sparse_bridge.kernels.maps.tile_batch import tile_batch
from sparse_bridge.kernels.maps.tile_list import TILE
from sparse_bridge.kernels.maps.tile_packing import pack_tiles
from tests.kernels.calls import target_of
from tests.kernels.test_mask_order import table

pytestmark = [pytest.mark.interpreted, pytest.mark.emulated]

KINDS = [(27, 300), (8, 2 * TILE + 1), (125, 130), (33, 65), (1, 1), (27, TILE - 1), (64, TILE)]


def copy_of(one):
    mask = None if one.mask is None else one.mask.clone()
    return NeighborTable(one.nbr.clone(), mask, one.count)


def counted(one, live):
    """The same table with memory for more rows than there are, in which anything may stand."""
    nbr = one.nbr.clone()
    nbr[:, live:] = 0x5A5A5A5A
    count = torch.full((1,), live - 1, dtype=torch.int32, device=nbr.device)
    return NeighborTable(nbr, None, count)


def parts_of(tiles):
    """What products read of tiles; elsewhere anything may stand."""
    found = [tiles.rows, tiles.counts]
    for block in (TILE, 2 * TILE):
        live, n_live = tiles.lists(block)
        inside = torch.arange(live.shape[1], device=live.device) < n_live[:, None]
        found += [n_live, torch.where(inside, live, -1)]
    there = (tiles.counts > 0).repeat_interleave(2 * TILE, 1)
    return [*found, torch.where(there, tiles.packed, -1)]


def assert_same(got, want):
    for mine, theirs in zip(parts_of(got), parts_of(want), strict=True):
        assert torch.equal(mine, theirs)


def filled(empty):
    def take(*args, **kwargs):
        made = empty(*args, **kwargs)
        return made if made.dtype.is_floating_point else made.fill_(0x7B7B7B7B)

    return take


def poisoned(monkeypatch):
    """Memory that is taken holds no zeros by luck."""
    for owner, name in ((torch.Tensor, "new_empty"), (torch, "empty")):
        monkeypatch.setattr(owner, name, filled(getattr(owner, name)))


def test_every_table_has_the_tiles_of_its_own(kernel_lane, monkeypatch):
    target = target_of(kernel_lane)
    tables = [table(kernel_lane, *kind, seed=i) for i, kind in enumerate(KINDS)]
    tables[3].masks(target)  # some have masks already
    tables.append(counted(table(kernel_lane, 27, 257, seed=9), 200))
    tables.append(counted(table(kernel_lane, 8, 64, seed=10), 0))
    want = [pack_tiles(one, mask_order(one, target), target) for one in map(copy_of, tables)]
    poisoned(monkeypatch)
    for got, made in zip(tile_batch(tables, target), want, strict=True):
        assert_same(got, made)


@pytest.mark.parametrize("few, many", [(0, 1), (128, 1), (256, 1), (128, 13)])
def test_large_tables_share_a_sort(kernel_lane, rules, calls_of, monkeypatch, few, many):
    """Where one table is large, all are sorted together, of more than 128 with keys of 64 bits; of
    some the host does not know how many rows are in use."""
    rules.set(ordering, FEW_ROWS=few)
    target = target_of(kernel_lane)
    kinds = [(27, 301), (8, 100), (27, 129), (125, 257), (1, 131), (8, 300), (27, 128)]
    tables = [table(kernel_lane, *kind, seed=i) for i, kind in enumerate(kinds)]
    tables[2].masks(target)
    for live in (0, 31, 128, 129, 257):
        tables.append(counted(table(kernel_lane, 27, 259, seed=live), live))
    tables += [table(kernel_lane, 8, 3 + i) for i in range(10 * (many - 1))]
    sorts = calls_of(torch, "sort")
    want = [pack_tiles(one, mask_order(one, target), target) for one in map(copy_of, tables)]
    poisoned(monkeypatch)
    for got, made in zip(tile_batch(tables, target), want, strict=True):
        assert_same(got, made)
    assert sorts[-1][0].dtype == (torch.int32 if many == 1 else torch.int64)


@pytest.mark.parametrize("rows", [(), (100,), (0, 70, 80)])
def test_few_tables(kernel_lane, rows):
    target = target_of(kernel_lane)
    tables = [table(kernel_lane, 8, count) for count in rows]
    made = tile_batch(tables, target)
    assert [tiles.n_rows for tiles in made] == list(rows)
    for one, tiles in zip(tables, made, strict=True):
        assert torch.equal(tiles.table().nbr, one.nbr)


def test_launches_do_not_grow_with_the_tables(kernel_lane, rules, calls_of):
    from sparse_bridge.kernels.runtime import launch

    launches, sorts = calls_of(launch.Kernel, "launch"), calls_of(torch, "sort")
    tile_batch([table(kernel_lane, 27, 70 + i) for i in range(6)], target_of(kernel_lane))
    names = [kernel.name for kernel, *_ in launches]
    assert names == ["masks_each", "keys_each", "orders_each", "tiles_each"] and not sorts
    launches.clear()
    rules.set(ordering, FEW_ROWS=72)
    tile_batch([table(kernel_lane, 27, 70 + i) for i in range(6)], target_of(kernel_lane))
    names = [kernel.name for kernel, *_ in launches]
    assert names == ["masks_each", "keys_each", "tiles_each"] and len(sorts) == 1
