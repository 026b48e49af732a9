"""Submanifold maps of rows that share coordinates: every row looks up the first of equal ones.

Rows of the result meet one row at an offset, as where coordinates differ, so it is the same product
over a table. Input rows meet several, but always all that are equal: the gradient is a product over
a table, too, of the rows' gradients and of such sums behind them. So rows that share nothing have
the bits that they have in scenes where no row does.
"""

from __future__ import annotations

import dataclasses

import torch

from .fold import Duplicates
from .kernel_map import KernelMap
from .pair_lists import PairLists
from .rulebook import Backward, Rulebook


def first_of_equal(distinct: Rulebook, fold: Duplicates, halved: bool = False) -> KernelMap:
    """The submanifold map of rows whose distinct coordinates have the map `distinct`. At the zero
    offset, where there is one, every row meets itself.

    halved: offsets behind the zero one are those before it, read backwards. Of equal rows only the
    first is found, so only the first meets anything there. Made once and kept with `distinct`.
    """
    key = "first of equal", halved
    first = distinct.cache.get(key)
    if first is None:
        rulebook = _forward(distinct, fold, halved)
        rulebook.backward = _backward(distinct, fold, halved)
        first = distinct.cache.put(key, KernelMap(rulebook))
    return first  # type: ignore[no-any-return]


def _forward(distinct: Rulebook, fold: Duplicates, halved: bool) -> Rulebook:
    sites = _Sites.of(distinct)
    y_rows, counts = fold.rows_at(sites.y)
    offsets, x_rows = (rows.repeat_interleave(counts) for rows in (sites.offsets, fold.first[sites.x]))
    if halved:
        alone = (offsets <= distinct.center) | (fold.first[fold.inverse[y_rows]] == y_rows)
        offsets, x_rows, y_rows = offsets[alone], x_rows[alone], y_rows[alone]
    n = len(fold.inverse)
    lists = _with_center(distinct, offsets, x_rows, y_rows, n)
    return Rulebook(n, n, distinct.n_offsets, distinct.device, center=distinct.center, lists=lists)


def _backward(distinct: Rulebook, fold: Duplicates, halved: bool) -> Backward:
    """Read as `distinct` is read for gradients: symmetric ones from the other end."""
    sites, backwards, n = _Sites.of(distinct), distinct.symmetric, len(fold.inverse)
    x_sites, y_sites = (sites.y, sites.x) if backwards else (sites.x, sites.y)
    new_rows = fold.first.clone()
    new_rows[fold.shared] = torch.arange(n, n + len(fold.shared), device=distinct.device)
    dy_rows = new_rows[y_sites]
    if halved:
        later = sites.offsets < distinct.center if backwards else sites.offsets > distinct.center
        dy_rows = torch.where(later, fold.first[y_sites], dy_rows)
    lists = _with_center(distinct, sites.offsets, dy_rows, fold.first[x_sites], n)
    rulebook = Rulebook(
        n + len(fold.shared), n, distinct.n_offsets, distinct.device, center=distinct.center, lists=lists
    )
    return Backward(rulebook, backwards, fold, distinct)


@dataclasses.dataclass
class _Sites:
    """The pairs of a map among distinct coordinates but for those of the zero offset, int64 [P].
    offsets: their kernel index, ascending."""

    offsets: torch.Tensor
    x: torch.Tensor
    y: torch.Tensor

    @staticmethod
    def of(distinct: Rulebook) -> _Sites:
        cached = distinct.cache.get("sites")
        if cached is None:
            offsets = [v for v in range(distinct.n_offsets) if v != distinct.center]
            pairs = [distinct.pair_list(v) for v in offsets]
            lengths = torch.tensor([len(x_rows) for x_rows, _ in pairs])
            numbers = torch.tensor(offsets).repeat_interleave(lengths).to(distinct.device)
            x_rows, y_rows = (torch.cat(rows).long() for rows in zip(*pairs, strict=True))
            cached = distinct.cache.put("sites", _Sites(numbers, x_rows, y_rows))
        return cached  # type: ignore[no-any-return]


def _with_center(
    distinct: Rulebook, offsets: torch.Tensor, x_rows: torch.Tensor, y_rows: torch.Tensor, n: int
) -> PairLists:
    """Lists of the pairs, and of `n` rows with themselves at the zero offset if there is one."""
    counts = offsets.bincount(minlength=distinct.n_offsets).tolist()
    center = distinct.center
    if center >= 0:
        at, every = sum(counts[:center]), torch.arange(n, device=distinct.device)
        x_rows, y_rows = (torch.cat([rows[:at], every, rows[at:]]) for rows in (x_rows, y_rows))
        counts[center] = n
    starts = [0]
    for count in counts:
        starts.append(starts[-1] + count)
    return PairLists(x_rows, y_rows, starts, False)
