"""Local and global pooling with gradients, on plain tensors."""

from __future__ import annotations

from typing import Any

import torch

from ... import log
from ...errors import DataTypeError, DeviceError, ShapeError, UnsupportedError
from ...kernels.runtime.target import Target
from ..arguments import expect, expect_count, expect_tensors
from ..conv.dataflow import Case
from ..conv.registry import row_kernels
from ..device import self_check, trace
from ..device.device_support import kernel_target
from ..device.no_double_backward import no_double_backward, refuse_transforms
from ..device.precision import KERNEL_DTYPES
from ..maps.fold import copy_rows, max_rows, sum_rows
from ..maps.kernel_map import KernelMap
from ..maps.rows import batch_of_input, fixed_items, register_grid, rows_of
from ..maps.segments import SegmentOperator, Segments, multiply, segment_max
from .max_rows import list_max
from .row_matrix import RowMatrix
from .spread import items_in_use

MODES = ("max", "avg", "sum")


def _counts(kmap: KernelMap) -> torch.Tensor:
    """Present inputs of every output row, int32 [n_out]."""
    counts = torch.zeros(kmap.rulebook.n_rows[kmap.side], dtype=torch.int32, device=kmap.device)
    for v in range(kmap.n_offsets):
        rows = kmap.pair_list(v)[1]
        counts.index_add_(0, rows, torch.ones_like(rows, dtype=torch.int32))
    return counts


def _host_forward(kmap: KernelMap, x: torch.Tensor, mode: str, floor: float) -> torch.Tensor:
    """`pool` in plain torch."""
    n_out = kmap.rulebook.n_rows[kmap.side]
    if mode == "max":
        y = x.new_full((n_out, x.shape[1]), floor)
        for v in range(kmap.n_offsets):
            x_rows, y_rows = kmap.pair_list(v)
            if not kmap.rulebook.regular:  # a list may name an output row twice
                values = x.index_select(0, x_rows)
                y.scatter_reduce_(0, y_rows.unsqueeze(1).expand_as(values), values, "amax")
                continue
            best = torch.maximum(y.index_select(0, y_rows), x.index_select(0, x_rows))
            y.index_copy_(0, y_rows, best)
        return y
    work = x if x.dtype == torch.float64 else x.float()
    y = work.new_zeros((n_out, x.shape[1]))
    for v in range(kmap.n_offsets):
        x_rows, y_rows = kmap.pair_list(v)
        y.index_add_(0, y_rows, work.index_select(0, x_rows))
    return y


def _host_backward(kmap: KernelMap, x: torch.Tensor, y: torch.Tensor, dy: torch.Tensor, mode: str) -> torch.Tensor:
    work = torch.float64 if dy.dtype == torch.float64 else torch.float32
    dx = dy.new_zeros((x.shape[0], dy.shape[1]), dtype=work)
    for v in range(kmap.n_offsets):
        x_rows, y_rows = kmap.pair_list(v)
        gradient = dy.index_select(0, y_rows).to(work)
        if mode == "max":
            gradient = gradient * (x.index_select(0, x_rows) == y.index_select(0, y_rows))
        dx.index_add_(0, x_rows, gradient)
    return dx


def _trusted(device: torch.device, target: Target, mode: str) -> bool:
    """Whether the kernels of a mode have passed the self-check."""
    problem = self_check.problem(device, target, f"{mode} pools")
    if problem is not None:
        log.once(
            ("fault", str(device), problem),
            f"On {device} {problem}. Pools are computed in torch. Please report this with the "
            "output of `python -m sparse_bridge doctor --json`.",
            level=30,
        )
    return problem is None


