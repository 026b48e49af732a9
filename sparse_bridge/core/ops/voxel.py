"""Points and voxels: means over the points of a voxel, interpolation at points, with gradients, on
plain tensors.

Sums run in fp32 (fp64 for fp64) in an order that depends on the indices alone, so results repeat
bit by bit.
"""

from __future__ import annotations

import torch

from ...errors import DataTypeError, DeviceError, OverflowLimitError, ShapeError
from ..device.device_support import kernel_target
from ..maps import map_cache
from ..maps.segments import SegmentOperator, Segments, accumulator, multiply, target_of

_INT32 = 1 << 31
_INTEGERS = (torch.int32, torch.int64)


def segments_of(index: torch.Tensor, n_values: int) -> Segments:
    """Segments of an index [N, K], int32 or int64, into n_values: made and sorted once per tensor, and kept as long
    as it lives."""
    store = map_cache.store_of(index)
    map_cache.adopt(index, store)
    segments: Segments = store.get(("segments", n_values), lambda: Segments(index.detach(), n_values))
    return segments


def _check(operation: str, feats: torch.Tensor, index: torch.Tensor, other: torch.Tensor) -> None:
    if feats.ndim != 2 or not feats.is_floating_point():
        raise (ShapeError if feats.ndim != 2 else DataTypeError)(
            f"{operation} got features of shape {list(feats.shape)} and {feats.dtype}; expected [N, C] floating point."
        )
    if index.dtype not in _INTEGERS:
        raise DataTypeError(f"{operation} got indices of {index.dtype}; expected int32 or int64.")
    if not feats.device == index.device == other.device:
        raise DeviceError(
            f"{operation} got features on {feats.device}, indices on {index.device} and {other.device}; "
            "move all to one device."
        )
    if max(index.numel(), feats.shape[0], other.shape[0]) >= _INT32:
        raise OverflowLimitError(
            f"{operation} got {index.numel()} indices for {feats.shape[0]} rows; both must stay below 2^31."
        )


