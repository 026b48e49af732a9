"""Sums, means and maxima of rows by segment, and copies of segments to rows: with gradients, no
atomics, bitwise repeatable.

Every linear operation over rows is a `RowOperator`: something that multiplies and can be
transposed, which is its gradient. Sums run in fp32 (fp64 for fp64).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Protocol

import torch

from ...kernels.runtime.target import Target
from ..device.device_support import kernel_target
from ..device.no_double_backward import no_double_backward, refuse_transforms
from ..device.precision import KERNEL_DTYPES

# Rows per segment from here on: a segment is shared by several programs, or added up in pairs.
_LONG = 512
_NONE = torch.iinfo(torch.int64).max


class Segments:
    """Which segments rows belong to.

    index: int32 or int64 [N, K] or [N]; row i belongs to the segments index[i, :]. Values
    outside 0 .. n - 1 are no segment. An entry e = i * K + k is one membership.
    """

    def __init__(self, index: torch.Tensor, n: int) -> None:
        index = index.contiguous()
        self.index, self.n = index if index.ndim == 2 else index.unsqueeze(1), n

    @functools.cached_property
    def inside(self) -> torch.Tensor:
        """int64 [N, K]: the segments, n for none."""
        index = self.index.long()
        return torch.where((index >= 0) & (index < self.n), index, self.n)

    @functools.cached_property
    def _sorted(self) -> tuple[torch.Tensor, torch.Tensor]:
        key = torch.where((self.index >= 0) & (self.index < self.n), self.index, self.n).int()
        ordered, order = torch.sort(key.reshape(-1), stable=True)
        values = torch.arange(self.n + 1, dtype=torch.int32, device=key.device)
        return order, torch.searchsorted(ordered, values)

    @property
    def order(self) -> torch.Tensor:
        """int64 [N * K]: entries by segment, ascending inside, those of no segment last."""
        return self._sorted[0]

    @property
    def starts(self) -> torch.Tensor:
        """int64 [n + 1]: segment s holds order[starts[s] : starts[s + 1]]."""
        return self._sorted[1]

    @property
    def is_long(self) -> bool:
        """Whether there are few segments of many rows each."""
        n_rows, per_row = self.index.shape
        return per_row == 1 and 0 < self.n * _LONG <= n_rows


class RowOperator(Protocol):
    """A linear map from rows [N, C] to rows [M, C], in their dtype."""

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """[M, C] from x [N, C], fp16 / bf16 / fp32 / fp64, in x's dtype."""

    def transposed(self) -> RowOperator:
        """The map from [M, C] to [N, C] that takes gradients back."""


