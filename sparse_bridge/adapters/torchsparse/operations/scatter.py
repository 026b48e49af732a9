"""Sums of plain tensors by index, with the arguments of torch_scatter."""

from __future__ import annotations

import torch

from ....core.maps.segments import SegmentOperator, Segments, multiply
from ....core.traced import between_graphs
from ....errors import CoordinateError, DataTypeError, ShapeError

__all__ = ["broadcast", "scatter_sum"]


def broadcast(src: torch.Tensor, other: torch.Tensor, dim: int) -> torch.Tensor:
    """`src` as a view with the shape of `other`: one of one axis runs along `dim`, axes that are
    missing at the end repeat it. Raises ShapeError."""
    axis = dim + other.dim() if dim < 0 else dim
    view = src
    if src.dim() == 1:
        view = src.view((1,) * axis + (-1,))
    if view.dim() <= other.dim():
        view = view.view(tuple(view.shape) + (1,) * (other.dim() - view.dim()))
        if all(n in (1, m) for n, m in zip(view.shape, other.shape, strict=True)):
            return view.expand(other.shape)
    raise ShapeError(f"a tensor of shape {list(src.shape)} along axis {dim} does not broadcast to {list(other.shape)}.")


@between_graphs
def scatter_sum(
    src: torch.Tensor, index: torch.Tensor, dim: int = -1, out: torch.Tensor | None = None, dim_size: int | None = None
) -> torch.Tensor:
    """Sums of `src` over equal values of `index` along `dim`, differentiable, without atomics.

    index: int64, or int32, that `broadcast` brings to the shape of src.  out: is added to, in
    place, and returned.  dim_size: of the result along `dim`; None: the largest index + 1.
    Raises ShapeError, DataTypeError, CoordinateError (an index outside of the result).
    """
    if index.dtype not in (torch.int64, torch.int32):
        raise DataTypeError(f"scatter_sum got indices of {index.dtype}; expected torch.int64.")
    every = broadcast(index, src, dim)
    low, high = (int(n) for n in index.aminmax()) if index.numel() else (0, -1)
    size = dim_size if out is None else out.shape[dim]
    size = high + 1 if size is None else int(size)
    if low < 0 or high >= size:
        raise CoordinateError(f"scatter_sum got the index {low if low < 0 else high}; expected 0 <= index < {size}.")
    shape = list(src.shape)
    shape[dim] = size
    if out is not None and list(out.shape) != shape:
        raise ShapeError(f"out has shape {list(out.shape)}; expected {shape}.")
    if src.is_floating_point() and src.numel() and size:
        sums = _sums(src, index if index.dim() == 1 else every, dim, size)
    else:  # whole numbers add up alike in any order
        sums = src.new_zeros(shape).scatter_add(dim, every.long(), src)
    return sums if out is None else out.add_(sums)


def _sums(src: torch.Tensor, index: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """index: of one axis, or in the shape of src."""
    rows = src.movedim(dim, 0)
    trailing = rows.shape[1:]
    x = rows.reshape(len(rows), -1)
    if index.dim() == 1:
        sums = multiply(x, SegmentOperator(Segments(index, size)))
    else:
        width = x.shape[1]
        cells = index.movedim(dim, 0).reshape(len(rows), -1).long() * width
        cells = cells + torch.arange(width, device=cells.device)
        segments = Segments(cells.reshape(-1), size * width)
        sums = multiply(x.reshape(-1, 1), SegmentOperator(segments))
    return sums.view(size, *trailing).movedim(0, dim)
