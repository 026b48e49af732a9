"""Neighbour caches of 2.0: a kernel map with the coordinates on its two ends."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from ....core.geometry.boxes import Box
from ....core.maps.kernel_map import KernelMap, dense_table
from ....core.traced import between_graphs
from ..arguments import Ints, check_features
from ..arguments import kernel_size as kernel_sizes
from ..errors import ArgumentShapeError, ArgumentTypeError, ArgumentValueError
from ..lattice import Lattice, between, columns_of, lattice, made_by, of_box, submanifold_map
from .windows import Window, box_window, centred_window, delta_window, split

__all__ = ["NeighborCache", "NeighborCacheT", "build_neighbor_cache"]


@dataclasses.dataclass(eq=False)
class NeighborCache:
    """Which input rows each output row reads, per kernel offset; of the geometry alone.

    It holds its coordinates, so that their memory is not used again while it lives.  window: of the
    layer that made it, from coarse to fine.  outputs_given: the output coordinates came
    from the caller, and may have no neighbours.  first_rows: the first of equal fine rows counts.
    """

    kmap: KernelMap
    source: Lattice
    target: Lattice
    window: Window
    outputs_given: bool = True
    first_rows: bool = False
    _turned: Any = dataclasses.field(default=None, repr=False)

    @property
    def input_coords(self) -> torch.Tensor:
        return self.source.coords

    @property
    def output_coords(self) -> torch.Tensor:
        return self.target.coords

    @property
    def neighbor_map(self) -> torch.Tensor:
        """int32 [output rows, V], -1 where there is no neighbour."""
        return dense_table(self.kmap, 0).t().contiguous()

    @property
    def T(self) -> NeighborCache:
        """The same pairs in the other direction; its own T is this cache."""
        transposed = self._turned() if isinstance(self._turned, weakref.ref) else self._turned
        if transposed is None:
            cache_class = NeighborCache if isinstance(self, NeighborCacheT) else NeighborCacheT
            turned = self.kmap.transposed(), self.target, self.source, self.window
            transposed = cache_class(*turned, first_rows=self.first_rows, _turned=self)
            self._turned = weakref.ref(transposed)  # in a circle both would live on for a while
        return transposed  # type: ignore[no-any-return]

    def assert_match(self, input_coords: torch.Tensor | None, output_coords: torch.Tensor | None = None) -> None:
        """ArgumentShapeError (an AssertionError) unless these are the coordinates of the cache, by
        memory address; None matches."""
        pairs = (("input", input_coords, self.source), ("output", output_coords, self.target))
        for name, coords, own in pairs:
            if coords is None:
                continue
            mine = own.coords
            if coords.data_ptr() != mine.data_ptr() or coords.shape != mine.shape:
                raise ArgumentShapeError(
                    f"the neighbour cache was made for other {name} coordinates, of shape "
                    f"{list(mine.shape)}; pass the same tensor, got one of {list(coords.shape)}."
                )

    def assert_window(self, caller: str, window: Window) -> None:
        """ArgumentShapeError (an AssertionError) unless the cache is of such a layer: its stride,
        and the offsets that its kernel, dilation and padding come to."""
        own = self.window
        if window.stride != own.stride:
            raise ArgumentShapeError(
                f"{caller} has stride {window.stride}, the neighbour cache is of stride {own.stride}."
            )
        if window.offsets != own.offsets:
            raise ArgumentShapeError(
                f"{caller} reads offsets from {window.offsets[0]} to {window.offsets[-1]} "
                f"({len(window.offsets)}), the neighbour cache from {own.offsets[0]} to "
                f"{own.offsets[-1]} ({len(own.offsets)}); it is of another kernel size, dilation "
                "or padding (offset)."
            )

    def __copy__(self) -> NeighborCache:
        return dataclasses.replace(self, _turned=None)

    def __reduce__(self) -> Any:
        """Copies and pickles hold the coordinates, and make the map anew."""
        lattices = [self.source] if self.target is self.source else [self.source, self.target]
        ends = [(end.coords, end.dimension, end.box.lo, end.box.size) for end in lattices]
        return _made_anew, (type(self), ends, self.window, self.outputs_given, self.first_rows)

    def kernel_map(self, feats: torch.Tensor, n_offsets: int) -> KernelMap:
        """The map, for these features and a kernel of `n_offsets`. Raises ArgumentTypeError,
        ArgumentShapeError."""
        check_features("the layer", feats)
        if feats.ndim != 2 or feats.shape[0] != self.kmap.n_in:
            raise ArgumentShapeError(
                f"features have shape {list(feats.shape)}; expected [{self.kmap.n_in}, C], one row per coordinate."
            )
        if n_offsets != self.kmap.n_offsets:
            raise ArgumentShapeError(
                f"the kernel has {n_offsets} offsets, the neighbour cache {self.kmap.n_offsets}; "
                "it is the cache of another kernel."
            )
        return self.kmap

    def shape(self, channels: int) -> torch.Size:
        """The output's shape, channels last."""
        return torch.Size((*self.target.sizes, channels))


