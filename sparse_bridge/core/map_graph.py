"""Maps built ahead, replayed: what a `Chain` queues, captured once as graphs of launches.

Queueing the maps of all levels costs the host more time than building them costs the GPU. Where
scenes of a grid keep asking the same, the launches are captured over a scene with room to spare
(see `padded`) and replayed for every later scene: its coordinates are copied in, the maps copied
out. Rows are numbered and ordered exactly as without. A graph holds the memory of the maps of one
scene, so only scenes whose host time matters get one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from .. import log, settings
from ..kernels.target import Target
from .coordinate_map import CoordinateMap
from .map_chain import Answers, Chain, Record, Sides, Step, ordered_alike
from .padded import PaddedScene, room_for

__all__ = ["MapGraphs"]

_STEADY = 2  # scenes alike before a graph is captured
_MOST_ROWS = 1 << 17  # above, the GPU takes longer than the host
_GRAPHS = 3  # of a grid
_CAPTURES = 16  # of a grid, in all
_SPARE = 1.125  # room of level 0 over the scene that is captured
_SLACK = 1.125  # room of the other levels over the estimate
_WIDEST = 1.7  # room over the rows of a scene it serves, unless the room is
_SMALL = 1 << 12

# The sides that were wanted of every step, as tiles and at all.
_Wants = tuple[dict[int, frozenset[int]], dict[int, frozenset[int]]]


def _wants(record: Record) -> _Wants:
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
        self.wants: _Wants | None = None
        self.pool: Any = None
        self.stream: torch.cuda.Stream | None = None  # of the last replay
        self.lock = threading.Lock()

    def clear(self) -> None:
        """Give the memory back; no more graphs."""
        self.graphs, self.captures = [], _CAPTURES

    def answers(self, cmap: CoordinateMap, steps: tuple[Step, ...], last: Record) -> Answers | None:
        """The answers of every step, from a graph; None where none serves this scene."""
        if not self.graphs or not settings.get().map_graphs or _capturing():
            return None
        with self.lock:
            graph = next((one for one in self.graphs if one.serves(cmap, steps, last)), None)
            if graph is None:
                return None
            with torch.cuda.device(cmap.device):
                stream = torch.cuda.current_stream()
                if self.stream is not None and stream != self.stream:
                    stream.wait_stream(self.stream)
                self.stream = stream
                found = graph.answers(cmap, stream)
            if found is None:  # too small, or the scene is not like the others
                self.graphs.remove(graph)
                self.steady = 0
            return found

    def consider(
        self, cmap: CoordinateMap, target: Target, steps: tuple[Step, ...], last: Record
    ) -> None:
        """Capture a graph where scenes like this one, just built without, keep coming."""
        if not _possible(cmap, target) or self.captures >= _CAPTURES:
            return
        wants = _wants(last)
        self.steady = self.steady + 1 if wants == self.wants else 0
        self.wants = wants
        if self.steady < _STEADY or _capturing():
            return
        with self.lock, torch.cuda.device(cmap.device):
            self.captures += 1
            self.steady = 0
            if self.pool is None:
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
            self.graphs = [graph, *self.graphs[: _GRAPHS - 1]]


def _capturing() -> bool:
    return torch.cuda.is_current_stream_capturing()


def _possible(cmap: CoordinateMap, target: Target) -> bool:
    """Whether maps over `cmap` may be replayed: a scene of few rows on an NVIDIA GPU."""
    return (
        cmap.device.type == "cuda"
        and target.backend == "cuda"
        and cmap.n_rows <= _MOST_ROWS
        and settings.get().map_graphs
    )


class _MapGraph:
    """Two graphs, of the coordinates of all levels and of the maps over them: the host learns how
    many rows there are as soon as the first is through."""

    def __init__(
        self, cmap: CoordinateMap, target: Target, steps: tuple[Step, ...], last: Record,
        wants: _Wants, pool: Any,
    ) -> None:  # fmt: skip
        self.target, self.steps, self.last, self.wants = target, steps, last, wants
        with torch.inference_mode(False), torch.no_grad():
            coords = torch.zeros(
                (_room(cmap.n_rows), cmap.coords.shape[1]), dtype=torch.int32, device=cmap.device
            )
            coords[: cmap.n_rows].copy_(cmap.coords)
            count = torch.full((1,), cmap.n_rows - 1, dtype=torch.int32, device=cmap.device)
            self.scene = PaddedScene(coords, count, last)
            stream = torch.cuda.Stream(cmap.device)
            stream.wait_stream(torch.cuda.current_stream(cmap.device))
            with torch.cuda.stream(stream):
                self._capture(cmap, pool)
            torch.cuda.current_stream(cmap.device).wait_stream(stream)
        self.event = torch.cuda.Event()

    def _chain(self, cmap: CoordinateMap) -> Chain:
        """Over the padded scene."""
        root = CoordinateMap(self.scene.coords, cmap.box)
        root.count = self.scene.count
        root.adopt()
        return Chain(root, self.target, self.steps, self.last, _SLACK)

    def _capture(self, cmap: CoordinateMap, pool: Any) -> None:
        rehearsal = self._chain(cmap)  # whatever is compiled or loaded is so before
        rehearsal.lay_out(self.scene)
        rehearsal.queued()
        assert self.scene.books is not None and self.scene.flags is not None
        self.lengths = [len(self.scene.books), len(self.scene.flags)]
        self.host = torch.empty(sum(self.lengths), dtype=torch.int32, pin_memory=True)
        parts = self.host.split(self.lengths)
        torch.cuda.current_stream().synchronize()
        del rehearsal
        chain = self._chain(cmap)

        def coordinates() -> None:
            chain.lay_out(self.scene)
            for mine, vector in zip(parts, (self.scene.books, self.scene.flags), strict=True):
                assert vector is not None
                mine.copy_(vector, non_blocking=True)

        self.first, _ = _captured(coordinates, pool)
        self.second, made = _captured(chain.queued, pool)
        self.made, self.coords = made, chain.coords()
        self._memory = chain  # its tables are read by the second graph
        self.sources = _tensors(made, self.coords)

    def serves(self, cmap: CoordinateMap, steps: tuple[Step, ...], last: Record) -> bool:
        """Whether this scene is of the graph's kind and size."""
        room = self.scene.coords.shape[0]
        return (
            cmap.n_rows <= room <= max(_SMALL, _WIDEST * cmap.n_rows)
            and ordered_alike({0: cmap.n_rows}, {0: room})
            and (last.tiled, last.asked) == self.wants
            and steps == self.steps
        )

    def answers(self, cmap: CoordinateMap, stream: torch.cuda.Stream) -> Answers | None:
        n_rows, scene = cmap.n_rows, self.scene
        scene.coords[:n_rows].copy_(cmap.coords)
        scene.count.fill_(n_rows - 1)
        self.first.replay()
        self.event.record(stream)
        self.second.replay()
        copies = {id(source): torch.empty_like(source) for source in self.sources}
        torch._foreach_copy_(list(copies.values()), self.sources)
        self.event.synchronize()
        books, flags = (part.tolist() for part in self.host.split(self.lengths))
        rows = scene.judged(books, flags, n_rows)
        if rows is None or not ordered_alike(rows, scene.rooms):
            return None
        if not cmap.checked:
            cmap.judge(n_rows, n_rows, False)
        made = [tuple(_copied(side, copies) for side in sides) for sides in self.made]
        coords = {level: copies[id(one)] for level, one in self.coords.items()}
        return Chain(cmap, self.target, self.steps, self.last).assembled(made, rows, coords)


