"""Sums of sparse tensors over the union of their coordinates, on plain tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...errors import ContractError, DeviceError, ShapeError
from ..arguments import expect_tensors
from ..maps.segments import SegmentOperator, Segments, multiply


def union_rows(
    indices_list: Sequence[torch.Tensor],
    features_list: Sequence[torch.Tensor],
    spatial_shape: Sequence[int],
    batch_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum features where coordinates coincide, inside an operand as well as between operands.

    Deterministic forward and backward on every device: rows of equal coordinates are added in
    operand order, then row order, without atomics. Half types accumulate in float32.

    Args:
        indices_list: int32 [N_k, 1 + nd] each, batch first.
        features_list: [N_k, C] each; differentiable. Mixed dtypes are promoted.
        spatial_shape, batch_size: those of the operands. Rows outside of them are kept, apart
            from one another, and sorted like all others.

    Returns:
        indices int32 [M, 1 + nd], lexicographically sorted and distinct, and features [M, C].

    Raises:
        ContractError: no operands, or operands that differ in channels or coordinate columns.
        ShapeError: features and indices of an operand do not pair up.
        DeviceError: tensors on different devices.
    """
    _check(indices_list, features_list, len(spatial_shape))
    indices = torch.cat([rows.int() for rows in indices_list])
    features = torch.cat(list(features_list))
    if indices.shape[0] == 0:
        return indices, features
    ordered, order = torch.sort(_keys(indices), stable=True)
    fresh = torch.ones_like(ordered, dtype=torch.bool)
    fresh[1:] = ordered[1:] != ordered[:-1]
    starts = fresh.nonzero().squeeze(1)
    union = indices.index_select(0, order.index_select(0, starts))
    segment = torch.empty_like(order)
    segment[order] = fresh.cumsum(0) - 1
    return union, multiply(features, SegmentOperator(Segments(segment, starts.shape[0])))


def _check(indices_list: Sequence[torch.Tensor], features_list: Sequence[torch.Tensor], ndim: int) -> None:
    if not indices_list or len(indices_list) != len(features_list):
        raise ContractError(
            f"got {len(indices_list)} index and {len(features_list)} feature tensors; "
            "a union needs one or more of each, in pairs"
        )
    first = features_list[0]
    for indices, features in zip(indices_list, features_list, strict=True):
        expect_tensors("the sum", indices=indices, features=features)
        if features.ndim != 2 or indices.ndim != 2 or features.shape[0] != indices.shape[0]:
            raise ShapeError(
                f"features {list(features.shape)} and indices {list(indices.shape)} do not pair "
                "up; expected [N, C] and [N, 1 + nd]"
            )
        if features.shape[1] != first.shape[1]:
            raise ContractError(f"operands have {first.shape[1]} and {features.shape[1]} channels; all must agree")
        if indices.shape[1] != ndim + 1:
            raise ContractError(
                f"indices have {indices.shape[1]} columns; a spatial shape of {ndim} axes needs {ndim + 1}"
            )
        if features.device != first.device or indices.device != first.device:
            raise DeviceError(
                f"operands are on {first.device}, {features.device} and {indices.device}; move them to one device"
            )


def _keys(indices: torch.Tensor) -> torch.Tensor:
    """int64 [N] keys that are equal and sort like the rows of `indices` [N, 1 + nd], N >= 1."""
    # The data's own bounds: coordinates outside the spatial shape must not alias those inside.
    lows, highs = torch.stack((indices.amin(0), indices.amax(0))).tolist()
    key: torch.Tensor = indices[:, 0].long() - lows[0]
    extent = highs[0] - lows[0] + 1
    for axis in range(1, indices.shape[1]):
        size = highs[axis] - lows[axis] + 1
        if extent * size >= 2**63:
            # Ranks in place of keys: there are never more than rows.
            values, key = torch.unique(key, return_inverse=True)
            extent = values.shape[0]
        key = key * size + (indices[:, axis].long() - lows[axis])
        extent *= size
    return key
