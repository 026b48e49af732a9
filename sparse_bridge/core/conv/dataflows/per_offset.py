"""The per-offset dataflow in plain torch: gather, multiply, add up. For CPUs, fp64, and devices
without working kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from ...device import rocm, workspace
from ...geometry.weights import WeightLayout
from ...maps.kernel_map import KernelMap
from ...maps.rulebook import Rulebook
from ..chunks import Chunks, Item, chunks_of
from ..dataflow import Dataflow, Gather, LayerProduct, Wgrad
from ..epilogue import Epilogue
from ..host_products import STEP, add_transposed, mm


def accumulator(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def columns(x: torch.Tensor, group: int, width: int) -> torch.Tensor:
    return x.narrow(1, group * width, width)


def gather_matmul(
    kmap: KernelMap, x: torch.Tensor, weight: torch.Tensor, w: WeightLayout
) -> torch.Tensor:
    """Gather, multiply, scatter-add, one run of offsets after another; [n_out, groups * c_out] in
    fp32 (fp64 for fp64). On the CPU half precision computes in fp32."""
    n_out = kmap.rulebook.n_rows[kmap.side]
    if n_out == 0 or x.shape[0] == 0:
        return x.new_zeros((n_out, w.columns_out), dtype=accumulator(x))
    accumulate = accumulator(x)
    work = x.dtype
    if x.device.type == "cpu":
        workspace.keep_heap()
        work = accumulate
    x, weight = x.to(work), weight.to(work)
    chunks = chunks_of(kmap, _worth_merging(kmap, w))
    if chunks.order is None:
        y = x.new_empty((n_out, w.columns_out), dtype=accumulate)
    else:
        x = _in_order(x, chunks.order, "x")
        y = workspace.take("y", n_out, w.columns_out, x, accumulate)
    for group in range(w.groups):
        matrices = w.matrices(weight, group)
        left, right = columns(x, group, w.c_in), columns(y, group, w.c_out)
        result = _multiply_chunks(chunks, left, matrices, right)
        if w.groups > 1 and result is not right:
            right.copy_(result)
        elif result is not right:
            y = result
    if chunks.order is not None:
        y = y.index_select(0, kmap.rulebook.lists().inverse())
    return y


def _worth_merging(kmap: KernelMap, w: WeightLayout) -> bool:
    """Merged runs read a packed copy of the weight, which narrow layers with many pairs repay."""
    return w.groups == 1 and len(kmap.rulebook.lists().in_rows) >= 2 * w.n_offsets * w.c_in


def _multiply_chunks(
    chunks: Chunks, x: torch.Tensor, matrices: Sequence[torch.Tensor], y: torch.Tensor
) -> torch.Tensor:
    """y[out] = sum of x[in] @ matrices[v] over the chunks, in `y` or new memory; columns of x and y
    may be strided."""
    same = x.dtype == y.dtype
    matrices = tuple(reversed(matrices)) if chunks.reverse else matrices
    n, c_in = x.shape
    windows, stacked = [x], [matrices]
    if chunks.widest > 1:
        # Neighbouring rows as one wider row, neighbouring matrices as one taller one.
        packed = torch.stack(tuple(matrices))
        stacked[0] = packed.unbind(0)
        for width in range(2, chunks.widest + 1):
            windows.append(x.as_strided((n - width + 1, width * c_in), (x.stride(0), 1)))
            stacked.append(
                [packed[v : v + width].flatten(0, 1) for v in range(len(matrices) - width + 1)]
            )
    rows = [_gathered("rows", chunks, window) for window in windows]

    def multiply(item: Item, result: torch.Tensor) -> None:
        v, width, count, x_rows, _ = item
        gathered = rows[width - 1][:count]
        torch.index_select(windows[width - 1], 0, x_rows, out=gathered)
        mm(rows[width - 1], stacked[width - 1][v], out=result)

    if _sums_rows(y) and same:
        return _sum_products(chunks, 0, x, matrices, multiply, y)
    if chunks.dense < 0:
        y.zero_()
    elif same and y.is_contiguous():
        mm(x, matrices[chunks.dense], out=y)
    else:
        y.copy_(rocm.linear(x, matrices[chunks.dense]))
    product = workspace.take("product", chunks.longest, y.shape[1], x, x.dtype)
    for item in chunks.items:
        result = product[: item[2]]
        multiply(item, result)
        _add_rows(y, item[4], result if same else result.to(y.dtype))
    return y


def _gathered(name: str, chunks: Chunks, x: torch.Tensor) -> torch.Tensor:
    """Room for the rows of `x` that any chunk gathers, rounded up to what products like."""
    n_rows = -(-chunks.longest // STEP) * STEP
    return workspace.take(name, n_rows, x.shape[1], x, x.dtype)


def _sums_rows(y: torch.Tensor) -> bool:
    """Where sums of rows by index lists are the quickest: torch's CPU code for embeddings."""
    return y.device.type == "cpu" and y.dtype == torch.float32


