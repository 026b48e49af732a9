"""Neighbour caches: what FlexGEMM hands out with a result and takes back for the next layer.

A cache is a bag of attributes that users read, write, slice and build themselves. One that was made
here keeps the engine's kernel map and writes out the arrays of the contract when somebody asks; one
that was made by hand, or whose `neighbor_map` was assigned or changed, gets its kernel map from
that array.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch

from ...core.maps.kernel_map import KernelMap, dense_table
from ...core.maps.map_builder import from_pairs
from ...errors import CoordinateError
from .arguments import check_tensors
from .errors import ArgumentShapeError, ArgumentTypeError

__all__ = [
    "NeighborCache",
    "SparseConv3dNeighborCache",
    "SubMConv3dNeighborCache",
    "SubMConvNeighborCache",
    "map_of",
    "written_out",
]

_INTEGERS = (torch.uint32, torch.int32, torch.int64)
_UNSIGNED = "_unsigned"
_ENGINE_CACHE = "_sparse_bridge"  # on caches of the installed FlexGEMM: the same for the engine
_PRIVATE = ("_kmap", "_stamp", "_backward", "_store")


class NeighborCache:
    """Attributes, also by item: cache["neighbor_map"] is cache.neighbor_map."""

    _absent: tuple[str, ...] = ()  # derived arrays that this kind does not have

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)

    @classmethod
    def of(cls, kmap: KernelMap, backward: bool = True) -> NeighborCache:
        """The cache of a kernel map.  backward: training will ask for the other direction too."""
        cache = cls()
        cache.__dict__.update(_kmap=kmap, _stamp=None, _backward=backward, _rows=kmap.n_in)
        return cache

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "neighbor_map":
            for derived in ("_kmap", "_rows"):
                self.__dict__.pop(derived, None)
            for derived in [key for key in self.__dict__ if key in _WRITERS or _of_blocks(key)]:
                del self.__dict__[derived]
        self.__dict__[name] = value

    def __getattr__(self, name: str) -> Any:
        writer = None if name in self._absent else _WRITERS.get(name) or _of_blocks(name)
        if writer is None or not {"_kmap", "neighbor_map"} & self.__dict__.keys():
            raise AttributeError(f"this neighbour cache has no {name!r}")
        value = self.__dict__[name] = writer(self)
        if name == "neighbor_map":
            self.__dict__["_stamp"] = (value, _version(value))
        return value

    def __getstate__(self) -> dict[str, Any]:
        if "_kmap" in self.__dict__:
            _ = self.neighbor_map
        state = {name: value for name, value in self.__dict__.items() if name not in _PRIVATE}
        # Plain pickles of torch lose unsigned tensors.
        state[_UNSIGNED] = names = [name for name, value in state.items() if _is_unsigned(value)]
        return {**state, **{name: state[name].view(torch.int32) for name in names}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        names = state.pop(_UNSIGNED, ())  # none in pickles of FlexGEMM itself
        self.__dict__.update(state)
        self.__dict__.update({name: state[name].view(torch.uint32) for name in names})

    def valid_kernel_callback(self, block: int) -> torch.Tensor:
        """int32: the live offsets of each block of `block` rows in `sorted_idx` order."""
        return self._live(block).nonzero(as_tuple=True)[1].int()

    def valid_kernel_seg_callback(self, block: int) -> torch.Tensor:
        """int32 [blocks + 1]: where each block starts in `valid_kernel_callback(block)`."""
        counts = self._live(block).sum(1)
        return torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()

    def _live(self, block: int) -> torch.Tensor:
        """bool [blocks, V]."""
        present = _signed(self.neighbor_map).index_select(0, self.sorted_idx) >= 0
        short = -present.shape[0] % block
        present = torch.cat([present, present.new_zeros((short, present.shape[1]))])
        return present.view(-1, block, present.shape[1]).any(1)

    def kernel_map(self, n_in: int, n_offsets: int, n_out: int | None = None) -> KernelMap:
        """The kernel map for features of `n_in` rows and a kernel of `n_offsets`.  n_out: as of `map_of`.

        Raises: ArgumentShapeError where the cache belongs to other rows or another kernel.
        """
        state = self.__dict__
        rows = state.get("_rows", n_in)  # the array alone does not tell; copies and pickles keep them
        if rows != n_in:
            raise ArgumentShapeError(f"features have {n_in} rows, the neighbour cache is of {rows}.")
        kmap, array = state.get("_kmap"), state.get("neighbor_map")
        stamp = state.get("_stamp")
        changed = array is not None and (stamp is None or stamp[0] is not array or stamp[1] != _version(array))
        if kmap is None or changed or kmap.n_in != n_in:
            kmap = _read(self.neighbor_map, n_in)
            array = self.neighbor_map
            state.update(_kmap=kmap, _stamp=(array, _version(array)))
        if kmap.rulebook.n_offsets != n_offsets:
            raise ArgumentShapeError(
                f"the weight has {n_offsets} kernel offsets, the neighbour cache "
                f"{kmap.n_offsets}; it is the cache of another kernel."
            )
        if n_out is not None and (n_out != n_in or "_rows" not in state) and kmap.n_out != n_out:
            raise ArgumentShapeError(f"the output has {n_out} rows, that of the neighbour cache {kmap.n_out}.")
        return kmap


class SubMConv3dNeighborCache(NeighborCache):
    """Of a submanifold layer; an absent name is an AttributeError."""

    _absent = ("neighbor_map_bwd", "gray_code_bwd", "sorted_idx_bwd")


class SparseConv3dNeighborCache(NeighborCache):
    """Of a strided layer; an absent name is None."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return super().__getattr__(name)
        except AttributeError:
            return None