def _room(n_rows: int) -> int:
    """Rows that a graph captured for a scene of `n_rows` has room for."""
    from ..kernels.mask_order import SORTED_APART

    room = room_for(int(_SPARE * n_rows))
    return min(room, SORTED_APART) if n_rows <= SORTED_APART else room


def _captured(work: Callable[[], Any], pool: Any) -> tuple[torch.cuda.CUDAGraph, Any]:
    """(the graph of what `work` launches on the current stream, what it returns).

    torch's own context manager would collect garbage and empty the allocator's cache before.
    """
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        made = work()
    finally:
        graph.capture_end()
    return graph, made


def _tensors(made: list[Sides], coords: dict[int, torch.Tensor]) -> list[torch.Tensor]:
    """All that answers consist of, each tensor once."""
    found = {id(one): one for one in coords.values()}
    for sides in made:
        for side in sides:
            for one in _parts(side):
                found[id(one)] = one
    return list(found.values())


def _parts(side: Any) -> list[torch.Tensor]:
    from ..kernels.mask_order import TileList

    if side is None:
        return []
    if isinstance(side, TileList):
        return [side.memory]
    return [side.nbr] if side.count is None else [side.nbr, side.count]


def _copied(side: Any, copies: dict[int, torch.Tensor]) -> Any:
    """The same over the copies. (Masks of a table that nobody wanted as tiles stay behind.)"""
    from ..kernels.mask_order import TileList
    from ..kernels.neighbor_table import NeighborTable

    if side is None:
        return None
    if isinstance(side, TileList):
        return TileList(copies[id(side.memory)], side.n_offsets, side.n_pairs, side.n_rows)
    count = None if side.count is None else copies[id(side.count)]
    return NeighborTable(copies[id(side.nbr)], None, count)
