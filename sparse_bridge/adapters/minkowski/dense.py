"""Dense and COO tensors from sparse ones, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...core.arguments import refuse_arrays
from ...core.ops.dense import first_outside, to_dense
from ...core.traced import between_graphs
from ...errors import ContractError
from . import profile
from .errors import ArgumentValueError, DenseIndexError


@between_graphs
def dense(
    x: Any, shape: Any, minimum: Any, contract: bool, old: tuple[Any, Any, bool | None]
) -> tuple[torch.Tensor, Any, Any]:
    """(dense tensor, min_coordinate, tensor stride) of a SparseTensor; see its method.

    old: min_coords, max_coords and contract_coords of 0.4; None for those that were not given.
    """
    low, high, contract_old = old
    is_old_call = any(part is not None for part in old)
    if is_old_call or (shape is minimum is None and profile.is_old()):
        return old_dense(x, low, high, contract if contract_old is None else contract_old)
    if shape is not None and not isinstance(shape, torch.Size):
        raise ContractError(f"shape is {shape!r}; expected a torch.Size.")
    if len(x) == 0:
        if shape is None:
            raise ContractError("dense() of an empty tensor needs a shape.")
        size = (shape[0], x.F.shape[1], *shape[2:])
        zeros = x.F.new_zeros(size) + x.F.sum().to(x.F.dtype)
        return zeros, torch.zeros(x.D, dtype=torch.int32), x.tensor_stride
    if minimum is not None and not isinstance(minimum, torch.Tensor):
        refuse_arrays("dense", min_coordinate=minimum)
        raise ContractError(f"min_coordinate is {minimum!r}; expected a torch.IntTensor.")
    result, reported = _to_dense(x.F, x._sites(), x.tensor_stride, shape, minimum, contract)
    return result, reported, torch.tensor(x.tensor_stride, dtype=torch.int32)


def _boxed(x: Any, low: Any, high: Any, contract: bool) -> tuple[torch.Tensor, list[int], torch.Tensor]:
    """(int64 index [N, 1 + D] in the box low .. high, its size with the batch first, low [1, D]).

    low: IntTensor [D], subtracted first; None for the smallest coordinates.  high: IntTensor [D],
    inclusive bound of the coordinates that sets the size; None for the largest.
    Raises: DenseIndexError (a coordinate outside of low .. high).
    """
    coords, dimension = x._sites(), x.D
    for name, corner in (("min_coords", low), ("max_coords", high)):
        if corner is not None and (not isinstance(corner, torch.Tensor) or corner.numel() != dimension):
            raise ContractError(f"{name} is {corner!r}; expected a torch.IntTensor of {dimension} numbers.")
    axes = coords[:, 1:]
    step = coords.new_tensor([max(1, s) for s in x.tensor_stride])
    empty = len(coords) == 0
    low = (axes.new_zeros(dimension) if empty else axes.amin(0)) if low is None else low.to(coords)
    high = (low - 1 if empty else axes.amax(0)) if high is None else high.to(coords)
    low, high = low.reshape(1, dimension), high.reshape(1, dimension)
    if bool(((axes < low) | (axes > high)).any()):
        raise DenseIndexError(f"coordinates leave {low[0].tolist()} .. {high[0].tolist()} (min_coords, max_coords).")
    axes, extent = axes - low, (high - low)[0]
    if contract:
        axes = torch.div(axes, step, rounding_mode="floor")
        extent = torch.div(extent, step, rounding_mode="floor")
    n_items = 0 if empty else int(coords[:, 0].max()) + 1
    size = [n_items, *(int(e) + 1 for e in extent)]
    return torch.cat([coords[:, :1], axes], 1).long(), size, low


@between_graphs
def coo(x: Any, low: Any, high: Any, contract: bool) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """(sparse COO tensor [B, X_1 .. X_D, C], min_coords [1, D], tensor stride) of a SparseTensor.

    low, high: as in `_boxed`.  Raises: DenseIndexError (a coordinate outside of low .. high).
    """
    index, size, low = _boxed(x, low, high, contract)
    dense_shape = (*size, x.F.shape[1])
    sparse = torch.sparse_coo_tensor(index.t(), x.F, dense_shape, check_invariants=False)
    return sparse, low, torch.tensor(x.tensor_stride, dtype=torch.int32)


def old_dense(
    x: Any, min_coords: Any = None, max_coords: Any = None, contract_coords: bool = True
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """0.4's `dense`: (dense [B, C, X_1 .. X_D], min_coords [1, D], tensor stride [D]).

    The box of the coordinates, or min_coords .. max_coords (IntTensors [D], inclusive, multiples of
    the tensor stride); with `contract_coords` its steps are tensor strides, also in min_coords.
    Raises: ContractError, DenseIndexError (a coordinate outside of the box).
    """
    stride = torch.tensor(x.tensor_stride, dtype=torch.int32)
    step = stride.clamp(min=1)
    for name, bound in (("min_coords", min_coords), ("max_coords", max_coords)):
        if bound is not None:
            _check_minimum(bound, step, x.D, name)
    index, size, low = _boxed(x, min_coords, max_coords, contract_coords)
    if contract_coords:
        low = torch.div(low, step.to(low.device), rounding_mode="floor")
    return to_dense(x.F, index, size), low.cpu().int(), stride


def _to_dense(
    features: torch.Tensor,
    coords: torch.Tensor,
    stride: Sequence[int],
    shape: Sequence[int] | None,
    minimum: torch.Tensor | None,
    contract: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(dense [B, C, X_1 .. X_D], the minimum that is reported, int32 [1, D]).

    shape: [B, any, X_1 .. X_D] or None for the data's own.  minimum: int32 [D], subtracted first,
    or None.  contract: divide by the tensor stride.
    Raises: ArgumentValueError (negative coordinates without a minimum), ContractError,
        DenseIndexError (a coordinate below the minimum or outside of the shape).
    """
    dimension = coords.shape[1] - 1
    axes = coords[:, 1:]
    step = coords.new_tensor([max(1, int(s)) for s in stride])
    if minimum is None:
        if bool((axes < 0).any()):
            raise ArgumentValueError(
                "dense() of negative coordinates needs min_coordinate, an IntTensor that is subtracted first."
            )
        reported = axes.amin(0, keepdim=True)
    else:
        reported = _check_minimum(minimum, step, dimension).to(coords)
        axes = axes - reported
    if contract:
        axes = torch.div(axes, step, rounding_mode="floor")
    index = torch.cat([coords[:, :1], axes], 1).long()
    if shape is None:
        size = [int(c) + 1 for c in index.amax(0)]
    else:
        if len(shape) != dimension + 2:
            raise ContractError(f"shape {list(shape)}; expected [batch, channels, and {dimension} axes].")
        size = [int(shape[0]), *(int(c) for c in shape[2:])]
    outside = first_outside(index, size)
    if outside is not None:
        raise DenseIndexError(
            f"the coordinate {coords[outside.row].tolist()} falls outside of the dense shape "
            f"{size} (batch first); use a larger shape or a smaller min_coordinate."
        )
    return to_dense(features, index, size), reported


