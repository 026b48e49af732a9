"""Keys, look-ups and weights of points and voxels as operators. They have no gradient."""

from __future__ import annotations

import torch

from ..maps import key_search
from ..ops import voxel
from .library import define


def _hash(coords: torch.Tensor, shifts: torch.Tensor | None, first: int, fold: bool) -> torch.Tensor:
    return key_search.hash_rows(coords, shifts, first=first, fold=fold).contiguous()


def _fake_hash(coords: torch.Tensor, shifts: torch.Tensor | None, first: int, fold: bool) -> torch.Tensor:
    shape = coords.shape[:1] if shifts is None else (shifts.shape[0], coords.shape[0])
    return coords.new_empty(shape, dtype=torch.int64)


def _find(queries: torch.Tensor, references: torch.Tensor, wide: bool) -> torch.Tensor:
    dtype = torch.int64 if wide else torch.int32
    return key_search.find_keys(queries, references, dtype).contiguous()


def _fake_find(queries: torch.Tensor, references: torch.Tensor, wide: bool) -> torch.Tensor:
    return queries.new_empty(queries.shape, dtype=torch.int64 if wide else torch.int32)


def _weights(coords: torch.Tensor, index: torch.Tensor, scale: float) -> torch.Tensor:
    return voxel.trilinear_weights(coords.detach(), index, scale).contiguous()


def _fake_weights(coords: torch.Tensor, index: torch.Tensor, scale: float) -> torch.Tensor:
    dtype = coords.dtype if coords.is_floating_point() else torch.float32
    return coords.new_empty(index.shape, dtype=dtype)


define("hash_rows", "(Tensor coords, Tensor? shifts, int first, bool fold) -> Tensor", _hash, _fake_hash)
define("find_keys", "(Tensor queries, Tensor references, bool wide) -> Tensor", _find, _fake_find)
define(
    "count_index",
    "(Tensor index, SymInt n_values) -> Tensor",
    voxel.count,
    lambda index, n_values: index.new_empty(n_values, dtype=torch.int32),
)
define("trilinear_weights", "(Tensor coords, Tensor index, float scale) -> Tensor", _weights, _fake_weights)
