"""Maps built ahead, replayed: what a `Chain` queues, captured once as graphs of launches.

Queueing the maps of all levels costs the host more time than building them costs the GPU. Where
scenes of a grid keep asking the same, the launches are captured over a scene with room to spare
(see `padded`) and replayed for every later scene: its coordinates are copied in, the maps copied
out. Rows are numbered and ordered exactly as without. A graph holds the memory of the maps of one
scene, so only scenes whose host time matters get one.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .. import log, settings
from ..kernels import target as targets
from .conv_spec import Box
from .coordinate_map import CoordinateMap
from .map_chain import Answers, Chain, Record, Sides, Step, ordered_alike
from .padded import PaddedScene, room_for

__all__ = ["CapturedMaps", "MapGraphs", "apart", "captured", "padded_scene", "possible"]

_STEADY = 2  # scenes alike before a graph is captured
_MOST_ROWS = 1 << 17  # above, the GPU takes longer than the host
_STREAMS = 4  # on which maps are built side by side
_GRAPHS = 3  # of a grid
_CAPTURES = 16  # of a grid, in all
_REFUSALS = 3  # in a row until a graph is dropped
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
        self.refusals, self.rest = 0, 0  # in a row; scenes to let pass before another capture
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
                found = graph.answers(cmap)
            if found is not None:
                self.refusals = 0
                return found
            # Too small, or the scene is not like the others; in a row, graphs are of no use.
            self.refusals += 1
            self.steady, self.rest = 0, 1 << min(self.refusals, 10)
            if self.refusals >= _REFUSALS:
                self.graphs.remove(graph)
            return None

    def consider(
        self, cmap: CoordinateMap, target: targets.Target, steps: tuple[Step, ...], last: Record
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
            self.graphs = [graph, *self.graphs[: _GRAPHS - 1]]


def _capturing() -> bool:
    return torch.cuda.is_current_stream_capturing()


def possible(cmap: CoordinateMap, target: targets.Target) -> bool:
    """Whether maps over `cmap` may be replayed: a scene of few rows on an NVIDIA GPU."""
    return (
        cmap.device.type == "cuda"
        and target.backend == "cuda"
        and cmap.n_rows <= _MOST_ROWS
        and settings.get().map_graphs
    )


class CapturedMaps:
    """The maps of a padded scene as two graphs, of the coordinates of all levels and of the maps
    over them: the host learns how many rows there are as soon as the first is through.

    scene: with the `n_rows` coordinates of a scene like those to come in place; its maps are
    `prepared`. box: of the coordinates.  distinct: see `Chain.lay_out`.  The current stream must
    not be the default one. Raises RuntimeError where nothing can be captured.
    """

    def __init__(
        self, scene: PaddedScene, box: Box, target: targets.Target, steps: tuple[Step, ...],
        pool: Any, n_rows: int, distinct: bool = False,
    ) -> None:  # fmt: skip
        self.scene = scene

        def chain() -> Chain:
            root = CoordinateMap(scene.coords, box)
            root.count = scene.count
            root.adopt()
            return Chain(root, target, steps, scene.record, _SLACK, n_rows)

        rehearsal = chain()  # whatever is compiled or loaded is so before
        if not rehearsal.lay_out(scene, distinct):
            raise RuntimeError("the last scene does not tell how large the levels get")
        rehearsal.queued()
        assert scene.books is not None and scene.flags is not None
        self.lengths = [len(scene.books), len(scene.flags)]
        self.host = torch.empty(sum(self.lengths), dtype=torch.int32, pin_memory=True)
        torch.cuda.current_stream().synchronize()
        del rehearsal
        self._chain = chain()  # its tables are read by the second graph
        self.first, _ = captured(lambda: self._coordinates(distinct), pool)
        streams = [torch.cuda.Stream(scene.coords.device) for _ in range(_STREAMS)]
        self.second, made = captured(lambda: self._chain.queued_apart(streams), pool)
        scene.prepared = made, self._chain.coords()
        self.event = torch.cuda.Event()

    def _coordinates(self, distinct: bool) -> None:
        scene = self.scene
        self._chain.lay_out(scene, distinct)
        assert scene.books is not None and scene.flags is not None
        mine = self.host.split(self.lengths)
        mine[0].copy_(scene.books, non_blocking=True)
        mine[1].copy_(scene.flags, non_blocking=True)

    def start(self, coords: torch.Tensor) -> None:
        """Queue the maps over these coordinates, of which there must be room for."""
        n_rows = coords.shape[0]
        self.scene.coords[:n_rows].copy_(coords)
        self.scene.count.fill_(n_rows - 1)
        self.first.replay()
        self.event.record(torch.cuda.current_stream())
        self.second.replay()

    def rows(self, n_rows: int) -> dict[int, int] | None:
        """Rows of every level; None where the scene cannot be served, or would be ordered
        otherwise. Waits for the first graph."""
        self.event.synchronize()
        books, flags = (part.tolist() for part in self.host.split(self.lengths))
        rows = self.scene.judged(books, flags, n_rows)
        return rows if rows is not None and ordered_alike(rows, self.scene.rooms) else None


def padded_scene(coords: torch.Tensor, room: int, record: Record) -> PaddedScene:
    """A scene with room for `room` rows, and `coords` [N, 1 + D] in place."""
    wide = coords.new_zeros((room, coords.shape[1]))
    wide[: coords.shape[0]].copy_(coords)
    return PaddedScene(wide, coords.new_full((1,), coords.shape[0] - 1), record)


@contextlib.contextmanager
def apart(device: torch.device) -> Iterator[None]:
    """A stream of its own, between what came before and what comes after, and other random
    numbers."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    try:
        with _random_numbers_apart(device), torch.cuda.stream(stream):
            yield
    finally:
        torch.cuda.current_stream(device).wait_stream(stream)


