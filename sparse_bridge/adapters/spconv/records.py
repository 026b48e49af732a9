"""Entries of `indice_dict`: records of the framework's own classes whose pair tensors are made only when read.

A record made here satisfies the framework's `isinstance` checks, its own layers (after `disable()`) can use it, and it
pickles as a plain record of the framework. The other way round, a record that the framework made is read here.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch

from ...core.kernel_map import KernelMap
from ...core.map_cache import MapStore

__all__ = ["dense_table", "indice_pairs", "kernel_map_of", "make_record", "masks_and_order"]

_COMMON = ("out_indices", "indices", "spatial_shape", "out_spatial_shape", "is_subm", "algo", "ksize", "stride",
           "dilation", "padding")  # fmt: skip


def indice_pairs(kmap: KernelMap, n_in: int, is_subm: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(pairs int32 [2, V, n_in] of (input, output) rows padded with -1, counts int32 [V]) as spconv lays them out: a
    submanifold layer counts only the offsets before the centre, the mirrored ones reuse those counts."""
    n_offsets = kmap.n_offsets
    pairs = torch.full((2, n_offsets, n_in), -1, dtype=torch.int32, device=kmap.device)
    counts = torch.zeros(n_offsets, dtype=torch.int32)
    for v in range(n_offsets):
        x_rows, y_rows = _row_pairs(kmap, v)
        pairs[0, v, : x_rows.shape[0]] = x_rows
        pairs[1, v, : y_rows.shape[0]] = y_rows
        if not is_subm or v < n_offsets // 2:
            counts[v] = x_rows.shape[0]
    return pairs, counts.to(kmap.device)


