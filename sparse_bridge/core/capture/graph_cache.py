"""Prefetched maps, replayed: what a `BatchedBuilder` queues, captured once as graphs of launches.

Queueing the maps of all levels costs the host more time than building them costs the GPU. Where
scenes of a grid keep asking the same, the launches are captured over a padded input
(see `padded`) and replayed for every later scene: its coordinates are copied in, the maps copied
out. Rows are numbered and ordered exactly as without. A graph holds the memory of the maps of one
scene, so only scenes whose host time matters get one, and all of a device together have a small
share of its memory: the one that has not been used for longest gives way.
"""

from __future__ import annotations

import collections
import contextlib
import threading
from typing import Any

import torch

from ... import log, settings
from ...kernels.runtime import target as targets
from ..maps.coordinate_map import CoordinateMap
from .batched_builder import Answers, BatchedBuilder, Sides, ordered_alike
from .captured_maps import CapturedMaps, Streams, padded_input
from .history import RequestHistory, Step
from .padded import capacity_of

_STEADY = 2  # scenes alike before a graph is captured
_MOST_ROWS = 1 << 17  # above, the GPU takes longer than the host
_GRAPHS = 3  # of a grid
_CAPTURES = 16  # of a grid, in all
_REFUSALS = 3  # in a row until a graph is dropped
_SHARE = 64  # of a device's memory that all graphs may take is one part of so many
_SPARE = 1.125  # capacity of level 0 over the scene that is captured
_WIDEST = 1.7  # capacity over the rows of a scene it serves, unless the capacity is
_SMALL = 1 << 12

# The sides that were wanted of every step, as tiles and at all.
_Wants = tuple[dict[int, frozenset[int]], dict[int, frozenset[int]]]


def _wants(record: RequestHistory) -> _Wants:
    tiled, asked = (
        {place: frozenset(sides) for place, sides in wanted.items()}
        for wanted in (record.tiled, record.asked)
    )
    return tiled, asked


class MapGraphs:
    """The graphs of a grid. One scene at a time: they share their memory."""

    def __init__(self) -> None:
        self.graphs: list[_MapGraph] = []
        self.steady, self.captures = 0, 0
        self.refusals, self.rest = 0, 0  # in a row; scenes to let pass before another capture
        self.wants: _Wants | None = None
        self.pool: Any = None
        self.stream: torch.cuda.Stream | None = None  # of the last replay
        self.streams: Streams | None = None
        self.lock = threading.Lock()

    def clear(self) -> None:
        """Give the memory back; no more graphs."""
        for graph in self.graphs:
            self.drop(graph)
        self.captures = _CAPTURES

    def answers(
        self, cmap: CoordinateMap, steps: tuple[Step, ...], last: RequestHistory
    ) -> Answers | None:
        """The answers of every step, from a graph; None where none serves this scene."""
        if not self.graphs or settings.get().capture != "graphs" or _capturing():
            return None
        with self.lock:
            graph = next((one for one in self.graphs if one.serves(cmap, steps, last)), None)
            if graph is None:
                return None
            with current(cmap.device):
                self._follow(cmap.device)
                found = graph.answers(cmap)
            if found is not None:
                self.refusals = 0
                _shelf.touch(graph)
                return found
            # Too small, or the scene is not like the others; in a row, graphs are of no use.
            self.refusals += 1
            self.steady, self.rest = 0, 1 << min(self.refusals, 10)
            if self.refusals >= _REFUSALS:
                self.drop(graph)
            return None

    def _follow(self, device: torch.device) -> None:
        """Wait for the last replay, where that was on another stream."""
        if self.streams is None:
            self.streams = Streams(device)
        stream = self.streams.current()
        if stream is not self.stream:
            if self.stream is not None:
                stream.wait_stream(self.stream)
            self.stream = stream

    def consider(
        self,
        cmap: CoordinateMap,
        target: targets.Target,
        steps: tuple[Step, ...],
        last: RequestHistory,
    ) -> None:
        """Capture a graph where scenes like this one, just built without, keep coming."""
        if not possible(cmap, target) or self.captures >= _CAPTURES:
            return
        wants = _wants(last)
        self.steady = self.steady + 1 if wants == self.wants else 0
        self.wants = wants
        self.rest = max(0, self.rest - 1)
        if self.steady < _STEADY or self.rest or _capturing():
            return
        with self.lock, torch.cuda.device(cmap.device):
            self.captures += 1
            self.steady = 0
            if not self.graphs:  # a pool lasts as long as its graphs
                self.pool = torch.cuda.graph_pool_handle()
            try:
                graph = _MapGraph(cmap, target, steps, last, wants, self.pool)
            except RuntimeError as error:  # an allocator that cannot, say; a full memory
                self.captures = _CAPTURES
                log.once(
                    ("map graph", str(cmap.device)),
                    f"maps are not replayed from graphs on {cmap.device}: {error}",
                    level=30,
                )
                return
            if not _shelf.holds(graph, self, _share(cmap.device)):
                self.captures = _CAPTURES
                return
            for old in self.graphs[_GRAPHS - 1 :]:
                self.drop(old)
            self.graphs = [graph, *self.graphs]

    def drop(self, graph: _MapGraph) -> None:
        """Let go of a graph, which may be at work in another thread."""
        self.graphs = [one for one in self.graphs if one is not graph]
        _shelf.remove(graph)


