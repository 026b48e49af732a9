"""Space-filling curves: one integer per voxel, along the Z-order or the Hilbert curve, and back.

The Hilbert curve is that of J. Skilling, "Programming the Hilbert curve" (2004), over (x, y, z).
"""

from __future__ import annotations

import torch

from ..device.device_support import kernel_target


def encode(coords: torch.Tensor, bits: int, curve: str, dtype: torch.dtype) -> torch.Tensor:
    """Codes [N] of voxels int32 [N, 4] (batch, x, y, z).

    The batch lies above 3 * bits; below it stand one bit of x, y and z per level, x highest. Bits
    of a coordinate beyond `bits` are left out. As unsigned numbers, stored in `dtype`.

    bits: 0 .. 21, of every axis.  curve: "z_order" or "hilbert".  dtype: int32 or int64.
    """
    coords = coords.contiguous()
    target = kernel_target(coords.device) if coords.shape[0] else None
    if target is not None:
        from ...kernels.ops.serialize import encode_voxels

        return encode_voxels(coords, bits, curve == "hilbert", dtype, target)
    batch, x, y, z = coords.long().unbind(1)
    inside = (1 << bits) - 1
    axes = [x & inside, y & inside, z & inside]
    if curve == "hilbert":
        axes = _transposed(axes, bits)
    code = batch << 3 * bits
    for level in range(bits):
        for dimension, axis in enumerate(axes):
            code = code | (axis >> level & 1) << (3 * level + 2 - dimension)
    return code.to(dtype)


def decode(code: torch.Tensor, bits: int, curve: str) -> torch.Tensor:
    """Voxels int32 [N, 4] (batch, x, y, z) of the codes of `encode`, int32 or int64 [N]; their dtype says how wide
    they are."""
    code = code.contiguous()
    target = kernel_target(code.device) if code.shape[0] else None
    if target is not None:
        from ...kernels.ops.serialize import decode_voxels

        return decode_voxels(code, bits, curve == "hilbert", target)
    wide = code.dtype == torch.int64
    code = code if wide else code.long() & 0xFFFFFFFF
    axes = [torch.zeros_like(code) for _ in range(3)]
    for level in range(bits):
        for dimension in range(3):
            axes[dimension] |= (code >> (3 * level + 2 - dimension) & 1) << level
    batch = code >> 3 * bits
    if wide and bits:  # the sign bit belongs to the batch and must not be copied
        batch &= (1 << (64 - 3 * bits)) - 1
    if curve == "hilbert":
        axes = _coordinates(axes, bits)
    return torch.stack([batch, *axes], 1).int()


def _transposed(axes: list[torch.Tensor], bits: int) -> list[torch.Tensor]:
    """Skilling's transposed Hilbert index of coordinates."""
    for level in range(bits - 1, 0, -1):
        for dimension in range(3):
            _undo(axes, dimension, 1 << level)
    axes[1] = axes[1] ^ axes[0]
    axes[2] = axes[2] ^ axes[1]
    turn = torch.zeros_like(axes[0])
    for level in range(bits - 1, 0, -1):
        q = 1 << level
        turn = torch.where((axes[2] & q) != 0, turn ^ (q - 1), turn)
    return [axis ^ turn for axis in axes]


def _coordinates(axes: list[torch.Tensor], bits: int) -> list[torch.Tensor]:
    """The inverse of `_transposed`."""
    turn = axes[2] >> 1
    axes[2] = axes[2] ^ axes[1]
    axes[1] = axes[1] ^ axes[0]
    axes[0] = axes[0] ^ turn
    for level in range(1, bits):
        for dimension in (2, 1, 0):
            _undo(axes, dimension, 1 << level)
    return axes


def _undo(axes: list[torch.Tensor], dimension: int, q: int) -> None:
    """One axis at one level: invert the low bits of the first axis, or exchange them with it."""
    first, other = axes[0], axes[dimension]
    invert, swap = (other & q) != 0, (first ^ other) & (q - 1)
    if dimension:
        axes[dimension] = torch.where(invert, other, other ^ swap)
    axes[0] = torch.where(invert, first ^ (q - 1), first ^ swap)