@dataclasses.dataclass(frozen=True, eq=False)
class SegmentOperator:
    """y[s] = the sum of weight[i, k] * x[i] over the entries of s, divided by divisor[s].

    gathers: the transpose, y[i] = the sum of weight[i, k] * x[s] / divisor[s] over the segments s of row i.  weight:
    [N, K] of any float dtype, or None for ones.  divisor: [n], integers or floats, or None for ones; a segment whose
    divisor is 0 becomes 0.
    """

    segments: Segments
    weight: torch.Tensor | None = None
    divisor: torch.Tensor | None = None
    gathers: bool = False

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """[n, C] from x [N, C], or [N, C] from [n, C] where it gathers; x and result in one float dtype. Products
        and sums run in fp32 (fp64 for fp64)."""
        x = x.contiguous()
        return self._gathered(x) if self.gathers else self._sums(x)

    def transposed(self) -> SegmentOperator:
        """Sums for what gathers, and the other way round."""
        return dataclasses.replace(self, gathers=not self.gathers)

    def _sums(self, x: torch.Tensor) -> torch.Tensor:
        segments, target = self.segments, target_of(x)
        if target is not None and segments.n:
            from ...kernels.ops.segment_sum import segment_sum

            y = x.new_empty((segments.n, x.shape[1]))
            segment_sum(
                x, segments.order, segments.starts, self.weight, self.divisor, y, segments.index.shape[1], target
            )
            return y
        return self._divided(_torch_sums(x, segments, self.weight)).to(x.dtype)

    def _gathered(self, x: torch.Tensor) -> torch.Tensor:
        index = self.segments.index
        (n_rows, per_row), target = index.shape, target_of(x)
        if target is not None and n_rows:
            from ...kernels.ops.voxel_ops import gather_sum

            y = x.new_empty((n_rows, x.shape[1]))
            gather_sum(x, index, self.weight, self.divisor, y, target)
            return y
        copies = per_row == 1 and self.weight is None
        work = x if copies and self.divisor is None else x.to(accumulator(x))
        work = self._divided(work)
        work = torch.cat([work, work.new_zeros((1, x.shape[1]))])
        inside = self.segments.inside
        if copies:
            return work.index_select(0, inside.reshape(-1)).to(x.dtype)
        y = work.new_zeros((n_rows, x.shape[1]))
        for k in range(per_row):
            rows = work.index_select(0, inside[:, k])
            if self.weight is not None:
                share = torch.where(inside[:, k] < self.segments.n, self.weight[:, k], 0)
                rows = rows * share.to(work.dtype).unsqueeze(1)
            y += rows
        return y.to(x.dtype)

    def _divided(self, rows: torch.Tensor) -> torch.Tensor:
        if self.divisor is None:
            return rows
        d = self.divisor.to(rows.dtype).unsqueeze(1)
        return torch.where(d > 0, rows / d.clamp(min=1e-30), 0)


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, operator: RowOperator) -> torch.Tensor:
        ctx.operator = operator
        return operator.product(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _Multiply.apply(grads[0], ctx.operator.transposed()), None


def multiply(x: torch.Tensor, operator: RowOperator) -> torch.Tensor:
    """What the operator makes of the rows x [N, C], any float dtype: [M, C] in that dtype, differentiable in x to
    any order. Raises: UnsupportedError in transforms of torch.func, in forward mode and in `torch.jit.trace`."""
    refuse_transforms()
    if not (x.requires_grad and torch.is_grad_enabled()):
        return operator.product(x)
    y: torch.Tensor = _Multiply.apply(x, operator)
    return y


def target_of(x: torch.Tensor) -> Target | None:
    """Whose kernels take x, floats of any shape; None: plain torch. That is so for empty x, for devices without
    kernels and for bf16 on GPUs without it."""
    if x.numel() == 0:
        return None
    target = kernel_target(x.device)
    return None if target and x.dtype == torch.bfloat16 and not target.has_bf16 else target


def accumulator(x: torch.Tensor) -> torch.dtype:
    """The dtype in which sums of x (any shape) run: fp64 for fp64, else fp32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def reduce_sorted(rows: torch.Tensor, segment: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Sums of rows [P, C] that stand segment by segment, each in order: [len(lengths), C] in the dtype of `rows`.

    rows: fp32 or fp64, as sums run.  segment: int64 [P], ascending.  lengths: integers [n], rows of each segment, P
    together.
    """
    if rows.device.type == "cpu":  # the same sums, faster
        total = rows.new_zeros((lengths.shape[0], rows.shape[1]))
        return total.index_add_(0, segment, rows)
    # index_add_ is atomic on a GPU; here one thread adds up a segment.
    return torch.segment_reduce(rows, "sum", lengths=lengths, axis=0, unsafe=True)


def _torch_sums(x: torch.Tensor, segments: Segments, weight: torch.Tensor | None) -> torch.Tensor:
    """fp32 (fp64) sums; how those of a segment are taken depends on its own length alone."""
    work, per_row = x.to(accumulator(x)), segments.index.shape[1]
    if x.device.type == "cpu":  # in the order of rows, which needs no sort
        total = work.new_zeros((segments.n + 1, x.shape[1]))
        for k in range(per_row):
            part = work if weight is None else work * weight[:, k : k + 1].to(work.dtype)
            total.index_add_(0, segments.inside[:, k], part)
    else:
        entries = segments.order[: int(segments.starts[-1])]
        rows = work.index_select(0, entries if per_row == 1 else entries // per_row)
        if weight is not None:
            rows = rows * weight.reshape(-1).index_select(0, entries).to(work.dtype).unsqueeze(1)
        inside = segments.inside.reshape(-1)[entries]
        total = reduce_sorted(rows, inside, segments.starts.diff())
    if weight is None and per_row == 1 and x.shape[0] >= _LONG:
        for segment in (segments.starts.diff() >= _LONG).nonzero().flatten().tolist():
            begin, end = segments.starts[segment : segment + 2].tolist()
            rows = work.index_select(0, segments.order[begin:end])
            total[segment] = rows.sum(0)
    return total[: segments.n]


def _first_largest(x: torch.Tensor, segments: Segments) -> torch.Tensor:
    """int64 [n, C]: the first row of each segment that holds its maximum, -1 for no rows. A NaN is
    larger than any number."""
    target = target_of(x)
    if target is not None and segments.is_long and x.dtype in KERNEL_DTYPES:
        from ...kernels.ops.pooling import first_largest

        shares = max(1, min(64, x.shape[0] // (_LONG * segments.n)))
        rows = first_largest(x, segments.order, segments.starts, shares, target)
        value = x.gather(0, rows.clamp(min=0).flatten(0, 1)).view_as(rows)
        best = torch.where(rows >= 0, value, float("-inf")).float().argmax(0, keepdim=True)
        # A share without rows never comes before one with rows.
        return rows.gather(0, best).squeeze(0)
    inside = segments.inside.expand_as(x)
    largest = x.new_full((segments.n + 1, x.shape[1]), float("-inf"))
    largest.scatter_reduce_(0, inside, x, "amax")
    mine = largest.gather(0, inside)
    row = torch.arange(x.shape[0], device=x.device).unsqueeze(1)
    row = torch.where((x == mine) | (x.isnan() & mine.isnan()), row, _NONE)
    first = torch.full(largest.shape, _NONE, dtype=torch.int64, device=x.device)
    first = first.scatter_reduce_(0, inside, row, "amin")[:-1]
    return torch.where(first == _NONE, -1, first)


class _Max(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, segments: Segments, ties: bool) -> torch.Tensor:
        first = _first_largest(x.contiguous(), segments)
        if x.shape[0]:
            y = torch.where(first >= 0, x.gather(0, first.clamp(min=0)), 0)
        else:
            y = x.new_zeros((segments.n, x.shape[1]))
        ctx.segments, ctx.n_rows = segments, x.shape[0]
        ctx.save_for_backward(first, *((x, y) if ties else ()))
        return y

    @staticmethod
    @no_double_backward
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        first, *values = ctx.saved_tensors
        if values:
            x, y = values
            copies = SegmentOperator(ctx.segments, gathers=True)
            equal = x == copies.product(y)
            return torch.where(equal, copies.product(dy), 0), None, None
        dx = dy.new_zeros((ctx.n_rows + 1, dy.shape[1]))
        # A row is the maximum of one segment at most: no two writes meet but in the spare row.
        dx.scatter_(0, torch.where(first >= 0, first, ctx.n_rows), dy)
        return dx[: ctx.n_rows], None, None


def segment_max(x: torch.Tensor, segments: Segments, ties: bool = False) -> torch.Tensor:
    """Largest of the rows x [N, C] of each segment, [n, C] in x's float dtype: 0 where there are none. A NaN counts
    as the largest.

    The gradient goes to the first row that holds the maximum; ties: to every row that equals it, and to none where
    it is a NaN. Rows belong to one segment at most (K = 1).
    Raises: UnsupportedError in transforms of torch.func, in forward mode, in `torch.jit.trace`, and for a gradient of
    the gradient.
    """
    refuse_transforms()
    y: torch.Tensor = _Max.apply(x, segments, ties)
    return y
