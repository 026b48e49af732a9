"""Operations on whole tensors: concatenation, sums, cropping, dense grids."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ....core.arguments import expect_tensors
from ....core.ops.union import union_rows
from ....core.traced import between_graphs
from ....errors import ContractError, ShapeError, SparseInputError
from ... import inference
from ..tensors import check_coords, expect_sparse, make_like, range_of

__all__ = ["add", "cat", "crop", "generative_add"]


def _check_rows(caller: str, tensors: Sequence[Any]) -> None:
    expect_sparse(caller, *tensors)
    for x in tensors:
        expect_tensors(caller, feats=x.feats)
    rows = [x.feats.shape[0] for x in tensors]
    if any(n != rows[0] for n in rows):
        raise ShapeError(
            f"{caller} got tensors of {', '.join(map(str, rows))} rows; "
            "they must have the same sites in the same order."
        )


def cat(inputs: Iterable[Any]) -> Any:
    """Channels of several tensors side by side; sites, stride and caches are the first one's.

    As in torchsparse the result has no `spatial_range`. Raises SparseInputError, ContractError, ShapeError.
    """
    if not isinstance(inputs, Iterable):
        raise SparseInputError(f"cat takes a list of SparseTensors, got {type(inputs).__name__}.")
    tensors = list(inputs)
    if not tensors:
        raise ContractError("cat got no tensors; expected one or more.")
    _check_rows("cat", tensors)
    first = tensors[0]
    feats = torch.cat([x.feats for x in tensors], 1)
    return make_like(first, feats, first.coords, first.stride)


def add(a: Any, b: Any) -> Any:
    """Row by row; sites, stride, range and caches are a's. Raises ShapeError."""
    if not hasattr(b, "stride") or inference.shape_of(a)[0] != inference.shape_of(b)[0]:
        _check_rows("+", (a, b))
    return make_like(a, inference.plus(a, b), a.coords, a.stride, range_of(a))


@between_graphs
def generative_add(a: Any, b: Any) -> Any:
    """Sum over the union of the sites, rows ascending; stride, range and caches of the larger one.

    Raises SparseInputError, ContractError (channels), ShapeError, DeviceError.
    """
    expect_sparse("generative_add", a, b)
    coords = [check_coords(x.coords, "generative_add") for x in (a, b)]
    sites, feats = union_rows(coords, [a.feats, b.feats], (1, 1, 1), 1)
    larger = a if a.feats.shape[0] >= b.feats.shape[0] else b
    return make_like(larger, feats, sites, larger.stride, range_of(larger))


def crop(x: Any, coords_min: Any = None, coords_max: Any = None) -> tuple[torch.Tensor, ...]:
    """(feats, coords) of the rows with coords_min <= columns 0..2 < coords_max.

    Those columns are x, y, z up to 2.0, and b, x, y in 2.1, where torchsparse reads them too.
    """
    expect_sparse("spcrop", x)
    expect_tensors("spcrop", feats=x.feats, coords=x.coords)
    coords = x.coords
    keep = torch.ones(coords.shape[0], dtype=torch.bool, device=coords.device)
    for limit, lower in ((coords_min, True), (coords_max, False)):
        if limit is None:
            continue
        limit = torch.as_tensor(limit, device=coords.device)
        if limit.numel() != 3:
            raise ShapeError(f"a crop limit has {limit.numel()} numbers; expected three.")
        inside = coords[:, :3] >= limit if lower else coords[:, :3] < limit
        keep &= inside.all(1)
    return x.feats[keep], coords[keep]
