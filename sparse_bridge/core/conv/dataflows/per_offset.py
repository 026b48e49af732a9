"""The per-offset dataflow in plain torch, for CPUs, fp64, and devices without working kernels (`core/conv/batches`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from ....hooks import TORCHS_ADD_
from ...device import rocm, workspace
from ...geometry.weights import WeightLayout, gradient_like
from ...maps.kernel_map import KernelMap
from ...maps.rulebook import Rulebook
from ..batches import products as batched
from ..batches.lists import Batch, Lists
from ..batches.rule import Limits, limits_of
from ..batches.steps import steps_of
from ..chunks import Block, Chunks, Item, Part, Slots, chunks_of
from ..dataflow import Dataflow, Gather, LayerProduct, Wgrad
from ..epilogue import Epilogue
from ..host_products import STEP, add_transposed, gather_rows, height_of, mm, together

TOGETHER = 1 << 18  # values of a part's rows that are gathered at once, at most


def accumulator(x: torch.Tensor) -> torch.dtype:
    """The dtype of sums of x (any shape): fp64 for fp64, else fp32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def columns(x: torch.Tensor, group: int, width: int) -> torch.Tensor:
    """Columns of one group, a view [N, width] of x [N, groups * width], any dtype."""
    return x if x.shape[1] == width else x.narrow(1, group * width, width)


def gather_matmul(kmap: KernelMap, x: torch.Tensor, weight: torch.Tensor, w: WeightLayout) -> torch.Tensor:
    """Gather, multiply, add up, one block of rows after another; [n_out, groups * c_out] in fp32
    (fp64 for fp64). On the CPU half precision computes in fp32."""
    n_out = kmap.rulebook.n_rows[kmap.side]
    if n_out == 0 or x.shape[0] == 0:
        return x.new_zeros((n_out, w.columns_out), dtype=accumulator(x))
    x = _working(x)[0]
    return sums_of(chunks_of(kmap, max(w.c_in, w.c_out)), n_out, x, w.stacks(weight, x.dtype), w)


def sums_of(chunks: Chunks, n_out: int, x: torch.Tensor, stacks: list[torch.Tensor], w: WeightLayout) -> torch.Tensor:
    """`gather_matmul` of x and `w.stacks` in the dtype of their products: [n_out, groups * c_out] in that dtype."""
    if w.strides[0] < 0:
        chunks = chunks.backwards()
    if w.groups == 1 and len(chunks.blocks) == 1:
        return _multiply(chunks, x, stacks[0], w.c_out)
    y = x.new_empty((n_out, w.columns_out), dtype=accumulator(x))
    for group, stack in enumerate(stacks):
        left, right = columns(x, group, w.c_in), columns(y, group, w.c_out)
        _multiply(chunks, left, stack, w.c_out, right)
    return y


def _multiply(
    chunks: Chunks, x: torch.Tensor, stack: torch.Tensor, width: int, y: torch.Tensor | None = None
) -> torch.Tensor:
    """y[j] = the sum of x[i] @ stack[v], of `width` columns; columns of x and y may be strided;
    y: new memory where none is given and there is one block."""
    matrices = _in_order(chunks, stack.unbind(0))
    at_once = _adds_at_once(x) and together(matrices[0])
    rows = x if at_once and not _large(chunks, x.shape[1]) else _gathered("rows", chunks, x)

    def multiply(item: Item, result: torch.Tensor) -> None:
        v, n_pairs, x_rows, _ = item
        gather_rows(x, x_rows, rows[:n_pairs])
        mm(rows, matrices[v], out=result)

    def multiply_part(part: Part, slots: Slots, results: Sequence[torch.Tensor]) -> None:
        gathered = x.index_select(0, slots.x_rows).split_with_sizes([len(product) for product in results])
        for v, own, result in zip(part.offsets, gathered, results, strict=True):
            rocm.cpu_mm(own, matrices[v], out=result)

    def batch(lists: Lists) -> torch.Tensor:
        factors = batched.matrices_of(stack, lists, chunks.reverse)
        return batched.multiply(batched.gather(x, lists.x_rows, lists), factors)

    limits = limits_of(x.shape[1], width)
    methods = Multiply(multiply, multiply_part if at_once else None, batch, limits, x.shape[1])
    return _sum_products(chunks, x, matrices, methods, width, y)


