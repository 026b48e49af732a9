"""Sums of sparse tensors over the union of their coordinates."""

from __future__ import annotations

from typing import Any

import torch

from ...core.conv.deferred import materialize
from ...core.ops.union import union_rows
from ...core.traced import between_graphs
from ...errors import ContractError
from ..convert import kind_of
from . import records
from .tensors import SparseInputError


@between_graphs
def sparse_add(*tensors: Any) -> Any:
    """Union of the coordinates in lexicographic order, features summed where they coincide.

    Differentiable. `indice_dict` is empty, unless the union has exactly the coordinates of the
    largest operand: then its maps go along, so that inverse and submanifold layers can use them.
    They are the operand's own dictionary where its rows were sorted; otherwise a copy with its
    maps brought to the new row order.

    Raises ContractError when spatial shapes, batch sizes or channel counts differ.
    """
    if not tensors:
        raise ContractError("sparse_add needs at least one tensor.")
    for x in tensors:
        if not hasattr(x, "indice_dict"):
            raise SparseInputError(f"sparse_add takes SparseConvTensors, got {kind_of(x, 'spconv')}.")
    first = tensors[0]
    for other in tensors[1:]:
        for attribute in ("spatial_shape", "batch_size"):
            if getattr(first, attribute) != getattr(other, attribute):
                raise ContractError(
                    f"{attribute} differs: {getattr(first, attribute)} and {getattr(other, attribute)}."
                )
    indices, features = union_rows(
        [x.indices for x in tensors],
        [materialize(x.features) for x in tensors],
        first.spatial_shape,
        int(first.batch_size),
    )
    result = first.replace_feature(features)
    result.indices = indices
    largest = max(tensors, key=lambda x: x.features.shape[0])
    same = indices.shape[0] == largest.features.shape[0]
    result.indice_dict = _maps_along(largest, indices) if same else {}
    return result


def _maps_along(operand: Any, indices: torch.Tensor) -> dict[Any, Any]:
    """The operand's maps for its rows in the order of `indices`, the same coordinates sorted."""
    if not operand.indice_dict or torch.equal(operand.indices, indices):
        return operand.indice_dict
    order = _lexicographic(operand.indices)
    return {
        key: records.reordered(record, operand.indices, indices, order) for key, record in operand.indice_dict.items()
    }


def _lexicographic(indices: torch.Tensor) -> torch.Tensor:
    """int64 [N], the row of `indices` at each index of the sorted order."""
    order = torch.arange(indices.shape[0], device=indices.device)
    for column in reversed(range(indices.shape[1])):
        values = indices[:, column].index_select(0, order)
        order = order.index_select(0, torch.sort(values, stable=True).indices)
    return order


@between_graphs
def sparse_add_hash_based(*tensors: Any) -> Any:
    """The same; spconv leaves this one's row order open, here it is sorted too."""
    return sparse_add(*tensors)
