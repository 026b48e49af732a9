"""Entries of `indice_dict`: records of the framework's own classes with pair tensors made on read.

A record made here satisfies the framework's `isinstance` checks, its own layers (after `disable()`)
can use it, and it pickles as a plain record of the framework. The other way round, a record that
the framework made is read here.
"""

from __future__ import annotations

import copy
import functools
import inspect
import weakref
from collections.abc import Hashable
from typing import Any

import torch

from ...core.maps.kernel_map import KernelMap, row_pairs
from ...core.maps.map_builder import from_pairs
from ...core.maps.map_cache import MapStore
from ...errors import UnsupportedError
from .geometry import LayerGeometry
from .maps import LayerMap, found_map, layer_map_of
from .pairs import indice_pairs, map_from_pairs, map_from_table, masks_and_order, tables_of
from .tensors import shape_of

_COMMON = (
    "out_indices",
    "indices",
    "spatial_shape",
    "out_spatial_shape",
    "is_subm",
    "algo",
    "ksize",
    "stride",
    "dilation",
    "padding",
)
_KINDS = ("IndiceData", "ImplicitGemmIndiceData")


class _Bridged:
    """What both kinds share: the layer's kernel map, the store of its coordinate maps, and the layer that made it."""

    _map: KernelMap
    _store: MapStore | None
    _lazy: dict[str, Any]
    _layer: weakref.ref[Any] | None = None

    def _fill(self, values: dict[str, Any], kmap: KernelMap, store: MapStore | None) -> None:
        self.__dict__.update(values)
        self._map, self._store, self._lazy = kmap, store, {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        values = {name: copy.deepcopy(self.__dict__[name], memo) for name in _COMMON}
        extra = {k: v for k, v in self.__dict__.items() if k.endswith("voxel_num")}
        copied._fill({**values, **extra}, self._map, None)
        return copied

    def _common(self) -> list[Any]:
        return [self.__dict__[name] for name in _COMMON[2:]]

    def _rows(self) -> int:
        return self.__dict__["indices"].shape[0]


class _NativeView(_Bridged):
    """Lazy `indice_pairs` and `indice_pair_num`."""

    def _pairs(self) -> tuple[torch.Tensor, torch.Tensor]:
        if "pairs" not in self._lazy:
            self._lazy["pairs"] = indice_pairs(self._map, self._rows(), self.__dict__["is_subm"])
        return self._lazy["pairs"]

    @property
    def indice_pairs(self) -> torch.Tensor:
        return self._pairs()[0]

    @property
    def indice_pair_num(self) -> torch.Tensor:
        return self._pairs()[1]

    def __getitem__(self, index: int) -> Any:
        """spconv 1.x kept a tuple: out_indices, indices, pairs, pair counts, spatial_shape."""
        names = ("out_indices", "indices", "indice_pairs", "indice_pair_num", "spatial_shape")
        return getattr(self, names[index])

    def __reduce__(self) -> Any:
        head = [self.__dict__["out_indices"], self.__dict__["indices"], *self._pairs()]
        return type(self).__bases__[1], (*head, *self._common(), self.__dict__["voxel_num"])


class _ImplicitView(_Bridged):
    """Lazy pair tables, masks and their orders; `pair_bwd` is always there, as in training."""

    def _tables(self) -> dict[str, Any]:
        if not self._lazy:
            import numpy as np

            fwd, bwd = tables_of(self._map)
            tables: dict[str, Any] = {"pair_fwd": fwd, "pair_bwd": bwd}
            for name, table in (("fwd", fwd), ("bwd", bwd)):
                mask, order = masks_and_order(table)
                tables[f"pair_mask_{name}_splits"] = [mask]
                tables[f"mask_argsort_{name}_splits"] = [order]
            tables["masks"] = [np.array([(1 << min(32, fwd.shape[0])) - 1], dtype=np.uint32)]
            self._lazy = tables  # only when all are there: memory may run out on the way
        return self._lazy

    pair_fwd = property(lambda self: self._tables()["pair_fwd"])
    pair_bwd = property(lambda self: self._tables()["pair_bwd"])
    pair_mask_fwd_splits = property(lambda self: self._tables()["pair_mask_fwd_splits"])
    pair_mask_bwd_splits = property(lambda self: self._tables()["pair_mask_bwd_splits"])
    mask_argsort_fwd_splits = property(lambda self: self._tables()["mask_argsort_fwd_splits"])
    mask_argsort_bwd_splits = property(lambda self: self._tables()["mask_argsort_bwd_splits"])
    masks = property(lambda self: self._tables()["masks"])
    indice_pairs = property(lambda self: indice_pairs(self._map, self._rows(), self.__dict__["is_subm"])[0])
    indice_pair_num = property(lambda self: indice_pairs(self._map, self._rows(), self.__dict__["is_subm"])[1])

    def __reduce__(self) -> Any:
        names = (
            "pair_fwd",
            "pair_bwd",
            "pair_mask_fwd_splits",
            "pair_mask_bwd_splits",
            "mask_argsort_fwd_splits",
            "mask_argsort_bwd_splits",
            "masks",
        )
        head = [self.__dict__["out_indices"], self.__dict__["indices"], *(self._tables()[n] for n in names)]
        counts = (self.__dict__["in_voxel_num"], self.__dict__["out_voxel_num"])
        return type(self).__bases__[1], (*head, *self._common(), *counts)


@functools.cache
def _record_class(base: type, view: type) -> Any:
    name = base.__name__
    return type(name, (view, base), {"__module__": base.__module__, "__qualname__": f"Bridged{name}"})


def record_of(x: Any, layer: Any, built: LayerMap) -> Any:
    """The entry of `indice_dict` for the map that `layer` has just built on `x`."""
    values = {
        "out_indices": built.indices,
        "indices": x.indices,
        "spatial_shape": shape_of(x),
        "out_spatial_shape": list(built.shape),
        "is_subm": layer.subm,
        "algo": layer.algo,
        "ksize": list(layer.kernel_size),
        "stride": list(layer.stride),
        "dilation": list(layer.dilation),
        "padding": list(layer.padding),
    }
    native = getattr(layer.algo, "name", None) == "Native"
    record = _new_record(_namespace(x)[_KINDS[not native]], values, built.kmap, built.store)
    record._layer = weakref.ref(layer)
    return record


def knows_its_layer(record: Any) -> bool:
    """Whether the layer is there that made the record."""
    layer = getattr(record, "_layer", None)
    return layer is not None and layer() is not None


def made_again(record: Any, x: Any, y: Any) -> Any:
    """The entry that the record's layer makes over `x`. y: a tensor over the coordinates of its output, or None."""
    layer = record._layer()
    built = layer_map_of(layer, x)
    return record_of(x, layer, built if y is None or layer.subm else built._replace(indices=y.indices))


def _namespace(x: Any) -> dict[str, Any]:
    """Globals of the module that defines `SparseConvTensor`: the record classes live beside it.

    Not through `sys.modules`, which may by now hold another spconv than the one `x` belongs to.
    """
    for base in type(x).__mro__:
        if base.__name__ == "SparseConvTensor":
            return inspect.unwrap(base.__init__).__globals__  # type: ignore[misc,attr-defined,no-any-return]
    raise UnsupportedError(
        f"{type(x).__module__}.{type(x).__qualname__} is no SparseConvTensor; pass one, or a subclass."
    )


def _new_record(base: type, values: dict[str, Any], kmap: KernelMap, store: MapStore | None) -> Any:
    """A record of the framework's class `base` around a kernel map.  values: those of `_COMMON`."""
    native = base.__name__ == _KINDS[0]
    record_class = _record_class(base, _NativeView if native else _ImplicitView)
    record = record_class.__new__(record_class)  # upstream's constructor would want the tables
    extra = {"voxel_num": None} if native else {"in_voxel_num": None, "out_voxel_num": None}
    record._fill({**values, **extra}, kmap, store)
    return record


def kernel_map_of(record: Any) -> KernelMap:
    """The kernel map of any record, made here or by the framework."""
    kmap = getattr(record, "_map", None)
    if isinstance(kmap, KernelMap):
        return kmap
    kmap = record.__dict__.get("_bridge_map")
    if kmap is None:
        kmap = record.__dict__["_bridge_map"] = _read(record)
    return kmap


def is_current(record: Any, x: Any) -> bool:
    """Whether the record is of the map that a submanifold layer over `x` would get now."""
    if not isinstance(record, _Bridged) or not record.__dict__["is_subm"]:
        return False
    kernel, stride, padding, dilation = (
        tuple(record.__dict__[name]) for name in ("ksize", "stride", "padding", "dilation")
    )
    return found_map(x, LayerGeometry(kernel, stride, padding, dilation, (), True, False)) is record._map


def is_over(record: Any, coords: torch.Tensor) -> bool:
    """Whether the record is of a submanifold map over the level of these coordinates, in the same memory."""
    rows = record.indices
    return bool(record.is_subm) and rows.shape == coords.shape and rows.data_ptr() == coords.data_ptr()


def facts(record: Any) -> Hashable:
    """What layers that share the record of a submanifold map compare."""
    return tuple(record.ksize), tuple(record.dilation), record.algo


def reordered(record: Any, original: torch.Tensor, permuted: torch.Tensor, order: torch.Tensor) -> Any:
    """`record` for a tensor whose rows `original` were put in another order.

    permuted: those rows, permuted[i] = original[order[i]].  order: int64 [N]. Ends of the map that are not
    these rows stay as they are; so do records that know nothing of them.
    """
    ends = [name for name in ("indices", "out_indices") if _same_rows(getattr(record, name), original)]
    if not ends:
        return record
    kmap = kernel_map_of(record)
    index = torch.empty_like(order)
    index[order] = torch.arange(order.shape[0], device=order.device)
    lists = []
    for v in range(kmap.n_offsets):
        x_rows, y_rows = (rows.long() for rows in row_pairs(kmap, v))
        x_rows = index.index_select(0, x_rows) if "indices" in ends else x_rows
        y_rows = index.index_select(0, y_rows) if "out_indices" in ends else y_rows
        lists.append((x_rows, y_rows))
    values = {name: getattr(record, name) for name in _COMMON} | dict.fromkeys(ends, permuted)
    base = next(c for c in reversed(type(record).__mro__) if c.__name__ in _KINDS)
    new = from_pairs(lists, kmap.n_in, kmap.n_out)
    return _new_record(base, values, new, None)


def _same_rows(rows: torch.Tensor, others: torch.Tensor) -> bool:
    return rows is others or (rows.shape == others.shape and torch.equal(rows, others))


def _read(record: Any) -> KernelMap:
    n_in, n_out = record.indices.shape[0], record.out_indices.shape[0]
    if hasattr(record, "pair_fwd"):
        return map_from_table(record.pair_fwd, n_in, n_out)
    return map_from_pairs(record.indice_pairs, record.indice_pair_num, n_in, n_out, record.is_subm)
