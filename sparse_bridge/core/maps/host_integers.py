"""Integers on the CPU by numpy, which takes a half to a tenth of torch's time there: vector
instructions for sorts and divisions, radix sorts of short keys, searches that follow one another,
and calls that cost a microsecond."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..geometry.host_cells import Array, Mask

_THREADS = 4  # from which on torch's own search, which shares its work, is the faster one


def stable_order(keys: npt.NDArray[Any], bound: int) -> Array:
    """int64 [N]: the rows of integer `keys` [N], all in 0 .. bound - 1, by key and then by row."""
    if bound <= 1 << 16:
        keys = keys.astype(np.uint8 if bound <= 1 << 8 else np.uint16)
    return keys.argsort(kind="stable")


def sort_keys(keys: Array, bound: int) -> tuple[Array, Array]:
    """(sorted keys, their rows), both int64 [N], of int64 `keys` [N] in 0 .. bound - 1; equal keys
    by row."""
    n_rows = len(keys)
    bits = max(n_rows - 1, 1).bit_length()
    if bound > 1 << (63 - bits):
        order = np.argsort(keys, kind="stable")
        return keys[order], order
    packed = (keys << bits) | np.arange(n_rows)
    packed.sort()
    return packed >> bits, packed & ((1 << bits) - 1)


def leaders(keys: Array, bound: int, as_table: bool) -> Array:
    """int64 [N]: of every key the place of the first one that equals it.

    keys: int64 [N] in 0 .. bound - 1.  as_table: by a table of `bound` places, else by sorting.
    """
    if as_table:
        first = np.empty(bound, np.int64)
        first[keys[::-1]] = np.arange(len(keys) - 1, -1, -1)  # of equal ones the last stays
        return first.take(keys)
    ordered, rows = sort_keys(keys, bound)
    new = differs(ordered)
    leading = np.empty_like(rows)
    leading[rows] = rows[new].take(new.cumsum() - 1)
    return leading


def differs(ordered: Array) -> Mask:
    """bool [N]: whether a value is another one than that before it."""
    first = np.empty(len(ordered), np.bool_)
    first[:1] = True
    np.not_equal(ordered[1:], ordered[:-1], out=first[1:])
    return first


def search(keys: Array, values: Array) -> Array:
    """int64, the shape of `values`: how many of ascending `keys` are less than each of these values."""
    if torch.get_num_threads() >= _THREADS:
        return torch.searchsorted(torch.from_numpy(keys), torch.from_numpy(values)).numpy()
    return keys.searchsorted(values)


def runs(steps: Array) -> list[tuple[Array, Array | None]]:
    """Places in ascending `steps` whose values can be found together, each lot but the first with
    the places of the values that are less by one."""
    every = np.arange(len(steps))
    heads = np.append(True, np.diff(steps) != 1)
    depth = every - np.maximum.accumulate(np.where(heads, every, 0))
    lots = [np.flatnonzero(depth == level) for level in range(int(depth.max()) + 1)]
    return [(at, at - 1 if level else None) for level, at in enumerate(lots)]