def voxelize(feats: torch.Tensor, index: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Mean of the points of each voxel: y[j] = sum of feats[i] over index[i] = j, divided by counts[j].

    Args:
        feats: [N, C] floating point; differentiable.
        index: [N] int32 or int64, the voxel of each point; points with an index outside 0 .. M - 1 are left out.
        counts: [M], integers or floats, divisors; a voxel whose count is 0 becomes 0.

    Returns: [M, C] in feats' dtype; autocast changes nothing, so averaged coordinates keep their precision.
    Raises: ShapeError, DataTypeError, DeviceError, OverflowLimitError; UnsupportedError in transforms of torch.func.
    """
    if index.ndim != 1 or counts.ndim != 1 or feats.shape[0] != index.shape[0]:
        raise ShapeError(
            f"voxelize got features {list(feats.shape)}, indices {list(index.shape)} and counts "
            f"{list(counts.shape)}; expected [N, C], [N] and [M]."
        )
    _check("voxelize", feats, index, counts)
    return multiply(feats, means(index, counts))


def means(index: torch.Tensor, counts: torch.Tensor) -> SegmentOperator:
    """`voxelize` by a checked index [N], int32 or int64, and counts [M], integers or floats: [N, C] -> [M, C]."""
    return SegmentOperator(segments_of(column_of(index), counts.shape[0]), divisor=counts)


def column_of(index: torch.Tensor) -> torch.Tensor:
    """index [N], int32 or int64, as [N, 1] in its dtype: the same object for the same index, so that what is kept
    with it is found again."""
    store = map_cache.store_of(index)
    map_cache.adopt(index, store)
    column: torch.Tensor = store.get("column", lambda: index.detach().contiguous().unsqueeze(1))
    return column


def devoxelize(feats: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Interpolate voxels at points: y[i] = sum over k of weights[i, k] * feats[index[i, k]].

    Args:
        feats: [M, C] floating point; differentiable.
        index: [N, K] int32 or int64; -1 (anything outside 0 .. M - 1) adds nothing.
        weights: [N, K] floating point; no gradient.

    Returns: [N, C] in feats' dtype.
    Raises: ShapeError, DataTypeError, DeviceError, OverflowLimitError.
    """
    if index.ndim != 2 or index.shape != weights.shape:
        raise ShapeError(
            f"devoxelize got indices {list(index.shape)} and weights {list(weights.shape)}; "
            "expected [N, K] for both (torchsparse 1.4 code transposes [8, N] first)."
        )
    if not weights.is_floating_point():
        raise DataTypeError(f"devoxelize got weights of {weights.dtype}; expected floating point.")
    _check("devoxelize", feats, index, weights)
    return multiply(feats, interpolation(index, weights, feats.shape[0]))


def interpolation(index: torch.Tensor, weights: torch.Tensor, n_voxels: int) -> SegmentOperator:
    """`devoxelize` of n_voxels rows, by a checked index [N, K], int32 or int64, and weights [N, K], any float dtype:
    [n_voxels, C] -> [N, C]."""
    segments = segments_of(index.contiguous(), n_voxels)
    return SegmentOperator(segments, weights.detach().contiguous(), gathers=True)


@torch.no_grad()
def trilinear_weights(coords: torch.Tensor, index: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """Weights of the 8 corners of the cell around each point.

    Args:
        coords: [N, >= 3], x, y, z in the first three columns.
        index: [N, 8] int32 or int64, row of corner 4 bx + 2 by + bz; negative ones get weight 0.
        scale: width of a cell.

    Returns: [N, 8], rows divided by their sum + 1e-8, in coords' dtype (fp32 for integers).
    Raises: ShapeError, DataTypeError, DeviceError.
    """
    if coords.ndim != 2 or coords.shape[1] < 3 or index.shape != (coords.shape[0], 8):
        raise ShapeError(
            f"trilinear weights got points {list(coords.shape)} and indices {list(index.shape)}; "
            "expected [N, 3] or wider, and [N, 8]."
        )
    if index.dtype not in _INTEGERS:
        raise DataTypeError(f"trilinear weights got indices of {index.dtype}; expected int32 or int64.")
    if coords.device != index.device:
        raise DeviceError(f"points are on {coords.device}, indices on {index.device}; move both to one device.")
    coords = coords if coords.is_floating_point() else coords.float()
    index = index.contiguous()
    target = target_of(coords)
    if target is not None:
        from ...kernels.ops.voxel_ops import trilinear

        weights = torch.empty(index.shape, dtype=coords.dtype, device=coords.device)
        trilinear(coords, index, weights, scale, target)
        return weights
    c = coords[:, :3].to(accumulator(coords))
    fraction = (c - torch.floor(c / scale) * scale) / scale
    low_high = torch.stack([1 - fraction, fraction], 2)  # [N, axis, bit]
    x, y, z = low_high.unbind(1)
    product = (x[:, :, None, None] * y[:, None, :, None] * z[:, None, None, :]).flatten(1)
    product = torch.where(index >= 0, product, 0)
    return (product / (product.sum(1, keepdim=True) + 1e-8)).to(coords.dtype)


def count(index: torch.Tensor, n_values: int) -> torch.Tensor:
    """Occurrences of 0 .. n_values - 1 in `index` (any shape, int32 or int64): int32 [n_values].

    Raises: DataTypeError, ShapeError (n_values below 0).
    """
    if index.dtype not in _INTEGERS:
        raise DataTypeError(f"count got {index.dtype}; expected int32 or int64.")
    if n_values < 0:
        raise ShapeError(f"count got {n_values} values; expected 0 or more.")
    flat = index.reshape(-1).contiguous()
    counts = torch.zeros(n_values, dtype=torch.int32, device=index.device)
    if flat.shape[0] == 0 or n_values == 0:
        return counts
    target = kernel_target(index.device)
    if target is not None:
        from ...kernels.ops.voxel_ops import count_index

        count_index(flat, counts, target)
        return counts
    inside = flat[(flat >= 0) & (flat < n_values)].long()
    return torch.bincount(inside, minlength=n_values).int()
