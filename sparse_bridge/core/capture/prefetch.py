"""Prefetched maps: all that a network asks of one input, queued at its first request.

Networks ask every input for the same maps in the same order. The history of the last inputs'
requests is remembered by grid; when a new input is asked the first of them, the maps of all levels
are queued at once, the sizes of deeper levels read from the device by the kernels themselves, and
the host waits once instead of once or twice a level. Rows are numbered and ordered exactly as
without.

Memory is taken by estimate: the last input's growth from level to level, and a quarter more. Where
an input exceeds that, or holds equal or outlying rows, what was queued is dropped and every map is
built when it is asked for.

`install` registers all this as the provider of `core.maps.request`.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from typing import Any

import torch

from ... import settings
from ...kernels.runtime import target as targets
from ..geometry.boxes import Box
from ..maps import request as requests
from ..maps.coordinate_map import CoordinateMap
from ..maps.map_cache import MapStore
from ..maps.request import BuiltMap, MapRequest
from . import graph_cache, padded
from .batched_builder import Answers, Chain, Record, Step
from .graph_cache import MapGraphs
from .padded import PaddedScene

__all__ = ["Step", "Trail", "forget", "habit_of", "install", "provide"]

_STEPS = 64  # requests remembered of an input
_GRIDS = 256  # grids remembered
_LONGEST_WAIT = 1 << 10  # inputs to let pass after repeated failures
_KINDS = ("submanifold", "strided")


@dataclasses.dataclass(eq=False)
class _Habit:
    """What inputs of a grid are asked."""

    record: Record | None = None
    steps: tuple[Step, ...] = ()
    wait: int = 0  # inputs to let pass
    failures: int = 0
    graphs: MapGraphs = dataclasses.field(default_factory=MapGraphs)


_habits: dict[Any, _Habit] = {}
_lock = threading.Lock()


class Trail:
    """The requests that one input is asked, and answers that are ready, for one stream."""

    def __init__(self, record: Record, ready: Answers, stream: int) -> None:
        self.record, self._ready, self._stream = record, ready, stream

    def ask(self, step: Step, cmap: CoordinateMap, stream: int) -> tuple[int, BuiltMap | None]:
        """(place of the step, its answer if there is one)."""
        self.record.steps.append(step)
        place = len(self.record.steps) - 1
        over, kmap, new = self._ready.get(step, (None, None, None))
        # Levels are counted, and requests that nobody expected shift the count: what tells levels
        # apart are their coordinates. Another stream may run before the work that was queued here.
        if over is not cmap or kmap is None or stream != self._stream:
            return place, None
        del self._ready[step]
        return place, BuiltMap.of(kmap, new)

    def answer(self, place: int, found: BuiltMap, fresh: bool) -> None:
        """Remember the map that a step got, and the level that it made.

        fresh: the map was built now, so what there is of it was asked for.
        """
        views = self.record.views(place)
        rulebook = found.kmap.rulebook
        for side in (0, 1):
            if fresh and rulebook.tiled(side):
                views.wanted(side, True)
        rulebook.observe(views)
        if found.coords is not None:
            self.record.rows[place] = found.coords.n_rows


# Of every store, the trail of the input that it descends from and its level there.
_trails: weakref.WeakKeyDictionary[MapStore, tuple[Trail, int]] = weakref.WeakKeyDictionary()


def install() -> None:
    """Have requests for maps answered here."""
    requests.register(provide)


def forget() -> None:
    """Drop what was learnt."""
    with _lock:
        _habits.clear()
    graph_cache.forget()


def provide(store: MapStore, cmap: CoordinateMap, req: MapRequest) -> BuiltMap:
    """A map over `cmap`, the coordinates of `store`: prefetched, or built now."""
    if req.kind not in _KINDS:
        return requests.build(cmap, req)
    with _lock:
        known = _trails.get(store)
    trail, level = (None, 0) if known is None else known
    step = Step(level, cmap.box, req)
    if trail is None:
        trail = _begin(cmap, step)
        _keep(store, trail, 0)
    if len(trail.record.steps) >= _STEPS:
        built = requests.build(cmap, req)
        _keep(built.store, trail, level)
        return built
    place, found = trail.ask(step, cmap, _stream(cmap.device))
    built = requests.build(cmap, req) if found is None else found  # raises for a padded input
    trail.answer(place, built, found is None)
    _keep(built.store, trail, place + 1)
    return built


def _keep(store: MapStore | None, trail: Trail, level: int) -> None:
    if store is not None:
        with _lock:
            _trails[store] = (trail, level)


def _begin(cmap: CoordinateMap, first: Step) -> Trail:
    """A trail for a scene that is asked its first question; answers are ready where the last two
    scenes of the grid were asked the same."""
    record = Record(cmap.n_rows)
    target = cmap.kernel_target()
    scene = padded.current()
    if scene is not None:
        return Trail(record, _padded(cmap, target, scene), _stream(cmap.device))
    now = settings.get()
    if target is None or now.capture == "off" or now.dataflow not in ("auto", "masked"):
        return Trail(record, {}, 0)
    with _lock:
        if len(_habits) >= _GRIDS:
            _habits.clear()
            graph_cache.forget()
        habit = _habits.setdefault((cmap.device, cmap.box), _Habit())
        last = habit.record
        steps = () if last is None else tuple(last.steps)
        trusted = steps == habit.steps and habit.wait == 0
        habit.record, habit.steps = record, steps
        habit.wait = max(0, habit.wait - 1)
    if last is None or not trusted or steps[:1] != (first,):
        return Trail(record, {}, 0)
    if not (_several(steps) or (len(steps) < _STEPS and graph_cache.possible(cmap, target))):
        return Trail(record, {}, 0)
    answers = _answers(habit.graphs, cmap, target, steps, last)
    with _lock:
        habit.failures = 0 if answers is not None else habit.failures + 1
        if answers is None:
            habit.wait = min(_LONGEST_WAIT, 1 << habit.failures)
    return Trail(record, answers or {}, _stream(cmap.device))


def _answers(
    graphs: MapGraphs, cmap: CoordinateMap, target: targets.Target, steps: tuple[Step, ...],
    last: Record,
) -> Answers | None:  # fmt: skip
    """The maps of a scene, replayed or queued; None where this scene is not like the last."""
    try:
        answers = graphs.answers(cmap, steps, last)
        if answers is None:
            answers = Chain(cmap, target, steps, last).answers()
            if answers is not None:
                graphs.consider(cmap, target, steps, last)
    except torch.cuda.OutOfMemoryError:  # map by map it takes less
        graphs.clear()
        return None
    return answers


def habit_of(device: torch.device, box: Box, training: bool = False) -> Record | None:
    """What the last two scenes of a grid were asked alike, if maps are built ahead for it.

    training: with what a backward pass asks as well, which of the last scene is still to come.
    """
    with _lock:
        habit = _habits.get((device, box))
        if habit is None or habit.record is None or habit.wait or habit.failures:
            return None
        steps = tuple(habit.record.steps)
        if steps != habit.steps or not 0 < len(steps) < _STEPS:
            return None
        return habit.record.both_ways() if training else habit.record


def _padded(cmap: CoordinateMap, target: targets.Target | None, scene: PaddedScene) -> Answers:
    """The maps of a padded scene, of which `cmap` must be the coordinates."""
    elsewhere = cmap.coords.data_ptr() != scene.coords.data_ptr()
    if target is None or elsewhere or scene.prepared is None:
        return {}
    cmap.adopt()
    chain = Chain(cmap, target, tuple(scene.record.steps), scene.record)
    made, coords = scene.prepared
    return chain.assembled(made, scene.rooms, coords, scene)


def _stream(device: torch.device) -> int:
    """The current stream of a GPU; 0 elsewhere."""
    if device.type != "cuda":
        return 0
    stream: int = torch._C._cuda_getCurrentRawStream(targets.device_index(device))
    return stream


def _several(steps: tuple[Step, ...]) -> bool:
    """Several maps, strided ones among them, which would each wait for the device."""
    return 1 < len(steps) < _STEPS and any(step.strided for step in steps)
