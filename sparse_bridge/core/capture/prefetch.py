"""Maps built ahead: all that a network asks of one scene, queued at the first question.

Networks ask every scene for the same maps in the same order. What the last scenes asked for is
remembered by grid; when a new scene asks the first of these questions, the maps of all levels are
queued at once, the sizes of deeper levels read from the device by the kernels themselves, and the
host waits once instead of once or twice a level. Rows are numbered and ordered exactly as without.

Memory is taken by estimate: the last scene's growth from level to level, and a quarter more. Where
a scene exceeds that, or holds equal or outlying rows, what was queued is dropped and every map is
built when it is asked for.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import torch

from ... import settings
from ...kernels.runtime import target as targets
from ..geometry.boxes import Box
from ..geometry.offsets import Offsets
from ..maps.coordinate_map import CoordinateMap
from ..maps.kernel_map import KernelMap
from ..maps.map_cache import MapStore
from . import graph_cache, padded
from .batched_builder import Answers, Chain, Record, Step
from .graph_cache import MapGraphs
from .padded import PaddedScene

__all__ = ["Step", "Trail", "forget", "habit_of", "resolve"]

_STEPS = 64  # questions remembered of a scene
_GRIDS = 256  # grids remembered
_LONGEST_WAIT = 1 << 10  # scenes to let pass after repeated failures


@dataclasses.dataclass(eq=False)
class _Habit:
    """What scenes of a grid are asked."""

    record: Record | None = None
    steps: tuple[Step, ...] = ()
    wait: int = 0  # scenes to let pass
    failures: int = 0
    graphs: MapGraphs = dataclasses.field(default_factory=MapGraphs)


_habits: dict[Any, _Habit] = {}
_lock = threading.Lock()


class Trail:
    """The questions that one scene is asked, and answers that are ready, for one stream."""

    def __init__(self, record: Record, ready: Answers, stream: int) -> None:
        self.record, self._ready, self._stream = record, ready, stream

    def ask(self, step: Step, cmap: CoordinateMap, stream: int) -> tuple[int, Any]:
        """(place of the step, its answer if there is one)."""
        self.record.steps.append(step)
        place = len(self.record.steps) - 1
        over, found = self._ready.get(step, (None, None))
        # Levels are counted, and questions that nobody expected shift the count: what tells levels
        # apart are their coordinates. Another stream may run before the work that was queued here.
        if over is not cmap or stream != self._stream:
            return place, None
        del self._ready[step]
        return place, found

    def answer(self, place: int, kmap: KernelMap, new: CoordinateMap | None = None) -> None:
        """Remember the map that a step got, and the level that it made."""
        self.record.tiled[place] = kmap.rulebook.tiled
        self.record.asked[place] = kmap.rulebook.asked
        if new is not None:
            self.record.rows[place] = new.n_rows


def forget() -> None:
    """Drop what was learnt."""
    with _lock:
        _habits.clear()
    graph_cache.forget()


def resolve(
    store: MapStore, cmap: CoordinateMap, build: Callable[[], Any], kind: str, offsets: Offsets,
    stride: tuple[int, ...] = (), out_box: Box | None = None,
) -> tuple[Any, tuple[Trail, int]]:  # fmt: skip
    """A map over `cmap`, the coordinates of `store`: built ahead, or by `build` now; with the place
    of the level it makes.

    kind, offsets, stride, out_box: see `Step`.  `build` returns a KernelMap ("submanifold") or the
    new coordinates and one ("strided").
    """
    level = 0 if store.trail is None else store.trail[1]
    step = Step(level, kind, cmap.box, offsets, stride, out_box)
    if store.trail is None:
        store.trail = _begin(cmap, step), 0
    trail: Trail = store.trail[0]
    if len(trail.record.steps) >= _STEPS:
        return build(), (trail, level)
    place, found = trail.ask(step, cmap, _stream(cmap.device))
    if found is None:
        found = build()  # raises for a padded scene
    new, kmap = found if kind == "strided" else (None, found)
    trail.answer(place, kmap, new)
    return found, (trail, place + 1)


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
    cmap.count = scene.count
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
    return 1 < len(steps) < _STEPS and any(step.kind == "strided" for step in steps)
