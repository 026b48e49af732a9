"""Kernels over much memory, of which only the device knows how many rows are in use: what they leave is
what they leave of those rows alone, whatever lies behind."""

from __future__ import annotations

import pytest
import torch

from sparse_bridge.core.geometry.boxes import Box
from sparse_bridge.core.geometry.offsets import box_offsets
from sparse_bridge.core.geometry.weights import layout_of
from sparse_bridge.kernels.gemm.gather_gemm import GatherGemm
from sparse_bridge.kernels.gemm.gather_spec import GemmSpec
from sparse_bridge.kernels.gemm.narrow_gemm import NarrowGemm, NarrowSpec
from sparse_bridge.kernels.gemm.product import EpilogueForm, Product
from sparse_bridge.kernels.maps.hash_table import HashTable, hash_insert
from sparse_bridge.kernels.maps.mask_order import mask_order
from sparse_bridge.kernels.maps.neighbor_lookup import neighbor_lookup
from sparse_bridge.kernels.maps.neighbor_table import NeighborTable
from sparse_bridge.kernels.maps.new_rows import count_owners, link_new_rows, number_new_rows, owner_counters
from sparse_bridge.kernels.maps.tile_list import TILE
from sparse_bridge.kernels.maps.tile_packing import pack_tiles
from sparse_bridge.kernels.tiles.tile import TileConfig
from tests.clouds import cloud, features
from tests.kernels.calls import geometry, reach, target_of
from tests.kernels.test_gemm import nan_like, random_table

pytestmark = [pytest.mark.interpreted, pytest.mark.emulated]

ROWS = (0, 1, TILE - 1, TILE, TILE + 1, 2 * TILE + 1)
CAPACITY = 6 * TILE + 5
BEHIND = 0x5A5A5A5A  # no row of anything


def counter(lane, rows):
    return torch.full((1,), rows - 1, dtype=torch.int32, device=lane.device)


def padded(values, capacity, behind=BEHIND):
    """The same columns, and room for more."""
    wide = values.new_full((*values.shape[:-1], capacity), behind)
    wide[..., : values.shape[-1]] = values
    return wide


def product(lane, narrow, packed, table, count):
    """The launch over a table [V, N], of whose columns `count` says how many are in use."""
    target, device = target_of(lane), torch.device(lane.device)
    c_in, n_rows = (4 if narrow else 16), table.shape[1]
    weight = features(9 * c_in, 16, 1).view(9, c_in, 16)
    made = Product(target, device, torch.float32, "ieee", layout_of(weight, "vio"), EpilogueForm(1))
    tile = TileConfig(TILE, 16, 32, 4, 1)
    if packed:
        rows = NeighborTable(table, None, count)
        table = pack_tiles(rows, mask_order(rows, target), target)
    kind, spec = (NarrowGemm, NarrowSpec) if narrow else (GatherGemm, GemmSpec)
    launch = kind(spec(made, tile, packed), table, n_rows, 50)
    if count is not None:
        launch.count_rows(count)
    bias = features(1, 16, 2)[0].to(device)
    y = nan_like(n_rows, 16, dtype=torch.float32, device=device)
    launch(features(50, c_in).to(device), weight.to(device), (bias, None, None, None, None, None), y)
    return y


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "plain"])
@pytest.mark.parametrize("narrow", [False, True], ids=["gather", "narrow"])
def test_products(kernel_lane, narrow, packed):
    """Behind the rows in use nothing is written."""
    for rows in ROWS:
        nbr = random_table(9, rows, 50).to(kernel_lane.device)
        nbr[:, : rows // 3] = -1  # rows without neighbours have the bias
        y = product(kernel_lane, narrow, packed, padded(nbr, CAPACITY), counter(kernel_lane, rows))
        assert y[rows:].isnan().all()
        if rows:
            assert torch.equal(y[:rows], product(kernel_lane, narrow, packed, nbr, None))


@pytest.mark.parametrize("stride", [1, 2])
def test_maps(kernel_lane, stride):
    """Hash tables, look-ups, new coordinates and the tables that link them."""
    lane, target, box = kernel_lane, target_of(kernel_lane), Box.grid(1, (24, 24))
    offsets = box_offsets((3, 3), (1, 1), (1, 1))
    kernel_geometry = geometry(offsets, lane.device, divisor=(stride, stride), sign=-1)
    for rows in (1, 31, 32, 33, 257):
        coords, results = cloud((24, 24), 1, 1.0, seed=rows)[:rows].contiguous(), []
        for count in (None, counter(lane, rows)):
            own = coords if count is None else padded(coords.t(), CAPACITY).t().contiguous()
            reached = reach(lane, own, box, kernel_geometry)._replace(last=count)
            table = HashTable.allocate(2048, box.key64, reached.coords.device, owner_counters(len(own)))
            slots = torch.full((kernel_geometry.n_row_offsets, len(own)), -7, dtype=torch.int32, device=lane.device)
            hash_insert(table, reached, slots, target)
            owned = count_owners(table, slots, target, count)
            new = table.flags.tolist()[3] + 1
            made = number_new_rows(table, slots, owned, new, reached, target)
            linked, scattered = link_new_rows(table, slots, new, reached, target)
            alone = HashTable.allocate(2048, box.key64, reached.coords.device)
            here = reach(lane, own, box, geometry(offsets, lane.device))._replace(last=count)
            zero = geometry(box_offsets((1, 1), (1, 1), (0, 0)), lane.device)
            hash_insert(alone, here._replace(geometry=zero), torch.empty_like(slots[:1]), target)
            found = neighbor_lookup(alone, len(own), here, target, 4)
            results.append((made, linked.nbr[:, :rows], scattered.nbr, found.nbr[:, :rows], found.mask[:, :rows]))
            assert (found.nbr[:, rows:] == -1).all() and (found.mask[:, rows:] == 0).all()
        assert len(results[0][0]) > 0
        for mine, theirs in zip(*results, strict=True):
            assert torch.equal(mine, theirs)
