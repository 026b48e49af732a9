"""`host_index` for boxes whose cells do not fit 64-bit keys: it compares whole coordinates.

Rare, and slower than keys.
"""

from __future__ import annotations

import functools
import itertools

import torch

from ..geometry.boxes import Box
from ..geometry.host_moves import Rule
from ..geometry.offsets import Offsets
from . import host_index
from .expansion import sorted_rows
from .host_index import HostIndex
from .pair_lists import PairLists


def _inside(coords: torch.Tensor, box: Box) -> torch.Tensor:
    """bool [N] of int64 coordinates."""
    lo = torch.tensor(box.lo, device=coords.device)
    size = torch.tensor(box.size, device=coords.device)
    return ((coords >= lo) & (coords - lo < size)).all(1)


def _distinct(coords: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(distinct rows in lexicographic order, index of each row among them)."""
    if coords.shape[0] == 0:
        return coords, coords.new_empty(0, dtype=torch.int64)
    distinct, index = torch.unique(coords, dim=0, return_inverse=True)
    return distinct, index


def _first_rank(index: torch.Tensor, rank: torch.Tensor, n_groups: int) -> torch.Tensor:
    """Smallest rank of each of `n_groups`, int64; index: the place of each rank."""
    first = torch.full((n_groups,), torch.iinfo(torch.int64).max, device=index.device)
    return first.scatter_reduce_(0, index, rank, "amin")


class Indexed(host_index.Indexed):
    """`host_index.Indexed` for an oversized box."""

    @functools.cached_property
    def unique(self) -> bool:
        """Whether no two live rows share a coordinate."""
        return self._placed[1].shape[0] == self._placed[0].shape[0]

    @functools.cached_property
    def _placed(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(live rows, distinct coordinates, the coordinate of each live row)."""
        n_rows, device = self.coords.shape[0], self.coords.device
        live = torch.arange(n_rows, device=device)
        if self.alive is not None:
            live = (self.alive >= 0).nonzero().squeeze(1)
        return live, *_distinct(self.coords.index_select(0, live))

    @functools.cached_property
    def index(self) -> HostIndex:
        """The distinct live coordinates in lexicographic order."""
        live, distinct, inverse = self._placed
        return HostIndex(self.coords, _first_rank(inverse, live, distinct.shape[0]), self.box)

    @functools.cached_property
    def inverse(self) -> torch.Tensor:
        """The place of every row in `index`, int64 [N]; -1 for dead ones."""
        live, _, of_live = self._placed
        inverse = torch.full((self.coords.shape[0],), -1, dtype=torch.int64, device=live.device)
        inverse[live] = of_live
        return inverse


def _match(index: HostIndex, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(positions of `query` int64 [M, 1 + D] that are present, their rows of the index)."""
    n = index.coords.shape[0]
    distinct, inverse = _distinct(torch.cat([index.coords.long(), query]))
    row_of = torch.full((distinct.shape[0],), -1, dtype=torch.int64, device=query.device)
    row_of[inverse[:n]] = index.rows
    rows = row_of.index_select(0, inverse[n:])
    hits = (rows >= 0).nonzero().squeeze(1)
    return hits, rows.index_select(0, hits)


def _collect(pairs: list[tuple[torch.Tensor, torch.Tensor]], mirrored: bool = False) -> PairLists:
    """One list of the pairs (in rows, out rows) of every offset."""
    in_rows, out_rows = zip(*pairs, strict=True)
    starts = [0, *itertools.accumulate(map(len, in_rows))]
    return PairLists(torch.cat(in_rows), torch.cat(out_rows), starts, mirrored)


def lookup(
    index: HostIndex, coords: torch.Tensor, alive: torch.Tensor | None, offsets: Offsets, stride: tuple[int, ...]
) -> PairLists:
    """Pairs (row of `index`, row of `coords` int32 [N, 1 + D]): coordinate * stride + offset, for every offset. alive:
    int32 [N], negative for rows that find nothing."""
    device = coords.device
    rows = torch.arange(coords.shape[0], device=device)
    if alive is not None:
        rows = (alive >= 0).nonzero().squeeze(1)
    scaled = coords.index_select(0, rows).long() * torch.tensor([1, *stride], device=device)
    pairs = []
    for offset in offsets.values:
        hits, x_rows = _match(index, scaled + torch.tensor([0, *offset], device=device))
        pairs.append((x_rows, rows.index_select(0, hits)))
    return _collect(pairs)


def submanifold(index: HostIndex, offsets: Offsets, n_rows: int) -> PairLists:
    """Pairs among the rows of `index`, at the zero offset each of the `n_rows` rows with itself
    (dead rows too)."""
    device, mirrored = index.rows.device, offsets.symmetric
    every = torch.arange(n_rows, device=device)
    pairs = []
    for v in range(len(offsets) // 2 + 1 if mirrored else len(offsets)):
        if v == offsets.center:
            pairs.append((every, every))
            continue
        offset = torch.tensor([0, *offsets.values[v]], device=device)
        hits, x_rows = _match(index, index.coords.long() + offset)
        pairs.append((x_rows, index.rows.index_select(0, hits)))
    return _collect(pairs, mirrored)


def expand(
    indexed: host_index.Indexed, offsets: Offsets, rule: Rule, out_box: Box, order: str
) -> tuple[torch.Tensor, PairLists]:
    """`host_index.expand` for an `out_box` of any size: (new coordinates int32 [M, 1 + D], the pairs)."""
    coords, device, n_offsets = indexed.coords, indexed.coords.device, len(offsets)
    scale = torch.tensor([1, *rule.multiplier], device=device)
    divide = torch.tensor([1, *rule.divisor], device=device)
    scaled = coords.long() * scale
    candidates, rows = [], []
    for offset in offsets.values:
        reached = scaled + rule.sign * torch.tensor([0, *offset], device=device)
        quotient = torch.div(reached, divide, rounding_mode="floor")
        ok = (quotient * divide == reached).all(1) & _inside(quotient, out_box)
        if indexed.alive is not None:
            ok &= indexed.alive >= 0
        rows.append(ok.nonzero().squeeze(1))
        candidates.append(quotient.index_select(0, rows[-1]))
    distinct, inverse = _distinct(torch.cat(candidates))
    rank = torch.cat([hit * n_offsets + v for v, hit in enumerate(rows)])
    if order == "by_offset":
        rank = torch.arange(rank.shape[0], device=device)
    if order in ("sorted", "ascending"):
        by_rank = sorted_rows(distinct, out_box, order)
    else:
        by_rank = torch.argsort(_first_rank(inverse, rank, distinct.shape[0]))
    number = torch.empty_like(by_rank)
    number[by_rank] = torch.arange(by_rank.shape[0], device=device)
    starts = [0]
    for hit in rows:
        starts.append(starts[-1] + hit.shape[0])
    pairs = PairLists(torch.cat(rows), number.index_select(0, inverse), starts, False)
    return distinct.index_select(0, by_rank).int(), pairs
