"""The rules of `indice_key`: who may share a map, and which exception says no."""

from __future__ import annotations

import enum
import math
import sys
from typing import Any

import torch

from ... import settings
from ...core.late_maps import carried, map_for_layer
from ...errors import ContractError, DataTypeError, GeometryError
from .geometry import check_dimension
from .tensors import shape_of

__all__ = ["KeyReuseError", "KeyTakenError", "checked", "entries_of", "find", "fits"]


# spconv's methods that subclasses override: of layers that share a map, and of those that invert one.
REUSE_CHECKS = "_check_subm_reuse_valid", "_check_inverse_reuse_valid"
_shared, _generation = False, -1  # the setting `shared_keys`, and the generation it was read at


class KeyReuseError(ContractError):
    """A non-submanifold layer tried to share an `indice_key`."""


class KeyTakenError(ContractError, GeometryError):
    """The `indice_key` of a pool is in use already."""


def checked_key(indice_key: Any) -> Any:
    """The `indice_key` of a new layer. Raises DataTypeError for one that no dictionary takes."""
    try:
        hash(indice_key)
    except TypeError:
        raise DataTypeError(
            f"indice_key is {indice_key!r} ({type(indice_key).__name__}); expected text, or another hashable value."
        ) from None
    return indice_key


def checked_algo(algo: Any, names: type[enum.Enum]) -> Any:
    """The `algo` of a new layer. Raises ContractError for what is none of `names`, the framework's `ConvAlgo`."""
    if not isinstance(algo, names):
        raise ContractError(f"algo is {algo!r}; expected one of {', '.join(map(str, names))}, or None.")
    return algo


def find(layer: Any, x: Any, features: torch.Tensor, weight: torch.Tensor) -> tuple[dict[Any, Any], Any, torch.Tensor]:
    """(the maps that the output carries, that of the layer's `indice_key` or None where the layer
    is to build one, the weight as it is applied).  Raises as `checked`."""
    key, entries = layer.indice_key, entries_of(x)
    record = None if key is None else entries.get(key) if type(entries) is dict else map_for_layer(entries, key)
    if record is None and not layer.inverse:
        return entries, None, weight
    if record is None or not fits(layer, x, record, features):
        weight = checked(layer, x, record, weight)
    return entries, record, weight


def fits(layer: Any, x: Any, record: Any, features: torch.Tensor) -> bool:
    """Whether plain comparisons show that `checked` has nothing to say and gives the whole
    weight. False says nothing."""
    shape, kernel, size = x.spatial_shape, layer.kernel_size, x.indices.shape
    if layer.inverse:
        allowed, grid, rows = not record.is_subm, record.out_spatial_shape, record.out_indices
        spread = mine = kernel
    else:
        allowed, grid, rows = layer.subm and record.is_subm, record.spatial_shape, record.indices
        spread, mine = record.dilation, layer.dilation
    # Other sequences of numbers, tensors say, may not compare to one truth.
    if not type(shape) is type(kernel) is type(grid) is type(record.ksize) is list:
        return False
    if not type(spread) is type(mine) is list or len(size) != 2:
        return False
    return (
        allowed
        and layer.algo is record.algo
        and record.ksize == kernel
        and spread == mine
        and grid == shape
        and layer.ndim == len(shape) == size[1] - 1
        and size[0] == rows.shape[0] == features.shape[0]
    )


def checked(layer: Any, x: Any, record: Any, weight: torch.Tensor) -> torch.Tensor:
    """The weight as a layer applies it that reads `record`, the map of its `indice_key`.

    record: None where an inverse layer finds nothing.  Raises ContractError and its kinds,
    GeometryError, DimensionError.
    """
    check_dimension(layer, x)
    if record is not None:
        check_algo(layer, record)
    if record is not None and _has_own_check(layer):  # `run_own_check` has run it
        _check_rows(type(layer).__name__, layer.indice_key, x, record.out_indices if layer.inverse else record.indices)
    elif layer.inverse:
        check_inverse(layer, x, record)
    else:
        check_reuse(layer, x, record)
    return weight if layer.inverse else used_offsets(weight, layer, record)


def _reuse_check(layer: Any) -> str:
    """The name of the method that decides which map a layer may share."""
    return REUSE_CHECKS[1 if layer.inverse else 0]  # torch.compile takes no truth value for a number


def _has_own_check(layer: Any) -> bool:
    """Whether a subclass, or the layer itself, decides which map it may share."""
    check = getattr(layer, _reuse_check(layer), None)
    return getattr(check, "__module__", __name__) not in ("spconv.pytorch.conv", __name__)


def run_own_check(layer: Any, x: Any) -> None:
    """Call the layer's own check, where it has one, on the map that it is about to share."""
    if (layer.inverse or layer.subm) and _has_own_check(layer):
        record = x.indice_dict.get(layer.indice_key)
        if record is not None:
            getattr(layer, _reuse_check(layer))(x, shape_of(x), record)


def subm_reuse_check(self: Any, inp: Any, spatial_shape: list[int], datas: Any) -> None:
    """spconv's method of that name: raises as `check_reuse`."""
    check_reuse(self, inp, datas)


