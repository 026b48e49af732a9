"""Sums of rows by lists of entries: a sparse matrix over rows, of any degrees, without atomics."""

from __future__ import annotations

import dataclasses
import functools

import torch

from .segments import accumulator, reduce_sorted, target_of


@dataclasses.dataclass(frozen=True, eq=False)
class EntrySums:
    """y[s] = the sum of x[column[e]] over the entries e of row s, divided by their number if
    `mean`.

    columns: int32 or int64 [E], row by row.  starts: int32 [n_out + 1], where each row's entries
    begin.  Rows without entries become 0.  A `RowOperator`; sums run in fp32 (fp64 for fp64),
    always in the same order.
    """

    columns: torch.Tensor
    starts: torch.Tensor
    n_in: int
    mean: bool = False

    @property
    def n_out(self) -> int:
        """Rows of the result."""
        return len(self.starts) - 1

    @functools.cached_property
    def counts(self) -> torch.Tensor:
        """Entries of every row, int32 [n_out]."""
        return self.starts.diff()

    @functools.cached_property
    def rows(self) -> torch.Tensor:
        """The row of every entry, int32 [E]."""
        every = torch.arange(self.n_out, dtype=torch.int32, device=self.starts.device)
        return every.repeat_interleave(self.counts, output_size=len(self.columns))

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """[n_out, C] from x [n_in, C], fp16 / bf16 / fp32 / fp64, in x's dtype."""
        return _sums(self, x, None, self.counts if self.mean else None)

    def transposed(self) -> _Transposed:
        """Rows [n_in, C] from [n_out, C]: where gradients go. Made once."""
        return self._transposed

    @functools.cached_property
    def _transposed(self) -> _Transposed:
        columns, order = torch.sort(self.columns, stable=True)
        bounds = torch.arange(self.n_in + 1, dtype=columns.dtype, device=columns.device)
        starts = torch.searchsorted(columns, bounds, out_int32=True)
        back = EntrySums(self.rows.index_select(0, order), starts, self.n_out)
        return _Transposed(self, back)

    @functools.cached_property
    def pieces(self) -> tuple[torch.Tensor, ...]:
        """Cuts of rows with many entries, each int32 [pieces of its level + 1], see `pieces_of`; () where no row is
        long. Waits for the device once, and once for each cut."""
        from ...kernels.gemm.grouped_gemm import pieces_of

        longest = int(self.counts.max()) if self.n_out else 0
        return pieces_of(self.starts, longest)

    @functools.cached_property
    def every(self) -> torch.Tensor:
        """int32 [most], 0, 1, ... of the most pieces that a cut has: a level's entries are all that the level before
        left."""
        most = max((len(cut) - 1 for cut in self.pieces), default=0)
        return torch.arange(most, dtype=torch.int32, device=self.starts.device)


@dataclasses.dataclass(frozen=True, eq=False)
class _Transposed:
    """x[column[e]] gets y[s] of its entries, divided as `forward` divides.  back: the sums."""

    forward: EntrySums
    back: EntrySums

    def product(self, y: torch.Tensor) -> torch.Tensor:
        share = None  # what an entry of each row counts
        if self.forward.mean:
            share = self.forward.counts.clamp(min=1).to(accumulator(y)).reciprocal()
        return _sums(self.back, y, share, None)

    def transposed(self) -> EntrySums:
        return self.forward


def _sums(sums: EntrySums, x: torch.Tensor, weight: torch.Tensor | None, count: torch.Tensor | None) -> torch.Tensor:
    """Sums of x, whose rows count `weight`, divided by `count` where it is not 0."""
    x, n_out = x.contiguous(), sums.n_out
    target = target_of(x)
    if target is None or not n_out:
        work = x.index_select(0, sums.columns).to(accumulator(x))
        if weight is not None:
            work = work * weight.index_select(0, sums.columns).to(work.dtype).unsqueeze(1)
        y = reduce_sorted(work, sums.rows, sums.counts)
        if count is not None:
            y = y / count.clamp(min=1).to(y.dtype).unsqueeze(1)
        return y.to(x.dtype)
    from ...kernels.ops.segment_sum import segment_sum

    result = x.new_empty((n_out, x.shape[1]))
    entries, pieces = sums.columns, sums.pieces
    if not pieces:
        segment_sum(x, entries, sums.starts, weight, count, result, 1, target)
        return result
    dtype = accumulator(x)
    for cut in pieces[:-1]:
        part = x.new_empty((len(cut) - 1, x.shape[1]), dtype=dtype)
        segment_sum(x, entries, cut, weight, None, part, 1, target)
        x, weight, entries = part, None, sums.every[: len(part)]
    segment_sum(x, entries, pieces[-1], None, count, result, 1, target)
    return result
