"""`torchsparse.backend.GPUHashTable`, which projects use directly."""

from __future__ import annotations

from typing import Any

import torch

from ....core.maps import key_search, map_cache
from ....core.maps.coordinate_map import CoordinateMap
from ....errors import ContractError, GeometryError
from .. import geometry
from .. import profile as profiles
from ..maps import coordinate_map, core_rows
from ..records import PAD
from ..spec import triple
from ..tensors import check_coords

__all__ = ["CoordinateTable"]


class CoordinateTable:
    """What `torchsparse.backend.GPUHashTable` does: rows by coordinate, or by 64-bit key.

    Results count from 1, 0 means absent, and are padded to a multiple of 128 rows.
    """

    def __init__(self) -> None:
        self._sites: CoordinateMap | None = None
        self._keys: torch.Tensor | None = None

    def insert_coords(self, coords: torch.Tensor) -> None:
        """coords: int32 [N, 4] as (x, y, z, b)."""
        rows = check_coords(coords, "insert_coords")
        store = map_cache.MapStore(device=rows.device)
        self._sites = coordinate_map(store, rows, profiles.PROFILES["2.0"])

    def lookup_coords(self, coords: torch.Tensor, kernel_size: Any, stride: Any, volume: int) -> torch.Tensor:
        """int32 [ceil(M / 128) * 128, volume]: row + 1 of xyz * stride + offset - (k - 1) // 2."""
        if self._sites is None:
            raise ContractError("lookup_coords before insert_coords: the table is empty.")
        kernel = triple(kernel_size, "kernel_size")
        offsets = geometry.core_offsets(geometry.kernel_offsets(kernel))
        if int(volume) != len(offsets):
            raise GeometryError(f"a kernel of {kernel} has {len(offsets)} offsets, not {volume}.")
        rows = core_rows(check_coords(coords, "lookup_coords"), profiles.PROFILES["2.0"])
        steps = triple(stride, "stride")[::-1]
        in_rows = key_search.find_rows(self._sites, rows, offsets, steps)
        return _padded(in_rows.t() + 1)

    def insert_vals(self, keys: torch.Tensor) -> None:
        """keys: int64 [N]."""
        self._keys = keys

    def lookup_vals(self, keys: torch.Tensor) -> torch.Tensor:
        """int32 [ceil(M / 128) * 128]: index + 1 of each int64 key."""
        if self._keys is None:
            raise ContractError("lookup_vals before insert_vals: the table is empty.")
        return _padded(key_search.find_keys(keys, self._keys, torch.int32) + 1)


def _padded(in_rows: torch.Tensor) -> torch.Tensor:
    rows = -(-in_rows.shape[0] // PAD) * PAD
    out = in_rows.new_zeros((rows, *in_rows.shape[1:]))
    out[: in_rows.shape[0]] = in_rows
    return out
