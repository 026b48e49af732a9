"""Coordinates on the host as columns of int64, the boxes around them, and keys of their cells."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from .boxes import Box
from .offsets import Offsets

Array = npt.NDArray[np.int64]
Rows32 = npt.NDArray[np.int32]
Mask = npt.NDArray[np.bool_]


def on_host(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """The integers of a tensor of any shape and dtype, in both; of one on the CPU its own memory. Waits for any
    other."""
    return tensor.numpy() if tensor.device.type == "cpu" else tensor.cpu().numpy()


def on_device(values: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """A tensor on `device` of integers, in their shape and dtype (any shape); over their memory if that is the CPU."""
    tensor = torch.from_numpy(values)
    return tensor if device.type == "cpu" else tensor.to(device)


class Hull(NamedTuple):
    """lo, size: of a box around coordinates, batch first."""

    lo: Sequence[int]
    size: Sequence[int]


def columns_of(coords: torch.Tensor) -> Array:
    """int64 [1 + D, N] of coordinates [N, 1 + D]."""
    columns: Array = on_host(coords).T.astype(np.int64, order="C")
    return columns


def hull_of(columns: Array) -> Hull | None:
    """The smallest box around coordinates; None if there are none."""
    if columns.shape[1] == 0:
        return None
    lo, hi = np.minimum.reduce(columns, 1).tolist(), np.maximum.reduce(columns, 1).tolist()
    return Hull(lo, [most - least + 1 for least, most in zip(lo, hi, strict=True)])


def cells_of(hull: Hull | Box, halo: tuple[int, ...]) -> int:
    """Cells of `hull` widened by `halo`."""
    n_cells = hull.size[0]
    for extent, reach in zip(hull.size[1:], halo, strict=True):
        n_cells *= extent + 2 * reach
    return n_cells


def steps_of(sizes: Sequence[int]) -> list[int]:
    """What a step along each axis of a box adds to row-major keys."""
    steps, step = [], 1
    for size in reversed(sizes):
        steps.append(step)
        step *= size
    return steps[::-1]


def fits(hull: Hull, box: Box) -> bool:
    """Whether all cells of `hull` are cells of `box`."""
    return all(
        low <= least and least + extent <= low + most
        for least, extent, low, most in zip(hull.lo, hull.size, box.lo, box.size, strict=True)
    )


def inside(columns: Array, lo: Sequence[int], size: Sequence[int]) -> Mask:
    """bool [N]: which coordinates lie in the box of `lo` and `size`."""
    every: Mask | None = None
    for column, low, extent in zip(columns, lo, size, strict=True):
        in_range = (column - low).view(np.uint64) < extent
        every = in_range if every is None else every & in_range
    assert every is not None
    return every


def _wrapped(value: int) -> int:
    """`value` modulo 2^64, as int64 has it."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def keys_of(columns: Array, hull: Hull, halo: tuple[int, ...]) -> Array:
    """Row-major int64 keys in `hull` widened by `halo` cells on both sides of every spatial
    axis."""
    first = hull.lo[0]  # the key of the box's first cell, if coordinates are taken as they are
    key: Array = columns[0].copy()
    for axis, reach in enumerate(halo, 1):
        extent = hull.size[axis] + 2 * reach
        key *= extent
        key += columns[axis]
        first = first * extent + hull.lo[axis] - reach
    key -= _wrapped(first)
    return key


@functools.lru_cache(maxsize=4096)  # offsets are interned
def values_of(offsets: Offsets) -> Array:
    """int64 [D, V]."""
    values: Array = np.array(offsets.values, np.int64).T.copy()
    return values


def halo_of(offsets: Offsets) -> tuple[int, ...]:
    """How far offsets reach along each axis, in cells [D]."""
    return tuple(offsets.reach(axis) for axis in range(offsets.dimension))