def _row_pairs(kmap: KernelMap, v: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(x rows, y rows) of offset v in the framework's own rows: folded coordinates spread out again."""
    if v == kmap.self_offset:
        every = torch.arange(kmap.n_in, device=kmap.device)
        return every, every
    x_rows, y_rows = kmap.pair_list(v)
    if kmap.x_fold is not None and kmap.self_offset < 0:
        y_rows, x_rows = _spread(y_rows, x_rows, kmap.x_fold.inverse)
    if kmap.y_fold is not None:
        x_rows, y_rows = _spread(x_rows, y_rows, kmap.y_fold.inverse)
        if kmap.self_offset >= 0:
            x_rows = kmap.y_fold.first.index_select(0, x_rows)
    return x_rows, y_rows


def _spread(
    value: torch.Tensor, at: torch.Tensor, inverse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`value` given at distinct coordinates `at` -> (value, row) for every row of such a coordinate."""
    table = torch.full((int(inverse.max()) + 2 if len(inverse) else 1,), -1, device=inverse.device)
    table[at.long()] = value.long()
    found = table.index_select(0, inverse)
    rows = (found >= 0).nonzero().squeeze(1)
    return found.index_select(0, rows), rows


class _Bridged:
    """What both record kinds share. `_map` is the layer's kernel map, `_store` keeps its coordinate maps alive."""

    _map: KernelMap
    _store: MapStore | None
    _lazy: dict[str, Any]

    def _fill(self, values: dict[str, Any], kmap: KernelMap, store: MapStore | None) -> None:
        self.__dict__.update(values)
        self._map, self._store, self._lazy = kmap, store, {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        values = {name: copy.deepcopy(self.__dict__[name], memo) for name in _COMMON}
        extra = {k: v for k, v in self.__dict__.items() if k.endswith("voxel_num")}
        twin._fill({**values, **extra}, self._map, None)
        return twin

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
        """spconv 1.x kept tuples: (out_indices, indices, indice_pairs, indice_pair_num, spatial_shape)."""
        names = ("out_indices", "indices", "indice_pairs", "indice_pair_num", "spatial_shape")
        return getattr(self, names[index])

    def __reduce__(self) -> Any:
        head = [self.__dict__["out_indices"], self.__dict__["indices"], *self._pairs()]
        return type(self).__bases__[1], (*head, *self._common(), self.__dict__["voxel_num"])


class _ImplicitView(_Bridged):
    """Lazy pair tables, masks and their orders (`pair_bwd` always, as spconv's training maps have it)."""

    def _tables(self) -> dict[str, Any]:
        if not self._lazy:
            import numpy as np

            fwd, bwd = dense_table(self._map, 0), dense_table(self._map, 1)
            self._lazy = {"pair_fwd": fwd, "pair_bwd": bwd}
            for name, table in (("fwd", fwd), ("bwd", bwd)):
                mask, order = masks_and_order(table)
                self._lazy[f"pair_mask_{name}_splits"] = [mask]
                self._lazy[f"mask_argsort_{name}_splits"] = [order]
            self._lazy["masks"] = [np.array([(1 << min(32, fwd.shape[0])) - 1], dtype=np.uint32)]
        return self._lazy

    pair_fwd = property(lambda self: self._tables()["pair_fwd"])
    pair_bwd = property(lambda self: self._tables()["pair_bwd"])
    pair_mask_fwd_splits = property(lambda self: self._tables()["pair_mask_fwd_splits"])
    pair_mask_bwd_splits = property(lambda self: self._tables()["pair_mask_bwd_splits"])
    mask_argsort_fwd_splits = property(lambda self: self._tables()["mask_argsort_fwd_splits"])
    mask_argsort_bwd_splits = property(lambda self: self._tables()["mask_argsort_bwd_splits"])
    masks = property(lambda self: self._tables()["masks"])
    indice_pairs = property(
        lambda self: indice_pairs(self._map, self._rows(), self.__dict__["is_subm"])[0]
    )
    indice_pair_num = property(
        lambda self: indice_pairs(self._map, self._rows(), self.__dict__["is_subm"])[1]
    )

    def __reduce__(self) -> Any:
        names = ("pair_fwd", "pair_bwd", "pair_mask_fwd_splits", "pair_mask_bwd_splits", "mask_argsort_fwd_splits",
                 "mask_argsort_bwd_splits", "masks")  # fmt: skip
        head = [
            self.__dict__["out_indices"],
            self.__dict__["indices"],
            *(self._tables()[n] for n in names),
        ]
        tail = (self.__dict__["in_voxel_num"], self.__dict__["out_voxel_num"])
        return type(self).__bases__[1], (*head, *self._common(), *tail)


def dense_table(kmap: KernelMap, side: int) -> torch.Tensor:
    """int32 [V, rows]: input row of every output row (side 0) or the reverse (side 1), -1 where absent."""
    table, reverse = kmap.relation.table(side ^ kmap.side)
    return table.nbr.flip(0) if reverse else table.nbr


def masks_and_order(table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(masks int32 [rows, ceil(V / 32)], bit t % 32 of word t // 32 set where tap t is present; row order int32 [rows]
    by the first word)."""
    width = -(-table.shape[0] // 32)
    present = torch.nn.functional.pad((table >= 0).long(), (0, 0, 0, 32 * width - table.shape[0]))
    weights = torch.bitwise_left_shift(torch.tensor(1), torch.arange(32)).to(table.device)
    words = (present.view(width, 32, -1) * weights[None, :, None]).sum(1)
    masks = torch.where(words >= 1 << 31, words - (1 << 32), words).int().t().contiguous()
    return masks, torch.argsort(masks[:, 0], stable=True).int()


@functools.lru_cache(maxsize=None)
def _record_class(base: type, view: type) -> type:
    name = base.__name__
    return type(
        name, (view, base), {"__module__": base.__module__, "__qualname__": f"Bridged{name}"}
    )


def make_record(
    core: Any, native: bool, values: dict[str, Any], kmap: KernelMap, store: MapStore
) -> Any:
    """A record of `core`'s class (spconv.pytorch.core, real or stand-in) around a kernel map.

    values: out_indices, indices, spatial_shape, out_spatial_shape, is_subm, algo, ksize, stride, dilation, padding.
    """
    base, view = (
        (core.IndiceData, _NativeView) if native else (core.ImplicitGemmIndiceData, _ImplicitView)
    )
    record = _record_class(base, view).__new__(_record_class(base, view))
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


def _read(record: Any) -> KernelMap:
    from .low_level import map_from_pairs, map_from_table

    n_in, n_out = record.indices.shape[0], record.out_indices.shape[0]
    if hasattr(record, "pair_fwd"):
        return map_from_table(record.pair_fwd, n_in, n_out)
    return map_from_pairs(record.indice_pairs, record.indice_pair_num, n_in, n_out, record.is_subm)
