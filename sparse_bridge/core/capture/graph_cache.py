"""Prefetched maps, replayed: what a `BatchedBuilder` queues, captured once as graphs of launches.

Queueing the maps of all levels costs the host more time than building them costs the GPU. Where
scenes keep asking the same, the launches are captured over a padded input (see `padded`), a graph
for every class of sizes, and replayed for later scenes of the class, whatever their shape: their
coordinates are copied in, the maps copied out. Rows are numbered and ordered exactly as without.
"""

from __future__ import annotations

import collections
import contextlib
from typing import Any

import torch

from ... import log, settings
from ...kernels.runtime import target as targets
from ..device import rocm
from ..maps.coordinate_map import CoordinateMap
from . import arena
from .arena import ArenaMaps, TooLargeError
from .batched_builder import Answers, BatchedBuilder
from .history import RequestHistory, Step, boxes_of
from .padded import capacity_of

_RECURS = 8  # scenes alike of a class before one is captured, which takes as long as a scene
_BETWEEN = 24  # scenes from one capture to the next
_MOST_ROWS = 1 << 17  # above, the GPU takes longer than the host
_CAPTURES = 64  # of one list of requests, in all
_REFUSALS = 3  # in a row until a graph is dropped

# The sides that were wanted of every step, as tiles and at all.
_Wants = tuple[dict[int, frozenset[int]], dict[int, frozenset[int]]]


def _wants(record: RequestHistory) -> _Wants:
    tiled, asked = (
        {place: frozenset(sides) for place, sides in wanted.items()}
        for wanted in (record.tiled, record.asked)
    )
    return tiled, asked


def forget() -> None:
    """Drop all graphs."""
    arena.forget()


