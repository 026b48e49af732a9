"""Entries of `kmaps`: a layer's map in the framework's own form, its tensors made only when
read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ...core.maps.kernel_map import KernelMap, dense_table, row_pairs
from ...core.maps.map_builder import from_pairs
from ...core.maps.map_cache import MapStore
from ...errors import ShapeError
from .profile import Profile

__all__ = [
    "PAD",
    "TRACED",
    "MapDict",
    "MapList",
    "Record",
    "entry_of",
    "leading_from",
    "padded_table",
    "pair_tensors",
    "read",
    "record_of",
]

PAD = 128
"""torchsparse rounds the rows of its tables up to a multiple of it."""

TRACED = "compiled"
"""What keys of `kmaps` begin with under which a compiled program keeps what its graph knows."""


@dataclasses.dataclass(eq=False)
class Record:
    """A map with the coordinates at both its ends, in the framework's layout.

    in_coords, out_coords: int32 [N, 4].  in_range, out_range: `spatial_range` there.
    stores: what the coordinate tensors know of themselves, kept as long as the map.
    again: makes what the same layer would over other coordinates, from these and their range.
    """

    kmap: KernelMap
    in_coords: torch.Tensor
    out_coords: torch.Tensor
    in_range: tuple[int, ...] | None = None
    out_range: tuple[int, ...] | None = None
    stores: tuple[MapStore, ...] = ()
    version: int | None = None
    again: Callable[[torch.Tensor, tuple[int, ...] | None], Record] | None = None

    def __post_init__(self) -> None:
        self.version = _version(self.in_coords)

    def starts_from(self, coords: torch.Tensor) -> bool:
        """The map was built for these coordinates."""
        own = self.in_coords
        return (coords is own or same_rows(own, coords)) and _version(own) == self.version

    def ends_at(self, coords: torch.Tensor) -> bool:
        """The map's outputs are these coordinates."""
        return coords is self.out_coords or same_rows(self.out_coords, coords)


def _version(coords: torch.Tensor) -> int | None:
    return None if coords.is_inference() else coords._version


def same_rows(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal coordinates; compared only where they are not one tensor."""
    if a is b:
        return True
    if a.shape != b.shape or a.device != b.device or a.dtype != b.dtype:
        return False
    if a.data_ptr() == b.data_ptr() and a.stride() == b.stride():
        return True
    return torch.equal(a, b)


def pair_tensors(kmap: KernelMap) -> tuple[torch.Tensor, torch.Tensor]:
    """(nbmaps int32 [M, 2] of (input row, output row) grouped by kernel index, nbsizes int32
    [V])."""
    lists = [torch.stack(row_pairs(kmap, v), 1) for v in range(kmap.n_offsets)]
    sizes = torch.tensor([len(rows) for rows in lists], dtype=torch.int32, device=kmap.device)
    return torch.cat(lists).int(), sizes


def padded_table(kmap: KernelMap, side: int) -> torch.Tensor:
    """`out_in_map` (side 0) int32 [ceil(n_out / 128) * 128, V], -1 where absent; side 1:
    reversed."""
    table = dense_table(kmap, side).t()
    rows = -(-table.shape[0] // PAD) * PAD
    return torch.nn.functional.pad(table, (0, 0, 0, rows - table.shape[0]), value=-1).contiguous()


class MapDict(dict):
    """The 2.1 form. Fields: out_in_map, nbmaps, nbsizes, coords, sizes, spatial_range; with `_t`
    behind the name, those of the transposed layer."""

    record: Record

    def __init__(self, record: Record) -> None:
        kmap = record.kmap
        super().__init__(coords=record.out_coords, sizes=(kmap.n_in, kmap.n_out), spatial_range=record.out_range)
        self.record = record

    def __missing__(self, key: str) -> Any:
        kmap = self.record.kmap
        if key in ("out_in_map", "out_in_map_t"):
            value: Any = padded_table(kmap, 1 if key.endswith("_t") else 0)
        elif key in ("nbmaps", "nbsizes"):
            self["nbmaps"], self["nbsizes"] = pair_tensors(kmap)
            return dict.__getitem__(self, key)
        elif key == "nbmaps_t":
            value = self["nbmaps"].flip(1)
        elif key == "nbsizes_t":
            value = self["nbsizes"]
        else:
            raise KeyError(key)
        self[key] = value
        return value

    def __deepcopy__(self, memo: dict[int, Any]) -> MapDict:
        return self

    def __reduce__(self) -> Any:
        names = ("out_in_map", "nbmaps", "nbsizes", *self)
        return dict, ({name: self[name] for name in names},)


class MapList(Sequence):
    """The form up to 2.0: [nbmaps, nbsizes, (n_in, n_out)]."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self._items: list[Any] | None = None

    def _materialized(self) -> list[Any]:
        if self._items is None:
            kmap = self.record.kmap
            self._items = [*pair_tensors(kmap), (kmap.n_in, kmap.n_out)]
        return self._items

    def __getitem__(self, index: Any) -> Any:
        return self._materialized()[index]

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[Any]:
        return iter(self._materialized())

    def __deepcopy__(self, memo: dict[int, Any]) -> MapList:
        return self

    def __reduce__(self) -> Any:
        return list, (list(self._materialized()),)


def entry_of(record: Record, profile: Profile) -> MapDict | MapList:
    """The value in `kmaps`."""
    return MapDict(record) if profile.divides else MapList(record)


def record_of(entry: Any) -> Record | None:
    """The record of an entry made here; None for one that the framework or a pickle made."""
    return entry.record if isinstance(entry, (MapDict, MapList)) else None


def leading_from(coords: torch.Tensor, entry: Any) -> Record | None:
    """The record of an entry made here if its map was built for these coordinates."""
    if isinstance(entry, (MapDict, MapList)) and entry.record.starts_from(coords):
        return entry.record
    return None


def read(entry: Any, in_coords: torch.Tensor, out_coords: torch.Tensor, in_range: tuple[int, ...] | None) -> Record:
    """The record of an entry in either form that was not made here. Raises ShapeError."""
    if isinstance(entry, dict):
        n_in, n_out = entry["sizes"]
        if entry.get("out_in_map") is not None:
            table = entry["out_in_map"][:n_out]
            lists = []
            for column in table.t():
                rows = (column >= 0).nonzero().squeeze(1)
                lists.append((column.index_select(0, rows), rows))
        else:
            lists = _split(entry["nbmaps"], entry["nbsizes"])
        out_range = entry.get("spatial_range")
    else:
        nbmaps, nbsizes, (n_in, n_out) = entry[0], entry[1], entry[2]
        lists, out_range = _split(nbmaps, nbsizes), None
    if (n_in, n_out) != (in_coords.shape[0], out_coords.shape[0]):
        raise ShapeError(
            f"a cached kernel map joins {n_in} and {n_out} rows, but the coordinates have "
            f"{in_coords.shape[0]} and {out_coords.shape[0]}; the caches belong to other tensors."
        )
    kmap = from_pairs(lists, int(n_in), int(n_out))
    return Record(kmap, in_coords, out_coords, in_range, out_range)


def _split(nbmaps: torch.Tensor, nbsizes: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    parts = nbmaps.split([int(n) for n in nbsizes.tolist()])
    return [(part[:, 0], part[:, 1]) for part in parts]
