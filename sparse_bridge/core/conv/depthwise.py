"""Depthwise sparse convolution with gradients, on plain tensors."""

from __future__ import annotations

from typing import Any

import torch

from ...errors import DataTypeError, ShapeError
from ...kernels.runtime.target import Target
from ..device import trace
from ..device.no_double_backward import no_double_backward, refuse_transforms
from ..maps.kernel_map import KernelMap
from .convolution import autocast_dtype
from .dataflow import Case
from .registry import row_kernels


def _accumulator(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _gather(kmap: KernelMap, x: torch.Tensor, weight: torch.Tensor, target: Target | None) -> torch.Tensor:
    """y[r] = sum over v of x[in(v, r)] * weight[v]."""
    n_out = kmap.rulebook.n_rows[kmap.side]
    if target is not None and n_out and x.shape[0] and x.shape[1]:
        from ...kernels.gemm.depthwise import channelwise_gather

        table, reverse = kmap.rulebook.table(kmap.side)
        y = x.new_empty((n_out, x.shape[1]))
        channelwise_gather(x.contiguous(), weight, table.nbr, y, reverse, target)
        return kmap.rulebook.rows[kmap.side].fill_padding(y)
    work = _accumulator(x)
    y, wide, weights = x.new_zeros((n_out, x.shape[1]), dtype=work), x.to(work), weight.to(work)
    for v in range(kmap.n_offsets):
        x_rows, y_rows = kmap.pair_list(v)
        y.index_add_(0, y_rows, wide.index_select(0, x_rows) * weights[v])
    return y.to(x.dtype)


def _weight_gradient(kmap: KernelMap, x: torch.Tensor, dy: torch.Tensor, target: Target | None) -> torch.Tensor:
    """dw [V, C] in the accumulation dtype."""
    if target is not None and dy.shape[0] and x.shape[0] and x.shape[1]:
        from ...kernels.gemm.depthwise import channelwise_wgrad

        table, reverse = kmap.rulebook.table(kmap.side)
        dw = channelwise_wgrad(x.contiguous(), dy, table.nbr, target)
        return dw.flip(0) if reverse else dw
    work = _accumulator(x)
    x, dy = x.to(work), dy.to(work)
    rows = []
    for v in range(kmap.n_offsets):
        x_rows, y_rows = kmap.pair_list(v)
        rows.append((x.index_select(0, x_rows) * dy.index_select(0, y_rows)).sum(0))
    return torch.stack(rows)


class _Channelwise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, kmap: KernelMap, dtype: torch.dtype | None
    ) -> torch.Tensor:
        ctx.dtypes = (x.dtype, weight.dtype)
        if dtype is not None and x.dtype != torch.float64:
            x, weight = x.to(dtype), weight.to(dtype)
        if x.dtype != weight.dtype:
            raise DataTypeError(
                f"features are {x.dtype} and the weight is {weight.dtype}; convert one, or use torch.autocast."
            )
        dataflow, target = row_kernels(Case(x.device, x.dtype, kmap.rulebook.regular))
        ctx.save_for_backward(x, weight)
        ctx.problem = (kmap, target)
        trace.emit("channelwise", dataflow, kmap, x.shape[1], x.shape[1])
        return _gather(kmap, x, weight, target)

    @staticmethod
    @no_double_backward
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        kmap, target = ctx.problem
        dy = dy.to(x.dtype).contiguous()
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = _gather(kmap.transposed(), dy, weight, target).to(ctx.dtypes[0])
        if ctx.needs_input_grad[1]:
            dw = _weight_gradient(kmap, x, dy, target).to(ctx.dtypes[1])
        return dx, dw, None, None


def channelwise(x: torch.Tensor, weight: torch.Tensor, kmap: KernelMap) -> torch.Tensor:
    """Convolve every channel by itself: y[r, c] = sum over v of x[in(v, r), c] * weight[v, c].

    Args:
        x: [N_in, C], fp16 / bf16 / fp32 / fp64.
        weight: [V, C], any strides, row v for offset v of the map.
        kmap: from `map_builder`, between distinct coordinates.

    Returns: [N_out, C] in x's dtype; under autocast in the autocast dtype (fp64 is left alone).
    Raises: ShapeError, DataTypeError, UnsupportedError (transforms of torch.func, forward mode).
    """
    if x.ndim != 2 or x.shape[0] != kmap.n_in:
        raise ShapeError(f"features have shape {list(x.shape)}, the kernel map was built for {kmap.n_in} rows.")
    if tuple(weight.shape) != (kmap.n_offsets, x.shape[1]):
        raise ShapeError(
            f"the weight has shape {list(weight.shape)}; expected [{kmap.n_offsets}, {x.shape[1]}] (offsets, channels)."
        )
    if not x.is_floating_point():
        raise DataTypeError(f"features are {x.dtype}; convolution takes floating point.")
    refuse_transforms()
    y: torch.Tensor = _Channelwise.apply(x, weight, kmap, autocast_dtype(x.device))
    return y
