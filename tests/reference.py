"""The slow truth: coordinates in dictionaries, one loop over the offsets, everything in fp64.

Nothing here shares code with the engine. Coordinates are int [N, 1 + D] (batch first), boxes say
which of them are live, offsets are [V, D]. Results are differentiable through plain torch; pairs
are lists (x rows, y rows) per offset.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sparse_bridge.core.geometry.boxes import Box

__all__ = [
    "Pairs",
    "conv",
    "find_pairs",
    "generative_coords",
    "global_pool",
    "pool",
    "pool_gradient",
    "strided_coords",
    "submanifold_pairs",
    "swapped",
]

Pairs = list[tuple[torch.Tensor, torch.Tensor]]
Site = tuple[int, ...]
Vectors = Sequence[Sequence[int]]


def _inside(site: Site, box: Box) -> bool:
    return all(low <= c < low + extent for c, low, extent in zip(site, box.lo, box.size, strict=True))


def _live_sites(coords: torch.Tensor, box: Box) -> list[tuple[int, Site]]:
    """(row, coordinate) of the rows inside the box."""
    sites = enumerate(tuple(site) for site in coords.tolist())
    return [(row, site) for row, site in sites if _inside(site, box)]


def _rows(rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int64)


def find_pairs(
    x_coords: torch.Tensor, x_box: Box, y_coords: torch.Tensor, y_box: Box, offsets: Vectors, stride: Sequence[int]
) -> Pairs:
    """All (x row, y row) with x coordinate = stride * y coordinate + offset, both live."""
    at: dict[Site, list[int]] = {}
    for row, site in _live_sites(x_coords, x_box):
        at.setdefault(site, []).append(row)
    pairs: Pairs = []
    for offset in offsets:
        x_rows, y_rows = [], []
        for y_row, (batch, *u) in _live_sites(y_coords, y_box):
            reached = tuple(s * c + o for s, c, o in zip(stride, u, offset, strict=True))
            for x_row in at.get((batch, *reached), ()):
                x_rows.append(x_row)
                y_rows.append(y_row)
        pairs.append((_rows(x_rows), _rows(y_rows)))
    return pairs


def submanifold_pairs(coords: torch.Tensor, box: Box, offsets: Vectors) -> Pairs:
    """Pairs among the rows of one map: a look-up finds the first of equal coordinates, the zero
    offset every row itself (dead rows too)."""
    first: dict[Site, int] = {}
    for row, site in _live_sites(coords, box):
        first.setdefault(site, row)
    pairs: Pairs = []
    for offset in offsets:
        if not any(offset):
            every = torch.arange(coords.shape[0])
            pairs.append((every, every))
            continue
        x_rows, y_rows = [], []
        for row, (batch, *u) in _live_sites(coords, box):
            found = first.get((batch, *(c + o for c, o in zip(u, offset, strict=True))))
            if found is not None:
                x_rows.append(found)
                y_rows.append(row)
        pairs.append((_rows(x_rows), _rows(y_rows)))
    return pairs


def strided_coords(
    coords: torch.Tensor, box: Box, offsets: Vectors, stride: Sequence[int], out_box: Box
) -> torch.Tensor:
    """Every u in `out_box` with a live coordinate at stride * u + offset, in the order of the first
    input row that reaches it, then of the offsets."""
    found: dict[Site, None] = {}
    for _, (batch, *c) in _live_sites(coords, box):
        for offset in offsets:
            moved = [a - o for a, o in zip(c, offset, strict=True)]
            if all(m % s == 0 for m, s in zip(moved, stride, strict=True)):
                site = (batch, *(m // s for m, s in zip(moved, stride, strict=True)))
                if _inside(site, out_box):
                    found[site] = None
    return _coords(found, coords)


def generative_coords(
    coords: torch.Tensor, box: Box, offsets: Vectors, stride: Sequence[int], out_box: Box
) -> torch.Tensor:
    """Every stride * c + offset in `out_box` of a live coordinate c, in the same order."""
    found: dict[Site, None] = {}
    for _, (batch, *c) in _live_sites(coords, box):
        for offset in offsets:
            site = (batch, *(s * a + o for a, s, o in zip(c, stride, offset, strict=True)))
            if _inside(site, out_box):
                found[site] = None
    return _coords(found, coords)


def _coords(found: dict[Site, None], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(list(found), dtype=torch.int32).reshape(-1, like.shape[1])


def swapped(pairs: Pairs) -> Pairs:
    """The pairs read in the other direction."""
    return [(y_rows, x_rows) for x_rows, y_rows in pairs]


def conv(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, pairs: Pairs, n_out: int, groups: int = 1
) -> torch.Tensor:
    """y[j] = bias + sum over v and pairs (i, j) of x[i] @ w[v].

    x: [N_in, C_in].  weight: [V, C_in / groups, C_out].  bias: [C_out].
    """
    parts = []
    for columns, part_weight in zip(x.double().chunk(groups, 1), weight.double().chunk(groups, 2), strict=True):
        part = columns.new_zeros((n_out, part_weight.shape[2]))
        for v, (x_rows, y_rows) in enumerate(pairs):
            part = part.index_add(0, y_rows, columns[x_rows] @ part_weight[v])
        parts.append(part)
    y = torch.cat(parts, 1)
    return y if bias is None else y + bias.double()


def _windows(pairs: Pairs, n_out: int) -> list[list[int]]:
    """x rows of every y row."""
    windows: list[list[int]] = [[] for _ in range(n_out)]
    for x_rows, y_rows in pairs:
        for i, j in zip(x_rows.tolist(), y_rows.tolist(), strict=True):
            windows[j].append(i)
    return windows


def pool(x: torch.Tensor, pairs: Pairs, n_out: int, mode: str, floor: float = float("-inf")) -> torch.Tensor:
    """Window by window: "max" (at least `floor`), "sum" or "avg" over the present rows."""
    rows = []
    for window in _windows(pairs, n_out):
        values = x.double()[window]
        if mode == "max":
            limit = values.new_full((1, x.shape[1]), floor)
            rows.append(torch.cat([limit, values]).amax(0))
        else:
            total = values.sum(0)
            rows.append(total / max(1, len(window)) if mode == "avg" else total)
    return torch.stack(rows) if rows else x.new_zeros((0, x.shape[1]), dtype=torch.float64)


def pool_gradient(
    x: torch.Tensor, dy: torch.Tensor, pairs: Pairs, mode: str, floor: float = float("-inf")
) -> torch.Tensor:
    """dx of `pool`; a row that equals the maximum of a window takes the whole gradient of it."""
    dx = torch.zeros(x.shape, dtype=torch.float64)
    y = pool(x, pairs, dy.shape[0], mode, floor)
    for j, window in enumerate(_windows(pairs, dy.shape[0])):
        for i in window:
            if mode == "max":
                dx[i] += torch.where(x[i].double() == y[j], dy[j].double(), 0)
            else:
                dx[i] += dy[j].double() / (len(window) if mode == "avg" else 1)
    return dx


def global_pool(x: torch.Tensor, batch: torch.Tensor, batch_size: int, mode: str) -> torch.Tensor:
    """[batch_size, C]: maximum, sum or mean of each item's rows, zeros for an item without rows."""
    rows = []
    for item in range(batch_size):
        values = x.double()[batch == item]
        if mode == "max" and len(values):
            rows.append(values.amax(0))
        else:
            total = values.sum(0)
            rows.append(total / max(1, len(values)) if mode == "avg" else total)
    return torch.stack(rows)
