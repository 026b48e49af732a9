"""Kernel maps written out in the caller's own rows: folded coordinates spread out again."""

from __future__ import annotations

import torch

from .kernel_map import KernelMap

_ABSENT = torch.iinfo(torch.int32).max


def row_pairs(kmap: KernelMap, v: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(x rows, y rows) of offset v, int64."""
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

    side 0: input row of every output row; side 1: output row of every input row. Of several rows
    a table holds the first.
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
