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
from collections.abc import Mapping
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
from .batched_builder import Answers, BatchedBuilder
from .graph_cache import MapGraphs
from .history import RequestHistory, Step
from .padded import PaddedInput

__all__ = ["Step", "Tracker", "forget", "history_of", "install", "provide"]

_STEPS = 64  # requests remembered of an input
_GRIDS = 256  # grids remembered
_LONGEST_WAIT = 1 << 10  # inputs to let pass after repeated failures
_KINDS = ("submanifold", "strided", "between")


@dataclasses.dataclass(eq=False)
class _History:
    """What inputs are asked: of one grid, which graphs may serve if they are `alike`, or of any."""

    alike: bool = True
    record: RequestHistory | None = None
    steps: tuple[Step, ...] = ()
    wait: int = 0  # inputs to let pass
    failures: int = 0
    graphs: MapGraphs = dataclasses.field(default_factory=MapGraphs)


_histories: dict[Any, _History] = {}
_lock = threading.Lock()


class Tracker:
    """The requests that one input is asked, and answers that are ready, for one stream."""

    def __init__(
        self, cmap: CoordinateMap, record: RequestHistory, ready: Answers, stream: int
    ) -> None:
        self.record, self._ready, self._stream = record, ready, stream
        self.levels = weakref.WeakKeyDictionary({cmap: 0})

    def ask(self, cmap: CoordinateMap, req: MapRequest) -> BuiltMap:
        """The map of `req` over coordinates of this input: one that is ready, or built now."""
        step = step_of(self.levels, cmap, req)
        if step is None or len(self.record.steps) >= _STEPS:
            return requests.build(cmap, req)
        self.record.steps.append(step)
        place = len(self.record.steps) - 1
        found = self._ready.get(step)
        # Levels are counted, and requests that nobody expected shift the count: what tells levels
        # apart are their coordinates. Another stream may run before the work that was queued here.
        if (
            found is None
            or found.over is not cmap
            or (step.out is not None and found.given is not req.output)
            or self._stream != _stream(cmap.device)
        ):
            built = requests.build(cmap, req)  # raises for a padded input
            self._remember(place, built, True)
        else:
            del self._ready[step]
            built = BuiltMap.of(found.kmap, found.new)
            self._remember(place, built, False)
        return built

    def _remember(self, place: int, built: BuiltMap, fresh: bool) -> None:
        """Remember the map that a step got, and the level that it made.

        fresh: the map was built now, so what tiles there are were asked for.
        """
        views, rulebook = self.record.views(place), built.kmap.rulebook
        for side in (0, 1):
            if fresh and rulebook.tiled(side):
                views.wanted(side, True)
        rulebook.observe(views)
        if built.coords is not None:
            self.record.rows[place] = built.coords.n_rows
            self.levels[built.coords] = place + 1


def step_of(
    levels: Mapping[CoordinateMap, int], cmap: CoordinateMap, req: MapRequest
) -> Step | None:
    """The request by levels; None where its coordinates are none of these."""
    level = levels.get(cmap)
    if level is None:
        return None
    if not isinstance(req.output, CoordinateMap):
        return Step(level, req)
    out = levels.get(req.output)
    return None if out is None else Step(level, req._replace(output=None), out)


def _relative(step: Step) -> bool:
    """Whether a step says nothing of absolute bounds."""
    return step.request.box is None and not isinstance(step.request.output, Box)


# Of every store, the tracker of the input that it descends from.
_trackers: weakref.WeakKeyDictionary[MapStore, Tracker] = weakref.WeakKeyDictionary()


def install() -> None:
    """Have requests for maps answered here."""
    requests.register(provide)


def forget() -> None:
    """Drop what was learnt."""
    with _lock:
        _histories.clear()
    graph_cache.forget()


def provide(store: MapStore, cmap: CoordinateMap, req: MapRequest) -> BuiltMap:
    """A map over `cmap`, the coordinates of `store`: prefetched, or built now."""
    if req.kind not in _KINDS:
        return requests.build(cmap, req)
    with _lock:
        tracker = _trackers.get(store)
    if tracker is None:
        first = step_of({cmap: 0}, cmap, req)
        if first is None:
            return requests.build(cmap, req)
        tracker = _begin(cmap, first)
        _keep(store, tracker)
    built = tracker.ask(cmap, req)
    if built.store is not None:
        _keep(built.store, tracker)
    return built


def _keep(store: MapStore, tracker: Tracker) -> None:
    with _lock:
        _trackers[store] = tracker


