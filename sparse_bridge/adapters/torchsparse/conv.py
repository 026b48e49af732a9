"""Every convolution of torchsparse, behind the patches and the stand-in's layers."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Iterator
from typing import Any

import torch

from ...core.conv.convolution import autocast_dtype
from ...core.conv.deferred.conv import DeferredConv
from ...core.conv.epilogue import Epilogue
from ...core.conv.layers import convolve_layer
from ...core.conv.plan import ConvForm
from ...core.device import trace
from ...core.device.selection import as_on_gpu
from ...core.device.torch_compat import allows_tf32
from ...core.maps import map_cache
from ...core.maps.kernel_map import KernelMap
from ...core.ops.pointwise import linear_layer
from ...errors import ContractError, CoordinateError, DataTypeError, DeviceError, SettingError, ShapeError
from ...log import once
from ..call_stats import note
from ..fusion import EpilogueLayers
from ..warmup_registry import Expected, new_coordinates, of_kernel
from .errors import MissingMapError
from .geometry import layer_of, shrunk_range
from .levels import generated_level
from .maps import as_tensor, build_record, coordinate_map
from .options import Options, resolve
from .profile import Profile, peek
from .records import TRACED, Record, entry_of, leading_from, read, record_of
from .spec import ONE, ConvSpec, MapKey, spec_of
from .tensors import caches_of, check_input, output_of, range_of

__all__ = ["allow_tf32", "conv3d", "convolve", "expected"]

_IEEE, _TF32 = ConvForm(), ConvForm(precision="tf32")
_HALVES = (torch.float16, torch.bfloat16)
Range = tuple[int, ...] | None


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
    """The convolution of a SparseTensor; arguments as torchsparse 2.1 names them. See `convolve`.

    Dilation is part of the cache key and otherwise ignored, as in every release.
    """
    spec = spec_of(kernel_size, stride, padding, dilation, transposed, generative)
    return convolve(x, weight, bias, spec, config)


def convolve(
    x: Any,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    spec: ConvSpec,
    config: Any = None,
    layers: EpilogueLayers | None = None,
) -> Any:
    """The convolution of a SparseTensor.

    weight: [V, C_in, C_out], or [C_in, C_out] when V is 1; any strides.  bias: [C_out] or None.
    layers: what its result goes through in the same launch, unless it is pointwise.
    Raises MissingMapError (a transposed layer without an earlier one), ContractError, SettingError,
    ShapeError, DataTypeError, DeviceError, GeometryError, CoordinateError.
    """
    feats, coords = check_input(x, "Conv3d")
    if spec.dilation != ONE:
        once(
            ("torchsparse-dilation",),
            f"Conv3d has dilation {spec.dilation}; torchsparse accepts it and computes without, so do we.",
        )
    if torch.compiler.is_compiling():
        return _traced(x, feats, weight, bias, spec, config)
    level = spec.levels.get(x.stride) if type(x.stride) is tuple else None
    stride, key = spec.level(x.stride) if level is None else level
    end = Epilogue(bias) if layers is None else layers.epilogue(bias)
    y: torch.Tensor | DeferredConv
    if spec.pointwise:
        layer_type, y, out_range = "Conv3d 1x1x1", _pointwise(feats, weight, bias, spec), range_of(x)
    elif spec.generative:
        layer_type = "Conv3d generative"
        kmap, coords, out_range = _generated(x, spec, config)
        y = _multiply(feats, weight, end, kmap, spec.release)
        caches = caches_of(x)
        caches.kmaps, caches.hashmaps = {}, {}
        caches.cmaps.pop(stride, None)
    elif spec.transposed:
        layer_type = "Conv3d transposed"
        record, out_range = _earlier_record(x, coords, spec, key)
        coords = record.in_coords
        y = _multiply(feats, weight, end, record.kmap.transposed(), spec.release)
    else:
        layer_type = "Conv3d"
        record = _record(x, coords, spec, key, config)
        coords, out_range = record.out_coords, record.out_range
        y = _multiply(feats, weight, end, record.kmap, spec.release)
    note("torchsparse", layer_type)
    return output_of(x, spec.release, y, coords, stride, out_range)


def _traced(
    x: Any, feats: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, spec: ConvSpec, config: Any
) -> Any:
    """`convolve` in a graph."""
    from . import compiled

    stride, key = spec.level(x.stride)
    if spec.transposed and not (spec.generative or compiled.reverses(x, key)):
        return compiled.outside(convolve, x, weight, bias, spec, config)
    if spec.pointwise:
        y = _pointwise(feats, weight, bias, spec)
        return output_of(x, spec.release, y, x.coords, stride, range_of(x))
    feats, weight = _checked(feats, weight, spec.release)
    if spec.generative:
        record = compiled.generated(x, spec, _generated_range(x, spec, config))
    elif spec.transposed:
        record = compiled.earlier_record(x, key)
    else:
        record = compiled.record_of(x, spec, key, config)
    form = _TF32 if allow_tf32(spec.release, feats.device) else _IEEE
    back = spec.transposed and not spec.generative
    y = compiled.multiplied(feats, weight, bias, record, form, back)
    sites, spatial_range = (record.in_sites, record.in_range) if back else (record.out_sites, record.out_range)
    if spec.generative:
        caches = caches_of(x)
        caches.kmaps, caches.hashmaps = {}, {}
        caches.cmaps.pop(stride, None)
    compiled.remember(x, stride, sites)
    return output_of(x, spec.release, y, sites.coords, stride, spatial_range)


def _pointwise(
    feats: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, spec: ConvSpec
) -> torch.Tensor | DeferredConv:
    """One matrix product over all rows; no map."""
    owner = weight
    feats, weight = _same_dtype(feats, weight, spec.release)
    if weight.ndim == 3 and weight.shape[0] == 1:
        weight = weight[0]
    if weight.ndim != 2 or weight.shape[0] != feats.shape[1]:
        raise _mismatch(feats, weight, "[C_in, C_out]")
    if feats.device != weight.device:
        raise DeviceError(f"features are on {feats.device}, the weight on {weight.device}; move both to one device.")
    if autocast_dtype(feats.device) is None:
        if feats.dtype != weight.dtype:
            raise DataTypeError(
                f"features are {feats.dtype} and the weight is {weight.dtype}; convert one, or use torch.autocast."
            )
        bias = None if bias is None else bias.to(feats.dtype)
    y = linear_layer(owner, feats, weight, bias)
    trace.emit_linear("mm", feats.shape[0], weight.shape[0], weight.shape[1])
    return y


def _mismatch(feats: torch.Tensor, weight: torch.Tensor, expected: str) -> ShapeError:
    return ShapeError(
        f"Input feature size and kernel size mismatch: {feats.shape[1]} channels, and a weight "
        f"of shape {list(weight.shape)}; expected {expected}."
    )


def _same_dtype(feats: torch.Tensor, weight: torch.Tensor, release: Profile) -> tuple[torch.Tensor, torch.Tensor]:
    """2.1 runs in half precision when either operand has it; autocast decides where it is on."""
    if feats.dtype != weight.dtype and release.divides and autocast_dtype(feats.device) is None:
        if weight.dtype == torch.float32 and feats.dtype in _HALVES:
            weight = weight.to(feats.dtype)
        elif feats.dtype == torch.float32 and weight.dtype in _HALVES:
            feats = feats.to(weight.dtype)
    return feats, weight


def _checked(feats: torch.Tensor, weight: torch.Tensor, release: Profile) -> tuple[torch.Tensor, torch.Tensor]:
    feats, weight = _same_dtype(feats, weight, release)
    if weight.ndim < 2 or feats.shape[1] != weight.shape[-2]:
        raise _mismatch(feats, weight, "[V, C_in, C_out]")
    return feats, weight


def _multiply(
    feats: torch.Tensor, weight: torch.Tensor, epilogue: Epilogue, kmap: KernelMap, release: Profile
) -> torch.Tensor | DeferredConv:
    owner = weight
    feats, weight = _checked(feats, weight, release)
    tf32 = allow_tf32(release, feats.device)
    return convolve_layer(owner, feats, weight, kmap, epilogue, _TF32 if tf32 else _IEEE)


def _record(x: Any, coords: torch.Tensor, spec: ConvSpec, key: MapKey, config: Any) -> Record:
    """The map of a forward layer: the cached one if it fits x's coordinates, else a new one.

    As in torchsparse the cache key knows neither padding nor mode: layers that share a key share
    the map, and the `spatial_range`, of the first.
    """
    kmaps = getattr(x, "_caches", x).kmaps
    record = leading_from(coords, kmaps.get(key))
    if record is None and (TRACED, *key) in kmaps:
        _of_graph(kmaps, key, spec)
        record = leading_from(coords, kmaps[key])
    if record is not None:
        return record
    build = functools.partial(_new_record, spec, key, resolve(spec.release, config))
    record = build(coords, range_of(x))
    record.again = build
    kmaps[key] = entry_of(record, spec.release)
    return record


def _new_record(spec: ConvSpec, key: MapKey, options: Options, coords: torch.Tensor, in_range: Range) -> Record:
    release, kernel, stride, padding = spec.release, spec.kernel, spec.stride, spec.padding
    in_range = in_range if release.divides else None
    layer = layer_of(
        release.name,
        kernel,
        stride,
        padding,
        ONE if release.divides else key[0],
        options.kmap_mode,
        options.downsample_mode,
        options.keep_tail,
    )
    out_range = shrunk_range(in_range, kernel, stride, padding, options.keep_tail)
    return build_record(coords, release, layer, in_range, out_range, "Conv3d")


def _earlier_record(x: Any, coords: torch.Tensor, spec: ConvSpec, key: MapKey) -> tuple[Record, Range]:
    """(the map of the layer that made x's coordinates, `spatial_range` of that layer's inputs).

    A transposed layer reads it backwards; its outputs are that layer's inputs.
    """
    caches = caches_of(x)
    entry, sites = caches.kmaps.get(key), caches.cmaps.get(key[0])
    fine, fine_range = sites if isinstance(sites, tuple) else (sites, None)
    record = record_of(entry)
    if entry is None and (TRACED, *key) in caches.kmaps:
        record = _of_graph(caches.kmaps, key, spec)
    if record is None:
        if entry is None:
            raise _missing(caches.kmaps, key, x.stride)
        if fine is None:
            raise MissingMapError(f"cmaps holds no coordinates at tensor stride {key[0]}.")
        record = read(entry, fine, coords, fine_range)
        caches.kmaps[key] = entry_of(record, spec.release)
    if not record.ends_at(coords):
        raise MissingMapError(
            f"the map cached for tensor strides {key[0]} to {x.stride} ends at "
            f"{len(record.out_coords)} sites, which are not the {len(coords)} of this tensor, so "
            "a transposed Conv3d cannot reverse it. Rows must stay as the encoder made them, order "
            "included."
        )
    # The map knows where it came from, so a raw input needs no registration in `cmaps`.
    return record, record.in_range if sites is None else fine_range


def _of_graph(kmaps: Any, key: MapKey, spec: ConvSpec) -> Record | None:
    """A map that `torch.compile` made in a part of the program."""
    from . import compiled

    record = compiled.record_from_graph(kmaps, key)
    if record is not None:
        kmaps[key] = entry_of(record, spec.release)
    return record


def _missing(kmaps: Any, key: MapKey, tensor_stride: Any) -> MissingMapError:
    fine, kernel, stride, dilation = key
    strides = [other[0] for other in kmaps if other[1:] == key[1:]]
    return MissingMapError(
        f"a transposed Conv3d (kernel {kernel}, stride {stride}, dilation {dilation}) at tensor "
        f"stride {tensor_stride} needs the map of an earlier layer with the same kernel, stride "
        f"and dilation at tensor stride {fine}; there are such maps at {strides}. Run the encoder "
        "on the same tensor first, and share its caches (`y._caches = x._caches`, or cmaps and "
        "kmaps)."
    )


def _generated(x: Any, spec: ConvSpec, config: Any) -> tuple[KernelMap, torch.Tensor, Range]:
    """(map, coordinates, range) of new coordinates around every input."""
    release, out_range = spec.release, _generated_range(x, spec, config)
    store = map_cache.store_of(x.coords)
    coarse_map = coordinate_map(store, x.coords, release)
    level = generated_level(coarse_map, store, spec.kernel, spec.stride, out_range)
    assert level.kmap is not None
    return level.kmap, as_tensor(level, release), out_range


def _generated_range(x: Any, spec: ConvSpec, config: Any) -> tuple[int, ...]:
    """The range of new coordinates. Raises SettingError, ContractError, CoordinateError."""
    release, kernel, stride = spec.release, spec.kernel, spec.stride
    if resolve(release, config).kmap_mode != "hashmap":
        raise SettingError(
            "generative layers exist with kmap_mode='hashmap' only; set it in the config: "
            "F.conv_config.get_default_conv_config().kmap_mode = 'hashmap', or a global config."
        )
    in_range = range_of(x)
    if in_range is None:
        raise ContractError(
            "a generative Conv3d needs the tensor's spatial_range (batch, x, y, z); it limits the outputs."
        )
    out_range = shrunk_range(in_range, kernel, stride, spec.padding)
    assert out_range is not None
    if min(out_range[1:]) < 1:
        raise CoordinateError(
            f"kernel {kernel} with stride {stride} leaves nothing of spatial_range {in_range}: "
            f"{out_range}. torchsparse limits generated sites to that smaller range; give a "
            "larger one."
        )
    return out_range


def allow_tf32(profile: Profile, device: torch.device) -> bool:
    """2.1 has a switch of its own, on by default where TF32 exists; the others follow torch's."""
    if device.type != "cuda" and (torch.compiler.is_compiling() or not as_on_gpu(device)):
        return False
    if not profile.divides:
        return allows_tf32()
    backends = sys.modules.get("torchsparse.backends")
    chosen = None if backends is None else vars(backends).get("allow_tf32")
    return chosen is None or bool(chosen)  # a GPU that has no TF32 computes without


def expected(layer: Any) -> Iterator[Expected]:
    """What a `torchsparse.nn.Conv3d` will ask the engine to multiply."""
    single = math.prod(layer.stride) == 1
    odd = all(size % 2 for size in layer.kernel_size) and single
    unstrided = single or layer.transposed
    strided = None if unstrided else new_coordinates(layer.kernel_size, layer.stride)
    tf32 = allow_tf32(peek(), layer.kernel.device)
    return of_kernel(layer, odd, tf32, strided, layer.transposed)
