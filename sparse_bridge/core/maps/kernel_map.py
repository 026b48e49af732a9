"""Kernel maps: a rulebook read in one direction. `transposed` reads it in the other at no cost."""

from __future__ import annotations

import dataclasses

import torch

from .fold import Duplicates
from .rulebook import Rulebook

_ABSENT = torch.iinfo(torch.int32).max  # of tables


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class KernelMap:
    """A rulebook in one direction: y[r] = sum over offsets v and present x rows of x @ w[v].

    flipped: reads the rulebook's other direction.  x_fold, y_fold: equal coordinates folded on that
    end; the rulebook then speaks of distinct coordinates: x rows are summed into them, y rows
    copied from them.
    """

    rulebook: Rulebook
    flipped: bool = False
    x_fold: Duplicates | None = None
    y_fold: Duplicates | None = None

    def __repr__(self) -> str:
        rows = f"{self.n_in} -> {self.n_out} rows"
        return f"KernelMap({self.n_offsets} offsets, {rows}, {self.device})"

    @property
    def n_offsets(self) -> int:
        """The kernel volume."""
        return self.rulebook.n_offsets

    @property
    def n_in(self) -> int:
        """Rows of x (before folding)."""
        return self.rulebook.n_rows[0 if self.flipped else 1] if self.x_fold is None else len(self.x_fold.inverse)

    @property
    def n_out(self) -> int:
        """Rows of y (after unfolding)."""
        return self.rulebook.n_rows[1 if self.flipped else 0] if self.y_fold is None else len(self.y_fold.inverse)

    @property
    def device(self) -> torch.device:
        """Where the coordinates of both ends are."""
        return self.rulebook.device

    def transposed(self) -> KernelMap:
        """The same pairs with x and y exchanged: inverse layers, dgrad."""
        rulebook = self.rulebook
        if rulebook.backward is not None:  # "the first of equal rows" is said of x only
            rulebook = rulebook.as_lists()
        return KernelMap(rulebook, not self.flipped, self.y_fold, self.x_fold)

    def of_first_rows(self) -> KernelMap:
        """The map in which the first of equal x rows stands for all, instead of their sum."""
        fold = self.x_fold
        return self if fold is None else dataclasses.replace(self, x_fold=fold.firsts)

    @property
    def side(self) -> int:
        """The side of the rulebook that gathers x rows for y rows."""
        return int(self.flipped)

    def pair_list(self, v: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(x rows, y rows) of offset v, each [P], among distinct coordinates; dtype and errors as in
        `Rulebook.pair_list`."""
        x_rows, y_rows = self.rulebook.pair_list(v)
        return (y_rows, x_rows) if self.flipped else (x_rows, y_rows)


def row_pairs(kmap: KernelMap, v: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(x rows, y rows) of offset v, int64 [P], equal coordinates written out. Waits for the device where there are
    such, or no lists yet. Raises: Refusal as `Rulebook.pair_list`."""
    x_rows, y_rows = (rows.long() for rows in kmap.pair_list(v))
    x_fold, y_fold = kmap.x_fold, kmap.y_fold
    if x_fold is not None:
        x_rows, counts = x_fold.rows_at(x_rows)
        y_rows = y_rows.repeat_interleave(counts)
    if y_fold is not None:
        y_rows, counts = y_fold.rows_at(y_rows)
        x_rows = x_rows.repeat_interleave(counts)
    return x_rows, y_rows


def dense_table(kmap: KernelMap, side: int) -> torch.Tensor:
    """int32 [V, rows], -1 where absent.

    side 0: input row of every output row, rows = n_out; side 1: output row of every input row, rows = n_in. Of
    several rows a table holds the first. It may be the rulebook's own table: not to be written.
    """
    rulebook, at = kmap.rulebook, side ^ kmap.side
    holds = rulebook.regular and not (at and rulebook.backward)
    if kmap.x_fold is None and kmap.y_fold is None and holds:
        table, reverse = rulebook.table(at)
        return table.nbr.flip(0) if reverse else table.nbr
    rows = kmap.n_in if side else kmap.n_out
    nbr = torch.full((kmap.n_offsets, rows), _ABSENT, dtype=torch.int32, device=kmap.device)
    for v in range(kmap.n_offsets):
        pair = row_pairs(kmap, v)
        nbr[v].scatter_reduce_(0, pair[1 - side], pair[side].int(), "amin")
    return nbr.masked_fill_(nbr == _ABSENT, -1)
