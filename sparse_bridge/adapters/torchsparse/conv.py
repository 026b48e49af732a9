"""`conv3d`: every convolution of torchsparse, behind the patches and the stand-in."""

from __future__ import annotations

from typing import Any

import torch

from ...core.conv.convolution import autocast_dtype, conv
from ...core.device import trace
from ...core.device.rocm import linear
from ...core.maps import map_builder, map_cache
from ...core.maps.kernel_map import KernelMap
from ...errors import (
    ContractError,
    CoordinateError,
    DataTypeError,
    DeviceError,
    SettingError,
    ShapeError,
)
from ...log import once
from ..ledger import note
from . import profile as profiles
from .errors import MissingMapError
from .geometry import core_offsets, generated_sites, kernel_offsets, layer_of, shrunk_range
from .maps import adopt_sites, build_record, coordinate_map
from .options import Options, allow_tf32, resolve
from .profile import Profile
from .records import MapDict, MapList, Record, read, record_of
from .tensors import caches_of, check_input, make_like, range_of, register_sites, triple

__all__ = ["conv3d", "kernel_record"]

Triple = tuple[int, int, int]
_ONE = (1, 1, 1)
_HALVES = (torch.float16, torch.bfloat16)


def conv3d(
    x: Any,
    weight: torch.Tensor,
    kernel_size: Any,
    bias: torch.Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    config: Any = None,
    transposed: bool = False,
    generative: bool = False,
) -> Any:
    """The convolution of a SparseTensor; arguments as torchsparse 2.1 names them.

    weight: [V, C_in, C_out], or [C_in, C_out] when V is 1; any strides. Dilation is part of the
    cache key and otherwise ignored, as in every release.
    Raises MissingMapError (a transposed layer without an earlier one), ContractError, SettingError,
    ShapeError, DataTypeError, DeviceError, GeometryError, CoordinateError.
    """
    release = profiles.current()
    feats, coords = check_input(x, "Conv3d")
    kernel, steps = triple(kernel_size, "kernel_size"), triple(stride, "stride")
    pads = triple(padding, "padding") if release.divides else (0, 0, 0)
    spread = triple(dilation, "dilation")
    if spread != _ONE:
        once(
            ("torchsparse-dilation",),
            f"Conv3d has dilation {dilation}; torchsparse accepts it and computes without, so do "
            "we.",
        )
    if generative and not transposed:
        raise ContractError("generative=True is for transposed layers; pass transposed=True too.")
    if kernel == steps == _ONE:
        return _pointwise(x, feats, coords, weight, bias, release)
    options = resolve(release, config)
    if generative:
        out, kind = _generative(x, feats, weight, bias, kernel, steps, pads, release, options)
    elif transposed:
        out, kind = _transposed(x, feats, weight, bias, kernel, steps, spread, release)
    else:
        record = kernel_record(x, kernel, steps, pads, spread, release, options)
        y = _multiply(feats, weight, bias, record.kmap, release)
        fine = triple(x.stride, "the tensor stride")
        coarse: Triple = tuple(t * s for t, s in zip(fine, steps, strict=True))  # type: ignore
        out = make_like(x, y, record.out_coords, coarse, record.out_range)
        register_sites(x, release, coarse, record.out_coords, record.out_range)
        kind = "Conv3d"
    note("torchsparse", kind)
    return out


def _pointwise(
    x: Any,
    feats: torch.Tensor,
    coords: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    release: Profile,
) -> Any:
    """One matrix product over all rows; no map, but the sites are registered."""
    feats, weight = _same_dtype(feats, weight, release)
    if weight.ndim == 3 and weight.shape[0] == 1:
        weight = weight[0]
    if weight.ndim != 2 or weight.shape[0] != feats.shape[1]:
        raise ShapeError(
            f"Input feature size and kernel size mismatch: {feats.shape[1]} channels, and a weight "
            f"of shape {list(weight.shape)}; expected [C_in, C_out]."
        )
    if feats.device != weight.device:
        raise DeviceError(
            f"features are on {feats.device}, the weight on {weight.device}; move both to one "
            "device."
        )
    if autocast_dtype(feats.device) is None:
        if feats.dtype != weight.dtype:
            raise DataTypeError(
                f"features are {feats.dtype} and the weight is {weight.dtype}; convert one, or use "
                "torch.autocast."
            )
        bias = None if bias is None else bias.to(feats.dtype)
    y = linear(feats, weight, bias)
    stride = triple(x.stride, "the tensor stride")
    spatial_range = range_of(x)
    register_sites(x, release, stride, coords, spatial_range)
    trace.emit_linear("mm", feats.shape[0], weight.shape[0], weight.shape[1])
    note("torchsparse", "Conv3d 1x1x1")
    return make_like(x, y, coords, stride, spatial_range)


def _same_dtype(
    feats: torch.Tensor, weight: torch.Tensor, release: Profile
) -> tuple[torch.Tensor, torch.Tensor]:
    """2.1 runs in half precision when either operand has it; autocast decides where it is on."""
    if feats.dtype != weight.dtype and release.divides and autocast_dtype(feats.device) is None:
        if weight.dtype == torch.float32 and feats.dtype in _HALVES:
            weight = weight.to(feats.dtype)
        elif feats.dtype == torch.float32 and weight.dtype in _HALVES:
            feats = feats.to(weight.dtype)
    return feats, weight


def _multiply(
    feats: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    kmap: KernelMap,
    release: Profile,
) -> torch.Tensor:
    feats, weight = _same_dtype(feats, weight, release)
    columns = weight.shape[-2] if weight.ndim >= 2 else -1
    if feats.shape[1] != columns:
        raise ShapeError(
            f"Input feature size and kernel size mismatch: {feats.shape[1]} channels, and a weight "
            f"of shape {list(weight.shape)}; expected [V, C_in, C_out]."
        )
    tf32 = allow_tf32(release, feats.device)
    return conv(feats, weight, bias, kmap, layout="vio", allow_tf32=tf32)


