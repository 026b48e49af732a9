"""Codes of voxels along the Z-order and the Hilbert curve (Skilling 2004), and back."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..runtime.launch import cdiv, register, specialise
from ..runtime.target import Target

_POINTS = 256


@triton.jit
def _undo_step(first, other, q):
    """One axis at one level of Skilling's transform: invert `first`, or exchange low bits."""
    low = q - 1
    swap = (first ^ other) & low
    invert = (other & q) != 0
    return tl.where(invert, first ^ low, first ^ swap), tl.where(invert, other, other ^ swap)


@triton.jit(do_not_specialize=["n_rows", "bits"])
def _encode_voxels(coords_ptr, code_ptr, n_rows, bits, HILBERT: tl.constexpr, POINTS: tl.constexpr):
    """code [N] of coords int32 [N, 4]: (batch << 3 * bits) | one bit of x, y, z per level."""
    row = tl.program_id(0) * POINTS + tl.arange(0, POINTS)
    ok = row < n_rows
    at = coords_ptr + row.to(tl.int64) * 4
    batch = tl.load(at, mask=ok, other=0).to(tl.int64)
    inside = (tl.zeros((POINTS,), tl.int64) + 1 << bits.to(tl.int64)) - 1
    x = tl.load(at + 1, mask=ok, other=0).to(tl.int64) & inside
    y = tl.load(at + 2, mask=ok, other=0).to(tl.int64) & inside
    z = tl.load(at + 3, mask=ok, other=0).to(tl.int64) & inside
    unit = tl.zeros((POINTS,), tl.int64) + 1
    if HILBERT:
        for step in range(1, bits):
            q = unit << (bits - step)
            x = tl.where((x & q) != 0, x ^ (q - 1), x)
            x, y = _undo_step(x, y, q)
            x, z = _undo_step(x, z, q)
        y ^= x
        z ^= y
        turn = tl.zeros((POINTS,), tl.int64)
        for step in range(1, bits):
            q = unit << (bits - step)
            turn = tl.where((z & q) != 0, turn ^ (q - 1), turn)
        x ^= turn
        y ^= turn
        z ^= turn
    code = batch << 3 * bits.to(tl.int64)
    for level in range(bits):
        code |= ((x >> level) & 1) << (3 * level + 2)
        code |= ((y >> level) & 1) << (3 * level + 1)
        code |= ((z >> level) & 1) << (3 * level)
    tl.store(code_ptr + row, code.to(code_ptr.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["n_rows", "bits"])
def _decode_voxels(code_ptr, coords_ptr, n_rows, bits, HILBERT: tl.constexpr, WIDE: tl.constexpr, POINTS: tl.constexpr):
    """coords int32 [N, 4] of code [N]; the batch is what lies above the bits of the axes."""
    row = tl.program_id(0) * POINTS + tl.arange(0, POINTS)
    ok = row < n_rows
    code = tl.load(code_ptr + row, mask=ok, other=0).to(tl.int64)
    top = tl.zeros((POINTS,), tl.int64) - 1
    if not WIDE:
        code &= 0xFFFFFFFF
    x = tl.zeros((POINTS,), tl.int64)
    y = tl.zeros((POINTS,), tl.int64)
    z = tl.zeros((POINTS,), tl.int64)
    for level in range(bits):
        x |= ((code >> (3 * level + 2)) & 1) << level
        y |= ((code >> (3 * level + 1)) & 1) << level
        z |= ((code >> (3 * level)) & 1) << level
    shift = 3 * bits.to(tl.int64)
    # The sign bit of a 64-bit code belongs to the batch and must not be copied.
    batch = code >> shift
    if WIDE:
        batch = tl.where(shift > 0, batch & ~(top << (64 - shift)), batch)
    unit = tl.zeros((POINTS,), tl.int64) + 1
    if HILBERT:
        turn = z >> 1
        z ^= y
        y ^= x
        x ^= turn
        for level in range(1, bits):
            q = unit << level
            x, z = _undo_step(x, z, q)
            x, y = _undo_step(x, y, q)
            x = tl.where((x & q) != 0, x ^ (q - 1), x)
    at = coords_ptr + row.to(tl.int64) * 4
    tl.store(at, batch.to(tl.int32), mask=ok)
    tl.store(at + 1, x.to(tl.int32), mask=ok)
    tl.store(at + 2, y.to(tl.int32), mask=ok)
    tl.store(at + 3, z.to(tl.int32), mask=ok)


encode_kernel = register(_encode_voxels)
decode_kernel = register(_decode_voxels)


def encode_voxels(coords: torch.Tensor, bits: int, hilbert: bool, dtype: torch.dtype, target: Target) -> torch.Tensor:
    """Codes [N] of contiguous int32 coordinates [N, 4], N >= 1; dtype: int32 or int64."""
    n_rows = coords.shape[0]
    code = torch.empty(n_rows, dtype=dtype, device=coords.device)
    constants = (hilbert, _POINTS)
    encode_kernel.launch(
        coords.device,
        target,
        (cdiv(n_rows, _POINTS), 1, 1),
        (coords, code, n_rows, bits),
        constants,
        {"num_warps": 4},
        (constants, dtype, specialise(coords.data_ptr())),
    )
    return code


def decode_voxels(code: torch.Tensor, bits: int, hilbert: bool, target: Target) -> torch.Tensor:
    """Coordinates int32 [N, 4] of contiguous codes int32 or int64 [N], N >= 1."""
    n_rows = code.shape[0]
    coords = torch.empty((n_rows, 4), dtype=torch.int32, device=code.device)
    constants = (hilbert, code.dtype == torch.int64, _POINTS)
    decode_kernel.launch(
        code.device,
        target,
        (cdiv(n_rows, _POINTS), 1, 1),
        (code, coords, n_rows, bits),
        constants,
        {"num_warps": 4},
        (constants, specialise(code.data_ptr())),
    )
    return coords
