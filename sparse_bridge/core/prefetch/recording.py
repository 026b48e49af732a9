"""Recordings of inputs: the requests for maps over one, in order, and the views of these maps that were
read; and what they predict for the next input."""

from __future__ import annotations

import dataclasses
import functools
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ... import policy
from ...kernels.runtime import target as targets
from ...native import calls as native_calls
from ..geometry.boxes import Box
from ..geometry.reach import BoxReach
from ..maps import request as requests
from ..maps.coordinate_map import CoordinateMap
from ..maps.kernel_map import KernelMap
from ..maps.request import BuiltMap, MapRequest

PAIRS = 2  # beside sides 0 and 1 of a map
INPUT = -1  # in the place of a step that makes a level
_DECAY = 0.98  # from input to input, of the largest growth so far


class Step(NamedTuple):
    """A request over level `level`, without bounds; out: the level of its output coordinates, where
    the caller gives those (and then no part of the request).

    Level 0 holds the input's own coordinates; the step with index i of the recording that makes
    coordinates makes level i + 1.
    """

    level: int
    request: MapRequest
    out: int | None = None

    @property
    def makes(self) -> bool:
        """Whether it makes coordinates."""
        return self.request.map_type in ("strided", "generative")

    def out_level(self, index: int) -> int:
        """The level of its outputs, if it has this index."""
        return index + 1 if self.makes else self.level if self.out is None else self.out

    @property
    def relative(self) -> bool:
        """Whether it says nothing of absolute bounds."""
        return not isinstance(self.request.output, Box)

    @property
    def derivable(self) -> bool:
        """Whether kernels can compute the bounds of the coordinates that it makes, if it makes any."""
        return not self.makes or isinstance(self.request.output, BoxReach)


def boxes_of(box: Box, steps: Sequence[Step], exact: Mapping[int, Box] | None = None) -> dict[int, Box]:
    """The boxes of all levels over inputs in `box`, as far as they have any.

    exact: bounds of `levels_with_unknown_bounds`, where they are known.
    """
    boxes = {0: box}
    for index, step in enumerate(steps):
        below = boxes.get(step.level)
        if exact and step.level in exact and isinstance(step.request.output, BoxReach):
            below = exact[step.level]
        out_box = step.request.out_box(below) if step.makes and below is not None else None
        if out_box is not None:
            boxes[index + 1] = out_box
    return boxes


@functools.lru_cache(maxsize=256)
def levels_with_unknown_bounds(steps: tuple[Step, ...]) -> tuple[int, ...]:
    """Levels whose bounds may lie inside their boxes, where those of others start from them."""
    sources = {s.level for s in steps if s.makes and isinstance(s.request.output, BoxReach)}
    return tuple(
        index + 1 for index, step in enumerate(steps) if step.makes and index + 1 in sources and step.request.loose
    )


class BuiltStep(NamedTuple):
    """kmap: the map of a step from `in_coords` to `out_coords`, where the request has those, or to the
    `new_coords` that the step made."""

    in_coords: CoordinateMap
    out_coords: CoordinateMap | None
    kmap: KernelMap
    new_coords: CoordinateMap | None


BuiltSteps = dict[Step, BuiltStep]


class Views(NamedTuple):
    """The sides of a map that were requested, as tiles and at all; PAIRS, too, where its pairs
    were. The rulebook's observer."""

    tiled: set[int]
    requested: set[int]

    def on_view(self, side: int, tiles: bool) -> None:
        """Side 0 or 1 of the map was requested. Twin in C: `noticed`."""
        self.requested.add(side)
        if tiles:
            self.tiled.add(side)

    def on_pairs(self) -> None:
        """The pairs of the map were requested."""
        self.requested.add(PAIRS)


native_calls.observer = Views


class Expectation:
    """A prediction: the input after one with a certain list of requests has the same requests as the
    last input that came after such a one. So networks that share their first request and take turns
    are distinguished.

    seen: inputs with this list so far.  following: the recording of the last input after one of
    them.  attempts: to prefetch its maps, which fail for inputs that are not like it.  key64: by
    number of their steps, levels that needed 64-bit keys.
    """

    def __init__(self) -> None:
        self.seen = 0
        self.following: Recording | None = None
        self.attempts = policy.Attempts(policy.PREFETCH)
        self.key64: dict[int, set[int]] = {}