def captured(work: Callable[[], Any], pool: Any) -> tuple[torch.cuda.CUDAGraph, Any]:
    """(the graph of what `work` launches on the current stream, what it returns).

    torch's own context manager would collect garbage and empty the allocator's cache before.
    """
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        made = work()
        graph.capture_end()
    except BaseException:
        _abandon(graph, pool)
        raise
    return graph, made


def _abandon(graph: torch.cuda.CUDAGraph, pool: Any) -> None:
    """End a capture that failed, in the allocator as well, which torch leaves out then."""
    with contextlib.suppress(RuntimeError):
        graph.capture_end()
    with contextlib.suppress(RuntimeError, AttributeError):
        torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)


@contextlib.contextmanager
def _random_numbers_apart(device: torch.device) -> Iterator[None]:
    """A GPU's random numbers from another generator: a capture that fails leaves the one that was
    in use unusable, and trials must not move the user's."""
    generator = torch.cuda.default_generators[targets.device_index(device)]
    own = generator.graphsafe_get_state()
    generator.graphsafe_set_state(torch.Generator(device).graphsafe_get_state())
    try:
        yield
    finally:
        generator.graphsafe_set_state(own)


class _MapGraph:
    """Captured maps, and copies of them for every scene."""

    def __init__(
        self, cmap: CoordinateMap, target: targets.Target, steps: tuple[Step, ...], last: Record,
        wants: _Wants, pool: Any,
    ) -> None:  # fmt: skip
        self.target, self.steps, self.last, self.wants = target, steps, last, wants
        with torch.inference_mode(False), torch.no_grad(), apart(cmap.device):
            scene = padded_scene(cmap.coords, _room(cmap.n_rows), last)
            self.maps = CapturedMaps(scene, cmap.box, target, steps, pool, cmap.n_rows)
        self.scene = scene
        assert scene.prepared is not None
        self.made, self.coords = scene.prepared
        self.sources = _tensors(self.made, self.coords)

    def serves(self, cmap: CoordinateMap, steps: tuple[Step, ...], last: Record) -> bool:
        """Whether this scene is of the graph's kind and size."""
        room = self.scene.coords.shape[0]
        return (
            cmap.n_rows <= room <= max(_SMALL, _WIDEST * cmap.n_rows)
            and ordered_alike({0: cmap.n_rows}, {0: room})
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
            cmap.judge(cmap.n_rows, cmap.n_rows, False)
        made = [tuple(_copied(side, copies) for side in sides) for sides in self.made]
        coords = {level: copies[id(one)] for level, one in self.coords.items()}
        return Chain(cmap, self.target, self.steps, self.last).assembled(made, rows, coords)


def _room(n_rows: int) -> int:
    """Rows that a graph captured for a scene of `n_rows` has room for."""
    from ..kernels.mask_order import SORTED_APART

    room = room_for(int(_SPARE * n_rows))
    return min(room, SORTED_APART) if n_rows <= SORTED_APART else room


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
