"""Prefetched maps: all that a network asks of one input, queued at its first request.

Networks ask every input for the same maps in the same order, whatever its shape. What the last
inputs were asked is remembered relative to their coordinates; when a new input is asked the first
of it, the maps of all levels are queued at once, the sizes of deeper levels read from the device by
the kernels themselves, and the host waits once instead of once or twice a level. Rows are numbered
and ordered exactly as without.

Memory is taken by estimate: the largest growth of the last inputs from level to level, and some
more. Where an input exceeds that, or holds equal or outlying rows, what was queued is dropped and
every map is built when it is asked for.

`install` registers all this as the provider of `core.maps.request`.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Hashable, Mapping

import torch

from ... import log, memory, policy, settings, state
from ...errors import KernelError, SparseBridgeError
from ...kernels.runtime import target as targets
from ...refusals import Why
from ..device.device_support import kernel_target
from ..geometry.boxes import Box
from ..maps import request as requests
from ..maps.coordinate_map import CoordinateMap
from ..maps.map_cache import MapStore
from ..maps.request import BuiltMap, MapRequest
from . import padded
from .batched_builder import Answers, BatchedBuilder
from .history import Expectation, KindHistory, RequestHistory, Step
from .padded import PaddedInput
from .traces.maps import Traces
from .unbounded_builder import UnboundedBuilder

__all__ = ["Step", "Tracker", "forget", "history_of", "install", "provide"]

_KINDS = ("submanifold", "strided", "generative", "between")

# What inputs are asked, by device, number of columns and first request, or kind of announcement.
_histories: dict[tuple[torch.device, int, Hashable], KindHistory] = {}
# The last record of inputs in a box, and where it belongs.
_records: dict[tuple[torch.device, Box], tuple[KindHistory, Expectation, RequestHistory]] = {}
_counts = dict.fromkeys(("prefetched", "traced", "requeued", "dropped"), 0)  # inputs
_lock = threading.Lock()


def counts() -> dict[str, int]:
    """Inputs whose maps were prefetched, those of them that were queued from a trace, or twice as
    their bounds had grown, and those whose maps were dropped."""
    with _lock:
        return dict(_counts)


class Tracker:
    """The requests that one input is asked, and answers that are ready, for one stream."""

    def __init__(self, cmap: CoordinateMap, record: RequestHistory, ready: Answers, stream: int) -> None:
        self.record, self.ready, self._stream = record, ready, stream
        self.levels = weakref.WeakKeyDictionary({cmap: 0})

    def ask(self, cmap: CoordinateMap, req: MapRequest) -> BuiltMap:
        """The map of `req` over coordinates of this input: one that is ready, or built now."""
        step = step_of(self.levels, cmap, req)
        if step is None or len(self.record.steps) >= policy.REQUESTS:
            return requests.build(cmap, req)
        self.record.steps.append(step)
        place = len(self.record.steps) - 1
        found = self.ready.get(step)
        # Levels are counted, and requests that nobody expected shift the count: what tells levels
        # apart are their coordinates. Another stream may run before the work that was queued here.
        if (
            found is None
            or found.over is not cmap
            or (step.out is not None and found.given is not req.output)
            or self._stream != targets.current_stream(cmap.device)
        ):
            built = requests.build(cmap, req)  # raises for a padded input
            self._remember(place, built, True)
        else:
            del self.ready[step]
            built = BuiltMap.of(found.kmap, found.new)
            self._remember(place, built, False)
        return built

    def again(self, step: Step) -> BuiltMap | None:
        """The answer that is ready to a request of which it is known that it takes this step; None
        where it has to be asked."""
        found = self.ready.get(step)
        if found is None or self._stream != targets.current_stream(found.over.device):
            return None
        del self.ready[step]
        self.record.steps.append(step)
        built = BuiltMap.of(found.kmap, found.new)
        self._remember(len(self.record.steps) - 1, built, False)
        return built

    def _remember(self, place: int, built: BuiltMap, fresh: bool) -> None:
        """Remember the map that a step got, and the level that it made.

        fresh: the map was built now, so what tiles there are were asked for.
        """
        views, rulebook = self.record.views(place), built.kmap.rulebook
        if fresh:
            for side in (0, 1):
                if rulebook.tiled(side):
                    views.wanted(side, True)
        rulebook.observe(views)
        if built.coords is not None:
            self.record.rows[place] = built.coords.n_rows
            self.levels[built.coords] = place + 1


def step_of(levels: Mapping[CoordinateMap, int], cmap: CoordinateMap, req: MapRequest) -> Step | None:
    """The request by levels; None where its coordinates are none of these."""
    level = levels.get(cmap)
    if level is None:
        return None
    if not isinstance(req.output, CoordinateMap):
        return Step(level, req if req.box is None else MapRequest(*req[:-1]))  # without the box
    out = levels.get(req.output)
    return None if out is None else Step(level, req._replace(output=None, box=None), out)


# Records of inputs that were announced, for which nothing could be prepared.
_announced: weakref.WeakKeyDictionary[MapStore, RequestHistory] = weakref.WeakKeyDictionary()


def install() -> None:
    """Have requests for maps answered here."""
    requests.register(provide, announced)


@state.owns
def forget() -> None:
    """Drop what was learnt."""
    with _lock:
        _histories.clear()
        _records.clear()
        _counts.update(dict.fromkeys(_counts, 0))


def provide(store: MapStore, cmap: CoordinateMap, req: MapRequest) -> BuiltMap:
    """A map over `cmap`, the coordinates of `store`: prefetched, or built now."""
    if req.kind not in _KINDS:
        return requests.build(cmap, req)
    tracker: Tracker | None = store.tracker
    if tracker is None:
        if _target(cmap) is None and padded.current() is None:
            return requests.build(cmap, req)  # nothing is ever queued on the host
        first = step_of({cmap: 0}, cmap, req)
        if first is None:
            return requests.build(cmap, req)
        with _lock:
            record = _announced.pop(store, None)
        twin = RequestHistory(cmap.n_rows) if record is None else record.twin()
        tracker = store.tracker = _begin(cmap, first, twin)
    built = tracker.ask(cmap, req)
    if built.store is not None:
        built.store.tracker = tracker
    return built


def announced(store: MapStore, cmap: CoordinateMap, kind: Hashable) -> None:
    """Prepare what inputs of this kind are asked, before the first request."""
    if padded.current() is not None:
        return
    record = RequestHistory(cmap.n_rows)
    tracker = _begin(cmap, kind, record)
    if tracker.ready:
        store.tracker = tracker
    else:
        with _lock:
            _announced[store] = record


def _begin(cmap: CoordinateMap, first: Hashable, record: RequestHistory) -> Tracker:
    """A tracker for an input that is asked its first request; answers are ready where inputs in its
    place were asked the same."""
    stream, scene = targets.current_stream(cmap.device), padded.current()
    if scene is not None:
        return Tracker(cmap, record, _padded(cmap, cmap.kernel_target(), scene), stream)
    target, now = _target(cmap), settings.get()
    allowed = now.capture != "off" and memory.limit is None  # all maps of a scene come at once
    if target is None or not allowed or now.dataflow not in ("auto", "masked"):
        return Tracker(cmap, record, {}, 0)
    history, expected, last = _learn(cmap, record, first)
    answers = None if last is None else _ready(history, expected, last, cmap, target)
    _enter(cmap, history, expected, record)
    return Tracker(cmap, record, answers or {}, stream)


def _target(cmap: CoordinateMap) -> targets.Target | None:
    """The target whose kernels search `cmap`, as far as can be told without its bounds."""
    return kernel_target(cmap.device) if cmap.unbounded else cmap.kernel_target()


def _learn(
    cmap: CoordinateMap, record: RequestHistory, first: Hashable
) -> tuple[KindHistory, Expectation, RequestHistory | None]:
    """What is to be expected of a new input, see `KindHistory.begin`."""
    with _lock:
        key = cmap.device, cmap.coords.shape[1], first
        history = _histories.get(key)
        if history is None or history.full:
            if len(_histories) >= policy.FIRST_REQUESTS:
                _histories.clear()
            history = _histories[key] = KindHistory()
        return history, *history.begin(record)


def _enter(cmap: CoordinateMap, history: KindHistory, expected: Expectation, record: RequestHistory) -> None:
    """Remember whose record that of an input is, whose bounds are known or needed now."""
    record.box = cmap.box
    with _lock:
        _records.pop((cmap.device, cmap.box), None)
        _records[cmap.device, cmap.box] = history, expected, record
        if len(_records) > policy.BOXES:
            del _records[next(iter(_records))]


def _ready(
    history: KindHistory, expected: Expectation, last: RequestHistory, cmap: CoordinateMap, target: targets.Target
) -> Answers | None:
    """The answers to what inputs like this one are asked; None where there are none."""
    steps = tuple(last.steps)
    if len(steps) >= policy.REQUESTS:
        return None
    unbounded = cmap.unbounded and last.box is not None
    if unbounded:
        steps = tuple(itertools.takewhile(lambda step: step.derivable, steps))
    elif cmap.box is not last.box:
        steps = tuple(itertools.takewhile(lambda step: step.relative, steps))
    if not (_several(steps) or (unbounded and steps)):
        return None
    key64 = history.key64.setdefault((last.number, len(steps)), set())
    traces = history.traces.setdefault((last.number, len(steps)), Traces())
    answers = _answers(cmap, target, steps, last, key64, traces)
    with _lock:
        expected.attempts.learn(answers is not None)
        _counts["dropped" if answers is None else "prefetched"] += 1
    return answers


def _answers(
    cmap: CoordinateMap,
    target: targets.Target,
    steps: tuple[Step, ...],
    last: RequestHistory,
    key64: set[int],
    traces: Traces,
) -> Answers | None:
    """The maps of a scene, queued; None where this scene is not like the last."""
    try:
        return _queued(cmap, target, steps, last, key64, traces)
    except KernelError:
        raise
    except SparseBridgeError as error:  # of a layer that this input may never reach: it will say so
        log.logger.debug("no prefetch: %s", Why.PREFETCH_LAYER.says(error))
        return None
    except torch.cuda.OutOfMemoryError:  # map by map it takes less
        log.logger.debug("no prefetch: %s", Why.PREFETCH_MEMORY.says())
        return None


def _queued(
    cmap: CoordinateMap,
    target: targets.Target,
    steps: tuple[Step, ...],
    last: RequestHistory,
    key64: set[int],
    traces: Traces,
) -> Answers | None:
    """The maps of a scene, queued; once more where its bounds are others than expected."""
    builder: BatchedBuilder | None = None
    if cmap.unbounded and last.box is not None:
        builder = unbounded = UnboundedBuilder(cmap, target, steps, last, key64, traces)
        answers = unbounded.answers()
        if unbounded.outgrown:
            with _lock:
                _counts["requeued"] += 1
            if cmap.kernel_target() is None:
                return None
            builder = None
    if builder is None:
        builder = BatchedBuilder(cmap, target, steps, last, traces=traces)
        answers = builder.answers()
    if builder.traced:
        with _lock:
            _counts["traced"] += 1
    return answers


def history_of(device: torch.device, box: Box, training: bool = False) -> RequestHistory | None:
    """What the last input in `box` was asked, and another one before, if maps are prefetched
    there.

    training: with what a backward pass asks as well, which of the last scene is still to come.
    """
    with _lock:
        found = _records.get((device, box))
        if found is None:
            return None
        history, expected, record = found
        if expected.attempts.wait or expected.attempts.failures or not history.settled(record):
            return None
        return record.both_ways() if training else record


def _padded(cmap: CoordinateMap, target: targets.Target | None, scene: PaddedInput) -> Answers:
    """The maps of a padded input, of which `cmap` must be the coordinates."""
    elsewhere = cmap.coords.data_ptr() != scene.coords.data_ptr()
    if target is None or elsewhere or scene.prepared is None:
        return {}
    cmap.adopt()
    builder = BatchedBuilder(cmap, target, tuple(scene.record.steps), scene.record)
    made, coords = scene.prepared
    return builder.assembled(made, scene.capacities, coords, scene)


def _several(steps: tuple[Step, ...]) -> bool:
    """Several maps, and new coordinates among them, which would each wait for the device."""
    return len(steps) > 1 and any(step.makes for step in steps)
