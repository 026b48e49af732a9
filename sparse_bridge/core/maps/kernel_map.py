"""Kernel maps: a rulebook read in one direction. `transposed` reads it in the other at no cost."""

from __future__ import annotations

import dataclasses

import torch

from .fold import Duplicates
from .pair_lists import PairLists
from .rulebook import Rulebook


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class KernelMap:
    """A rulebook in one direction: y[r] = sum over offsets v and present x rows of x @ w[v].

    flipped: reads the rulebook's other direction.  x_fold, y_fold: equal coordinates folded on that
    end; the rulebook then speaks of distinct coordinates: x rows are summed into them, y rows
    copied from them. self_offset: for folded submanifold maps, the offset at which every row also
    meets itself, outside the rulebook; there the first of equal x rows stands for all instead of
    their sum.
    """

    rulebook: Rulebook
    flipped: bool = False
    x_fold: Duplicates | None = None
    y_fold: Duplicates | None = None
    self_offset: int = -1

    def __repr__(self) -> str:
        rows = f"{self.n_in} -> {self.n_out} rows"
        return f"KernelMap({self.n_offsets} offsets, {rows}, {self.device})"

    @property
    def n_offsets(self) -> int:
        return self.rulebook.n_offsets

    @property
    def n_in(self) -> int:
        """Rows of x (before folding)."""
        return (
            self.rulebook.n_rows[0 if self.flipped else 1]
            if self.x_fold is None
            else len(self.x_fold.inverse)
        )

    @property
    def n_out(self) -> int:
        """Rows of y (after unfolding)."""
        return (
            self.rulebook.n_rows[1 if self.flipped else 0]
            if self.y_fold is None
            else len(self.y_fold.inverse)
        )

    @property
    def device(self) -> torch.device:
        return self.rulebook.device

    def transposed(self) -> KernelMap:
        """The same pairs with x and y exchanged: inverse layers, dgrad."""
        if self.self_offset >= 0:  # "the first of equal rows" is said of x only
            return unfolded(self).transposed()
        return KernelMap(self.rulebook, not self.flipped, self.y_fold, self.x_fold)

    def of_first_rows(self) -> KernelMap:
        """The map in which the first of equal x rows stands for all, instead of their sum."""
        fold = self.x_fold
        return self if fold is None else dataclasses.replace(self, x_fold=fold.firsts)

    @property
    def side(self) -> int:
        return int(self.flipped)

    def pair_list(self, v: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(x rows, y rows) int64 of offset v, among distinct coordinates."""
        x_rows, y_rows = self.rulebook.pair_list(v)
        return (y_rows, x_rows) if self.flipped else (x_rows, y_rows)


def unfolded(kmap: KernelMap, halved: bool = False) -> KernelMap:
    """A folded submanifold map as explicit pairs of its rows: every row meets itself at the zero
    offset and the first of equal rows at the others. Made once and kept with the rulebook.

    halved: offsets behind the zero one are those before it, read backwards. Of equal rows only the
    first is found, so only the first meets anything there.
    """
    rulebook, fold = kmap.rulebook, kmap.x_fold
    assert fold is not None
    key = "unfolded", halved
    found = rulebook.cache.get(key)
    if found is None:
        every = torch.arange(len(fold.inverse), device=kmap.device)
        x_parts, y_parts, starts = [], [], [0]
        for v in range(kmap.n_offsets):
            if v == kmap.self_offset:
                x_rows = y_rows = every
            else:
                x_sites, y_sites = rulebook.pair_list(v)
                x_rows, y_rows = fold.first[x_sites], fold.first[y_sites]
                if not (halved and v > kmap.self_offset):
                    y_rows, counts = fold.rows_at(y_sites)
                    x_rows = x_rows.repeat_interleave(counts)
            x_parts.append(x_rows)
            y_parts.append(y_rows)
            starts.append(starts[-1] + len(x_rows))
        lists = PairLists(torch.cat(x_parts), torch.cat(y_parts), starts, False)
        n = len(every)
        found = KernelMap(Rulebook(n, n, kmap.n_offsets, kmap.device, lists=lists, regular=None))
        rulebook.cache.put(key, found)
    return found.transposed() if kmap.flipped else found
