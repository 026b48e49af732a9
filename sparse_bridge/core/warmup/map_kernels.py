"""The kernels between coordinates and tiles, launched over stand-ins: for `precompile.dry_run`.

They differ little between networks: by kernel volume and by how many kernel offsets of a strided
layer can reach new coordinates from one row.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import NamedTuple

import torch

from ...kernels.runtime.target import Target
from ..device.self_check_problems import KEYS
from ..geometry.boxes import Box
from ..geometry.offsets import Offsets, box_offsets
from ..maps.expansion import Expansion, Source

FEW = 64  # rows of the tensors that stand for real ones
_ONES = (1, 1, 1)


class Strided(NamedTuple):
    """A layer that makes new coordinates."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]


CHECKED = Strided((3, 3, 3), (2, 2, 2))  # the self-check's


class MapKernels:
    """Those of one device and width of keys."""

    def __init__(self, device: torch.device, target: Target, key64: bool) -> None:
        from ...kernels.maps.coord_key import Reach
        from ...kernels.maps.hash_table import HashTable

        self.target = target
        self._offsets = box_offsets((3, 3, 3), _ONES, _ONES)
        self._nbr = torch.empty((len(self._offsets), FEW), dtype=torch.int32)
        self._coords = self._nbr.new_empty((FEW, 4))
        self._box = Box.grid(1, KEYS["int64 keys" if key64 else "int32 keys"])
        self._table = HashTable.allocate(1 << 9, key64, device)
        near = self._offsets.geometry(device, _ONES, _ONES, 1)
        origin = Offsets.of([(0, 0, 0)]).geometry(device, _ONES, _ONES, 1)
        bounds, wide = self._box.layout(device).bounds, self._box.wide(self._offsets, _ONES)
        self._near = Reach(self._coords, near, bounds, wide)
        self._same = Reach(self._coords, origin, bounds, False)

    def looked_up(self) -> None:
        """What a first submanifold map is looked up with, which is checked before anything else."""
        from ...kernels.maps.hash_table import hash_insert

        slots = self._nbr.new_empty((1, FEW))
        hash_insert(self._table, self._same, slots, self.target)
        self._look_up()

    def ordered(self, volumes: Iterable[int]) -> None:
        """What it is ordered and packed with.  volumes: kernel volumes of such layers."""
        from ...kernels.maps.mask_order import mask_order
        from ...kernels.maps.neighbor_table import NeighborTable
        from ...kernels.maps.tile_packing import pack_tiles

        nbr, target = self._nbr, self.target
        table = NeighborTable(nbr, nbr)
        self._order = mask_order(table, target)
        self._tiles = pack_tiles(table, self._order, target)
        order = mask_order(NeighborTable(self._many(len(nbr)), nbr), target)
        pack_tiles(table, order[:FEW], target)
        NeighborTable(nbr).masks(target)
        for volume in sorted({*volumes} - {len(nbr)}):
            other = nbr[:1].expand(volume, -1).contiguous()
            mask_order(NeighborTable(other, other), target)
            mask_order(NeighborTable(self._many(volume), other), target)

    def _many(self, volume: int) -> torch.Tensor:
        """A table of rows whose places are not counted."""
        from ...kernels.maps.mask_order import FEW_ROWS

        return self._nbr[:1, :1].expand(volume, FEW_ROWS + 1)

    def expanded(self, layers: Collection[Strided]) -> None:
        """What strided layers number, sort and link new coordinates with."""
        for kernel, stride in layers:
            self._expand(box_offsets(kernel, _ONES, _ONES), stride, True)

    def together(self, volumes: Iterable[int]) -> None:
        """What the maps of a scene are ordered and packed with side by side.  volumes: kernel
        volumes of all layers."""
        from ...kernels.maps.neighbor_table import NeighborTable
        from ...kernels.maps.tile_batch import tile_batch

        for volume in sorted({*volumes, len(self._nbr)}):
            nbr = self._nbr[:1].expand(volume, -1).contiguous()
            tile_batch([NeighborTable(nbr), NeighborTable(nbr)], self.target)
            tile_batch([NeighborTable(self._many(volume), nbr)] * 2, self.target)

    def less_common(self, strided: Collection[Strided]) -> None:
        """Kernels that fewer programs launch: of other views of a map, and of large maps.

        strided: layers whose maps are ordered, too, where they are large.
        """
        from ...kernels.maps.level_bounds import level_bounds
        from ...kernels.maps.mask_order import mask_order
        from ...kernels.maps.neighbor_table import NeighborTable
        from ...kernels.maps.row_ranks import move_sorted
        from ...kernels.maps.tile_batch import tile_batch

        nbr, target = self._nbr, self.target
        self._expand(self._offsets, CHECKED.stride, False)
        move_sorted(nbr[0].long(), self._coords, self._coords, nbr[0], target)
        ends = self._coords.new_empty(2 * FEW, dtype=torch.int64)
        level_bounds(self._coords[:2], self._coords, ends, target)
        self._table.reversed = False
        self._look_up()
        for volume in {math.prod(layer.kernel) for layer in strided if layer != CHECKED}:
            single = NeighborTable(self._many(volume), nbr)
            mask_order(single, target)
            tile_batch([single] * 2, target)

    def paired(self) -> None:
        """What pairs are listed with, for gradients of weights."""
        from ...kernels.maps.pair_batch import PairBatch
        from ...kernels.maps.tile_packing import write_pairs

        order, tiles = self._order, self._tiles
        PairBatch([tiles], [len(self._offsets)], self.target).write([1])
        write_pairs(tiles, order.long(), tiles.counts, order, order, len(self._offsets), self.target)

    def _look_up(self) -> None:
        from ...kernels.maps.neighbor_lookup import neighbor_lookup

        neighbor_lookup(self._table, FEW, self._near, self.target, self._offsets.center)

    def _expand(self, offsets: Offsets, stride: tuple[int, ...], link: bool) -> None:
        from ...kernels.maps.hash_table import HashTable
        from ...kernels.maps.new_rows import owner_counters

        coords, box = self._coords, self._box
        table = HashTable.allocate(1 << 9, box.key64, coords.device, owner_counters(FEW))
        source, layout = Source.of(coords, box), box.layout(coords.device)
        expansion = Expansion(source, offsets, _ONES, stride, -1, layout, self.target)
        expansion.insert(table)
        expansion.number(FEW, "sorted", False)
        expansion.link(FEW, link=link)