def inverse_reuse_check(self: Any, inp: Any, spatial_shape: list[int], datas: Any) -> None:
    """spconv's method of that name: raises as `check_inverse`."""
    check_inverse(self, inp, datas)


OUR_CHECKS = subm_reuse_check, inverse_reuse_check


def check_algo(layer: Any, record: Any) -> None:
    # Above 32 offsets spconv's own defaults differ between pools and convolutions; below, only an
    # explicit choice can. A build for CPUs leaves no choice: its convolutions have one algorithm,
    # its average pools the other.
    if getattr(sys.modules.get("spconv.cppconstants"), "CPU_ONLY_BUILD", False):
        return
    if layer.algo != record.algo and math.prod(layer.kernel_size) <= 32 and math.prod(record.ksize) <= 32:
        raise ContractError(
            f"layers that share indice_key {layer.indice_key!r} must use the same algo: this "
            f"{type(layer).__name__} has {layer.algo}, the map was made with {record.algo}."
        )


def check_inverse(layer: Any, x: Any, record: Any) -> None:
    layer_name, key = type(layer).__name__, layer.indice_key
    if record is None:
        raise ContractError(
            f"{layer_name} needs the indice_key of the layer it inverts; {key!r} is not among "
            f"{sorted(map(str, x.indice_dict))}."
        )
    if record.is_subm:
        raise ContractError(
            f"{layer_name}: indice_key {key!r} belongs to a submanifold layer; only regular, transposed "
            "and pooling layers can be inverted."
        )
    if list(record.ksize) != list(layer.kernel_size):
        raise GeometryError(
            f"{layer_name} has kernel size {layer.kernel_size}, indice_key {key!r} was made with "
            f"{list(record.ksize)}; an inverse layer needs the same kernel."
        )
    if list(record.out_spatial_shape) != shape_of(x):
        raise GeometryError(
            f"{layer_name} got a grid of {shape_of(x)}, indice_key {key!r} produced "
            f"{list(record.out_spatial_shape)}; feed it the output of that layer."
        )
    _check_rows(layer_name, key, x, record.out_indices)


def check_reuse(layer: Any, x: Any, record: Any) -> None:
    layer_name, key = type(layer).__name__, layer.indice_key
    if not layer.subm or not record.is_subm:
        raise KeyReuseError(
            f"{layer_name}: indice_key {key!r} already holds the map of another layer; only submanifold "
            "layers share a key. Give this layer a key of its own."
        )
    if list(record.ksize) != list(layer.kernel_size) and not _shares(layer, record):
        raise GeometryError(
            f"{layer_name} has kernel size {layer.kernel_size}, indice_key {key!r} was made with "
            f"{list(record.ksize)}; submanifold layers of one key need one kernel size "
            "(SPARSE_BRIDGE_RULES=shared_keys allows others of no less volume, as spconv 1.x)."
        )
    if list(record.dilation) != list(layer.dilation):
        raise GeometryError(
            f"{layer_name} has dilation {layer.dilation}, indice_key {key!r} was made with "
            f"{list(record.dilation)}; give it a key of its own."
        )
    if list(record.spatial_shape) != shape_of(x):
        raise GeometryError(
            f"{layer_name} got a grid of {shape_of(x)}, indice_key {key!r} was made on "
            f"{list(record.spatial_shape)}; give it a key of its own."
        )
    _check_rows(layer_name, key, x, record.indices)


def _shares(layer: Any, record: Any) -> bool:
    """spconv 1.x let submanifold layers of a key read its map whatever their kernels were.

    Published weights (Cylinder3D's) need that. A smaller kernel read beyond its own weight there.
    """
    return settings.get().shared_keys and math.prod(layer.kernel_size) >= math.prod(record.ksize)


def used_offsets(weight: torch.Tensor, layer: Any, record: Any) -> torch.Tensor:
    """The part of a weight [C_out, *kernel, C_in] that a shared map has use for.

    As in spconv 1.x that is the first kernel offsets in row-major order, as many as the map has.
    """
    if list(record.ksize) == list(layer.kernel_size):
        return weight
    return weight.flatten(1, -2)[:, : math.prod(record.ksize)]


def entries_of(x: Any) -> dict[Any, Any]:
    """The maps that a layer's output carries: a copy of its input's.

    In spconv 1.x all tensors that come of one input share one dictionary, and so do they while
    keys are shared: branches see each other's maps.
    """
    global _shared, _generation
    if _generation != settings.generation:
        now = settings.generation
        _shared = settings.get().shared_keys
        _generation = now  # last: other threads go by it
    entries: dict[Any, Any] = x.indice_dict
    return entries if _shared else dict(entries) if type(entries) is dict else carried(entries)


def _check_rows(layer_name: str, key: Any, x: Any, indices: torch.Tensor) -> None:
    if x.indices.shape[0] != indices.shape[0] or x.features.shape[0] != indices.shape[0]:
        raise GeometryError(
            f"{layer_name} got {x.features.shape[0]} rows ({x.indices.shape[0]} indices), but indice_key "
            f"{key!r} was made for {indices.shape[0]}; the tensor changed since. Use a new key "
            "after changing rows."
        )
