"""Packing coordinates into one integer key, inside kernels.

`geometry` is an int32 table `[2 + V, D]`: per-axis multiplier, per-axis divisor (or its logarithm,
see `Geometry`), then V offsets.
`bounds` is an int32 table `[1 + D, 2]`: (lowest, extent) for the batch column and every axis. The
coordinate that row `r` reaches by offset `v` is `(c * multiplier + offset[v]) / divisor`, and
exists only if the division is exact and it lies inside `bounds`; its key is its row-major index in
that box, so keys are never negative and never collide.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..runtime.parts import Operand

EMPTY = tl.constexpr(-1)  # a hash slot without a key


class Geometry(NamedTuple):
    """table: as above.  division: 0 where every divisor is 1; 1 where all are powers of two, and
    the table holds their logarithms; 2 otherwise. (A division costs as much as all the rest.)

    class_offsets: int32 [classes, W] on the device, or None. What a coordinate leaves behind
    its divisors decides which offsets lead to a whole one: the class, row-major over the
    remainders, lists them in ascending order, padded with -1. (Of a kernel of 3x3x3 with stride 2
    at most 8 of 27.)
    """

    table: torch.Tensor
    division: int
    class_offsets: torch.Tensor | None = None

    @property
    def n_offsets(self) -> int:
        """The kernel volume, V."""
        return self.table.shape[0] - 2

    @property
    def n_row_offsets(self) -> int:
        """Offsets that may lead to a whole coordinate from one row, at most."""
        return self.n_offsets if self.class_offsets is None else self.class_offsets.shape[1]

    @property
    def classes(self) -> torch.Tensor:
        """`class_offsets`, int32 [classes, W]; where that is None `table`, which stands for a pointer that
        is not followed."""
        return self.table if self.class_offsets is None else self.class_offsets


class Reach(NamedTuple):
    """Rows, and what they reach by the offsets of a geometry.

    coords: int32 [N, 1 + D], contiguous.  bounds: int32 [1 + D, 2], as above, of what is reached.  wide: it is
    computed in 64 bits.  alive: int32 [N], rows below 0 reach nothing; None: all may.  last: int32 [1], one less
    than the rows in use; None: all are.
    """

    coords: torch.Tensor
    geometry: Geometry
    bounds: Operand
    wide: bool
    alive: torch.Tensor | None = None
    last: Operand | None = None


@triton.jit
def live_rows(count_ptr, n_rows, counted):
    """How many of `n_rows` rows there are: all, or where `counted` as many as a counter that
    started at -1 says. (A number, not a constexpr: one form of each kernel serves both.)"""
    in_use = tl.load(count_ptr, mask=counted != 0, other=0) + 1
    return tl.where(counted != 0, tl.minimum(in_use, n_rows), n_rows)


@triton.jit
def _divided(scaled, geometry_ptr, axis, D: tl.constexpr, DIVISION: tl.constexpr):
    """`scaled` over the axis' divisor; rounded somehow where that is not whole."""
    if DIVISION == 0:
        return scaled
    elif DIVISION == 1:
        return scaled >> tl.load(geometry_ptr + D + axis)
    else:
        return scaled // tl.load(geometry_ptr + D + axis)


@triton.jit
def row_offset(
    coords_ptr,
    geometry_ptr,
    classes_ptr,
    row,
    position,
    ok,
    n_row_offsets,
    D: tl.constexpr,
    WIDE: tl.constexpr,
    DIVISION: tl.constexpr,
    CLASSES: tl.constexpr,
):
    """The offset at `position` among those that may lead from `row` to a whole coordinate, or -1; row,
    position and ok broadcast against each other. ok: of the rows.

    CLASSES: `Geometry.class_offsets` lists them. Otherwise all offsets may.
    """
    if CLASSES:
        offset_class = tl.zeros_like(row)
        for axis in tl.static_range(D):
            c = tl.load(coords_ptr + row.to(tl.int64) * (D + 1) + 1 + axis, mask=ok, other=0)
            if WIDE:
                c = c.to(tl.int64)
            scaled = c * tl.load(geometry_ptr + axis)
            step = tl.load(geometry_ptr + D + axis)
            if DIVISION == 1:
                offset_class = (offset_class << step) + (scaled & ((1 << step) - 1)).to(tl.int32)
            else:
                remainder = (scaled % step).to(tl.int32)  # of the sign of `scaled`
                offset_class = offset_class * step + tl.where(remainder < 0, remainder + step, remainder)
        v = tl.load(
            classes_ptr + offset_class * n_row_offsets + position, mask=ok & (position < n_row_offsets), other=-1
        )
    else:
        v = tl.where(position < n_row_offsets, position, -1)
    return v


