"""Sparse matrices over rows: weighted gathers and sums with gradients and without atomics."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..device import stream_order
from ..maps.segments import Segments, multiply, reduce_sorted

_GATHER_BYTES = 256 << 20  # gathered rows are held at once up to this size, else by column blocks


class _Sorted:
    """Pairs grouped by the row they add into: rows and cols int64 [P], weights [P] or None,
    lengths [R].

    plain: row r adds up exactly one pair, number r.
    """

    def __init__(self, rows: torch.Tensor, cols: torch.Tensor, weights: torch.Tensor | None, n_rows: int) -> None:
        segments = Segments(rows, n_rows)
        order = segments.order
        self.rows, self.cols = rows.index_select(0, order), cols.index_select(0, order)
        self.weights = None if weights is None else weights.index_select(0, order)
        self.lengths = segments.starts.diff()
        self.plain = rows.shape[0] == n_rows and bool((self.lengths == 1).all())


class RowMatrix:
    """M [n_out, n_in] given as pairs: M @ x adds weight * x[in_row] into row out_row.

    out_rows, in_rows: int64 [P], any order, repeats allowed.  weights: [P] or None for ones.
    Sums run in the order of the pairs (fp32, fp64 for fp64): bitwise repeatable everywhere.
    """

    def __init__(
        self, out_rows: torch.Tensor, in_rows: torch.Tensor, weights: torch.Tensor | None, n_out: int, n_in: int
    ) -> None:
        self.out_rows, self.in_rows, self.weights = out_rows, in_rows, weights
        self.n_out, self.n_in = n_out, n_in
        self._sides: list[_Sorted | None] = [None, None]
        self._order = stream_order.of(out_rows.device)

    def transposed(self) -> RowMatrix:
        """The transpose; shares the sorted views made so far."""
        other = RowMatrix(self.in_rows, self.out_rows, self.weights, self.n_in, self.n_out)
        other._sides = self._sides[::-1]
        self._follow()
        return other

    def _follow(self) -> None:
        """Have the current stream wait for what of this was queued on another one."""
        if self._order is not None:
            self._order.wait(self._tensors)

    def _tensors(self) -> Iterator[torch.Tensor]:
        tensors = [self.out_rows, self.in_rows, self.weights]
        for side in self._sides:
            if side is not None:
                tensors += [side.rows, side.cols, side.weights, side.lengths]
        return (tensor for tensor in tensors if tensor is not None)

    def side(self, transposed: bool) -> _Sorted:
        """The pairs by output row, or by input row if `transposed`; sorted once."""
        pairs = self._sides[transposed]
        self._follow()
        if pairs is None:
            rows, cols = self.out_rows, self.in_rows
            if transposed:
                rows, cols = cols, rows
            n_rows = self.n_in if transposed else self.n_out
            pairs = _Sorted(rows, cols, self.weights, n_rows)
            if self._order is not None:
                self._order.queued()
            self._sides[transposed] = pairs
        return pairs

    def counts(self) -> torch.Tensor:
        """Pairs of every output row, int64 [n_out]."""
        return self.side(False).lengths

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """M @ x for x [n_in, C], any float dtype: [n_out, C] in x's dtype, without a gradient."""
        pairs = self.side(False)
        if pairs.plain:
            y = x.index_select(0, pairs.cols)
            return y if pairs.weights is None else (y * pairs.weights.unsqueeze(1)).to(x.dtype)
        work = torch.float64 if x.dtype == torch.float64 else torch.float32
        row_bytes = pairs.cols.shape[0] * work.itemsize
        step = max(16, _GATHER_BYTES // max(1, row_bytes))
        parts = [_columns(pairs, part, work).to(x.dtype) for part in x.split(step, dim=1)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """M @ x for x [n_in, C], any float dtype: [n_out, C] in x's dtype; differentiable in x."""
        return multiply(x, self)


def _columns(pairs: _Sorted, x: torch.Tensor, work: torch.dtype) -> torch.Tensor:
    rows = x.index_select(0, pairs.cols).to(work)
    if pairs.weights is not None:
        rows = rows * pairs.weights.unsqueeze(1).to(work)
    return reduce_sorted(rows, pairs.rows, pairs.lengths)
