"""Codes of voxels along space-filling curves, as operators."""

from __future__ import annotations

from typing import Any

import torch

from ..ops import serialize
from .library import define

ops: Any = torch.ops.sparse_bridge


def _encode(coords: torch.Tensor, bits: int, curve: str, wide: bool) -> torch.Tensor:
    return serialize.encode(coords, bits, curve, torch.int64 if wide else torch.int32)


def _fake_encode(coords: torch.Tensor, bits: int, curve: str, wide: bool) -> torch.Tensor:
    return coords.new_empty(coords.shape[0], dtype=torch.int64 if wide else torch.int32)


define("voxel_codes", "(Tensor coords, int bits, str curve, bool wide) -> Tensor", _encode, _fake_encode)
define(
    "voxels_of_codes",
    "(Tensor codes, int bits, str curve) -> Tensor",
    serialize.decode,
    lambda codes, bits, curve: codes.new_empty((codes.shape[0], 4), dtype=torch.int32),
)


def encode(coords: torch.Tensor, bits: int, curve: str, dtype: torch.dtype) -> torch.Tensor:
    """`serialize.encode` while a program is traced: codes [N] in `dtype`, int32 or int64, of voxels int32 [N, 4]."""
    codes: torch.Tensor = ops.voxel_codes(coords, bits, curve, dtype == torch.int64)
    return codes


def decode(codes: torch.Tensor, bits: int, curve: str) -> torch.Tensor:
    """`serialize.decode` while a program is traced: voxels int32 [N, 4] of codes int32 or int64 [N]."""
    coords: torch.Tensor = ops.voxels_of_codes(codes, bits, curve)
    return coords
