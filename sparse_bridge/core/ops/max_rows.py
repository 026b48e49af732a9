"""Maxima of rows whose gradient goes to one row: the smallest one that holds the maximum."""

from __future__ import annotations

from typing import Any

import torch

from ...errors import ShapeError
from ..conv.dataflow import Case
from ..conv.registry import row_kernels
from ..device import trace
from ..device.no_double_backward import no_double_backward, refuse_transforms
from ..maps.kernel_map import KernelMap
from ..maps.segments import SegmentOperator, Segments, multiply, segment_max

_NONE = torch.iinfo(torch.int64).max


def _host_window(kmap: KernelMap, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    n_out = kmap.rulebook.n_rows[kmap.side]
    y = x.new_full((n_out, x.shape[1]), float("-inf"))
    index = torch.full(y.shape, _NONE, dtype=torch.int64, device=x.device)
    for v in range(kmap.n_offsets):
        x_rows, y_rows = kmap.pair_list(v)
        value, best = x.index_select(0, x_rows), y.index_select(0, y_rows)
        best_row, row = index.index_select(0, y_rows), x_rows.unsqueeze(1).expand_as(value)
        nan, best_nan = value.isnan(), best.isnan()
        take = (value > best) | (nan & ~best_nan)
        take |= ((value == best) | (nan & best_nan)) & (row < best_row)
        y.index_copy_(0, y_rows, torch.where(take, value, best))
        index.index_copy_(0, y_rows, torch.where(take, row, best_row))
    empty = index == _NONE
    return torch.where(empty, 0, y), torch.where(empty, -1, index)


def _host_window_backward(kmap: KernelMap, index: torch.Tensor, dy: torch.Tensor, n_in: int) -> torch.Tensor:
    dx = dy.new_zeros((n_in, dy.shape[1]))
    for v in range(kmap.n_offsets):
        x_rows, y_rows = kmap.pair_list(v)
        mine = index.index_select(0, y_rows) == x_rows.unsqueeze(1)
        dx.index_add_(0, x_rows, torch.where(mine, dy.index_select(0, y_rows), 0))
    return dx


class _WindowMax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, kmap: KernelMap) -> torch.Tensor:
        dataflow, target = row_kernels(Case(x.device, x.dtype, kmap.rulebook.regular))
        n_out = kmap.rulebook.n_rows[kmap.side]
        if target is None or not (n_out and x.numel()):
            target = None
            y, index = _host_window(kmap, x)
        else:
            from ...kernels.ops.window_max import window_max as forward

            y, index = forward(x.contiguous(), kmap.rulebook.table(kmap.side)[0].nbr, target)
        trace.emit("pool", dataflow, kmap, x.shape[1], x.shape[1])
        ctx.save_for_backward(index)
        ctx.problem = (kmap, target, x.shape[0])
        return y

    @staticmethod
    @no_double_backward
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        (index,) = ctx.saved_tensors
        kmap, target, n_in = ctx.problem
        if target is None:
            return _host_window_backward(kmap, index, dy, n_in), None
        from ...kernels.ops.window_max import window_max_backward

        nbr = kmap.rulebook.table(1 - kmap.side)[0].nbr
        return window_max_backward(dy.contiguous(), index, nbr, target), None


def window_max(x: torch.Tensor, kmap: KernelMap) -> torch.Tensor:
    """Largest input of every window: x [N_in, C], any float dtype -> [N_out, C] in that dtype, 0 where a window has
    none.

    A NaN counts as the largest. Ties give their gradient to the smallest row.
    Raises: ShapeError; UnsupportedError in transforms of torch.func, in forward mode, and for a gradient of the
        gradient.
    """
    if x.ndim != 2 or x.shape[0] != kmap.n_in:
        raise ShapeError(f"features have shape {list(x.shape)}, the kernel map was built for {kmap.n_in} rows.")
    refuse_transforms()
    y: torch.Tensor = _WindowMax.apply(x, kmap)
    return y


def list_max(x: torch.Tensor, in_rows: torch.Tensor, out_rows: torch.Tensor, n_out: int) -> torch.Tensor:
    """`window_max` over pairs (in_rows, out_rows) int64 [P] in any order: [n_out, C]."""
    # The first row that holds a maximum becomes the smallest.
    in_rows, order = torch.sort(in_rows, stable=True)
    values = multiply(x, SegmentOperator(Segments(in_rows, x.shape[0]), gathers=True))
    return segment_max(values, Segments(out_rows.index_select(0, order), n_out))
