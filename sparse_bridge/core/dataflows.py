"""The two products of sparse convolution on every dataflow.

`gather_matmul`: y[r] = act(sum_v x[in(v, r)] @ w[v] + bias); forward, and dgrad through the
transposed map and weight. `weight_gradient`: dw[v] = sum over the pairs (i, j) of v of x[i]^T
dy[j]. All take folded (distinct-coordinate) rows; channels are contiguous, accumulation is fp32
(fp64 for fp64).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from ..errors import UnsupportedError
from ..kernels.target import Target
from . import rocm, scratch
from .chunks import Chunks, chunks_of
from .kernel_map import KernelMap
from .weights import WeightLayout

__all__ = ["ACTIVATIONS", "Epilogue", "Norm", "gather_matmul", "gradients", "weight_gradient"]

ACTIVATIONS = (None, "relu", "leaky_relu", "sigmoid")
_EXPLICIT_BYTES = 64 << 20


class Norm(NamedTuple):
    """A normalisation by fixed statistics, vectors [C_out]: (x - mean) / sqrt(var + eps) * weight +
    bias."""

    mean: torch.Tensor
    var: torch.Tensor
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    eps: float


class Epilogue(NamedTuple):
    """What follows the sum: bias [C_out] or none, a norm or none, then an activation (alpha: slope
    of leaky_relu)."""

    bias: torch.Tensor | None = None
    activation: str | None = None
    alpha: float = 0.0
    norm: Norm | None = None

    @property
    def vectors(self) -> tuple[torch.Tensor | None, ...]:
        """(bias, mean, var, weight, bias of the norm)."""
        if self.norm is None:
            return self.bias, None, None, None, None
        return self.bias, *self.norm[:4]

    @property
    def tail(self) -> int:
        """Which vectors there are: 1 for a bias, plus 2 for a norm, plus 4 for its weight and
        bias."""
        tail = int(self.bias is not None)
        if self.norm is not None:
            tail += 2 if self.norm.weight is None else 6
        return tail

    def finish(self, y: torch.Tensor) -> torch.Tensor:
        """Apply to `y`, in place."""
        if self.bias is not None:
            y += self.bias.to(y.dtype)
        if self.norm is not None:
            mean, var, weight, bias = (
                None if vector is None else vector.to(y.dtype) for vector in self.norm[:4]
            )
            y = F.batch_norm(y, mean, var, weight, bias, eps=self.norm.eps)
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
    dataflow: str, target: Target | None, kmap: KernelMap, x: torch.Tensor, dy: torch.Tensor,
    dw: torch.Tensor, w: WeightLayout, precision: str,
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
    """Gather, multiply, scatter-add, one run of offsets after another; on the CPU half precision
    computes in fp32."""
    n_out, dtype = kmap.relation.n_rows[kmap.side], x.dtype
    accumulate = _accumulator(x)
    work = dtype
    if x.device.type == "cpu":
        scratch.keep_heap()
        work = accumulate
    x, weight = x.to(work), weight.to(work)
    chunks = chunks_of(kmap, _worth_merging(kmap, w))
    if chunks.order is None:
        y = x.new_empty((n_out, w.columns_out), dtype=accumulate)
    else:
        x = _in_order(x, chunks.order, "x")
        y = scratch.take("y", n_out, w.columns_out, x, accumulate)
    for group in range(w.groups):
        taps = w.matrices(weight, group)
        left, right = _columns(x, group, w.c_in), _columns(y, group, w.c_out)
        _multiply_chunks(chunks, left, taps, right)
    if chunks.order is not None:
        y = y.index_select(0, kmap.relation.lists().inverse())
    return epilogue.finish(y).to(dtype)


def _worth_merging(kmap: KernelMap, w: WeightLayout) -> bool:
    """Merged runs read a packed copy of the weight, which narrow layers with many pairs repay."""
    return w.groups == 1 and len(kmap.relation.lists().in_rows) >= 2 * w.n_offsets * w.c_in


def _multiply_chunks(
    chunks: Chunks, x: torch.Tensor, taps: Sequence[torch.Tensor], y: torch.Tensor
) -> None:
    """Write y: y[out] = sum of x[in] @ taps[v] over the chunks; columns of x and y may be
    strided."""
    same = x.dtype == y.dtype
    taps = tuple(reversed(taps)) if chunks.reverse else taps
    if chunks.dense < 0:
        y.zero_()
    elif same and y.is_contiguous():
        rocm.mm(x, taps[chunks.dense], out=y)
    else:
        y.copy_(rocm.linear(x, taps[chunks.dense]))
    n, c_in = x.shape
    windows, stacked = [x], [taps]
    if chunks.widest > 1:
        # Neighbouring rows as one wider row, neighbouring taps as one taller matrix.
        packed = torch.stack(tuple(taps))
        stacked[0] = packed.unbind(0)
        for width in range(2, chunks.widest + 1):
            windows.append(x.as_strided((n - width + 1, width * c_in), (x.stride(0), 1)))
            stacked.append(
                [packed[v : v + width].flatten(0, 1) for v in range(len(taps) - width + 1)]
            )
    rows = [scratch.take("rows", chunks.longest, window.shape[1], x, x.dtype) for window in windows]
    product = scratch.take("product", chunks.longest, y.shape[1], x, x.dtype)
    for tap, width, count, x_rows, y_rows in chunks.items:
        gathered, result = rows[width - 1][:count], product[:count]
        torch.index_select(windows[width - 1], 0, x_rows, out=gathered)
        rocm.mm(gathered, stacked[width - 1][tap], out=result)
        _add_rows(y, y_rows, result if same else result.to(y.dtype))


def _add_rows(y: torch.Tensor, rows: torch.Tensor, value: torch.Tensor) -> None:
    """y[rows] += value, rows distinct."""
    if y.device.type == "cpu":
        # The same sums as index_add_, but quicker on several threads.
        y.scatter_add_(0, rows.unsqueeze(1).expand_as(value), value)
    else:
        y.index_add_(0, rows, value)


def _in_order(x: torch.Tensor, order: torch.Tensor, name: str) -> torch.Tensor:
    out = scratch.take(name, order.shape[0], x.shape[1], x, x.dtype)
    return torch.index_select(x, 0, order, out=out)


def _per_offset_wgrad(
    kmap: KernelMap, x: torch.Tensor, dy: torch.Tensor, dw: torch.Tensor, w: WeightLayout
) -> None:
    work = _accumulator(x) if x.device.type == "cpu" else x.dtype
    x, dy = x.to(work), dy.to(work)
    chunks = chunks_of(kmap, _worth_merging(kmap, w))
    if chunks.order is not None:
        x, dy = _in_order(x, chunks.order, "x"), _in_order(dy, chunks.order, "y")
    total = scratch.take("dw", w.n_offsets * w.c_in, w.c_out, x, _accumulator(x))
    for group in range(w.groups):
        left, right = _columns(x, group, w.c_in), _columns(dy, group, w.c_out)
        _sum_chunks(chunks, left, right, total.zero_())
        results = total.view(w.n_offsets, w.c_in, w.c_out).unbind(0)
        if chunks.reverse:
            results = results[::-1]
        for tap, result in zip(w.matrices(dw, group), results, strict=True):
            tap.copy_(result)


def gradients(
    kmap: KernelMap, x: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor, dw: torch.Tensor,
    w: WeightLayout,
) -> torch.Tensor:  # fmt: skip
    """Both gradients on the per-offset dataflow: writes dw, returns dx [n_in, ...]. dy is gathered
    only once."""
    if x.shape[0] == 0 or dy.shape[0] == 0 or _worth_merging(kmap, w):
        weight_gradient("per_offset", None, kmap, x, dy, dw, w, "ieee")
        return gather_matmul(
            "per_offset", None, kmap.transposed(), dy, weight, w.transposed(), Epilogue(), "ieee"
        )
    work = _accumulator(x) if x.device.type == "cpu" else x.dtype
    dtype = x.dtype
    x, weight, dy = x.to(work), weight.to(work), dy.to(work)
    dx = x.new_empty(x.shape, dtype=_accumulator(x))
    chunks = chunks_of(kmap, False)
    # Products are added where the gradient lies, if it can hold them, else to a copy of it.
    exact = dw.dtype == dx.dtype
    total = dw if exact else torch.empty_like(dw, dtype=dx.dtype)
    total.zero_()
    for group in range(w.groups):
        left, right = _columns(x, group, w.c_in), _columns(dy, group, w.c_out)
        taps, out = w.matrices(weight, group), _columns(dx, group, w.c_in)
        _both_chunks(chunks, left, right, taps, w.matrices(total, group), out)
    if not exact:
        dw.copy_(total)
    return dx.to(dtype)


def _both_chunks(
    chunks: Chunks, x: torch.Tensor, dy: torch.Tensor, taps: Sequence[torch.Tensor],
    sums: Sequence[torch.Tensor], dx: torch.Tensor,
) -> None:  # fmt: skip
    """sums[v] [C_in, C_out] += x[in]^T dy[out]; dx[in] = the sum of dy[out] @ taps[v]^T."""
    same = dx.dtype == x.dtype
    if chunks.dense >= 0:
        _accumulate(sums[chunks.dense], x, dy, same)
        if same and dx.is_contiguous():
            rocm.mm(dy, taps[chunks.dense].t(), out=dx)
        else:
            dx.copy_(rocm.linear(dy, taps[chunks.dense].t()))
    else:
        dx.zero_()
    rows = scratch.take("rows", chunks.longest, x.shape[1], x, x.dtype)
    other = scratch.take("other", chunks.longest, dy.shape[1], x, x.dtype)
    for tap, _, count, x_rows, y_rows in chunks.items:
        left, right = rows[:count], other[:count]
        torch.index_select(x, 0, x_rows, out=left)
        torch.index_select(dy, 0, y_rows, out=right)
        _accumulate(sums[tap], left, right, same)
        rocm.mm(right, taps[tap].t(), out=left)
        _add_rows(dx, x_rows, left if same else left.to(dx.dtype))


def _sum_chunks(chunks: Chunks, x: torch.Tensor, dy: torch.Tensor, total: torch.Tensor) -> None:
    """total [V * C_in, C_out] += x[in]^T dy[out] of every chunk, at its taps."""
    n, c_in = x.shape
    same = total.dtype == x.dtype
    if chunks.dense >= 0:
        _accumulate(total.narrow(0, chunks.dense * c_in, c_in), x, dy, same)
    windows = [x]
    for width in range(2, chunks.widest + 1):
        windows.append(x.as_strided((n - width + 1, width * c_in), (x.stride(0), 1)))
    rows = [scratch.take("rows", chunks.longest, part.shape[1], x, x.dtype) for part in windows]
    other = scratch.take("product", chunks.longest, dy.shape[1], x, x.dtype)
    for tap, width, count, x_rows, y_rows in chunks.items:
        left, right = rows[width - 1][:count], other[:count]
        torch.index_select(windows[width - 1], 0, x_rows, out=left)
        torch.index_select(dy, 0, y_rows, out=right)
        _accumulate(total.narrow(0, tap * c_in, width * c_in), left, right, same)


def _accumulate(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, same: bool) -> None:
    if same:
        total.addmm_(left.t(), right)
    else:
        total += left.t() @ right


def _explicit(
    kmap: KernelMap, x: torch.Tensor, weight: torch.Tensor, w: WeightLayout, epilogue: Epilogue
) -> torch.Tensor:
    """Gather all neighbours of a slice of rows into one matrix and multiply once: the slow
    truth."""
    table, reverse = kmap.relation.table(kmap.side)
    if reverse:
        w = w.reversed()
    nbr, dtype, work = table.nbr, x.dtype, _accumulator(x)
    n_offsets, n_out = nbr.shape
    padded = torch.cat([x, x.new_zeros((1, x.shape[1]))]).to(work)
    weights = [
        torch.stack(w.matrices(weight, group)).flatten(0, 1).to(work) for group in range(w.groups)
    ]
    y = padded.new_empty((n_out, w.columns_out))
    step = max(1, _EXPLICIT_BYTES // (n_offsets * x.shape[1] * padded.element_size()))
    for begin in range(0, n_out, step):
        rows = nbr[:, begin : begin + step].t().long()
        gathered = padded[rows]  # row -1 is the row of zeros
        for group in range(w.groups):
            left = gathered[:, :, group * w.c_in : (group + 1) * w.c_in].flatten(1)
            _columns(y[begin : begin + step], group, w.c_out).copy_(
                rocm.linear(left, weights[group])
            )
    return epilogue.finish(y).to(dtype)