class NeighborCacheT(NeighborCache):
    """Of a layer that goes from coarse to fine coordinates."""


def _made_anew(
    cache_class: type[NeighborCache], ends: Sequence[Any], window: Window, outputs_given: bool, first_rows: bool
) -> NeighborCache:
    """ends: coordinates, axes and box of the source, and of the target unless it is the same."""
    lattices = [of_box(coords, dimension, Box.spanning(lo, size)) for coords, dimension, lo, size in ends]
    source, target, turned = lattices[0], lattices[-1], issubclass(cache_class, NeighborCacheT)
    if source is target:
        kmap = submanifold_map(source, window.offsets)
    else:
        kmap = between(*((target, source) if turned else (source, target)), window.offsets, window.stride)
    kmap = kmap.of_first_rows() if first_rows else kmap
    return cache_class(kmap.transposed() if turned else kmap, source, target, window, outputs_given, first_rows)


NeighborCache.__module__ = NeighborCacheT.__module__ = "flex_gemm.ops"


def around(caller: str, coords: torch.Tensor, shape: Sequence[int] | None, window: Window, cache: Any) -> NeighborCache:
    """The given cache, checked, or the one of these coordinates."""
    if cache is not None:
        return _checked(caller, cache, NeighborCache, window, (coords, None))
    n_batch = columns_of(coords, window.dimension, caller) - window.dimension
    sizes = None if shape is None else sum(split(shape, n_batch, window.dimension, caller), ())
    own = lattice(coords, window.dimension, sizes, caller)
    return NeighborCache(submanifold_map(own, window.offsets), own, own, window, False)


@dataclasses.dataclass(frozen=True)
class Outputs:
    """What a call says of its output.  covering: coarse extents are rounded up, so that no input is
    lost."""

    coords: torch.Tensor | None = None
    shape: Sequence[int] | None = None
    cache: Any = None
    covering: bool = False


