"""Integers on the CPU by numpy, which takes a half to a tenth of torch's time there: vector
instructions for sorts and divisions, radix sorts of short keys, searches that follow one another.
Tensors of other devices are left to torch."""

from __future__ import annotations

import numpy as np
import torch

_THREADS = 4  # from which on torch's own search, which shares its work, is the faster one


def stable_order(keys: torch.Tensor, bound: int) -> torch.Tensor:
    """int64 [N]: the rows of integer `keys` [N], all in 0 .. bound - 1, by key and then by row."""
    if keys.device.type != "cpu" or bound > 1 << 16:
        return torch.sort(keys, stable=True).indices
    short = keys.numpy().astype(np.uint8 if bound <= 1 << 8 else np.uint16)
    return torch.from_numpy(np.argsort(short, kind="stable"))


def sort_keys(keys: torch.Tensor, bound: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(sorted keys, their rows), both int64 [N], of int64 `keys` [N] in 0 .. bound - 1; equal keys
    by row."""
    n_rows = keys.shape[0]
    bits = max(n_rows - 1, 1).bit_length()
    if keys.device.type != "cpu" or bound > 1 << (63 - bits):
        found = torch.sort(keys, stable=True)
        return found.values, found.indices
    packed = ((keys << bits) | torch.arange(n_rows, device="cpu")).numpy()
    packed.sort()
    both = torch.from_numpy(packed)
    return both >> bits, both & ((1 << bits) - 1)


def distinct(keys: torch.Tensor, bound: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(distinct keys, ascending; place of every key among them), int64, of int64 `keys` [N] in
    0 .. bound - 1."""
    if keys.device.type != "cpu":
        return torch.unique(keys, return_inverse=True)
    ordered, rows = sort_keys(keys, bound)
    first = differs(ordered)
    place = torch.empty_like(rows)
    place.scatter_(0, rows, first.cumsum(0) - 1)
    return ordered.index_select(0, places(first)), place


def differs(ordered: torch.Tensor) -> torch.Tensor:
    """bool [N]: whether a value is another one than that before it."""
    first = torch.ones_like(ordered, dtype=torch.bool)
    torch.ne(ordered[1:], ordered[:-1], out=first[1:])
    return first


def search(keys: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """int64 [M]: how many of ascending `keys` are less than each of `wanted` [M]."""
    if keys.device.type != "cpu" or torch.get_num_threads() >= _THREADS:
        return torch.searchsorted(keys, wanted)
    return torch.from_numpy(np.searchsorted(keys.numpy(), wanted.numpy()))


def places(mask: torch.Tensor) -> torch.Tensor:
    """int64 [K]: where `mask` [N] is set."""
    if mask.device.type != "cpu":
        return mask.nonzero().squeeze(1)
    return torch.from_numpy(np.flatnonzero(mask.numpy()))


def divided(values: torch.Tensor, divisor: int) -> torch.Tensor:
    """`values` / `divisor`, rounded down."""
    if divisor == 1:
        return values
    if values.device.type != "cpu":
        return torch.div(values, divisor, rounding_mode="floor")
    return torch.from_numpy(values.numpy() // values.numpy().dtype.type(divisor))
