"""Hashing and point-voxel operators with torchsparse's layouts."""

from __future__ import annotations

from typing import Any

import torch

from ....core.arguments import expect_tensors
from ....core.maps import key_search
from ....core.ops import voxel
from ....errors import ContractError, DataTypeError
from .. import profile as profiles


def _operators() -> Any:
    """Operators for programs that are traced."""
    from .. import compiled

    return compiled.ops


class HashInputError(ContractError, DataTypeError):
    """`sphash` asserts the shape and type of its input."""


def sphash(coords: torch.Tensor, offsets: torch.Tensor | None = None) -> torch.Tensor:
    """int64 keys of coordinates int32 [N, 4]: [N], or [K, N] moved by offsets int32 [K, 3].

    Offsets move x, y and z: columns 0..2 up to 2.0, columns 1..3 in 2.1. Keys up to 2.0 are not
    negative. Raises HashInputError.
    """
    for name, value, width in (("coords", coords, 4), ("offsets", offsets, 3)):
        if value is None:
            expect_tensors("sphash", coords=coords)
            continue
        expect_tensors("sphash", **{name: value})
        if value.dtype != torch.int32 or value.ndim != 2 or value.shape[1] != width:
            raise HashInputError(
                f"sphash got {name} of {value.dtype} {list(value.shape)}; expected torch.int32 [N, {width}]."
            )
    release = profiles.current()
    first, fold = release.first_axis, not release.batch_first
    if torch.compiler.is_compiling():
        return _operators().hash_rows(coords, offsets, first, fold)
    return key_search.hash_rows(coords, offsets, first=first, fold=fold)


def sphashquery(queries: torch.Tensor, references: torch.Tensor) -> torch.Tensor:
    """First index of each query in references, -1 where it is missing; the shape of queries.

    int64 up to 2.0, int32 in 2.1. Raises ShapeError, DataTypeError, DeviceError.
    """
    expect_tensors("sphashquery", queries=queries, references=references)
    narrow = profiles.current().batch_first
    if torch.compiler.is_compiling():
        return _operators().find_keys(queries, references.reshape(-1), not narrow)
    dtype = torch.int32 if narrow else torch.int64
    return key_search.find_keys(queries, references.reshape(-1), dtype)


def spcount(coords: torch.Tensor, num: Any) -> torch.Tensor:
    """Occurrences of 0 .. num - 1 in an int32 index, int32 [num]; other values are passed over.

    Raises DataTypeError for int64, as torchsparse does.
    """
    expect_tensors("spcount", coords=coords)
    if coords.dtype != torch.int32:
        raise DataTypeError(f"spcount got indices of {coords.dtype}; expected int32 (use .int()).")
    if torch.compiler.is_compiling():
        return _operators().count_index(coords, int(num))
    return voxel.count(coords, int(num))


def spvoxelize(feats: torch.Tensor, coords: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Mean of the points of each voxel, [M, C]; see `core.voxel.voxelize`."""
    expect_tensors("spvoxelize", feats=feats, coords=coords, counts=counts)
    index = coords.reshape(-1) if coords.ndim != 1 else coords
    if torch.compiler.is_compiling():
        return _operators().voxelize(feats, index, counts)
    return voxel.voxelize(feats, index, counts)


def spdevoxelize(feats: torch.Tensor, coords: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Voxels interpolated at points, [N, C]; coords and weights [N, 8]. See
    `core.voxel.devoxelize`."""
    expect_tensors("spdevoxelize", feats=feats, coords=coords, weights=weights)
    if torch.compiler.is_compiling():
        return _operators().devoxelize(feats, coords, weights)
    return voxel.devoxelize(feats, coords, weights)


def calc_ti_weights(coords: torch.Tensor, idx_query: torch.Tensor, scale: float = 1) -> torch.Tensor:
    """Trilinear weights of points whose first columns are x, y, z.

    idx_query and the result: [8, N] up to 2.0, [N, 8] in 2.1. Raises ShapeError, DataTypeError,
    SignatureError (the layout of an older release).
    """
    expect_tensors("calc_ti_weights", coords=coords, idx_query=idx_query)
    if profiles.peek().batch_first and 8 != coords.shape[0] == idx_query.shape[-1] and idx_query.shape[0] == 8:
        profiles.saw_old_signature("calc_ti_weights got an idx_query of [8, N]")
    if profiles.current().batch_first:
        return _weights(coords, idx_query, scale)
    return _weights(coords, idx_query.t(), scale).t().contiguous()


def _weights(coords: torch.Tensor, index: torch.Tensor, scale: float) -> torch.Tensor:
    if torch.compiler.is_compiling():
        return _operators().trilinear_weights(coords, index, float(scale))
    return voxel.trilinear_weights(coords, index, scale)
