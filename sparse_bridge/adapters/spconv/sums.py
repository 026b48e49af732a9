"""Sums of sparse tensors over the union of their sites."""

from __future__ import annotations

from typing import Any

from ...errors import ContractError
from .sparse_add import union_rows

__all__ = ["sparse_add", "sparse_add_hash_based"]


def sparse_add(*tensors: Any) -> Any:
    """Union of the sites in lexicographic order, features summed where they coincide; differentiable.

    `indice_dict` is empty, unless the union has as many rows as the largest operand: then that operand's dictionary is
    attached, which keeps its inverse layers usable if its rows were sorted.
    Raises ContractError when spatial shapes, batch sizes or channel counts differ.
    """
    if not tensors:
        raise ContractError("sparse_add needs at least one tensor.")
    first = tensors[0]
    for other in tensors[1:]:
        for what in ("spatial_shape", "batch_size"):
            if getattr(first, what) != getattr(other, what):
                raise ContractError(
                    f"{what} differs: {getattr(first, what)} and {getattr(other, what)}."
                )
    indices, features = union_rows(
        [x.indices for x in tensors],
        [x.features for x in tensors],
        first.spatial_shape,
        int(first.batch_size),
    )
    result = first.replace_feature(features)
    result.indices = indices
    largest = max(tensors, key=lambda x: x.features.shape[0])
    same = indices.shape[0] == largest.features.shape[0]
    result.indice_dict = largest.indice_dict if same else {}
    return result


def sparse_add_hash_based(*tensors: Any) -> Any:
    """The same; spconv leaves this one's row order open, here it is sorted too."""
    return sparse_add(*tensors)
