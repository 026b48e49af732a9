"""`ops.serialize`: codes of voxels along the Z-order or the Hilbert curve."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...core.ops.serialize import decode, encode
from .arguments import check_tensors
from .errors import ArgumentShapeError, ArgumentValueError, PointTypeError
from .geometry import grid_shape

__all__ = ["decode_seq", "encode_seq"]

_MODES = {"z_order": "z_order", "hilbert": "hilbert"}


def _layout(shape: Sequence[int], mode: str) -> tuple[int, torch.dtype]:
    """(bits of each axis, dtype of the codes). Raises ArgumentValueError."""
    if mode not in _MODES:
        raise ArgumentValueError(f"mode is {mode!r}; expected 'z_order' or 'hilbert'.")
    batch, _, extents = grid_shape(shape)
    bits = max(0, max(extents) - 1).bit_length()
    total = 3 * bits + max(0, batch - 1).bit_length()
    if total > 64:
        raise ArgumentValueError(f"a grid of {batch} x {extents} needs codes of {total} bits; at most 64 are served.")
    return bits, torch.int32 if total <= 32 else torch.int64


@torch.no_grad()
def encode_seq(coords: torch.Tensor, shape: Sequence[int], mode: str = "z_order") -> torch.Tensor:
    """The code of every voxel: the batch above, then one bit of x, y and z per level, x highest.

    coords: int32 [N, 4] (batch, x, y, z).  Returns [N], int32 where all bits fit, else int64; with
    exactly 32 (64) bits codes of the upper batches are negative.
    Raises: ArgumentShapeError, PointTypeError, ArgumentValueError.
    """
    check_tensors("encode_seq", coords=coords)
    if coords.ndim != 2 or coords.shape[1] != 4:
        raise ArgumentShapeError(f"encode_seq got coordinates of shape {list(coords.shape)}; expected [N, 4].")
    bits, dtype = _layout(shape, mode)
    if coords.dtype != torch.int32:
        raise PointTypeError(f"encode_seq got coordinates of {coords.dtype}; expected int32.")
    if torch.compiler.is_compiling():
        from ...core.compile import codes

        return codes.encode(coords, bits, mode, dtype)
    return encode(coords, bits, mode, dtype)


@torch.no_grad()
def decode_seq(code: torch.Tensor, shape: Sequence[int], mode: str = "z_order") -> torch.Tensor:
    """The voxels of codes int32 or int64 [N]: int32 [N, 4].

    Raises: ArgumentShapeError, PointTypeError, ArgumentValueError.
    """
    check_tensors("decode_seq", code=code)
    if code.ndim != 1:
        raise ArgumentShapeError(f"decode_seq got codes of shape {list(code.shape)}; expected [N].")
    if mode not in _MODES:
        raise ArgumentValueError(f"mode is {mode!r}; expected 'z_order' or 'hilbert'.")
    _, _, extents = grid_shape(shape)
    if code.dtype not in (torch.int32, torch.int64):
        raise PointTypeError(f"decode_seq got codes of {code.dtype}; expected int32 or int64.")
    bits = max(0, max(extents) - 1).bit_length()
    if 3 * bits > 64:
        raise ArgumentValueError(f"a grid of {extents} needs codes of {3 * bits} bits; at most 64 are served.")
    if torch.compiler.is_compiling():
        from ...core.compile import codes

        return codes.decode(code, bits, mode)
    return decode(code, bits, mode)


def ordered_by_code(coords: torch.Tensor, shape: Sequence[int], mode: int) -> torch.Tensor:
    """Distinct voxels in the order of their codes; mode 1: Z-order, 2: Hilbert."""
    codes = encode_seq(coords, shape, "z_order" if mode == 1 else "hilbert")
    return coords.index_select(0, torch.argsort(codes))
