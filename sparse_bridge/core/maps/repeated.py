"""Submanifold maps of rows that share coordinates: every row looks up the first of equal ones.

Rows of the result meet one row at an offset, as where coordinates differ, so it is the same product
over a table. Input rows meet several, but always all that are equal: the gradient is a product over
a table, too, of the rows' gradients and of such sums behind them. So rows that share nothing have
the bits that they have in scenes where no row does.
"""

from __future__ import annotations

import torch

from .fold import Backward, Duplicates
from .kernel_map import KernelMap
from .rulebook import Rulebook


def first_of_equal(distinct: Rulebook, fold: Duplicates, halved: bool = False) -> KernelMap:
    """The submanifold map of rows whose distinct coordinates have the map `distinct`. At the zero
    offset, where there is one, every row meets itself.

    halved: offsets behind the zero one are those before it, read backwards. Of equal rows only the
    first is found, so only the first meets anything there.
    """
    nbr, later = distinct.neighbors(0)[0], max(0, distinct.center)
    columns = fold.inverse, (fold.firsts if halved else fold).inverse
    parts = [_spread(nbr[:later], fold.first, columns[0]), _spread(nbr[later:], fold.first, columns[1])]
    rulebook = _over_table(distinct, torch.cat(parts), len(fold.inverse))
    rulebook.backward = Backward(fold, distinct, lambda: _gradients_map(distinct, fold, halved))
    return KernelMap(rulebook)


def _gradients_map(distinct: Rulebook, fold: Duplicates, halved: bool) -> Rulebook:
    """See `Backward`."""
    n = len(fold.inverse)
    new_rows = fold.first.clone()
    new_rows[fold.shared] = torch.arange(n, n + len(fold.shared), device=new_rows.device)
    nbr, backwards = distinct.neighbors(1)
    columns, later = fold.firsts.inverse, max(0, distinct.center)
    numbers = [new_rows, new_rows]
    if halved:
        numbers[0 if backwards else 1] = fold.first
    parts = [_spread(nbr[:later], numbers[0], columns), _spread(nbr[later:], numbers[1], columns)]
    return _over_table(distinct, torch.cat(parts), n + len(fold.shared))


def _spread(nbr: torch.Tensor, numbers: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """int32 [V, N]: for each row the column of nbr int32 [V, U] that int64 columns [N] names, or nothing where that
    is U.  numbers: int64 [U], what the rows are called that are met."""
    absent = nbr.new_full((len(nbr), 1), -1)
    met = torch.cat([nbr, absent], 1).index_select(1, columns) + 1
    named = torch.cat([absent.new_full((1,), -1), numbers.int()])
    return named.index_select(0, met.reshape(-1)).view(met.shape)


def _over_table(distinct: Rulebook, nbr: torch.Tensor, n_in: int) -> Rulebook:
    """The map with this table, int32 [V, N], in which every row meets itself at the zero offset.  n_in: rows that may
    be met."""
    from ...kernels.maps.neighbor_table import NeighborTable

    n, center = nbr.shape[1], distinct.center
    if center >= 0:
        torch.arange(n, out=nbr[center])
    return Rulebook(n_in, n, distinct.n_offsets, distinct.device, center=center, views=(NeighborTable(nbr), None))