@triton.jit
def locate(
    coords_ptr,
    geometry_ptr,
    bounds_ptr,
    row,
    v,
    ok,
    D: tl.constexpr,
    KEY64: tl.constexpr,
    WIDE: tl.constexpr,
    DIVISION: tl.constexpr,
):
    """(key, ok) of the coordinate reached from `row` by offset `v`; row, v and ok broadcast against
    each other.

    WIDE: compute coordinates in 64 bits, needed when multiplier * extent can leave 32.
    """
    # Triton 3.0 does not widen a pointer to its mask.
    base, _ = tl.broadcast(coords_ptr + row.to(tl.int64) * (D + 1), ok)
    batch = tl.load(base, mask=ok, other=-1) - tl.load(bounds_ptr)
    ok = ok & (batch >= 0) & (batch < tl.load(bounds_ptr + 1))
    key = batch.to(tl.int64) if KEY64 else batch
    for axis in tl.static_range(D):
        c = tl.load(base + 1 + axis, mask=ok, other=0)
        offset = tl.load(geometry_ptr + (2 + v) * D + axis)
        if WIDE:
            c = c.to(tl.int64)
        scaled = c * tl.load(geometry_ptr + axis) + offset
        index = _divided(scaled, geometry_ptr, axis, D, DIVISION)
        if DIVISION == 1:
            ok = ok & (index << tl.load(geometry_ptr + D + axis) == scaled)
        if DIVISION == 2:
            ok = ok & (index * tl.load(geometry_ptr + D + axis) == scaled)
        index = index - tl.load(bounds_ptr + 2 * axis + 2)
        extent = tl.load(bounds_ptr + 2 * axis + 3)
        ok = ok & (index >= 0) & (index < extent)
        # Inside the box an index fits the key's type, whatever it was computed in.
        key = key * extent + index.to(key.dtype)
    return tl.where(ok, key, 0), ok


@triton.jit
def coordinate(coords_ptr, geometry_ptr, row, v, ok, axis, D: tl.constexpr, WIDE: tl.constexpr, DIVISION: tl.constexpr):
    """Coordinate along `axis` that `row` reaches by offset `v` (int32)."""
    c = tl.load(coords_ptr + row.to(tl.int64) * (D + 1) + 1 + axis, mask=ok, other=0)
    if WIDE:
        c = c.to(tl.int64)
    scaled = c * tl.load(geometry_ptr + axis) + tl.load(geometry_ptr + (2 + v) * D + axis)
    return _divided(scaled, geometry_ptr, axis, D, DIVISION).to(tl.int32)


@triton.jit
def home_slot(key, capacity, KEY64: tl.constexpr):
    """First slot to probe. Keys that differ only in their low bits share a group of four slots, so
    that neighbours along the last axis are found in one memory sector. `capacity` is a power of
    two."""
    if KEY64:
        mixed = (key >> 2) * -7046029254386353131  # odd(2^64 / golden ratio)
        mixed = mixed.to(tl.uint64, bitcast=True)
        mixed = mixed ^ (mixed >> 32)  # the product's high half is the well mixed one
        slot = (mixed << 2).to(tl.int64, bitcast=True) | (key & 3)
    else:
        mixed = ((key >> 2) * -1640531527).to(tl.uint32, bitcast=True)
        mixed = mixed ^ (mixed >> 16)
        slot = (mixed << 2).to(tl.int32, bitcast=True) | (key & 3)
    return (slot & (capacity - 1)).to(tl.int32)


@triton.jit
def next_slot(slot, capacity):
    """The slot to probe behind this one. Keys that fill a group of four meet another group as one: the
    next step takes each of them past it. By single slots they would walk four steps each. Five, being
    odd, leads through all slots."""
    return (slot + 5) & (capacity - 1)
