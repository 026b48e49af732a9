"""The one way to a kernel map: a request, answered from the store of the coordinates it is over or
by a provider, who builds it.

Whoever registers a provider sees every map that is not there yet, and may answer with one that was
built before: see `core.prefetch.prefetch`. An answer is never changed afterwards. A listener hears
of coordinates before the first request over them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch

from ... import memory
from ...errors import GeometryError
from ..device import memory_use
from ..device.no_double_backward import refuse_trace
from ..geometry.boxes import Box
from ..geometry.offsets import Offsets
from ..geometry.reach import BoxReach
from . import map_builder
from .coordinate_map import CoordinateMap, capacity_for
from .kernel_map import KernelMap
from .map_cache import MapStore
from .rulebook import Rulebook
from .views.derived import map_bytes


class OutputRule(Protocol):
    """Where output coordinates may lie, by where the input's are: what repeats from input to input
    where bounds do not. Hashable by value. Of a `BoxReach` kernels know the arithmetic, too."""

    def output_box(self, box: Box) -> Box:
        """The box of the output coordinates of inputs in `box`."""


class MapRequest(NamedTuple):
    """A request for a kernel map over a coordinate map.

    map_type: "submanifold"; "strided", y[u] gathers x[stride * u + offset], or "generative", y[stride *
    u + offset] gathers x[u], both with output rows of their own; "between", like "strided" with
    output rows that are given.  output: the box of the output coordinates or a rule for it; for
    "between" their `CoordinateMap`.  order: of the output rows: "given"; by the "first_seen" input
    row and then by offset; by the first offset that reaches them and then by input row
    ("by_offset", made on the host alone); by batch and then by the axes, from the last to the first
    ("sorted") or from the first to the last ("ascending").  box: of the coordinates of the request,
    where a store has several readings of them.
    """

    map_type: str
    offsets: Offsets
    stride: tuple[int, ...] = ()
    output: Box | OutputRule | CoordinateMap | None = None
    order: str = "given"
    box: Box | None = None

    def out_box(self, box: Box) -> Box | None:
        """The box of the output coordinates of inputs in `box`; None where they are given."""
        if isinstance(self.output, Box):
            return self.output
        rule = getattr(self.output, "output_box", None)  # a look at the protocol takes longer
        return None if rule is None else rule(box)

    @property
    def loose(self) -> bool:
        """Whether output coordinates are, see `BoxReach`."""
        return isinstance(self.output, BoxReach) and self.output.loose

    @property
    def nonnegative(self) -> bool:
        """Whether it is of coordinates from 0 on alone, see `BoxReach`."""
        return isinstance(self.output, BoxReach) and self.output.nonnegative


class BuiltMap(NamedTuple):
    """kmap: the map.  coords: output coordinates, where it made them, with the store of all that is
    asked over them."""

    kmap: KernelMap
    coords: CoordinateMap | None = None
    store: MapStore | None = None

    @staticmethod
    def of(kmap: KernelMap, coords: CoordinateMap | None) -> BuiltMap:
        """The answer around a map that was just made."""
        return BuiltMap(kmap, coords, None if coords is None else MapStore(coords))


_local = threading.local()
Provider = Callable[[MapStore, CoordinateMap, MapRequest], BuiltMap]
Listener = Callable[[MapStore, CoordinateMap, Hashable], None]


def _shown(built: BuiltMap) -> torch.Tensor | None:
    return None if built.coords is None else built.coords.coords


def request(store: MapStore, cmap: CoordinateMap | Callable[[], CoordinateMap], req: MapRequest) -> BuiltMap:
    """The map of `req` over `cmap`, of which `store` holds the maps; cmap: or how to get it."""
    built: BuiltMap | None = store.peek(req)
    if built is None:
        built = store.get(req, lambda: _provider(store, cmap() if callable(cmap) else cmap, req), _shown)
        holder: list[Any] | None = getattr(_local, "holder", None)
        if holder is not None:
            holder.append((store, built))
    return built


@contextmanager
def keeping(maps: list[Any]) -> Iterator[None]:
    """Have `maps` hold the maps that this thread builds, with their stores."""
    previous = getattr(_local, "holder", None)
    _local.holder = maps
    try:
        yield
    finally:
        _local.holder = previous


class _Rebuild:
    """Builds the map of an earlier request again; see `views.view_set.Rebuild`."""

    def __init__(self, cmap: CoordinateMap, req: MapRequest, new: CoordinateMap | None) -> None:
        self._cmap, self._req = cmap, req
        output = req.output if isinstance(req.output, CoordinateMap) else None
        self._rows = cmap if req.map_type == "submanifold" else output if output is not None else new

    def rulebook(self) -> Rulebook:
        return build(self._cmap, self._req).kmap.rulebook

    @property
    def by_rows(self) -> bool:
        return (
            self._req.map_type != "generative"
            and self._cmap.kernel_target() is not None
            and all(coords is not None and coords.distinct for coords in (self._cmap, self._rows))
        )

    @property
    def searching(self) -> int:
        n = self._cmap.n_rows
        return 0 if self._cmap.tabled else 12 * capacity_for(n) + 4 * n

    def search(self) -> None:
        target = self._cmap.kernel_target()
        assert target is not None
        self._cmap.table(target)

    def table_of(self, begin: int, end: int) -> torch.Tensor:
        assert self._rows is not None
        dimension = self._req.offsets.dimension
        stride = self._req.stride or (1,) * dimension
        return map_builder.table_of_rows(self._cmap, self._rows, self._req.offsets, stride, slice(begin, end))

    def drop(self) -> None:
        for coords in (self._cmap, self._rows):
            if coords is not None and coords.distinct:
                coords.drop_table()


def build(cmap: CoordinateMap, req: MapRequest) -> BuiltMap:
    """Build the map now.

    Raises:
        UnsupportedError: `torch.jit.trace` is recording: it would keep this input's map for all.
        GeometryError: no map is of this kind with this output, or see `map_builder`.
        MemoryLimitError: the map does not fit under the limit in force.
    """
    refuse_trace()
    if memory.limit is not None and cmap.device.type != "cpu":
        n, volume = cmap.n_rows, len(req.offsets)
        n_new = {"strided": n, "generative": n * volume}.get(req.map_type, 0)
        most = map_bytes(n, n_new, volume)
        memory_use.need(cmap.device, most, f"building a map of {cmap.n_rows} coordinates")
    map_type, offsets, reach = req.map_type, req.offsets, isinstance(req.output, BoxReach)
    out_box = req.out_box(cmap.extent if reach else cmap.box)
    new: CoordinateMap | None = None
    if map_type == "submanifold":
        kmap = map_builder.submanifold(cmap, offsets)
    elif map_type == "strided" and out_box is not None:
        new, kmap = map_builder.strided(cmap, offsets, req.stride, out_box, req.order)
    elif map_type == "generative" and out_box is not None:
        new, kmap = map_builder.generative(cmap, offsets, req.stride, out_box, req.order)
    elif map_type == "between" and isinstance(req.output, CoordinateMap):
        kmap = map_builder.between(cmap, req.output, offsets, req.stride)
    else:
        raise GeometryError(f"no map is of the kind {map_type!r} with output {req.output!r}.")
    if new is not None:
        new.loose = req.loose
    if memory.limit is not None and kmap.rulebook.backward is None:
        kmap.rulebook.rebuild = _Rebuild(cmap, req, new)
    return BuiltMap.of(kmap, new)


def _build(store: MapStore, cmap: CoordinateMap, req: MapRequest) -> BuiltMap:
    """The default provider."""
    return build(cmap, req)


_provider: Provider = _build
_listener: Listener | None = None


def announce(store: MapStore, cmap: CoordinateMap, key: Hashable) -> None:
    """Say that requests over `cmap`, of which `store` will hold the maps, are to be expected.

    key: inputs with equal keys are likely to have the same requests.
    """
    if _listener is not None:
        _listener(store, cmap, key)


def registered() -> tuple[Provider, Listener | None]:
    """Who answers and who listens, as `register` takes them."""
    return _provider, _listener


def register(provider: Provider | None, listener: Listener | None = None) -> None:
    """Have `provider` answer requests for maps that no store holds, and `listener` hear what is
    announced; None: they are built, and nobody listens."""
    global _provider, _listener
    _provider, _listener = _build if provider is None else provider, listener