def _begin(cmap: CoordinateMap, first: Step) -> Tracker:
    """A tracker for an input that is asked its first request; answers are ready where the last two
    inputs of the grid were asked the same, or the last two of any grid if no request names one."""
    record = RequestHistory(cmap.n_rows)
    target = cmap.kernel_target()
    scene = padded.current()
    if scene is not None:
        return Tracker(cmap, record, _padded(cmap, target, scene), _stream(cmap.device))
    now = settings.get()
    if target is None or now.capture == "off" or now.dataflow not in ("auto", "masked"):
        return Tracker(cmap, record, {}, 0)
    # The grid's own history first, of which there may be graphs.
    keys = [(cmap.device, cmap.box), *([(cmap.device, first)] if _relative(first) else [])]
    answers: Answers | None = None
    for history, last in [_history(key, record) for key in keys]:
        if answers is None and last is not None:
            answers = _ready(history, last, cmap, target, first)
    return Tracker(cmap, record, answers or {}, _stream(cmap.device))


def _history(key: Any, record: RequestHistory) -> tuple[_History, RequestHistory | None]:
    """(what inputs of `key` are asked, of which `record` is the newest; the last one's record if
    the last two were asked the same)."""
    with _lock:
        if len(_histories) >= _GRIDS:
            _histories.clear()
            graph_cache.forget()
        history = _histories.setdefault(key, _History(alike=isinstance(key[1], Box)))
        last = history.record
        steps = () if last is None else tuple(last.steps)
        trusted = last is not None and steps == history.steps and history.wait == 0
        history.record, history.steps = record, steps
        history.wait = max(0, history.wait - 1)
    return history, last if trusted else None


def _ready(
    history: _History,
    last: RequestHistory,
    cmap: CoordinateMap,
    target: targets.Target,
    first: Step,
) -> Answers | None:
    """The answers to what inputs like this one are asked; None where there are none."""
    steps = tuple(last.steps)
    graphs = history.graphs if history.alike else None
    if steps[:1] != (first,) or (graphs is None and not all(map(_relative, steps))):
        return None
    replayed = graphs is not None and len(steps) < _STEPS and graph_cache.possible(cmap, target)
    if not (_several(steps) or replayed):
        return None
    answers = _answers(graphs, cmap, target, steps, last)
    with _lock:
        history.failures = 0 if answers is not None else history.failures + 1
        if answers is None:
            history.wait = min(_LONGEST_WAIT, 1 << history.failures)
    return answers


def _answers(
    graphs: MapGraphs | None, cmap: CoordinateMap, target: targets.Target,
    steps: tuple[Step, ...], last: RequestHistory,
) -> Answers | None:  # fmt: skip
    """The maps of a scene, replayed or queued; None where this scene is not like the last."""
    try:
        answers = None if graphs is None else graphs.answers(cmap, steps, last)
        if answers is None:
            answers = BatchedBuilder(cmap, target, steps, last).answers()
            if answers is not None and graphs is not None:
                graphs.consider(cmap, target, steps, last)
    except torch.cuda.OutOfMemoryError:  # map by map it takes less
        if graphs is not None:
            graphs.clear()
        return None
    return answers


def history_of(device: torch.device, box: Box, training: bool = False) -> RequestHistory | None:
    """What the last two scenes of a grid were asked alike, if maps are prefetched for it.

    training: with what a backward pass asks as well, which of the last scene is still to come.
    """
    with _lock:
        history = _histories.get((device, box))
        if history is None or history.record is None or history.wait or history.failures:
            return None
        steps = tuple(history.record.steps)
        if steps != history.steps or not 0 < len(steps) < _STEPS:
            return None
        return history.record.both_ways() if training else history.record


def _padded(cmap: CoordinateMap, target: targets.Target | None, scene: PaddedInput) -> Answers:
    """The maps of a padded scene, of which `cmap` must be the coordinates."""
    elsewhere = cmap.coords.data_ptr() != scene.coords.data_ptr()
    if target is None or elsewhere or scene.prepared is None:
        return {}
    cmap.adopt()
    builder = BatchedBuilder(cmap, target, tuple(scene.record.steps), scene.record)
    made, coords = scene.prepared
    return builder.assembled(made, scene.capacities, coords, scene)


def _stream(device: torch.device) -> int:
    """The current stream of a GPU; 0 elsewhere."""
    if device.type != "cuda":
        return 0
    stream: int = torch._C._cuda_getCurrentRawStream(targets.device_index(device))
    return stream


def _several(steps: tuple[Step, ...]) -> bool:
    """Several maps, strided ones among them, which would each wait for the device."""
    return 1 < len(steps) < _STEPS and any(step.strided for step in steps)
