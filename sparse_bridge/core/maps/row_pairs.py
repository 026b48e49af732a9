"""Kernel maps written out in the caller's own rows: folded coordinates spread out again."""

from __future__ import annotations

import torch

from .kernel_map import KernelMap


def row_pairs(kmap: KernelMap, v: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(x rows, y rows) of offset v, int64."""
    if v == kmap.self_offset:
        every = torch.arange(kmap.n_in, device=kmap.device)
        return every, every
    x_rows, y_rows = kmap.pair_list(v)
    if kmap.x_fold is not None and kmap.self_offset < 0:
        y_rows, x_rows = _spread(y_rows, x_rows, kmap.x_fold.inverse)
    if kmap.y_fold is not None:
        x_rows, y_rows = _spread(x_rows, y_rows, kmap.y_fold.inverse)
        if kmap.self_offset >= 0:
            x_rows = kmap.y_fold.first.index_select(0, x_rows)
    return x_rows, y_rows


def _spread(
    value: torch.Tensor, at: torch.Tensor, inverse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`value` at distinct coordinates `at` -> (value, row) for every row of such a coordinate."""
    table = torch.full((int(inverse.max()) + 2 if len(inverse) else 1,), -1, device=inverse.device)
    table[at.long()] = value.long()
    found = table.index_select(0, inverse)
    rows = (found >= 0).nonzero().squeeze(1)
    return found.index_select(0, rows), rows


def dense_table(kmap: KernelMap, side: int) -> torch.Tensor:
    """int32 [V, rows], -1 where absent.

    side 0: input row of every output row; side 1: output row of every input row. Of several rows
    that share a coordinate a table holds one.
    """
    if kmap.x_fold is None and kmap.y_fold is None:
        table, reverse = kmap.rulebook.table(side ^ kmap.side)
        return table.nbr.flip(0) if reverse else table.nbr
    rows = kmap.n_in if side else kmap.n_out
    nbr = torch.full((kmap.n_offsets, rows), -1, dtype=torch.int32, device=kmap.device)
    for v in range(kmap.n_offsets):
        pair = row_pairs(kmap, v)
        nbr[v].index_copy_(0, pair[1 - side], pair[side].int())
    return nbr