def _check_minimum(
    minimum: torch.Tensor, step: torch.Tensor, dimension: int, name: str = "min_coordinate"
) -> torch.Tensor:
    if not isinstance(minimum, torch.Tensor) or minimum.dtype != torch.int32:
        raise ContractError(f"{name} is {minimum!r}; expected a torch.IntTensor.")
    if minimum.numel() != dimension:
        raise ContractError(f"{name} has {minimum.numel()} entries; expected {dimension}.")
    minimum = minimum.reshape(1, dimension)
    if bool((minimum % step.to(minimum.device)).any()):
        raise ContractError(f"{name} {minimum[0].tolist()} is not a multiple of the tensor stride {step.tolist()}.")
    return minimum


@between_graphs
def dense_coordinates(shape: Sequence[int], device: torch.device | None = None) -> torch.Tensor:
    """Every position of a dense [B, C, X_1 .. X_D]: int32 [B * prod X, 1 + D], row-major."""
    if not hasattr(shape, "__len__") or isinstance(shape, str):
        raise ContractError(f"shape is {shape!r}; expected (batch, channels, axes ..).")
    if len(shape) < 3:
        raise ContractError(f"shape {list(shape)}; expected [batch, channels, axes ..].")
    ranges = [torch.arange(int(n), device=device) for n in (shape[0], *shape[2:])]
    return torch.cartesian_prod(*ranges).int().reshape(-1, len(ranges))


@between_graphs
def nonzero_cells(x: torch.Tensor, layout: str | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions of a dense tensor where any channel is not 0: (int32 [N, 1 + D], features [N, C]).

    layout: like "BCXX" or "BXXC"; None for "BCX..". Raises: ContractError.
    """
    layout = layout or "BC" + "X" * (x.ndim - 2)
    if len(layout) != x.ndim:
        raise ContractError(f"format {layout!r} for a tensor of {x.ndim} axes.")
    if layout[0] != "B" or layout.count("C") != 1 or layout.count("B") != 1:
        raise ContractError(f"format {layout!r}; expected B first, exactly one C, and X elsewhere.")
    channel = layout.index("C")
    last = x.movedim(channel, -1)
    coords = (last != 0).any(-1).nonzero()
    return coords.int().contiguous(), last[tuple(coords.t())]
