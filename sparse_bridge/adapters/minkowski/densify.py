"""`SparseTensor.dense` and `.sparse`."""

from __future__ import annotations

from typing import Any

import torch

from ...errors import ContractError
from .dense import to_dense
from .errors import DenseIndexError

__all__ = ["coo", "dense"]


def dense(x: Any, shape: Any, minimum: Any, contract: bool) -> tuple[torch.Tensor, Any, Any]:
    """(dense tensor, min_coordinate, tensor stride) of a SparseTensor; see its method."""
    if shape is not None and not isinstance(shape, torch.Size):
        raise ContractError(f"shape is {shape!r}; expected a torch.Size.")
    if len(x) == 0:
        if shape is None:
            raise ContractError("dense() of an empty tensor needs a shape.")
        size = (shape[0], x.F.shape[1], *shape[2:])
        zeros = x.F.new_zeros(size) + x.F.sum().to(x.F.dtype)
        return zeros, torch.zeros(x.D, dtype=torch.int32), x.tensor_stride
    if minimum is not None and not isinstance(minimum, torch.Tensor):
        raise ContractError(f"min_coordinate is {minimum!r}; expected a torch.IntTensor.")
    result, reported = to_dense(x.F, x.C, x.tensor_stride, shape, minimum, contract)
    return result, reported, torch.tensor(x.tensor_stride, dtype=torch.int32)


def coo(x: Any, low: Any, high: Any, contract: bool) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """(sparse COO tensor [B, X_1 .. X_D, C], min_coords [1, D], tensor stride) of a SparseTensor.

    low: IntTensor [D], subtracted first; None for the smallest coordinates.  high: IntTensor [D],
    inclusive bound of the coordinates that sets the shape; None for the largest.
    Raises: DenseIndexError (a coordinate outside of low .. high).
    """
    coords, dimension = x.C, x.D
    axes = coords[:, 1:]
    step = coords.new_tensor([max(1, s) for s in x.tensor_stride])
    empty = len(coords) == 0
    low = (axes.new_zeros(dimension) if empty else axes.amin(0)) if low is None else low.to(coords)
    high = (low - 1 if empty else axes.amax(0)) if high is None else high.to(coords)
    low, high = low.reshape(1, dimension), high.reshape(1, dimension)
    if bool(((axes < low) | (axes > high)).any()):
        raise DenseIndexError(
            f"coordinates leave {low[0].tolist()} .. {high[0].tolist()} (min_coords, max_coords)."
        )
    axes, extent = axes - low, (high - low)[0]
    if contract:
        axes = torch.div(axes, step, rounding_mode="floor")
        extent = torch.div(extent, step, rounding_mode="floor")
    n_items = 0 if empty else int(coords[:, 0].max()) + 1
    size = (n_items, *(int(e) + 1 for e in extent), x.F.shape[1])
    index = torch.cat([coords[:, :1], axes], 1).t().long()
    sparse = torch.sparse_coo_tensor(index, x.F, size, check_invariants=False)
    return sparse, low, torch.tensor(x.tensor_stride, dtype=torch.int32)
