"""Pairs of rulebooks on the device: counted for several of them at once; and as the grouped
gather-GEMM follows them, kept with the rulebook."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ...kernels.runtime.target import Target
from .rulebook import Rulebook

if TYPE_CHECKING:
    from ...kernels.gemm.grouped_gemm import Groups
    from ...kernels.maps.pair_batch import PairBatch


def count_pairs(
    rulebooks: Sequence[Rulebook], target: Target, captured: bool = False, counted: PairBatch | None = None
) -> PairBatch | None:
    """Have the pairs of several maps counted; None where none have tiles. Whoever asks for their lists later, a
    backward pass say, need not wait for the device then.

    captured: only the device knows the rows; lists are there in turn, with room for as many pairs as there can be.
    counted: the same for other rulebooks of the same maps.
    """
    from ...kernels.maps.pair_batch import ListsInTurn, PairBatch

    countable = [(rulebook, *tiles) for rulebook in rulebooks if (tiles := rulebook.countable()) is not None]
    if not countable:
        return None
    if counted is None:
        lists = [rulebook.n_lists for rulebook, _, _ in countable]
        rooms = [rulebook.n_lists * rulebook.n_rows[side] for rulebook, _, side in countable] if captured else None
        counted = PairBatch([tiles for _, tiles, _ in countable], lists, target, rooms)
    source = ListsInTurn(counted) if captured else counted
    for index, (rulebook, _, side) in enumerate(countable):
        rulebook.expect(source, index, side)
    return counted


def likely_pairs(n_offsets: int, n_rows: int) -> int:
    """About how many pairs a map into so many rows has; every row one, where there is one offset. Nobody knows yet;
    it decides little: products over pairs are wide."""
    return n_rows * math.ceil(n_offsets / 3)


class PairGroups:
    """The pairs of one side, and their tiles of any height.

    groups: for the kernels.  n_pairs: how many the lists have room for.
    """

    def __init__(self, rulebook: Rulebook, side: int, target: Target) -> None:
        from ...kernels.gemm.grouped_gemm import LONGEST, Groups, pieces_of

        pairs, n_rows = rulebook.device_pairs(target), rulebook.n_rows[side]
        starts, rows = pairs.starts, (pairs.in_rows, pairs.out_rows)
        source, result = rows[side], rows[1 - side]
        n_lists, n_listed = len(starts) - 1, len(source)
        position = torch.arange(n_listed, device=source.device)
        # Lists may have room for more pairs than there are: those are no row's.
        result = torch.where(position < starts[-1], result, n_rows)
        self._offsets = torch.arange(n_lists, device=source.device)
        self._lengths, self._begins = starts.diff(), starts[:-1]
        if pairs.mirrored:
            # Offset V - 1 - v has the pairs of v, swapped; the middle one has a list of its own.
            behind = rulebook.n_offsets - n_lists
            swapped = torch.where(position < starts[behind], rows[side], n_rows)
            source, result = torch.cat([source, rows[1 - side]]), torch.cat([result, swapped])
            mirror = rulebook.n_offsets - 1 - self._offsets[:behind]
            self._offsets = torch.cat([self._offsets, mirror])
            self._lengths = torch.cat([self._lengths, self._lengths[:behind]])
            self._begins = torch.cat([self._begins, starts[:behind] + n_listed])
        self.n_pairs = len(source)
        ordered, entries = torch.sort(result, stable=True)
        bounds = torch.arange(n_rows + 1, dtype=result.dtype, device=result.device)
        begins = torch.searchsorted(ordered, bounds, out_int32=True)
        pieces: tuple[torch.Tensor, ...] = ()
        if not rulebook.regular or rulebook.n_offsets > LONGEST:
            pieces = pieces_of(begins, int(begins.diff().max()))
        self.groups: Groups = Groups(source, entries.int(), begins, pieces)
        self._tiles: dict[int, torch.Tensor] = {}

    def lists(self, block_m: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(`tiles` int32 [T, 4], bool [T]: whether a tile has pairs), read as the tiles of a `TileList` and the
        number of blocks that each visits."""
        tiles = self.tiles(block_m)
        return tiles, tiles[:, 2] > 0

    def tiles(self, block_m: int) -> torch.Tensor:
        """int32 [T, 4]: offset, first pair and number of pairs (twice) of every tile; tiles that
        are not needed have no pairs. Without waiting for the device."""
        tiles = self._tiles.get(block_m)
        if tiles is None:
            lengths = self._lengths
            per_list = (lengths + block_m - 1) // block_m
            ends = per_list.cumsum(0)
            tile = torch.arange(self.n_pairs // block_m + len(lengths), device=lengths.device)
            which = torch.searchsorted(ends, tile, right=True).clamp_(max=len(lengths) - 1)
            within = (tile - (ends - per_list)[which]) * block_m
            count = (lengths[which] - within).clamp_(0, block_m)
            first = torch.where(count > 0, self._begins[which] + within, 0)
            records = torch.stack([self._offsets[which], first, count, count], 1).int()
            tiles = self._tiles[block_m] = records
        return tiles


def pair_groups(rulebook: Rulebook, side: int, target: Target) -> PairGroups:
    """The pairs by which rows of `side` are computed; made once. Waits for the device where nobody
    has asked for pair lists before."""
    key = ("pair groups", side)
    groups: PairGroups | None = rulebook.cache.get(key)
    return rulebook.cache.put(key, PairGroups(rulebook, side, target)) if groups is None else groups
