"""Products of batches. No row is the target of two additions of one call, so that results repeat
bit for bit."""

from __future__ import annotations

import torch

from .lists import Batch, Lists

_SUM = 0  # mode of torch's sums of embeddings
_SUMS = ("cuda", "cpu")  # where they are known to be there in every torch


def gather(x: torch.Tensor, rows: torch.Tensor, lists: Lists) -> torch.Tensor:
    """[n, height, C]: the rows of x [N, C] of every list, in x's dtype. rows: int32 [n * height]."""
    return x.index_select(0, rows).view(len(lists), lists.height, x.shape[1])


def gather_clean(x: torch.Tensor, rows: torch.Tensor, batch: Batch) -> torch.Tensor:
    """[n, height, C]: the rows of x [N, C] of every list, in x's dtype, zeros in place of padding. rows: int32 [n *
    height]."""
    gathered = gather(x, rows, batch)
    return gathered if batch.padding is None else gathered.masked_fill_(batch.padding, 0)


def matrices_of(stack: torch.Tensor, lists: Lists, reverse: bool) -> torch.Tensor:
    """The matrices [n, K, N] of its offsets out of those of all, [V, K, N], in their dtype: a view of neighbours,
    else a copy."""
    if lists.first >= 0 and not reverse:
        return stack.narrow(0, lists.first, len(lists))
    return stack.index_select(0, lists.offset_indices(len(stack), reverse))


def multiply(rows: torch.Tensor, matrices: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """rows [n, height, K] @ matrices [n, K, N]: [n, height, N], in `out` if that is given; all of one float dtype. A
    list is shorter than the products that ROCm releases get wrong, see `rocm.MOST_ROWS`."""
    return torch.bmm(rows, matrices) if out is None else torch.bmm(rows, matrices, out=out)


def sums_of(products: torch.Tensor, order: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """[R, C]: row r is the sum of the products order[starts[r] : starts[r + 1]], one by one.

    products: [P, C], any float dtype, which is the result's.  order: int32 [Q].  starts: int32 [R + 1].
    """
    sums: torch.Tensor = torch.embedding_bag(products, order, starts, mode=_SUM, include_last_offset=True)[0]
    return sums


def add_rows(y: torch.Tensor, products: torch.Tensor, batch: Batch) -> None:
    """y[j] += the products [n, height, C] of its pairs, in y's dtype; padding is not read. y: [N, C] float."""
    products = products.to(y.dtype)
    if y.device.type in _SUMS:
        rows, order, starts = batch.sums
        y.index_add_(0, rows, sums_of(products.flatten(0, 1), order, starts))
        return
    every = batch.y_rows.view(len(batch), -1)
    for rows, own, size in zip(every, products, batch.sizes, strict=True):
        y.index_add_(0, rows[:size], own[:size])


def add_matrices(sums: torch.Tensor, left: torch.Tensor, right: torch.Tensor, batch: Batch, reverse: bool) -> None:
    """sums [V, K, N] += left^T right of every list, [n, height, K] and [n, height, N], both with zeros in place of
    padding. Left and right are of one float dtype; what is added is cast to that of the sums."""
    products = torch.bmm(left.transpose(1, 2), right)
    sums.index_add_(0, batch.offset_indices(len(sums), reverse), products.to(sums.dtype))
