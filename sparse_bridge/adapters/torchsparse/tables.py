"""The framework's functions below its layers: kernel maps, output sites, hash tables."""

from __future__ import annotations

from typing import Any

import torch

from ...core.maps import key_search, map_cache
from ...core.maps.coordinate_map import CoordinateMap
from ...errors import ContractError, GeometryError, UnsupportedError
from . import profile as profiles
from . import rules
from .maps import (
    adopt_sites,
    bounds_of,
    build_record,
    check_coords,
    coordinate_map,
    core_rows,
)
from .records import MapDict, pair_tensors
from .tensors import triple

__all__ = [
    "CoordinateTable",
    "build_kernel_map",
    "downsample",
    "generate",
    "transposed_table",
]

_PAD = 128


def _layer(
    kernel: rules.Triple,
    stride: rules.Triple,
    padding: rules.Triple,
    tensor_stride: rules.Triple,
    mode: str,
    downsample_mode: str,
) -> rules.Layer:
    if mode == "grid":
        raise UnsupportedError("mode='grid' orders taps differently and is not bridged.")
    release = profiles.current()
    return rules.layer_of(
        release.name, kernel, stride, padding, tensor_stride, mode, downsample_mode, False
    )


def build_kernel_map(
    coords: torch.Tensor,
    kernel_size: Any,
    stride: Any,
    padding: Any = 0,
    tensor_stride: Any = 1,
    spatial_range: Any = None,
    mode: str = "hashmap",
    downsample_mode: str = "spconv",
) -> Any:
    """A kernel map: the dict of a `kmaps` entry in 2.1, (nbmaps, nbsizes, coords) before."""
    release = profiles.current()
    coords = check_coords(coords, "build_kernel_map")
    kernel, steps = triple(kernel_size, "kernel_size"), triple(stride, "stride")
    pads, fine = triple(padding, "padding"), triple(tensor_stride, "tensor_stride")
    layer = _layer(kernel, steps, pads, fine, mode, downsample_mode)
    given = None if spatial_range is None else tuple(spatial_range)
    out_range = rules.shrunk_range(given, kernel, steps, pads)
    record = build_record(coords, release, layer, given, out_range, "build_kernel_map")
    if release.divides:
        return MapDict(record)
    return (*pair_tensors(record.kmap), record.out_coords)


def downsample(
    coords: torch.Tensor,
    stride: Any,
    kernel_size: Any,
    padding: Any = 0,
    tensor_stride: Any = 1,
    spatial_range: Any = None,
    downsample_mode: str = "spconv",
) -> torch.Tensor:
    """Output coordinates of a strided layer, int32 [M, 4], ascending; 2.1: its hashmap mode's."""
    release = profiles.current()
    coords = check_coords(coords, "spdownsample")
    kernel, steps = triple(kernel_size, "kernel_size"), triple(stride, "stride")
    pads, fine = triple(padding, "padding"), triple(tensor_stride, "tensor_stride")
    layer = _layer(kernel, steps, pads, fine, "hashmap", downsample_mode)
    if layer.sites is None:
        return coords
    store = map_cache.store_of(coords)
    cmap = coordinate_map(store, coords, release)
    bounds = bounds_of(store, coords, release)
    given = None if spatial_range is None else tuple(spatial_range)
    return adopt_sites(*rules.output_sites(layer.sites, cmap, bounds, given), release)[0]


def generate(
    coords: torch.Tensor, stride: Any, kernel_size: Any, padding: Any, spatial_range: Any
) -> torch.Tensor:
    """Sites of a generative layer (2.1): every site around coords * stride, inside the range behind
    such a layer. Raises ContractError without a range."""
    if spatial_range is None:
        raise ContractError("generated sites need a spatial_range (batch, x, y, z).")
    release = profiles.current()
    coords = check_coords(coords, "spupsample_generative")
    kernel, steps = triple(kernel_size, "kernel_size"), triple(stride, "stride")
    out_range = rules.shrunk_range(tuple(spatial_range), kernel, steps, triple(padding, "padding"))
    assert out_range is not None
    cmap = coordinate_map(map_cache.store_of(coords), coords, release)
    return adopt_sites(*rules.generated_sites(cmap, kernel, steps, out_range), release)[0]


def transposed_table(out_in_map: torch.Tensor, size: int) -> torch.Tensor:
    """int32 [ceil(size / 128) * 128, V]: the output row of each input row, from the reverse."""
    n_rows = -(-int(size) // _PAD) * _PAD
    table = out_in_map.new_full((n_rows, out_in_map.shape[1]), -1)
    rows, taps = (out_in_map >= 0).nonzero(as_tuple=True)
    table[out_in_map[rows, taps].long(), taps] = rows.to(table.dtype)
    return table


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
        store = map_cache.MapStore()
        self._sites = coordinate_map(store, rows, profiles.PROFILES["2.0"])

    def lookup_coords(
        self, coords: torch.Tensor, kernel_size: Any, stride: Any, volume: int
    ) -> torch.Tensor:
        """int32 [ceil(M / 128) * 128, volume]: row + 1 of xyz * stride + tap - (k - 1) // 2."""
        if self._sites is None:
            raise ContractError("lookup_coords before insert_coords: the table is empty.")
        kernel = triple(kernel_size, "kernel_size")
        offsets = rules.core_offsets(rules.kernel_offsets(kernel))
        if int(volume) != len(offsets):
            raise GeometryError(f"a kernel of {kernel} has {len(offsets)} taps, not {volume}.")
        rows = core_rows(check_coords(coords, "lookup_coords"), profiles.PROFILES["2.0"])
        steps = triple(stride, "stride")[::-1]
        found = key_search.find_rows(self._sites, rows, offsets, steps)
        return _padded(found.t() + 1)

    def insert_vals(self, keys: torch.Tensor) -> None:
        """keys: int64 [N]."""
        self._keys = keys

    def lookup_vals(self, keys: torch.Tensor) -> torch.Tensor:
        """int32 [ceil(M / 128) * 128]: place + 1 of each int64 key."""
        if self._keys is None:
            raise ContractError("lookup_vals before insert_vals: the table is empty.")
        return _padded(key_search.find_keys(keys, self._keys, torch.int32) + 1)


def _padded(found: torch.Tensor) -> torch.Tensor:
    rows = -(-found.shape[0] // _PAD) * _PAD
    out = found.new_zeros((rows, *found.shape[1:]))
    out[: found.shape[0]] = found
    return out
