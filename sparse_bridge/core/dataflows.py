"""The two products of sparse convolution on every dataflow.

`gather_matmul`: y[r] = act(sum_v x[in(v, r)] @ w[v] + bias); forward, and dgrad through the transposed map and weight.
`weight_gradient`: dw[v] = sum over the pairs (i, j) of v of x[i]^T dy[j].
All take folded (distinct-coordinate) rows; channels are contiguous, accumulation is fp32 (fp64 for fp64).
"""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F

from ..errors import UnsupportedError
from ..kernels.target import Target
from .kernel_map import KernelMap
from .weights import WeightLayout

__all__ = ["ACTIVATIONS", "Epilogue", "gather_matmul", "weight_gradient"]

ACTIVATIONS = (None, "relu", "leaky_relu", "sigmoid")
_EXPLICIT_BYTES = 64 << 20
_CHUNK = 4096  # pairs multiplied at a time: both buffers stay in a core's cache


@dataclasses.dataclass(frozen=True)
class Epilogue:
    """What follows the sum: bias [C_out] or none, then an activation (alpha: slope of leaky_relu)."""

    bias: torch.Tensor | None = None
    activation: str | None = None
    alpha: float = 0.0

    def finish(self, y: torch.Tensor) -> torch.Tensor:
        """Apply to `y`, in place."""
        if self.bias is not None:
            y += self.bias.to(y.dtype)
        if self.activation == "relu":
            y.relu_()
        elif self.activation == "leaky_relu":
            F.leaky_relu(y, self.alpha, inplace=True)
        elif self.activation == "sigmoid":
            y.sigmoid_()
        elif self.activation is not None:
            raise UnsupportedError(
                f"activation {self.activation!r}; expected one of {ACTIVATIONS}."
            )
        return y


def gather_matmul(
    dataflow: str, target: Target | None, kmap: KernelMap, x: torch.Tensor, weight: torch.Tensor,
    w: WeightLayout, epilogue: Epilogue, precision: str,
) -> torch.Tensor:  # fmt: skip
    """x [n_in, groups * c_in] -> y [n_out, groups * c_out] in x's dtype."""
    n_out = kmap.relation.n_rows[kmap.side]
    if n_out == 0 or x.shape[0] == 0:
        y = x.new_zeros((n_out, w.columns_out))
        return epilogue.finish(y)
    if target is not None and dataflow in ("masked", "unmasked"):
        from .plan import triton_gather

        return triton_gather(dataflow, target, kmap, x, weight, w, epilogue, precision)
    if dataflow == "explicit":
        return _explicit(kmap, x, weight, w, epilogue)
    return _per_offset(kmap, x, weight, w, epilogue)


def weight_gradient(
    dataflow: str, target: Target | None, kmap: KernelMap, x: torch.Tensor, dy: torch.Tensor, dw: torch.Tensor,
    w: WeightLayout, precision: str,
) -> None:  # fmt: skip
    """Write dw (any float dtype) from x [n_in, ...] and dy [n_out, ...]."""
    if x.shape[0] == 0 or dy.shape[0] == 0:
        dw.zero_()
    elif target is not None and dataflow in ("masked", "unmasked"):
        from .plan import triton_wgrad

        triton_wgrad(target, kmap, x, dy, dw, w, precision)
    else:
        _per_offset_wgrad(kmap, x, dy, dw, w)


