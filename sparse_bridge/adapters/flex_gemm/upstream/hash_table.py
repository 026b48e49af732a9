"""FlexGEMM's hash tables as its users see them: two vectors, keys and values.

Where an entry stands in the vectors is nobody's business: entries fill the free slots in order, and
look-ups sort the keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ....core.traced import between_graphs
from ..arguments import INTEGERS, check_tensors, per_axis, shape_entries
from ..errors import ArgumentShapeError, ArgumentTypeError, ArgumentValueError
from ..geometry import check_coords, grid_shape

_SIGNED = {torch.uint32: torch.int32, torch.uint64: torch.int64}


@between_graphs
def init_hashmap(spatial_size: Sequence[int], hashmap_size: int, device: Any, with_values: bool = True) -> Any:
    """(keys filled with ones, uninitialised values uint32), or the keys alone.

    spatial_size: a five-entry shape; keys are uint32 while its cells fit, else uint64.
    Raises: ArgumentValueError.
    """
    (slots,) = per_axis(hashmap_size, 1, "hashmap_size", 0)
    batch, _, extents = grid_shape(spatial_size)
    cells = batch * extents[0] * extents[1] * extents[2]
    if cells >= 1 << 64:
        raise ArgumentValueError(f"a grid of {tuple(spatial_size)} has {cells} cells; keys take 64 bits.")
    dtype = torch.uint32 if cells < 1 << 32 else torch.uint64
    keys = torch.full((slots,), -1, dtype=_SIGNED[dtype], device=device).view(dtype)
    if not with_values:
        return keys
    return keys, torch.empty(slots, dtype=torch.int32, device=device).view(torch.uint32)


def _signed(values: torch.Tensor) -> torch.Tensor:
    return values.view(_SIGNED[values.dtype]) if values.dtype in _SIGNED else values


@between_graphs
def hashmap_insert(keys: torch.Tensor, vals: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Enter values under keys, in place; a key that is there gets the new value. Raises
    ArgumentValueError where the table is full."""
    _check("hashmap_insert", keys, vals, k)
    _check("hashmap_insert", keys, vals, v)
    if len(k) != len(v):
        raise ArgumentShapeError(f"hashmap_insert got {len(k)} keys for {len(v)} values.")
    table_keys, stored, new, value = _signed(keys), _signed(vals), _signed(k), _signed(v)
    new, inverse = torch.unique(new, return_inverse=True)
    last = torch.zeros_like(new, dtype=torch.int64)
    last.scatter_reduce_(0, inverse, torch.arange(len(inverse), device=inverse.device), "amax")
    value = value.index_select(0, last)
    slots = _slots(table_keys, new)
    missing = (slots < 0).nonzero().squeeze(1)
    free = (table_keys == -1).nonzero().squeeze(1)
    if len(free) < len(missing):
        raise ArgumentValueError(f"{len(missing)} new keys for {len(free)} free slots; make the table larger.")
    slots[missing] = free[: len(missing)]
    table_keys[slots], stored[slots] = new.to(table_keys.dtype), value.to(stored.dtype)


def _check(caller: str, keys: torch.Tensor, vals: torch.Tensor, query: torch.Tensor) -> None:
    """Raises ArgumentTypeError, ArgumentShapeError."""
    check_tensors(caller, keys=keys, vals=vals, query=query)
    for name, tensor in (("keys", keys), ("vals", vals), ("query", query)):
        if tensor.ndim != 1 or tensor.dtype not in (*_SIGNED, *INTEGERS):
            raise ArgumentShapeError(
                f"{caller} got {name} of shape {list(tensor.shape)} and {tensor.dtype}; expected [M], "
                "integers of 32 or 64 bits."
            )
    if len(keys) != len(vals):
        raise ArgumentShapeError(f"{caller} got {len(keys)} keys and {len(vals)} values.")


def _slots(table_keys: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Where each key stands, int64, -1 where it does not."""
    if not len(table_keys):
        return torch.full(query.shape, -1, device=query.device)
    ordered, order = torch.sort(table_keys)
    at = torch.searchsorted(ordered, query.to(table_keys.dtype)).clamp(max=len(table_keys) - 1)
    present = (ordered[at] == query) & (query != -1)
    return torch.where(present, order[at], -1)


@between_graphs
def hashmap_lookup(keys: torch.Tensor, vals: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """The value of every key; all ones where it is absent."""
    _check("hashmap_lookup", keys, vals, k)
    slots = _slots(_signed(keys), _signed(k))
    stored = _signed(vals)
    values = torch.where(slots >= 0, stored[slots.clamp(min=0)], -1).to(stored.dtype)
    return values.view(vals.dtype)


def cell_keys(coords: torch.Tensor, extents: Sequence[int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(keys of coordinates [M, 4], which of them lie in the box). Raises ArgumentShapeError,
    ArgumentTypeError, ArgumentValueError."""
    check_coords(coords, "the hash table")
    extents = shape_entries(extents, 3, "S1, S2, S3", "the grid of a hash table")
    if dtype not in _SIGNED:
        raise ArgumentTypeError(f"the hash table has keys of {dtype}; expected uint32 or uint64.")
    key = coords[:, 0].long()
    inside = torch.ones_like(key, dtype=torch.bool)
    for axis, extent in enumerate(extents):
        value = coords[:, axis + 1].long()
        inside &= (value >= 0) & (value < extent)
        key = key * extent + value
    return key.to(_SIGNED[dtype]).view(dtype), inside


def hashmap_insert_3d(
    keys: torch.Tensor, vals: torch.Tensor, coords: torch.Tensor, v: torch.Tensor, *extents: int
) -> None:
    """`hashmap_insert` by coordinates int32 [M, 4]."""
    hashmap_insert(keys, vals, cell_keys(coords, extents, keys.dtype)[0], v)


def hashmap_insert_3d_idx_as_val(keys: torch.Tensor, vals: torch.Tensor, coords: torch.Tensor, *extents: int) -> None:
    """The row number under every coordinate."""
    rows = torch.arange(len(coords), dtype=torch.int32, device=coords.device)
    hashmap_insert_3d(keys, vals, coords, rows.view(torch.uint32), *extents)


def hashmap_lookup_3d(keys: torch.Tensor, vals: torch.Tensor, coords: torch.Tensor, *extents: int) -> torch.Tensor:
    """The value under every coordinate; all ones where there is none or outside of the box."""
    query, inside = cell_keys(coords, extents, keys.dtype)
    values = _signed(hashmap_lookup(keys, vals, query))
    return torch.where(inside, values, -1).to(values.dtype).view(vals.dtype)