def kernel_record(
    x: Any,
    kernel: Triple,
    stride: Triple,
    padding: Triple,
    dilation: Triple,
    release: Profile,
    options: Options,
) -> Record:
    """The map of a forward layer: the cached one if it fits x's coordinates, else a new one.

    As in torchsparse the cache key knows neither padding nor mode: layers that share a key share
    the map, and the `spatial_range`, of the first.
    """
    fine = triple(x.stride, "the tensor stride")
    kmaps, key = caches_of(x).kmaps, (fine, kernel, stride, dilation)
    record = record_of(kmaps.get(key))
    if record is not None and record.starts_from(x.coords):
        return record
    given = range_of(x) if release.divides else None
    layer = layer_of(
        release.name, kernel, stride, padding, _ONE if release.divides else fine,
        options.kmap_mode, options.downsample_mode, options.keep_tail,
    )  # fmt: skip
    out_range = shrunk_range(given, kernel, stride, padding, options.keep_tail)
    record = build_record(x.coords, release, layer, given, out_range, "Conv3d")
    kmaps[key] = MapDict(record) if release.divides else MapList(record)
    return record


def _transposed(
    x: Any,
    feats: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    kernel: Triple,
    stride: Triple,
    dilation: Triple,
    release: Profile,
) -> tuple[Any, str]:
    """The map of the layer that made x's sites, read backwards; outputs are that layer's inputs."""
    coarse = triple(x.stride, "the tensor stride")
    fine: Triple = tuple(t // s for t, s in zip(coarse, stride, strict=True))  # type: ignore
    caches, key = caches_of(x), (fine, kernel, stride, dilation)
    entry, sites = caches.kmaps.get(key), caches.cmaps.get(fine)
    at, fine_range = sites if isinstance(sites, tuple) else (sites, None)
    if entry is None:
        known = [k for k in caches.kmaps if k[1:] == key[1:]]
        raise MissingMapError(
            f"a transposed Conv3d (kernel {kernel}, stride {stride}, dilation {dilation}) at "
            f"tensor stride {coarse} needs the map of an earlier layer with the same kernel, "
            f"stride and dilation at tensor stride {fine}; there are such maps at "
            f"{[k[0] for k in known]}. Run the encoder on the same tensor first, and share its "
            "caches (`y._caches = x._caches`, or cmaps and kmaps)."
        )
    record = record_of(entry)
    if record is None:
        if at is None:
            raise MissingMapError(f"cmaps holds no coordinates at tensor stride {fine}.")
        record = read(entry, at, x.coords, fine_range)
        caches.kmaps[key] = MapDict(record) if release.divides else MapList(record)
    if not record.ends_at(x.coords):
        raise MissingMapError(
            f"the map cached for tensor strides {fine} to {coarse} ends at "
            f"{len(record.out_coords)} sites, which are not the {len(x.coords)} of this tensor, so "
            "a transposed Conv3d cannot reverse it. Rows must stay as the encoder made them, order "
            "included."
        )
    y = _multiply(feats, weight, bias, record.kmap.transposed(), release)
    # The map knows where it came from, so a raw input needs no registration in `cmaps`.
    fine_range = record.in_range if sites is None else fine_range
    register_sites(x, release, fine, record.in_coords, fine_range)
    return make_like(x, y, record.in_coords, fine, fine_range), "Conv3d transposed"


def _generative(
    x: Any,
    feats: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    kernel: Triple,
    stride: Triple,
    padding: Triple,
    release: Profile,
    options: Options,
) -> tuple[Any, str]:
    """New sites around every input; the shared kernel maps are dropped, as torchsparse does."""
    if options.kmap_mode != "hashmap":
        raise SettingError(
            "generative layers exist with kmap_mode='hashmap' only; set it in the config: "
            "F.conv_config.get_default_conv_config().kmap_mode = 'hashmap', or a global config."
        )
    given = range_of(x)
    if given is None:
        raise ContractError(
            "a generative Conv3d needs the tensor's spatial_range (batch, x, y, z); it limits "
            "the outputs."
        )
    out_range = shrunk_range(given, kernel, stride, padding)
    assert out_range is not None
    if min(out_range[1:]) < 1:
        raise CoordinateError(
            f"kernel {kernel} with stride {stride} leaves nothing of spatial_range {given}: "
            f"{out_range}. torchsparse limits generated sites to that smaller range; give a "
            "larger one."
        )
    store = map_cache.store_of(x.coords)
    coarse_map = coordinate_map(store, x.coords, release)
    coords, out_store = adopt_sites(
        *generated_sites(coarse_map, kernel, stride, out_range), release
    )
    fine_map = coordinate_map(out_store, coords, release)
    # p * s = q + o read from q: the inputs of q are the p at which q = s * p - o.
    negated = core_offsets([(-x, -y, -z) for x, y, z in kernel_offsets(kernel)])
    kmap = map_builder.between(fine_map, coarse_map, negated, stride[::-1]).transposed()
    y = _multiply(feats, weight, bias, kmap, release)
    coarse = triple(x.stride, "the tensor stride")
    fine: Triple = tuple(t // s for t, s in zip(coarse, stride, strict=True))  # type: ignore
    caches = caches_of(x)
    caches.kmaps, caches.hashmaps = {}, {}
    register_sites(x, release, fine, coords, out_range, overwrite=True)
    return make_like(x, y, coords, fine, out_range), "Conv3d generative"
