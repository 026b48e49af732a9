"""The union of coordinate maps."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..geometry.boxes import Box
from .coordinate_map import CoordinateMap


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
    fold = joined.duplicates()
    return fold.map, list(fold.inverse.split(sizes))