class _Pool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, kmap: KernelMap, mode: str, floor: float) -> torch.Tensor:
        dataflow, target = row_kernels(Case(x.device, x.dtype, kmap.rulebook.regular))
        if target is not None and not _trusted(x.device, target, mode):
            dataflow, target = "per_offset", None
        x = x.contiguous()
        n_out = kmap.rulebook.n_rows[kmap.side]
        count = None
        if target is not None and n_out and x.shape[0]:
            from ...kernels.ops.pooling import pool_forward

            y = x.new_empty((n_out, x.shape[1]))
            count = torch.empty(n_out, dtype=torch.int32, device=x.device)
            nbr = _forward_table(kmap)
            pool_forward(x, nbr, y, count, mode, floor, target)
        else:
            target = None
            y = _host_forward(kmap, x, mode, floor)
            if mode == "avg":
                count = _counts(kmap)
                y /= count.clamp(min=1).unsqueeze(1)
            y = y.to(x.dtype)
        y = kmap.rulebook.rows[kmap.side].fill_padding(y)
        trace.emit("pool", dataflow, kmap, x.shape[1], x.shape[1])
        ctx.save_for_backward(x if mode == "max" else x.new_empty((x.shape[0], 0)), y, count)
        ctx.problem = (kmap, mode, target)
        return y

    @staticmethod
    @no_double_backward
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        x, y, count = ctx.saved_tensors
        kmap, mode, target = ctx.problem
        dy = dy.contiguous()
        if target is not None:
            return _kernel_backward(kmap, x, y, dy, count, mode, target), None, None, None
        if mode == "avg":
            dy = dy / count.clamp(min=1).unsqueeze(1).to(dy.dtype)
        return _host_backward(kmap, x, y, dy, mode).to(dy.dtype), None, None, None


def _forward_table(kmap: KernelMap) -> torch.Tensor:
    # The order of offsets does not matter to a pool, so a reversed table serves as it is.
    return kmap.rulebook.table(kmap.side)[0].nbr


def _kernel_backward(
    kmap: KernelMap,
    x: torch.Tensor,
    y: torch.Tensor,
    dy: torch.Tensor,
    count: torch.Tensor | None,
    mode: str,
    target: Target,
) -> torch.Tensor:
    from ...kernels.ops.pooling import pool_backward

    dx = dy.new_empty((x.shape[0], dy.shape[1]))
    nbr = kmap.rulebook.table(1 - kmap.side)[0].nbr
    pool_backward(x, y, dy, nbr, dy if count is None else count, dx, mode, target)
    return dx


def pool(x: torch.Tensor, kmap: KernelMap, mode: str, floor: float = float("-inf")) -> torch.Tensor:
    """Pool the rows of `x` [N_in, C] along a kernel map: [N_out, C] in x's dtype, fp16 / bf16 / fp32 / fp64.

    mode: "max" (at least `floor`; the gradient goes to every input that equals its window's maximum), "avg" (over
    the present inputs) or "sum". Sums run in fp32 (fp64 for fp64).
    Raises: ShapeError, DataTypeError, DeviceError, UnsupportedError (another mode, transforms of torch.func, a
        gradient of the gradient).
    """
    if mode not in MODES:
        raise UnsupportedError(f"pooling mode {mode!r}; expected one of {', '.join(MODES)}.")
    expect_tensors("pool", x=x)
    expect(KernelMap, kmap=kmap)
    if x.ndim != 2 or x.shape[0] != kmap.n_in:
        raise ShapeError(f"features have shape {list(x.shape)}, the kernel map was built for {kmap.n_in} rows.")
    _check_dtype(x)
    if x.device != kmap.device:
        raise DeviceError(f"features are on {x.device}, the coordinates on {kmap.device}; move both to one device.")
    refuse_transforms()
    if kmap.rulebook.backward is not None:
        kmap = KernelMap(kmap.rulebook.as_lists())
    if kmap.x_fold is not None:
        if mode == "avg":
            ones = x.new_ones((x.shape[0], 1))
            total: torch.Tensor = _Pool.apply(sum_rows(x, kmap.x_fold), _plain(kmap), "sum", 0.0)
            weight: torch.Tensor = _Pool.apply(sum_rows(ones, kmap.x_fold), _plain(kmap), "sum", 0.0)
            return total / weight.clamp(min=1)
        x = max_rows(x, kmap.x_fold) if mode == "max" else sum_rows(x, kmap.x_fold)
    y: torch.Tensor = _Pool.apply(x, _plain(kmap), mode, floor)
    if kmap.y_fold is not None:
        y = copy_rows(y, kmap.y_fold)
        if mode == "max" and floor != 0:  # rows outside the grid, like all that nothing reaches
            dead = kmap.y_fold.inverse >= kmap.y_fold.n_distinct
            y = y.masked_fill(dead.unsqueeze(1), floor)
    return y