def down(caller: str, coords: torch.Tensor, shape: Sequence[int] | None, window: Window, out: Outputs) -> NeighborCache:
    """From fine to coarse: coarse[q] reads fine[q * stride + offset]."""
    if out.cache is not None:
        if isinstance(out.cache, NeighborCacheT):
            raise ArgumentTypeError(f"{caller} got a transposed neighbour cache; pass cache.T.")
        return _checked(caller, out.cache, NeighborCache, window, (coords, out.coords))
    fine, extents = _input(caller, coords, shape, window)
    if out.covering:
        new = tuple(-(-s // step) for s, step in zip(extents, window.stride, strict=True))
    else:
        new = window.down(extents)
    coarse = _output(caller, fine, "strided", window, new, out)
    kmap = between(fine, coarse, window.offsets, window.stride).of_first_rows()
    return NeighborCache(kmap, fine, coarse, window, out.coords is not None, first_rows=True)


def up(
    caller: str, coords: torch.Tensor, shape: Sequence[int] | None, window: Window, out: Outputs, strict: bool = False
) -> NeighborCache:
    """From coarse to fine: fine[q * stride + offset] reads coarse[q].

    strict: a cache must be transposed already; else that of the way down is turned.
    """
    if out.cache is not None:
        cache = out.cache
        if isinstance(cache, NeighborCache) and not isinstance(cache, NeighborCacheT):
            if strict:
                raise ArgumentTypeError(f"{caller} needs a transposed neighbour cache; pass cache.T.")
            cache = cache.T
        return _checked(caller, cache, NeighborCacheT, window, (coords, out.coords))
    coarse, extents = _input(caller, coords, shape, window)
    fine = _output(caller, coarse, "generative", window, window.up(extents), out)
    kmap = between(fine, coarse, window.offsets, window.stride).transposed()
    return NeighborCacheT(kmap, coarse, fine, window, out.coords is not None)


def _input(caller: str, coords: torch.Tensor, shape: Sequence[int] | None, window: Window) -> tuple[Lattice, Ints]:
    """The input's coordinates and the extents of its axes."""
    n_batch = columns_of(coords, window.dimension, caller) - window.dimension
    batch, extents = split(shape, n_batch, window.dimension, caller)
    return lattice(coords, window.dimension, (*batch, *extents), caller), extents


def _output(caller: str, own: Lattice, map_type: str, window: Window, extents: Ints, out: Outputs) -> Lattice:
    """The output's coordinates: given, or every one that the input reaches."""
    n_batch, batch = own.n_batch, own.sizes[: own.n_batch]
    if out.shape is not None:
        batch, extents = split(out.shape, n_batch, window.dimension, f"{caller} (output_shape)")
    if out.coords is None:
        return made_by(own, map_type, window.offsets, window.stride, extents)
    columns_of(out.coords, window.dimension, f"{caller} (output_coords)")
    if out.coords.shape[-1] != own.coords.shape[1] or out.coords.device != own.coords.device:
        raise ArgumentShapeError(
            f"{caller} got output coordinates of shape {list(out.coords.shape)} on "
            f"{out.coords.device} for inputs of {list(own.coords.shape)} on {own.coords.device}."
        )
    return lattice(out.coords, window.dimension, (*batch, *extents), f"{caller} (output_coords)")


def _checked(
    caller: str, cache: Any, cache_class: type, window: Window, coords: tuple[torch.Tensor | None, torch.Tensor | None]
) -> NeighborCache:
    """A given cache, checked.  coords: of the input and the output."""
    if not isinstance(cache, cache_class):
        raise ArgumentTypeError(
            f"{caller} got {type(cache).__name__} as its neighbour cache; expected "
            f"{cache_class.__name__}, as an earlier call returned it."
        )
    assert isinstance(cache, NeighborCache)
    cache.assert_match(*coords)
    cache.assert_window(caller, window)
    return cache


@between_graphs
def build_neighbor_cache(
    coords: torch.Tensor,
    shape: Sequence[int] | None,
    *,
    kernel_size: Any = None,
    kernel_delta: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    offset: Any = 0,
    output_coords: torch.Tensor | None = None,
    output_shape: Sequence[int] | None = None,
    submanifold: bool = False,
    transposed: bool = False,
) -> NeighborCache:
    """The cache that a layer of this geometry would return.

    kernel_size: a tuple, with padding and dilation; or kernel_delta [V, D], with offset.
    submanifold: outputs are the inputs; stride, padding, offset and outputs are not looked at.
    Raises: ArgumentShapeError, ArgumentTypeError, ArgumentValueError.
    """
    caller = "build_neighbor_cache"
    if (kernel_size is None) == (kernel_delta is None):
        raise ArgumentValueError(f"{caller} takes either kernel_size or kernel_delta.")
    kernel = None if kernel_size is None else kernel_sizes(kernel_size, None)
    if submanifold:
        window = delta_window(kernel_delta) if kernel is None else centred_window(kernel, dilation)
        return around(caller, coords, shape, window, None)
    if kernel is None:
        window = delta_window(kernel_delta, stride, offset)
    else:
        window = box_window(kernel, stride, padding, dilation)
    out = Outputs(output_coords, output_shape)
    return (up if transposed else down)(caller, coords, shape, window, out)