def on_cpu(x: torch.Tensor) -> bool:
    """Whether x (any shape, float) is where calls cost less than padding does, and half precision more than fp32."""
    return x.device.type == "cpu"


def _working(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
    """Tensors in the dtype of their products."""
    if not on_cpu(tensors[0]):
        return tensors
    workspace.keep_heap()
    dtype = accumulator(tensors[0])
    if all(tensor.dtype is dtype for tensor in tensors):
        return tensors
    return [tensor.to(dtype) for tensor in tensors]


def _in_order(chunks: Chunks, matrices: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The matrices of all offsets, as the offsets of chunks count."""
    return tuple(reversed(matrices)) if chunks.reverse else matrices


def _adds_at_once(x: torch.Tensor) -> bool:
    """Whether the products of all offsets are added up in one pass: torch has code for embeddings
    that does, of fp32 on the CPU."""
    return on_cpu(x) and x.dtype is torch.float32


def _large(pairs: Chunks | Part, width: int) -> bool:
    """Whether rows of `width` values are too much to gather for all offsets at once."""
    n_pairs = pairs.n_pairs if isinstance(pairs, Part) else pairs.products
    return n_pairs * width > TOGETHER


class Multiply(NamedTuple):
    """item: writes the products [>= n_pairs, C_out] of an item, and of the rows that fill them up.  part: writes those
    of a part, whose rows are gathered at once; None where that is no gain.  batch: returns those of a batch, [n,
    height, C_out].  limits: of batches.  width: columns that it gathers. All in the dtype of the operands: fp32 or
    fp64 on CPUs."""

    item: Callable[[Item, torch.Tensor], None]
    part: Callable[[Part, Slots, Sequence[torch.Tensor]], None] | None
    batch: Callable[[Batch], torch.Tensor]
    limits: Limits
    width: int


def _gathered(name: str, chunks: Chunks, x: torch.Tensor) -> torch.Tensor:
    """Room for the rows of `x` that any chunk gathers, rounded up to what products like."""
    n_rows = -(-chunks.longest // STEP) * STEP
    return workspace.take(name, n_rows, x.shape[1], x, x.dtype)


def _sum_products(
    chunks: Chunks,
    x: torch.Tensor,
    matrices: Sequence[torch.Tensor],
    multiply: Multiply,
    width: int,
    y: torch.Tensor | None,
) -> torch.Tensor:
    """y = the products of x at the dense offset, and of every item, in the order of the offsets:
    whatever else a map holds, a row's sum has the same bits."""
    at_once = _adds_at_once(x)
    for block in chunks.blocks:
        result = None if y is None else y[block.begin : block.end]
        total = _block_sum(block, matrices, multiply, width, x) if at_once else None
        if chunks.dense < 0 and total is not None:
            result = total if result is None else result.copy_(total)
            continue
        if result is None:
            result = x.new_empty((block.end, width), dtype=accumulator(x))
        if chunks.dense < 0:
            result.zero_()
        elif result.dtype == x.dtype:
            mm(x[block.begin :], matrices[chunks.dense], out=result)
        else:
            result.copy_(rocm.linear(x[block.begin : block.end], matrices[chunks.dense]))
        if total is not None:
            TORCHS_ADD_(result, total)
    if y is None:  # one block
        assert result is not None
        y = result
    if not at_once:
        _add_one_by_one(chunks, x, matrices, multiply, width, y)
    return y


def _add_one_by_one(
    chunks: Chunks, x: torch.Tensor, matrices: Sequence[torch.Tensor], multiply: Multiply, width: int, y: torch.Tensor
) -> None:
    """y += the products of every item. fp64 keeps to the order of the offsets, too; halves and fp32
    of GPUs whose kernels do not serve multiply lists of alike lengths together, out of turn."""
    most = height_of(chunks.longest, matrices[0])
    products = workspace.take("products", most, width, x, x.dtype)
    turns = on_cpu(x) or x.dtype == torch.float64
    alone, batches = steps_of(chunks, None if turns else multiply.limits)
    for item in alone:
        multiply.item(item, products[: height_of(item.n_pairs, matrices[0]) if turns else item.n_pairs])
        y.index_add_(0, item.y_rows, products[: item.n_pairs].to(y.dtype))
    for batch in batches:
        batched.add_rows(y, multiply.batch(batch), batch)


def _block_sum(
    block: Block, matrices: Sequence[torch.Tensor], multiply: Multiply, width: int, x: torch.Tensor
) -> torch.Tensor | None:
    """The sums of a block's products, each row's one after another; None where there are none."""
    total: torch.Tensor | None = None
    for part in block.parts:
        heights = [height_of(size, matrices[0]) for size in part.sizes]
        slots = part.slots(heights)
        n_slots = len(slots.x_rows)
        n_rows = n_slots + (part.n_rows if part.behind else 0)
        products = workspace.take("products", n_rows, width, x, x.dtype)
        results = products[:n_slots].split_with_sizes(heights)
        if multiply.part is not None and not _large(part, multiply.width):
            multiply.part(part, slots, results)
        else:
            for item, result in zip(part.items, results, strict=True):
                multiply.item(item, result)
        if total is not None:
            products[n_slots:].copy_(total)
        total = batched.sums_of(products, slots.order, slots.starts)
    return total


def weight_gradient(kmap: KernelMap, x: torch.Tensor, dy: torch.Tensor, dw: torch.Tensor, w: WeightLayout) -> None:
    """dw = the sum of x[i]^T dy[j] over the pairs of every offset, written in dw's float dtype, which sums are cast
    to.

    x: [n_in, groups * c_in].  dy: [n_out, groups * c_out] of x's dtype.  dw: the weight's shape, laid out as `w`
    says.
    """
    x, dy = _working(x, dy)
    chunks = chunks_of(kmap, max(w.c_in, w.c_out))
    with _summed(dw, accumulator(x)) as total:
        for group in range(w.groups):
            left, right = columns(x, group, w.c_in), columns(dy, group, w.c_out)
            stack = w.stacked(total, group)
            sums = _in_order(chunks, stack.unbind(0))
            if chunks.dense >= 0:
                _accumulate(sums[chunks.dense], left, right, len(left))
            alone, batches = steps_of(chunks, None if on_cpu(x) else limits_of(w.c_in, w.c_out))
            for batch in batches:
                first = batched.gather_clean(left, batch.x_rows, batch)
                other = batched.gather_clean(right, batch.y_rows, batch)
                batched.add_matrices(stack, first, other, batch, chunks.reverse)
            rows, other = _gathered("rows", chunks, left), _gathered("other", chunks, right)
            for v, n_pairs, x_rows, y_rows in alone:
                gather_rows(left, x_rows, rows[:n_pairs])
                gather_rows(right, y_rows, other[:n_pairs])
                _accumulate(sums[v], rows, other, n_pairs)


@contextmanager
def _summed(dw: torch.Tensor, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Zeros to add to: `dw` itself if it can hold such sums, else what is copied to it."""
    total = dw if dw.dtype == dtype else gradient_like(dw, dtype)
    yield total.zero_()
    if total is not dw:
        dw.copy_(total)


def gradients(
    kmap: KernelMap, x: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor, dw: torch.Tensor, w: WeightLayout
) -> torch.Tensor:
    """Both gradients on the per-offset dataflow: writes dw, returns dx [n_in, groups * c_in] in x's dtype. dy
    [n_out, groups * c_out], of x's dtype, is gathered only once. dw: any float dtype, laid out as `w` says."""
    if x.shape[0] == 0 or dy.shape[0] == 0:
        dw.zero_()
        return torch.zeros_like(x)
    dtype = x.dtype
    x, dy = _working(x, dy)
    dx = x.new_empty(x.shape, dtype=accumulator(x))
    chunks = chunks_of(kmap.transposed(), max(w.c_in, w.c_out))
    with _summed(dw, dx.dtype) as total:
        for group in range(w.groups):
            left, right = columns(x, group, w.c_in), columns(dy, group, w.c_out)
            back, sums = w.stacked(weight, group).to(x.dtype).transpose(1, 2), w.stacked(total, group)
            _both(chunks, left, right, back, sums, columns(dx, group, w.c_in))
    return dx.to(dtype)


def _both(
    chunks: Chunks, x: torch.Tensor, dy: torch.Tensor, turned: torch.Tensor, total: torch.Tensor, dx: torch.Tensor
) -> None:
    """total[v] [C_in, C_out] += x[i]^T dy[j]; dx[i] = the sum of dy[j] @ turned[v]. Chunks read dy
    and write dx."""
    back, sums = (_in_order(chunks, stack.unbind(0)) for stack in (turned, total))
    if chunks.dense >= 0:
        _accumulate(sums[chunks.dense], x, dy, len(x))
    rows, other = _gathered("rows", chunks, x), _gathered("other", chunks, dy)
    at_once = _adds_at_once(x) and together(back[0]) and sums[0].dtype is x.dtype

    def multiply(item: Item, result: torch.Tensor) -> None:
        v, n_pairs, dy_rows, x_rows = item
        gather_rows(dy, dy_rows, other[:n_pairs])
        gather_rows(x, x_rows, rows[:n_pairs])
        mm(other, back[v], out=result)
        _accumulate(sums[v], rows, other, n_pairs)

    def multiply_part(part: Part, slots: Slots, results: Sequence[torch.Tensor]) -> None:
        heights = [len(product) for product in results]
        rights = dy.index_select(0, slots.x_rows).split_with_sizes(heights)
        lefts = x.index_select(0, part.rows).t().split_with_sizes(part.sizes, 1)
        for v, right, left, result in zip(part.offsets, rights, lefts, results, strict=True):
            rocm.cpu_mm(right, back[v], out=result)
            sums[v].addmm_(left, right[: left.shape[1]])

    def batch(lists: Batch) -> torch.Tensor:
        right = batched.gather_clean(dy, lists.x_rows, lists)
        left = batched.gather_clean(x, lists.y_rows, lists)
        batched.add_matrices(total, left, right, lists, chunks.reverse)
        return batched.multiply(right, batched.matrices_of(turned, lists, chunks.reverse))

    limits, width = limits_of(x.shape[1], dy.shape[1]), x.shape[1] + dy.shape[1]
    methods = Multiply(multiply, multiply_part if at_once else None, batch, limits, width)
    _sum_products(chunks, dy, back, methods, x.shape[1], dx)


def _accumulate(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, n_rows: int) -> None:
    if total.dtype == left.dtype:
        add_transposed(total, left, right, n_rows)
    else:
        total += left[:n_rows].t() @ right[:n_rows]


class PerOffset(Dataflow):
    """Plain torch, a product for each kernel offset: on the CPU, in fp64, and where kernels do not serve."""

    name, joint = "per_offset", True

    def gather(self, product: LayerProduct) -> Gather:
        w = product.w

        def gather(rulebook: Rulebook, side: int, x: torch.Tensor, weight: torch.Tensor, end: Epilogue) -> torch.Tensor:
            return end.finish(gather_matmul(KernelMap(rulebook, bool(side)), x, weight, w), x.dtype)

        return gather

    def wgrad(self, product: LayerProduct, dtype: torch.dtype) -> Wgrad:
        w = product.w

        def wgrad(rulebook: Rulebook, side: int, x: torch.Tensor, dy: torch.Tensor, dw: torch.Tensor) -> None:
            weight_gradient(KernelMap(rulebook, bool(side)), x, dy, dw, w)

        return wgrad

    def gradients(
        self,
        product: LayerProduct,
        kmap: KernelMap,
        x: torch.Tensor,
        weight: torch.Tensor,
        dy: torch.Tensor,
        dw: torch.Tensor,
    ) -> torch.Tensor:
        """See `gradients`: dx [n_in, groups * c_in] in x's dtype, with dw written."""
        return gradients(kmap, x, weight, dy, dw, product.w)


DATAFLOW = PerOffset()
