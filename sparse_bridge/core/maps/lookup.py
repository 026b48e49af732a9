"""Finding single coordinates in a coordinate map, the distinct rows of integer tables, and the
union of coordinate maps."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..geometry.boxes import Box
from ..geometry.offsets import Offsets
from . import host_index, wide_index
from .coordinate_map import CoordinateMap
from .expansion import Source, look_up
from .map_builder import search_of

_INT32 = torch.iinfo(torch.int32)


def find_rows(cmap: CoordinateMap, query: torch.Tensor) -> torch.Tensor:
    """Row of every queried coordinate, -1 where it is absent: int64 [M].

    cmap: distinct coordinates.  query: [M, 1 + D], batch first; int64 may leave the 32-bit range.
    """
    inside = (query >= _INT32.min) & (query <= _INT32.max)
    coords = query.clamp(_INT32.min, _INT32.max).int().contiguous()
    target = cmap.kernel_target()
    if target is None or coords.shape[0] == 0:
        rows = _host_rows(cmap, coords)
    else:
        ones = (1,) * cmap.box.dimension
        origin = Offsets.of([(0,) * cmap.box.dimension])
        source, hash_table = Source.of(coords, cmap.box), cmap.table(target)
        table = look_up(source, hash_table, cmap.n_rows, source.layout, origin, ones, target)
        rows = table.nbr[0].long()
    return rows if query.dtype == torch.int32 else torch.where(inside.all(1), rows, -1)


def _host_rows(cmap: CoordinateMap, coords: torch.Tensor) -> torch.Tensor:
    zero = Offsets.of([(0,) * cmap.box.dimension])
    stride = (1,) * cmap.box.dimension
    pairs = search_of(cmap.box, zero).lookup(cmap.host(), coords, None, zero, stride)
    rows = torch.full((coords.shape[0],), -1, dtype=torch.int64, device=coords.device)
    rows[pairs.out_rows] = pairs.in_rows
    return rows


def distinct_rows(table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(first row of every distinct row, the distinct row of every row), int64 [U] and [N].

    table: int32 [N, K], K >= 1.  Distinct rows are numbered in the order of their first one.
    Plain torch on every device, whatever dataflow is forced: data loaders call this on the CPU.
    """
    n_rows, device = table.shape[0], table.device
    if n_rows == 0:
        none = torch.empty(0, dtype=torch.int64, device=device)
        return none, none
    padded = torch.cat([torch.zeros_like(table[:, :1]), table], 1)
    lo, hi = torch.stack([padded.amin(0), padded.amax(0)]).tolist()
    box = Box.spanning(tuple(lo), tuple(h - c + 1 for c, h in zip(lo, hi, strict=True)))
    built = (wide_index if box.oversized else host_index).Indexed(padded, box)
    order = torch.argsort(built.index.rows)
    number = torch.empty_like(order)
    number[order] = torch.arange(order.shape[0], device=device)
    return built.index.rows.index_select(0, order), number.index_select(0, built.inverse)


def merge(maps: Sequence[CoordinateMap]) -> tuple[CoordinateMap, list[torch.Tensor]]:
    """(the union of distinct coordinate sets, its row for every row of each set, int64 [N_i]).

    Rows of the union: those of the first map in order, then what each later map adds, in order.
    """
    lo = tuple(min(m.box.lo[c] for m in maps) for c in range(len(maps[0].box.lo)))
    hi = tuple(max(m.box.lo[c] + m.box.size[c] for m in maps) for c in range(len(lo)))
    box = Box.spanning(lo, tuple(h - low for low, h in zip(lo, hi, strict=True)))
    joined = CoordinateMap(torch.cat([m.coords for m in maps]), box)
    sizes = [m.n_rows for m in maps]
    if joined.unique:
        rows = torch.arange(joined.n_rows, device=joined.device)
        return joined, list(rows.split(sizes))
    return joined.distinct_map(), list(joined.duplicates().inverse.split(sizes))
