"""The functions below torchsparse's layers: kernel maps and output coordinates."""

from __future__ import annotations

from typing import Any

import torch

from ....core.maps import map_cache
from ....core.maps.map_cache import MapStore
from ....core.traced import between_graphs
from ....errors import ContractError, SettingError, UnsupportedError
from .. import geometry, options
from .. import profile as profiles
from ..levels import Level, generated_level, strided_level
from ..maps import as_tensor, bounds_of, build_record, coordinate_map, inside_range
from ..profile import Profile
from ..records import PAD, MapDict, Record, pair_tensors
from ..spec import triple
from ..tensors import check_coords

__all__ = ["build_kernel_map", "downsample", "generate", "transposed_table"]


def _layer(
    kernel: geometry.Triple,
    stride: geometry.Triple,
    padding: geometry.Triple,
    tensor_stride: geometry.Triple,
    mode: str,
    downsample_mode: str,
) -> geometry.Layer:
    if mode == "grid":
        raise UnsupportedError("mode='grid' orders kernel offsets differently and is not bridged.")
    options.check_modes(mode, downsample_mode)
    release = profiles.current()
    return geometry.layer_of(release.name, kernel, stride, padding, tensor_stride, mode, downsample_mode, False)


def build_kernel_map(
    coords: torch.Tensor,
    kernel_size: Any,
    stride: Any,
    padding: Any = 0,
    tensor_stride: Any = 1,
    spatial_range: Any = None,
    mode: str = "hashmap",
    downsample_mode: str = "spconv",
    dataflow: Any = None,
    generative: bool = False,
) -> Any:
    """A kernel map: the dict of a `kmaps` entry in 2.1, (nbmaps, nbsizes, coords) before.

    generative: of a layer that makes new sites (2.1), in `spatial_range`.
    """
    release = profiles.current()
    coords = check_coords(coords, "build_kernel_map")
    kernel, steps = triple(kernel_size, "kernel_size"), triple(stride, "stride")
    pads, fine = triple(padding, "padding"), triple(tensor_stride, "tensor_stride")
    layer = _layer(kernel, steps, pads, fine, mode, downsample_mode)
    options.check_dataflow(dataflow)
    in_range = None if spatial_range is None else tuple(spatial_range)
    if generative:
        return MapDict(_generated(coords, release, mode, kernel, steps, pads, in_range))
    out_range = geometry.shrunk_range(in_range, kernel, steps, pads)
    record = build_record(coords, release, layer, in_range, out_range, "build_kernel_map")
    if release.divides:
        return MapDict(record)
    return (*pair_tensors(record.kmap), record.out_coords)


def _generated(
    coords: torch.Tensor,
    release: Profile,
    mode: str,
    kernel: geometry.Triple,
    stride: geometry.Triple,
    padding: geometry.Triple,
    spatial_range: tuple[int, ...] | None,
) -> Record:
    if mode != "hashmap":
        raise SettingError(f"generative maps exist with mode='hashmap' only, got {mode!r}.")
    level, out_range = _new_level(coords, release, kernel, stride, padding, spatial_range)
    assert level.kmap is not None
    return Record(level.kmap, coords, as_tensor(level, release), spatial_range, out_range)


def _new_level(
    coords: torch.Tensor,
    release: Profile,
    kernel: geometry.Triple,
    stride: geometry.Triple,
    padding: geometry.Triple,
    spatial_range: tuple[int, ...] | None,
) -> tuple[Level, tuple[int, ...]]:
    """(every site around coords * stride, inside the range behind such a layer, that range)."""
    if spatial_range is None:
        raise ContractError("generated sites need a spatial_range (batch, x, y, z).")
    out_range = geometry.shrunk_range(spatial_range, kernel, stride, padding)
    assert out_range is not None
    store = map_cache.store_of(coords)
    cmap = coordinate_map(store, coords, release)
    return generated_level(cmap, store, kernel, stride, out_range), out_range


@between_graphs
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
    bounds = bounds_of(store, coords, release)
    if spatial_range is None:
        cmap = coordinate_map(store, coords, release)
    else:
        cmap = inside_range(coords, release, bounds, spatial_range)
        store = MapStore(cmap)
    level = strided_level(layer.sites, cmap, store, lambda: bounds, spatial_range)
    return as_tensor(level, release)


def generate(coords: torch.Tensor, stride: Any, kernel_size: Any, padding: Any, spatial_range: Any) -> torch.Tensor:
    """Sites of a generative layer (2.1): every site around coords * stride, inside the range behind
    such a layer. Raises ContractError without a range."""
    release = profiles.current()
    coords = check_coords(coords, "spupsample_generative")
    in_range = None if spatial_range is None else tuple(spatial_range)
    sizes = triple(kernel_size, "kernel_size"), triple(stride, "stride"), triple(padding, "padding")
    return as_tensor(_new_level(coords, release, *sizes, in_range)[0], release)


def transposed_table(out_in_map: torch.Tensor, size: int) -> torch.Tensor:
    """int32 [ceil(size / 128) * 128, V]: the output row of each input row, the first where there
    are several, from the reverse."""
    n_rows = -(-int(size) // PAD) * PAD
    absent = torch.iinfo(out_in_map.dtype).max
    table = out_in_map.new_full((n_rows, out_in_map.shape[1]), absent)
    outputs, offsets = (out_in_map >= 0).nonzero(as_tuple=True)
    cells = out_in_map[outputs, offsets].long() * table.shape[1] + offsets
    table.view(-1).scatter_reduce_(0, cells, outputs.to(table.dtype), "amin")
    return table.masked_fill_(table == absent, -1)
