"""64-bit keys of coordinate rows, and finding keys or coordinates among others."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...errors import DataTypeError, DeviceError, OverflowLimitError, ShapeError
from ..device.device_support import kernel_target
from ..geometry.offsets import Offsets
from .coordinate_map import CoordinateMap, capacity_for
from .map_builder import search_of

_BASIS = 14695981039346656037 - (1 << 64)
_PRIME = 1099511628211


def hash_rows(
    coords: torch.Tensor, shifts: torch.Tensor | None = None, *, first: int = 0, fold: bool = True
) -> torch.Tensor:
    """64-bit keys of the rows of `coords` int32 [N, D]: h = (h xor 32-bit word) * 1099511628211
    mod 2^64 per column.

    shifts: int32 [K, 3] are added to columns first .. first + 2; the result is then [K, N], else
    [N], int64.
    fold: xor the four top bits into the rest, so that keys are not negative.
    Raises: ShapeError, DataTypeError, DeviceError.
    """
    if coords.ndim != 2 or (shifts is not None and (shifts.ndim != 2 or shifts.shape[1] != 3)):
        sizes = None if shifts is None else list(shifts.shape)
        raise ShapeError(f"coordinates {list(coords.shape)} and offsets {sizes}; expected [N, D] and [K, 3].")
    if coords.dtype != torch.int32 or (shifts is not None and shifts.dtype != torch.int32):
        raise DataTypeError(
            "coordinates are "
            f"{coords.dtype}{'' if shifts is None else f', offsets {shifts.dtype}'}; expected "
            "int32 (use .int())."
        )
    if shifts is not None and shifts.device != coords.device:
        raise DeviceError(f"coordinates are on {coords.device}, offsets on {shifts.device}; move both to one device.")
    n_shifts = 1 if shifts is None else shifts.shape[0]
    keys = torch.empty((n_shifts, coords.shape[0]), dtype=torch.int64, device=coords.device)
    target = kernel_target(coords.device)
    if keys.numel() == 0:
        pass
    elif target is not None:
        from ...kernels.maps.key_table import hash_rows as launch

        launch(coords.contiguous(), None if shifts is None else shifts.contiguous(), first, fold, keys, target)
    else:
        keys = _host_hash(coords, shifts, first, fold)
    return keys[0] if shifts is None else keys


def _host_hash(coords: torch.Tensor, shifts: torch.Tensor | None, first: int, fold: bool) -> torch.Tensor:
    words = coords.unsqueeze(0)
    if shifts is not None:
        words = words.repeat(shifts.shape[0], 1, 1)
        words[:, :, first : first + 3] += shifts.unsqueeze(1)
    h = torch.full(words.shape[:2], _BASIS, dtype=torch.int64, device=coords.device)
    for column in words.unbind(2):
        h = (h ^ (column.long() & 0xFFFFFFFF)) * _PRIME
    return ((h >> 60) & 15) ^ (h & 0x0FFFFFFFFFFFFFFF) if fold else h


def find_keys(queries: torch.Tensor, references: torch.Tensor, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Where each query occurs in `references`: its first place, or -1.

    Args:
        queries: int64, any shape.  references: int64 [R], any values, repeats allowed.
        dtype: of the result, int64 or int32.

    Returns: the shape of `queries`.
    Raises: ShapeError, DataTypeError, DeviceError, OverflowLimitError.
    """
    if references.ndim != 1:
        raise ShapeError(f"references have shape {list(references.shape)}; expected [R].")
    if queries.dtype != torch.int64 or references.dtype != torch.int64:
        raise DataTypeError(
            f"queries are {queries.dtype}, references {references.dtype}; expected int64 keys (as from a hash)."
        )
    if queries.device != references.device:
        raise DeviceError(
            f"queries are on {queries.device}, references on {references.device}; move both to one device."
        )
    if references.shape[0] >= 1 << 29:
        raise OverflowLimitError(f"{references.shape[0]} references; a key table takes fewer than 2^29.")
    rows = torch.full(queries.shape, -1, dtype=dtype, device=queries.device)
    if rows.numel() == 0 or references.shape[0] == 0:
        return rows
    target = kernel_target(queries.device, key64=True)
    if target is None:
        return _host_find(queries, references).to(dtype)
    from ...kernels.maps.key_table import build_table
    from ...kernels.maps.key_table import find_keys as launch

    table = build_table(references.contiguous(), capacity_for(references.shape[0]), target)
    launch(table, queries.reshape(-1), rows.view(-1), target)
    return rows


def _host_find(queries: torch.Tensor, references: torch.Tensor) -> torch.Tensor:
    ordered, order = torch.sort(references, stable=True)
    position = torch.searchsorted(ordered, queries.contiguous()).clamp_(max=ordered.shape[0] - 1)
    return torch.where(ordered[position] == queries, order[position], -1)


def find_rows(cmap: CoordinateMap, coords: torch.Tensor, offsets: Offsets, stride: Sequence[int]) -> torch.Tensor:
    """Rows of `cmap` at coordinate * stride + offset: int32 [V, M], -1 where there is none.

    coords: int32 [M, 1 + D], batch first, repeats allowed.  Of equal coordinates of the map the
    first row is found.
    Raises: ShapeError, DataTypeError, DeviceError.
    """
    if coords.ndim != 2 or coords.shape[1] != cmap.coords.shape[1] or coords.dtype != torch.int32:
        raise (DataTypeError if coords.dtype != torch.int32 else ShapeError)(
            f"queries are {coords.dtype} {list(coords.shape)}; expected int32 [M, {cmap.coords.shape[1]}]."
        )
    if coords.device != cmap.device:
        raise DeviceError(f"queries are on {coords.device}, the map on {cmap.device}; move both to one device.")
    n_offsets, steps = len(offsets), tuple(stride)
    nbr = torch.full((n_offsets, coords.shape[0]), -1, dtype=torch.int32, device=coords.device)
    if coords.shape[0] == 0 or cmap.n_rows == 0:
        return nbr
    first = None if cmap.unique else cmap.duplicates()
    distinct = cmap.distinct_map()
    target = distinct.kernel_target()
    if target is None:
        search = search_of(distinct.box, offsets)
        lists = search.lookup(distinct.host(), coords, None, offsets, steps)
        for v in range(n_offsets):
            part = slice(lists.starts[v], lists.starts[v + 1])
            nbr[v, lists.out_rows[part]] = lists.in_rows[part].int()
    else:
        from ...kernels.maps.coord_key import Reach
        from ...kernels.maps.neighbor_lookup import neighbor_lookup

        ones = (1,) * offsets.dimension
        # The queries' bounds are unknown, so coordinates are computed in 64 bits.
        geometry = offsets.geometry(coords.device, steps, ones, 1)
        bounds = distinct.box.layout(coords.device).bounds
        reach = Reach(coords.contiguous(), geometry, bounds, True)
        nbr = neighbor_lookup(distinct.table(target), distinct.n_rows, reach, target).nbr
    if first is not None:
        rows = first.first.int()
        nbr = torch.where(nbr >= 0, rows[nbr.clamp(min=0).long()], nbr)
    return nbr