def _sum_products(
    chunks: Chunks, side: int, dense_x: torch.Tensor, matrices: Sequence[torch.Tensor],
    multiply: Callable[[Item, torch.Tensor], None], y: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Products of every item (and of dense_x at the dense offset), each row's added up in one pass
    instead of one per offset: in new memory, or in `y` where there is nothing to add."""
    total: torch.Tensor | None = None
    for part in chunks.sums(side):
        products = workspace.take("products", part.products, y.shape[1], y, y.dtype)
        at = 0
        if part.dense:
            at = y.shape[0]
            mm(dense_x, matrices[chunks.dense], out=products[:at])
        for item in chunks.items[part.items]:
            multiply(item, products[at : at + item[2]])
            at += item[2]
        found = F.embedding_bag(
            part.bags, products, part.starts, mode="sum", include_last_offset=True
        )
        total = found if total is None else total.add_(found)
    return y.zero_() if total is None else total


def _add_rows(y: torch.Tensor, rows: torch.Tensor, value: torch.Tensor) -> None:
    """y[rows] += value, rows distinct."""
    if y.device.type == "cpu":
        # The same sums as index_add_, but quicker on several threads.
        y.scatter_add_(0, rows.unsqueeze(1).expand_as(value), value)
    else:
        y.index_add_(0, rows, value)


def _in_order(x: torch.Tensor, order: torch.Tensor, name: str) -> torch.Tensor:
    out = workspace.take(name, order.shape[0], x.shape[1], x, x.dtype)
    return torch.index_select(x, 0, order, out=out)


def weight_gradient(
    kmap: KernelMap, x: torch.Tensor, dy: torch.Tensor, dw: torch.Tensor, w: WeightLayout
) -> None:
    work = accumulator(x) if x.device.type == "cpu" else x.dtype
    x, dy = x.to(work), dy.to(work)
    chunks = chunks_of(kmap, _worth_merging(kmap, w))
    if chunks.order is not None:
        x, dy = _in_order(x, chunks.order, "x"), _in_order(dy, chunks.order, "y")
    total = workspace.take("dw", w.n_offsets * w.c_in, w.c_out, x, accumulator(x))
    for group in range(w.groups):
        left, right = columns(x, group, w.c_in), columns(dy, group, w.c_out)
        _sum_chunks(chunks, left, right, total.zero_())
        results = total.view(w.n_offsets, w.c_in, w.c_out).unbind(0)
        if chunks.reverse:
            results = results[::-1]
        for matrix, result in zip(w.matrices(dw, group), results, strict=True):
            matrix.copy_(result)


def gradients(
    kmap: KernelMap, x: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor, dw: torch.Tensor,
    w: WeightLayout,
) -> torch.Tensor:  # fmt: skip
    """Both gradients on the per-offset dataflow: writes dw, returns dx [n_in, ...]. dy is gathered
    only once."""
    if x.shape[0] == 0 or dy.shape[0] == 0 or _worth_merging(kmap, w):
        weight_gradient(kmap, x, dy, dw, w)
        dx = gather_matmul(kmap.transposed(), dy, weight, w.transposed())
        return dx.to(x.dtype)
    work = accumulator(x) if x.device.type == "cpu" else x.dtype
    dtype = x.dtype
    x, weight, dy = x.to(work), weight.to(work), dy.to(work)
    dx = x.new_empty(x.shape, dtype=accumulator(x))
    chunks = chunks_of(kmap, False)
    # Products are added where the gradient lies, if it can hold them, else to a copy of it.
    exact = dw.dtype == dx.dtype
    total = dw if exact else torch.empty_like(dw, dtype=dx.dtype)
    total.zero_()
    for group in range(w.groups):
        left, right = columns(x, group, w.c_in), columns(dy, group, w.c_out)
        matrices, out = w.matrices(weight, group), columns(dx, group, w.c_in)
        result = _both_chunks(chunks, left, right, matrices, w.matrices(total, group), out)
        if w.groups > 1 and result is not out:
            out.copy_(result)
        elif result is not out:
            dx = result
    if not exact:
        dw.copy_(total)
    return dx.to(dtype)


def _both_chunks(
    chunks: Chunks, x: torch.Tensor, dy: torch.Tensor, matrices: Sequence[torch.Tensor],
    sums: Sequence[torch.Tensor], dx: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """sums[v] [C_in, C_out] += x[in]^T dy[out]; dx[in] = the sum of dy[out] @ matrices[v]^T, in
    `dx` or new memory."""
    same = dx.dtype == x.dtype
    if chunks.dense >= 0:
        _accumulate(sums[chunks.dense], x, dy, len(x), same)
    rows, other = _gathered("rows", chunks, x), _gathered("other", chunks, dy)
    back = [matrix.t() for matrix in matrices]

    def multiply(item: Item, result: torch.Tensor) -> None:
        v, _, count, x_rows, y_rows = item
        torch.index_select(x, 0, x_rows, out=rows[:count])
        torch.index_select(dy, 0, y_rows, out=other[:count])
        _accumulate(sums[v], rows, other, count, same)
        mm(other, back[v], out=result)

    if _sums_rows(dx) and same:
        return _sum_products(chunks, 1, dy, back, multiply, dx)
    if chunks.dense < 0:
        dx.zero_()
    elif same and dx.is_contiguous():
        mm(dy, back[chunks.dense], out=dx)
    else:
        dx.copy_(rocm.linear(dy, back[chunks.dense]))
    product = workspace.take("product", chunks.longest, x.shape[1], x, x.dtype)
    for item in chunks.items:
        result = product[: item[2]]
        multiply(item, result)
        _add_rows(dx, item[3], result if same else result.to(dx.dtype))
    return dx


def _sum_chunks(chunks: Chunks, x: torch.Tensor, dy: torch.Tensor, total: torch.Tensor) -> None:
    """total [V * C_in, C_out] += x[in]^T dy[out] of every chunk, at its offsets."""
    n, c_in = x.shape
    same = total.dtype == x.dtype
    if chunks.dense >= 0:
        _accumulate(total.narrow(0, chunks.dense * c_in, c_in), x, dy, n, same)
    windows = [x]
    for width in range(2, chunks.widest + 1):
        windows.append(x.as_strided((n - width + 1, width * c_in), (x.stride(0), 1)))
    rows = [_gathered("rows", chunks, part) for part in windows]
    other = _gathered("other", chunks, dy)
    for v, width, count, x_rows, y_rows in chunks.items:
        left = rows[width - 1]
        torch.index_select(windows[width - 1], 0, x_rows, out=left[:count])
        torch.index_select(dy, 0, y_rows, out=other[:count])
        _accumulate(total.narrow(0, v * c_in, width * c_in), left, other, count, same)


def _accumulate(
    total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, n_rows: int, same: bool
) -> None:
    if same:
        add_transposed(total, left, right, n_rows)
    else:
        total += left[:n_rows].t() @ right[:n_rows]


class PerOffset(Dataflow):
    name, joint = "per_offset", True

    def gather(self, product: LayerProduct) -> Gather:
        w = product.w

        def gather(
            rulebook: Rulebook, side: int, x: torch.Tensor, weight: torch.Tensor, end: Epilogue
        ) -> torch.Tensor:
            return end.finish(gather_matmul(KernelMap(rulebook, bool(side)), x, weight, w)).to(
                x.dtype
            )

        return gather

    def wgrad(self, product: LayerProduct, dtype: torch.dtype) -> Wgrad:
        w = product.w

        def wgrad(
            rulebook: Rulebook, side: int, x: torch.Tensor, dy: torch.Tensor, dw: torch.Tensor
        ) -> None:
            weight_gradient(KernelMap(rulebook, bool(side)), x, dy, dw, w)

        return wgrad

    def gradients(
        self, product: LayerProduct, kmap: KernelMap, x: torch.Tensor, weight: torch.Tensor,
        dy: torch.Tensor, dw: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        return gradients(kmap, x, weight, dy, dw, product.w)


DATAFLOW = PerOffset()