def _accumulator(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _columns(x: torch.Tensor, group: int, width: int) -> torch.Tensor:
    return x.narrow(1, group * width, width)


def _per_offset(
    kmap: KernelMap, x: torch.Tensor, weight: torch.Tensor, w: WeightLayout, epilogue: Epilogue
) -> torch.Tensor:
    """Gather, multiply, scatter-add, one offset after another; on the CPU half precision computes in fp32."""
    n_out, dtype = kmap.relation.n_rows[kmap.side], x.dtype
    accumulate = _accumulator(x)
    work = accumulate if x.device.type == "cpu" else dtype
    x, weight = x.to(work), weight.to(work)
    lists = kmap.relation.lists()
    if lists.order is not None:
        x = x.index_select(0, lists.order)
    center = kmap.relation.center
    dense = center >= 0 and kmap.place_list(center)[0].shape[0] == n_out == x.shape[0]
    y = x.new_empty((n_out, w.columns_out), dtype=accumulate)
    if dense:
        for group in range(w.groups):
            left, right = _columns(x, group, w.c_in), w.matrix(weight, center, group)
            if w.groups == 1 and work == accumulate:
                torch.mm(left, right, out=y)
            else:
                _columns(y, group, w.c_out).copy_(left @ right)
    else:
        y.zero_()
    scratch = _Scratch(x, w)
    for v in range(w.n_offsets):
        if dense and v == center:
            continue
        x_rows, y_rows = kmap.place_list(v)
        for begin in range(0, x_rows.shape[0], _CHUNK):
            rows = slice(begin, begin + _CHUNK)
            scratch.add(y, x, weight, w, v, x_rows[rows], y_rows[rows])
    if lists.order is not None:
        y = y.index_select(0, lists.inverse())
    return epilogue.finish(y).to(dtype)


class _Scratch:
    """Two buffers for the gathered rows and their products, reused by every chunk: fresh memory for each would cost more
    than the products of narrow layers."""

    def __init__(self, x: torch.Tensor, w: WeightLayout) -> None:
        rows = min(_CHUNK, x.shape[0])
        self.rows = x.new_empty((rows, w.columns_in))
        self.product = x.new_empty((rows, w.columns_out))

    def add(self, y, x, weight, w: WeightLayout, v: int, x_rows, y_rows) -> None:  # type: ignore[no-untyped-def]
        """y[y_rows] += x[x_rows] @ w[v]"""
        n = x_rows.shape[0]
        if n > self.rows.shape[0]:  # a row may meet several others only in pair lists of the user
            self.rows, self.product = (b.new_empty((n, b.shape[1])) for b in (self.rows, self.product))
        rows, product = self.rows[:n], self.product[:n]
        torch.index_select(x, 0, x_rows, out=rows)
        for group in range(w.groups):
            left = _columns(rows, group, w.c_in)
            out = _columns(product, group, w.c_out)
            if w.groups == 1:
                torch.mm(left, w.matrix(weight, v), out=out)
            else:
                out.copy_(left @ w.matrix(weight, v, group))
        y.index_add_(0, y_rows, product.to(y.dtype))


def _per_offset_wgrad(
    kmap: KernelMap, x: torch.Tensor, dy: torch.Tensor, dw: torch.Tensor, w: WeightLayout
) -> None:
    work = _accumulator(x) if x.device.type == "cpu" else x.dtype
    x, dy = x.to(work), dy.to(work)
    order = kmap.relation.lists().order
    if order is not None:
        x, dy = x.index_select(0, order), dy.index_select(0, order)
    center = kmap.relation.center
    for v in range(w.n_offsets):
        x_rows, y_rows = kmap.place_list(v)
        if v == center and x_rows.shape[0] == x.shape[0] == dy.shape[0]:
            left, right = x, dy
        else:
            left, right = x.index_select(0, x_rows), dy.index_select(0, y_rows)
        for group in range(w.groups):
            product = _columns(left, group, w.c_in).t() @ _columns(right, group, w.c_out)
            w.matrix(dw, v, group).copy_(product)


def _explicit(
    kmap: KernelMap, x: torch.Tensor, weight: torch.Tensor, w: WeightLayout, epilogue: Epilogue
) -> torch.Tensor:
    """Gather all neighbours of a slice of rows into one matrix and multiply once: the slow truth."""
    table, reverse = kmap.relation.table(kmap.side)
    if reverse:
        w = w.reversed()
    nbr, dtype, work = table.nbr, x.dtype, _accumulator(x)
    n_offsets, n_out = nbr.shape
    padded = torch.cat([x, x.new_zeros((1, x.shape[1]))]).to(work)
    weights = [
        torch.stack([w.matrix(weight, v, group) for v in range(n_offsets)]).flatten(0, 1).to(work)
        for group in range(w.groups)
    ]
    y = padded.new_empty((n_out, w.columns_out))
    step = max(1, _EXPLICIT_BYTES // (n_offsets * x.shape[1] * padded.element_size()))
    for begin in range(0, n_out, step):
        rows = nbr[:, begin : begin + step].t().long()
        gathered = padded[rows]  # row -1 is the row of zeros
        for group in range(w.groups):
            left = gathered[:, :, group * w.c_in : (group + 1) * w.c_in].flatten(1)
            _columns(y[begin : begin + step], group, w.c_out).copy_(left @ weights[group])
    return epilogue.finish(y).to(dtype)