class _Shelf:
    """All graphs there are, the one used last at the end, with their owners."""

    def __init__(self) -> None:
        self._held: collections.OrderedDict[_MapGraph, MapGraphs] = collections.OrderedDict()
        self._lock = threading.RLock()

    def holds(self, graph: _MapGraph, owner: MapGraphs, limit: int) -> bool:
        """Whether a new graph may stay; for it others of its device may have to go."""
        if graph.bytes > limit:
            return False
        with self._lock:
            self._held[graph] = owner
            while True:
                here = [one for one in self._held if one.device == graph.device]
                if sum(one.bytes for one in here) <= limit:
                    return True
                self._held[here[0]].drop(here[0])

    def touch(self, graph: _MapGraph) -> None:
        with self._lock:
            if graph in self._held:
                self._held.move_to_end(graph)

    def remove(self, graph: _MapGraph) -> None:
        with self._lock:
            self._held.pop(graph, None)


_shelf = _Shelf()


def forget() -> None:
    """Drop all graphs."""
    with _shelf._lock:
        for graph, owner in list(_shelf._held.items()):
            owner.drop(graph)


def _share(device: torch.device) -> int:
    """Bytes that the graphs of a device may take."""
    total: int = torch.cuda.mem_get_info(device)[1]
    return total // _SHARE


def current(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """The device as the current one; nothing where it is."""
    if targets.device_index(device) == torch._C._cuda_getDevice():
        return contextlib.nullcontext()
    return torch.cuda.device(device)


def _capturing() -> bool:
    return torch.cuda.is_current_stream_capturing()


def possible(cmap: CoordinateMap, target: targets.Target) -> bool:
    """Whether maps over `cmap` may be replayed: a scene of few rows on an NVIDIA GPU."""
    return (
        cmap.device.type == "cuda"
        and target.backend == "cuda"
        and cmap.n_rows <= _MOST_ROWS
        and settings.get().capture == "graphs"
    )


class _MapGraph:
    """Captured maps, and copies of them for every scene."""

    def __init__(
        self, cmap: CoordinateMap, target: targets.Target, steps: tuple[Step, ...],
        last: RequestHistory, wants: _Wants, pool: Any,
    ) -> None:  # fmt: skip
        self.target, self.steps, self.last, self.wants = target, steps, last, wants
        with torch.inference_mode(False), torch.no_grad():
            scene = padded_input(cmap.coords, _capacity(cmap.n_rows), last)
            # The host is busy with layers meanwhile: what counts is memory.
            self.maps = CapturedMaps(
                scene, cmap.box, target, steps, pool, cmap.n_rows, abreast=False
            )
        self.scene, self.device, self.bytes = scene, cmap.device, self.maps.bytes
        assert scene.prepared is not None
        self.made, self.coords = scene.prepared
        self.sources = _tensors(self.made, self.coords)

    def serves(self, cmap: CoordinateMap, steps: tuple[Step, ...], last: RequestHistory) -> bool:
        """Whether this scene is of the graph's kind and size."""
        capacity = self.scene.coords.shape[0]
        return (
            cmap.n_rows <= capacity <= max(_SMALL, _WIDEST * cmap.n_rows)
            and ordered_alike({0: cmap.n_rows}, {0: capacity})
            and (last.tiled, last.asked) == self.wants
            and steps == self.steps
        )

    def answers(self, cmap: CoordinateMap) -> Answers | None:
        self.maps.start(cmap.coords)
        copies = {id(source): torch.empty_like(source) for source in self.sources}
        torch._foreach_copy_(list(copies.values()), self.sources)
        rows = self.maps.rows(cmap.n_rows)
        if rows is None:
            return None
        if not cmap.checked:
            cmap.validate(cmap.n_rows, cmap.n_rows, False)
        made = [tuple(_copied(side, copies) for side in sides) for sides in self.made]
        coords = {level: copies[id(one)] for level, one in self.coords.items()}
        return BatchedBuilder(cmap, self.target, self.steps, self.last).assembled(
            made, rows, coords
        )


def _capacity(n_rows: int) -> int:
    """Rows that a graph captured for a scene of `n_rows` has capacity for."""
    from ...kernels.maps.mask_order import SORTED_APART

    capacity = capacity_of(int(_SPARE * n_rows))
    return min(capacity, SORTED_APART) if n_rows <= SORTED_APART else capacity


def _tensors(made: list[Sides], coords: dict[int, torch.Tensor]) -> list[torch.Tensor]:
    """All that answers consist of, each tensor once."""
    found = {id(one): one for one in coords.values()}
    for sides in made:
        for side in sides:
            for one in () if side is None else side.parts:
                found[id(one)] = one
    return list(found.values())


def _copied(side: Any, copies: dict[int, torch.Tensor]) -> Any:
    """The same over the copies. (Masks of a table that nobody wanted as tiles stay behind.)"""
    return None if side is None else side.over(*[copies[id(part)] for part in side.parts])
