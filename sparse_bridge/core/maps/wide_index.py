"""`host_index` for boxes whose cells do not fit 64-bit keys: it compares whole coordinates.

Rare, and slower than keys.
"""

from __future__ import annotations

import itertools

import torch

from ..geometry.boxes import Box
from ..geometry.offsets import Offsets
from .host_index import HostIndex, Indexed, PairLists


def _inside(coords: torch.Tensor, box: Box) -> torch.Tensor:
    """bool [N] of int64 coordinates."""
    lo = torch.tensor(box.lo, device=coords.device)
    size = torch.tensor(box.size, device=coords.device)
    return ((coords >= lo) & (coords - lo < size)).all(1)


def _distinct(coords: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(distinct rows in lexicographic order, place of each row among them)."""
    if coords.shape[0] == 0:
        return coords, coords.new_empty(0, dtype=torch.int64)
    return torch.unique(coords, dim=0, return_inverse=True)


def _first_rank(place: torch.Tensor, rank: torch.Tensor, n_places: int) -> torch.Tensor:
    """Smallest rank of each place, int64 [n_places]."""
    first = torch.full((n_places,), torch.iinfo(torch.int64).max, device=place.device)
    return first.scatter_reduce_(0, place, rank, "amin")


def build(coords: torch.Tensor, box: Box) -> Indexed:
    """Index the rows of `coords` [N, 1 + D] in `box`; of equal coordinates the first row counts."""
    inside = _inside(coords.long(), box)
    all_alive = bool(inside.all())
    live = inside.nonzero().squeeze(1)
    distinct, place = _distinct(coords.index_select(0, live))
    rows = _first_rank(place, live, distinct.shape[0])
    inverse = torch.full((coords.shape[0],), -1, dtype=torch.int64, device=coords.device)
    inverse[live] = place
    alive = None if all_alive else torch.where(inside, 0, -1).int()
    unique = distinct.shape[0] == live.shape[0]
    return Indexed(HostIndex(coords, rows, box), alive, unique, lambda: inverse)


def _match(index: HostIndex, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(positions of `query` int64 [M, 1 + D] that are present, their rows of the index)."""
    n = index.coords.shape[0]
    distinct, place = _distinct(torch.cat([index.coords.long(), query]))
    row_of = torch.full((distinct.shape[0],), -1, dtype=torch.int64, device=query.device)
    row_of[place[:n]] = index.rows
    found = row_of.index_select(0, place[n:])
    hits = (found >= 0).nonzero().squeeze(1)
    return hits, found.index_select(0, hits)


def _collect(found: list[tuple[torch.Tensor, torch.Tensor]], mirrored: bool = False) -> PairLists:
    """One list of the pairs (in rows, out rows) of every offset."""
    in_rows, out_rows = zip(*found, strict=True)
    starts = [0, *itertools.accumulate(map(len, in_rows))]
    return PairLists(torch.cat(in_rows), torch.cat(out_rows), starts, mirrored)


def lookup(
    index: HostIndex,
    coords: torch.Tensor,
    alive: torch.Tensor | None,
    offsets: Offsets,
    stride: tuple[int, ...],
) -> PairLists:
    """Pairs (row of `index`, row of `coords`): coordinate * stride + offset, for every offset."""
    device = coords.device
    rows = torch.arange(coords.shape[0], device=device)
    if alive is not None:
        rows = (alive >= 0).nonzero().squeeze(1)
    scaled = coords.index_select(0, rows).long() * torch.tensor([1, *stride], device=device)
    found = []
    for offset in offsets.values:
        hits, x_rows = _match(index, scaled + torch.tensor([0, *offset], device=device))
        found.append((x_rows, rows.index_select(0, hits)))
    return _collect(found)


def submanifold(index: HostIndex, offsets: Offsets, n_rows: int, keep_center: bool) -> PairLists:
    """Pairs among the rows of `index`.

    keep_center: pair each of the `n_rows` rows with itself at the zero offset (dead rows too).
    """
    device, mirrored = index.rows.device, offsets.symmetric
    every = torch.arange(n_rows if keep_center else 0, device=device)
    found = []
    for v in range(len(offsets) // 2 + 1 if mirrored else len(offsets)):
        if v == offsets.center:
            found.append((every, every))
            continue
        offset = torch.tensor([0, *offsets.values[v]], device=device)
        hits, x_rows = _match(index, index.coords.long() + offset)
        found.append((x_rows, index.rows.index_select(0, hits)))
    return _collect(found, mirrored)


def expand(
    coords: torch.Tensor, alive: torch.Tensor | None, offsets: Offsets, multiplier: tuple[int, ...],
    divisor: tuple[int, ...], sign: int, out_box: Box,
) -> tuple[torch.Tensor, PairLists]:  # fmt: skip
    """`host_index.expand` for an oversized `out_box`."""
    device, n_offsets = coords.device, len(offsets)
    scale = torch.tensor([1, *multiplier], device=device)
    divide = torch.tensor([1, *divisor], device=device)
    scaled = coords.long() * scale
    candidates, rows = [], []
    for offset in offsets.values:
        reached = scaled + sign * torch.tensor([0, *offset], device=device)
        whole = torch.div(reached, divide, rounding_mode="floor")
        ok = (whole * divide == reached).all(1) & _inside(whole, out_box)
        if alive is not None:
            ok &= alive >= 0
        rows.append(ok.nonzero().squeeze(1))
        candidates.append(whole.index_select(0, rows[-1]))
    distinct, place = _distinct(torch.cat(candidates))
    rank = torch.cat([hit * n_offsets + v for v, hit in enumerate(rows)])
    order = torch.argsort(_first_rank(place, rank, distinct.shape[0]))
    number = torch.empty_like(order)
    number[order] = torch.arange(order.shape[0], device=device)
    starts = [0]
    for hit in rows:
        starts.append(starts[-1] + hit.shape[0])
    pairs = PairLists(torch.cat(rows), number.index_select(0, place), starts, False)
    return distinct.index_select(0, order).int(), pairs