def _check_dtype(x: torch.Tensor) -> None:
    if x.dtype not in (*KERNEL_DTYPES, torch.float64):
        raise DataTypeError(f"features are {x.dtype}; expected one of fp16, bf16, fp32, fp64 (use .float()).")


def _plain(kmap: KernelMap) -> KernelMap:
    return KernelMap(kmap.rulebook, kmap.flipped)


def global_pool(x: torch.Tensor, batch: torch.Tensor, batch_size: int, mode: str) -> torch.Tensor:
    """Reduce the rows of each batch item: x [N, C], batch int32 or int64 [N] -> [batch_size, C] in x's dtype, fp16 /
    bf16 / fp32 / fp64.

    Rows whose batch index is outside 0 .. batch_size - 1 take no part, as the dead rows of a coordinate map with
    outside="ignore"; no error names them, since to look at their values would be to wait for the device. An item
    without rows gives zeros. The gradient of "max" goes to the first row that holds the maximum.
    Raises: ShapeError, DataTypeError, DeviceError, UnsupportedError, GeometryError (batch_size below 0).
    """
    if mode not in MODES:
        raise UnsupportedError(f"pooling mode {mode!r}; expected one of {', '.join(MODES)}.")
    expect_tensors("global_pool", x=x, batch=batch)
    if x.ndim != 2 or batch.shape != (x.shape[0],):
        raise ShapeError(f"features {list(x.shape)} and batch indices {list(batch.shape)}; expected [N, C], [N].")
    _check_dtype(x)
    if batch.dtype not in (torch.int32, torch.int64):
        raise DataTypeError(f"batch indices are {batch.dtype}; expected int32 or int64.")
    if x.device != batch.device:
        raise DeviceError(f"features are on {x.device}, batch indices on {batch.device}; move both to one device.")
    expect_count("batch_size", batch_size)
    if fixed_items() is not None and (rows := rows_of(x)).device is not None:
        return _up_to(rows.device, x, batch, batch_size, mode)
    batch_of_input(batch_size)
    segments = Segments(items_in_use(batch).contiguous(), batch_size)
    if mode == "max":
        return segment_max(x, segments)
    counts = segments.starts.diff() if mode == "avg" else None
    return multiply(x, SegmentOperator(segments, divisor=counts))


def _up_to(last: torch.Tensor, x: torch.Tensor, batch: torch.Tensor, batch_size: int, mode: str) -> torch.Tensor:
    """`global_pool` of the rows 0 .. last, which the device alone knows."""
    from ...kernels.ops.item_pool import item_pool

    target = kernel_target(x.device)
    if target is None or x.dtype not in KERNEL_DTYPES:
        raise UnsupportedError(f"no kernel pools {x.dtype} on {x.device} where only the device knows the rows.")
    register_grid(batch_size)
    return item_pool(x.contiguous(), batch.int(), last, batch_size, mode, target)


def pool_pairs(x: torch.Tensor, matrix: RowMatrix, mode: str) -> torch.Tensor:
    """Pool the rows of x [n_in, C] into the rows that a matrix of ones pairs them with: [n_out, C] in x's float
    dtype.

    mode: "sum", "avg" or "max" (ties give their gradient to the smallest row). No input gives 0.
    Raises: UnsupportedError in transforms of torch.func.
    """
    if mode == "max":
        return list_max(x, matrix.in_rows, matrix.out_rows, matrix.n_out)
    if mode == "sum":
        return matrix.multiply(x)
    # Sums of half types may overflow where their mean does not.
    half = x.dtype in (torch.float16, torch.bfloat16)
    total = matrix.multiply(x.float() if half else x)
    return (total / matrix.counts().clamp(min=1).unsqueeze(1).to(total.dtype)).to(x.dtype)