class SubMConvNeighborCache(SubMConv3dNeighborCache):
    """Of a submanifold layer of any dimension; its map is int32 with -1 for "no neighbour"."""

    def __init__(self, neighbor_map: torch.Tensor | None = None, **attributes: Any) -> None:
        if neighbor_map is not None:
            attributes["neighbor_map"] = neighbor_map
        super().__init__(**attributes)


SubMConvNeighborCache.__module__ = "flex_gemm.ops.spconv.submanifold_conv"
SubMConv3dNeighborCache.__module__ = "flex_gemm.ops.spconv.submanifold_conv3d"
SparseConv3dNeighborCache.__module__ = "flex_gemm.ops.spconv.sparse_conv3d"


def _version(array: Any) -> int:
    """Changes when an array is changed in place; tensors of inference mode do not count."""
    return 0 if array.is_inference() else array._version  # type: ignore[no-any-return]


def _is_unsigned(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == torch.uint32


def map_of(cache: Any, n_in: int, n_offsets: int, n_out: int | None = None) -> KernelMap:
    """`NeighborCache.kernel_map` of the caller's cache: ours, or one of the installed
    FlexGEMM, read by its `neighbor_map`.

    n_out: how many rows the layer's output has; None where the cache alone says it.
    Raises: ArgumentTypeError, ArgumentShapeError.
    """
    return _as_cache(cache).kernel_map(n_in, n_offsets, n_out)


def _as_cache(cache: Any) -> NeighborCache:
    if isinstance(cache, NeighborCache):
        if not {"_kmap", "neighbor_map"} & cache.__dict__.keys():
            raise ArgumentTypeError("the neighbour cache has no neighbor_map; pass None instead.")
        return cache
    engine_cache = getattr(cache, "engine_cache", None)
    if callable(engine_cache):  # of a compiled graph
        return engine_cache()  # type: ignore[no-any-return]
    array = getattr(cache, "neighbor_map", None)
    if not isinstance(array, torch.Tensor):
        raise ArgumentTypeError(
            f"got a {type(cache).__name__} as the neighbour cache; expected one that an earlier call returned, or None."
        )
    wrapped: Any = cache.__dict__.get(_ENGINE_CACHE)
    if wrapped is None or wrapped.neighbor_map is not array:
        wrapped = cache.__dict__[_ENGINE_CACHE] = NeighborCache(neighbor_map=array)
    return wrapped  # type: ignore[no-any-return]


def written_out(table: torch.Tensor) -> torch.Tensor:
    """uint32 [rows, V] of a neighbour table int32 [V, rows]; -1 becomes 0xffffffff."""
    return table.int().t().contiguous().view(torch.uint32)


def _signed(neighbor_map: torch.Tensor) -> torch.Tensor:
    """int64 [rows, V], -1 where there is no neighbour."""
    if neighbor_map.dtype == torch.uint32:
        neighbor_map = neighbor_map.contiguous().view(torch.int32)
    return neighbor_map.long()


def _read(neighbor_map: torch.Tensor, n_in: int) -> KernelMap:
    """The kernel map of an array uint32 (or signed, with -1) [rows, V]."""
    check_tensors("the neighbour cache", neighbor_map=neighbor_map)
    if neighbor_map.ndim != 2:
        raise ArgumentShapeError(f"neighbor_map has shape {list(neighbor_map.shape)}; expected [rows, V].")
    if neighbor_map.dtype not in _INTEGERS:
        raise ArgumentTypeError(f"neighbor_map is {neighbor_map.dtype}; expected uint32, int32 or int64.")
    table = _signed(neighbor_map).t()
    offset, y_rows = (table >= 0).nonzero(as_tuple=True)
    lengths = torch.bincount(offset, minlength=table.shape[0]).tolist()
    x_rows = table[offset, y_rows]
    pairs = zip(x_rows.split(lengths), y_rows.split(lengths), strict=True)
    try:
        return from_pairs(list(pairs), n_in, table.shape[1])
    except CoordinateError as error:
        raise ArgumentShapeError(f"features have {n_in} rows, the neighbour cache names others: {error}") from None


def _neighbor_map(cache: NeighborCache) -> torch.Tensor:
    table = written_out(dense_table(cache._kmap, 0))
    return table.view(torch.int32) if isinstance(cache, SubMConvNeighborCache) else table


def _neighbor_map_bwd(cache: NeighborCache) -> torch.Tensor | None:
    state = cache.__dict__
    if "_kmap" not in state or not state["_backward"]:
        return None
    return written_out(dense_table(cache._kmap, 1))


def _masks(neighbor_map: torch.Tensor) -> torch.Tensor:
    """int32 [rows], bit t set where offset t has a neighbour; at most 32 offsets."""
    present = (_signed(neighbor_map) >= 0).long()
    if present.shape[1] > 32:
        raise AttributeError("masks of 32 bits do not hold the offsets of this kernel")
    bits = torch.ones((), dtype=torch.int64, device=present.device) << torch.arange(
        present.shape[1], device=present.device
    )
    return (present * bits).sum(1).int()


def _sorted_idx(masks: torch.Tensor) -> torch.Tensor:
    """Order of the Gray-decoded masks, as signed numbers."""
    code = masks.long() & 0xFFFFFFFF
    for shift in (1, 2, 4, 8, 16):
        code = code ^ (code >> shift)
    return torch.argsort(code.int())


def _signal(part: int) -> Callable[[NeighborCache], torch.Tensor]:
    """Input rows, output rows or starts of all pairs, grouped by offset, rows ascending."""

    def write(cache: NeighborCache) -> torch.Tensor:
        table = _signed(cache.neighbor_map).t()
        offset, out_rows = (table >= 0).nonzero(as_tuple=True)
        counts = torch.bincount(offset, minlength=table.shape[0])
        starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        rows = (table[offset, out_rows], out_rows, starts)[part]
        return rows.int().view(torch.uint32)

    return write


_WRITERS: dict[str, Callable[[Any], Any]] = {
    "neighbor_map": _neighbor_map,
    "neighbor_map_bwd": _neighbor_map_bwd,
    "gray_code": lambda cache: _masks(cache.neighbor_map),
    "sorted_idx": lambda cache: _sorted_idx(cache.gray_code),
    "gray_code_bwd": lambda cache: _masks(cache.neighbor_map_bwd),
    "sorted_idx_bwd": lambda cache: _sorted_idx(cache.gray_code_bwd),
    "valid_signal_i": _signal(0),
    "valid_signal_o": _signal(1),
    "valid_signal_seg": _signal(2),
}


def _of_blocks(name: str) -> Callable[[Any], torch.Tensor] | None:
    """What writes `valid_kernel_64`, `valid_kernel_seg_64` and the like."""
    match = re.fullmatch(r"valid_kernel(_seg)?_([1-9]\d*)", name)
    if match is None:
        return None
    callback = "valid_kernel_seg_callback" if match[1] else "valid_kernel_callback"
    return lambda cache: getattr(cache, callback)(int(match[2]))  # type: ignore[no-any-return]