def current(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """The device as the current one; nothing where it is."""
    if targets.is_current(device):
        return contextlib.nullcontext()
    return torch.cuda.device(device)


def _capturing() -> bool:
    return torch.cuda.is_current_stream_capturing()


def _wanted() -> bool:
    return settings.get().capture in ("graphs", "always") and rocm.replays_graphs()


def possible(cmap: CoordinateMap, target: targets.Target) -> bool:
    """Whether maps over `cmap` may be replayed: a scene of few rows on an NVIDIA GPU, on ROCm only
    if the settings ask for that by name."""
    return cmap.device.type == "cuda" and cmap.n_rows <= _MOST_ROWS and _wanted()


def _least_bytes(cmap: CoordinateMap, steps: tuple[Step, ...], last: RequestHistory) -> int:
    """What the maps of scenes like this one take at least."""
    rows, elements = {0: cmap.n_rows}, 0
    for place, step in enumerate(steps):
        here = step.ends(place)
        if step.makes:
            rows[here] = int((last.growth(place) or 0.0) * cmap.n_rows)
        elements += len(step.request.offsets) * rows[here]
    return 4 * elements


class MapGraphs:
    """The graphs of one list of requests, by capacity.

    key64: levels that needed 64-bit keys.
    """

    def __init__(self) -> None:
        self.graphs: dict[int, _MapGraph] = {}
        self.key64: set[int] = set()
        self.captures = 0
        self.wants: _Wants | None = None  # of the last scenes
        self.met: collections.Counter[int] = collections.Counter()  # such scenes, by capacity
        self.too_large: set[int] = set()  # capacities
        self.refusals, self.rest = 0, 0  # in a row; scenes to let pass before another capture

    def clear(self) -> None:
        """Give the memory back; no more graphs."""
        for graph in list(self.graphs.values()):
            graph.arena.drop(graph)
        self.captures = _CAPTURES

    def answers(self, cmap: CoordinateMap, last: RequestHistory) -> Answers | None:
        """The answers of every step, from a graph; None where none serves this scene."""
        graph = self.graphs.get(capacity_of(cmap.n_rows))
        if graph is None or not _wanted() or _capturing():
            return None
        with graph.arena.lock:
            if graph not in graph.arena.graphs or not graph.serves(cmap, last):
                return None
            with current(cmap.device):
                graph.arena.follow()
                found = graph.answers(cmap)
            graph.arena.hold(graph)
            if found is not None:
                self.refusals = 0
                return found
            # Too small, or the scene is not like the others; in a row, graphs are of no use.
            self.refusals += 1
            self.met.clear()
            self.rest = max(self.rest, 1 << min(self.refusals, 10))
            if self.refusals >= _REFUSALS:
                graph.arena.drop(graph)
            return None

    def consider(
        self, cmap: CoordinateMap, target: targets.Target, steps: tuple[Step, ...],
        last: RequestHistory,
    ) -> None:  # fmt: skip
        """Capture a graph where scenes like this one, just built without, keep coming."""
        capacity = capacity_of(cmap.n_rows)
        if not possible(cmap, target) or self.captures >= _CAPTURES or capacity in self.too_large:
            return
        wants = _wants(last)
        if wants != self.wants:
            self.wants = wants
            self.met.clear()
        self.met[capacity] += 1
        self.rest = max(0, self.rest - 1)
        if self.met[capacity] < _RECURS or self.rest or _capturing():
            return
        if _least_bytes(cmap, steps, last) > arena.MOST_BYTES:
            self.too_large.add(capacity)  # a dry run would take that memory, and more, to find out
            return
        shared = arena.arena_of(cmap.device)
        with shared.lock, torch.cuda.device(cmap.device):
            shared.follow()  # another stream's replay may still read what this one overwrites
            self.captures += 1
            self.met[capacity], self.rest = 0, _BETWEEN
            if capacity in self.graphs:  # it does not serve such scenes any longer
                self.graphs[capacity].arena.drop(self.graphs[capacity])
            try:
                graph = _MapGraph(self, cmap, target, steps, last)
            except TooLargeError:
                self.too_large.add(capacity)
            except RuntimeError as error:  # an allocator that cannot, say; a full memory
                self.captures = _CAPTURES
                log.once(
                    ("map graph", str(cmap.device)),
                    f"maps are not replayed from graphs on {cmap.device}: {error}",
                    level=30,
                )
            else:
                self.graphs[capacity] = graph
                shared.hold(graph)
            finally:
                shared.release()


class _MapGraph:
    """Captured maps of a class of scenes, and copies of them for every scene."""

    def __init__(
        self, owner: MapGraphs, cmap: CoordinateMap, target: targets.Target,
        steps: tuple[Step, ...], last: RequestHistory,
    ) -> None:  # fmt: skip
        self.owner, self.target, self.steps, self.last = owner, target, steps, last
        self.exact = cmap.data_bounds is not None and all(one.derivable for one in steps)
        self.wants, self.arena = _wants(last), arena.arena_of(cmap.device)
        self.capacity, boxes = capacity_of(cmap.n_rows), boxes_of(cmap.box, steps)
        owner.key64 |= {level for level, box in boxes.items() if box.key64}
        self.levels = [level for level in boxes if level]
        with torch.inference_mode(False), torch.no_grad():
            self.maps = ArenaMaps(
                self.arena, cmap, self.capacity, target, steps, last, owner.key64, self.exact
            )

    def dropped(self) -> None:
        self.owner.graphs.pop(self.capacity, None)

    def serves(self, cmap: CoordinateMap, last: RequestHistory) -> bool:
        """Whether this scene is of the graph's kind, as far as is known."""
        if (last.tiled, last.asked) != self.wants or (self.exact and cmap.data_bounds is None):
            return False
        return self.exact if cmap.unbounded else self.maps.serves(cmap.box)

    def answers(self, cmap: CoordinateMap) -> Answers | None:
        maps, bounds = self.maps, cmap.data_bounds if self.exact else None
        maps.start(cmap.coords, cmap.box if bounds is None else bounds)
        copies = maps.copies()
        coords = {level: next(copies) for level in self.levels}
        made = [
            tuple(side and side.over(*[next(copies) for _ in side.parts]) for side in sides)
            for sides in maps.made
        ]  # fmt: skip
        rows = maps.rows(cmap.n_rows, bounds)
        if rows is None:
            return None
        if not cmap.checked:
            cmap.validate(cmap.n_rows, cmap.n_rows, False)
        builder = BatchedBuilder(cmap, self.target, self.steps, self.last)
        builder.learn(maps.ends, rows)
        return builder.assembled(made, rows, coords)