@dataclasses.dataclass(eq=False)
class Recording:
    """The requests over one input of `n_rows` rows in `box`, and predictions from them.

    levels: of its coordinates.  steps: the requests.  By their indices, views: of their maps; rows:
    of the levels that they made; largest: such rows per row of the input, of earlier inputs; most: such rows, and
    those of the `INPUT`, of earlier inputs.
    prepared: steps that are expected, built for `stream`.  expected: the prediction for this input,
    from inputs like the previous one.  next_expectation: that for the next one, from inputs like this
    one, once the next one has come.  lists: all predictions from inputs with the same first request, by
    their steps.  threads: that made requests.
    """

    n_rows: int
    levels: weakref.WeakKeyDictionary[CoordinateMap, int] = dataclasses.field(default_factory=weakref.WeakKeyDictionary)
    steps: list[Step] = dataclasses.field(default_factory=list)
    views: list[Views] = dataclasses.field(default_factory=list)
    rows: dict[int, int] = dataclasses.field(default_factory=dict)
    largest: dict[int, float] = dataclasses.field(default_factory=dict)
    most: dict[int, int] = dataclasses.field(default_factory=dict)
    box: Box | None = None
    prepared: BuiltSteps = dataclasses.field(default_factory=dict)
    stream: int = 0
    expected: Expectation | None = None
    next_expectation: Expectation | None = None
    lists: dict[tuple[Step, ...], Expectation] = dataclasses.field(default_factory=dict)
    threads: set[int] = dataclasses.field(default_factory=set)

    def shared(self) -> Recording:
        """The same for inputs to come, without the prepared steps, which go with the input."""
        return Recording(self.n_rows, self.levels, self.steps, self.views, self.rows, threads=self.threads)

    def snapshot(self) -> Recording:
        """The same as it is now: more maps and views may be requested over the same input."""
        steps = list(self.steps)  # behind their views, see `_append`
        views = [Views(set(tiled), set(requested)) for tiled, requested in self.views[: len(steps)]]
        return dataclasses.replace(self, steps=steps, views=views, rows=dict(self.rows))

    # while requests over the input arrive

    def step_of(self, cmap: CoordinateMap, req: MapRequest) -> Step | None:
        """The request by levels; None where its coordinates are none of these."""
        level = self.levels.get(cmap)
        if level is None:
            return None
        if not isinstance(req.output, CoordinateMap):
            return Step(level, req if req.box is None else MapRequest(*req[:-1]))  # without the box
        out = self.levels.get(req.output)
        return None if out is None else Step(level, req._replace(output=None, box=None), out)

    def request(self, cmap: CoordinateMap, req: MapRequest) -> BuiltMap:
        """The map of `req` over coordinates of this input: prepared, or built now."""
        step = self.step_of(cmap, req)
        if step is None or len(self.steps) >= policy.REQUESTS:
            return requests.build(cmap, req)
        prepared = self.prepared.get(step)
        # Levels are counted, and requests that nobody expected shift the count: what tells levels
        # apart are their coordinates. Another stream may run before the work that was queued here.
        if (
            prepared is not None
            and prepared.in_coords is cmap
            and (step.out is None or prepared.out_coords is req.output)
            and self.stream == targets.current_stream(cmap.device)
        ):
            del self.prepared[step]
            return self._observe(self._append(step), BuiltMap.of(prepared.kmap, prepared.new_coords))
        index = self._append(step)
        built = requests.build(cmap, req)  # raises for a padded input
        rulebook = built.kmap.rulebook
        for side in (0, 1):  # built now, so its tiles exist because they were requested
            if rulebook.tiled(side):
                self.views[index].on_view(side, True)
        return self._observe(index, built)

    def _append(self, step: Step) -> int:
        """The index of a step that is taken now."""
        self.threads.add(threading.get_ident())
        self.views.append(Views(set(), set()))
        self.steps.append(step)
        return len(self.steps) - 1

    def _observe(self, index: int, built: BuiltMap) -> BuiltMap:
        """Record from now on which views of the map are requested, and the level that it made."""
        built.kmap.rulebook.observe(self.views[index])
        if built.coords is not None:
            self.rows[index] = built.coords.n_rows
            self.levels.setdefault(built.coords, index + 1)
        return built

    # once all its requests have come

    def growth(self, index: int) -> float | None:
        """Rows that a step made, per row of the input: the most that this and earlier inputs
        had."""
        rows = self.rows.get(index)
        if rows is None:
            return None
        return max(rows / max(1, self.n_rows), _DECAY * self.largest.get(index, 0.0))

    def most_rows(self, index: int) -> int:
        """Rows that a step made, or of the `INPUT`: the most that this and earlier inputs had."""
        return max(self.n_rows if index == INPUT else self.rows.get(index, 0), self.most.get(index, 0))

    def link_previous(self, previous: Recording | None) -> Recording | None:
        """Learn that this input came after `previous`, the last one with the same first request. The
        recording of the input that it is expected to be like; None unless several had the same
        requests, and where attempts are suspended for now."""
        if previous is None or len(previous.lists) >= policy.REQUEST_LISTS:  # always something else: no network
            return None
        self.lists = previous.lists
        expected = self.lists.setdefault(tuple(previous.steps), Expectation())
        self.expected = previous.next_expectation = expected
        expected.seen += 1
        last, trusted = expected.following, expected.attempts.due()
        expected.following = self
        if last is None or last.next_expectation is None:
            return None
        grown = {index: last.growth(index) or last.largest.get(index) for index in {**last.largest, **last.rows}}
        self.largest = {index: rate for index, rate in grown.items() if rate is not None}
        self.most = {index: last.most_rows(index) for index in (INPUT, *grown)}
        return last if trusted and last.next_expectation.seen >= policy.INPUTS_ALIKE else None

    def is_stable(self) -> bool:
        """Whether the next input will probably have the same requests as this one."""
        expected = self.expected
        if expected is not None and (expected.attempts.wait or expected.attempts.failures):
            return False
        alike = self.lists.get(tuple(self.steps))
        seen = (0 if alike is None else alike.seen) + (self.next_expectation is None)
        return 0 < len(self.steps) < policy.REQUESTS and seen >= policy.INPUTS_ALIKE

    def with_backward_views(self) -> Recording:
        """The same with the views that a backward pass requests: the pairs of every map of which there are
        tiles, and both sides of every map that makes coordinates, as tiles where one side is."""
        views = list(self.views)
        for index, step in enumerate(self.steps):
            tiled, requested = views[index]
            requested = requested | {PAIRS} if tiled else requested
            views[index] = Views(tiled, requested)
            if step.makes:
                views[index] = Views({0, 1} if tiled else tiled, requested | {0, 1})
        return dataclasses.replace(self, views=views)
