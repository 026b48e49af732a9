"""Request histories: which maps an input was asked for, in which order, and which views of them;
and what that says of the next input."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ... import policy
from ...native import calls as native_calls
from ..geometry.boxes import Box
from ..geometry.reach import BoxReach
from ..maps.request import MapRequest

_DECAY = 0.98  # from input to input, of the largest growth so far


class Step(NamedTuple):
    """A request over level `level`, without bounds; out: the level of its output coordinates, where
    those are given (and then no part of the request).

    Level 0 holds the input's own coordinates; a step at place i of the history that makes
    coordinates makes level i + 1.
    """

    level: int
    request: MapRequest
    out: int | None = None

    @property
    def makes(self) -> bool:
        """Whether it makes coordinates."""
        return self.request.kind in ("strided", "generative")

    def ends(self, place: int) -> int:
        """The level of its outputs, if it stands at this place."""
        return place + 1 if self.makes else self.level if self.out is None else self.out

    @property
    def relative(self) -> bool:
        """Whether it says nothing of absolute bounds."""
        return not isinstance(self.request.output, Box)

    @property
    def derivable(self) -> bool:
        """Whether kernels know what follows for bounds, if anything does."""
        return not self.makes or isinstance(self.request.output, BoxReach)


def boxes_of(box: Box, steps: Sequence[Step], found: Mapping[int, Box] | None = None) -> dict[int, Box]:
    """The boxes of all levels over inputs in `box`, as far as they have any.

    found: exact bounds of `loose_levels`, where they are known.
    """
    boxes = {0: box}
    for place, step in enumerate(steps):
        below = boxes.get(step.level)
        if found and step.level in found and isinstance(step.request.output, BoxReach):
            below = found[step.level]
        made = step.request.out_box(below) if step.makes and below is not None else None
        if made is not None:
            boxes[place + 1] = made
    return boxes


@functools.lru_cache(maxsize=256)
def loose_levels(steps: tuple[Step, ...]) -> tuple[int, ...]:
    """Levels that may end inside their boxes, where the bounds of others start from their ends."""
    sources = {s.level for s in steps if s.makes and isinstance(s.request.output, BoxReach)}
    return tuple(
        place + 1 for place, step in enumerate(steps) if step.makes and place + 1 in sources and step.request.loose
    )


class Views(NamedTuple):
    """The sides of a map that were asked for, as tiles and at all, and the places of maps whose
    pairs were: an observer of the rulebook at `place`."""

    tiled: set[int]
    asked: set[int]
    paired: set[int]
    place: int

    def wanted(self, side: int, tiles: bool) -> None:
        """Side 0 or 1 of the map was asked for."""
        self.asked.add(side)
        if tiles:
            self.tiled.add(side)

    def listed(self) -> None:
        """The pairs of the map were asked for."""
        self.paired.add(self.place)


native_calls.observer = Views


@dataclasses.dataclass(eq=False)
class RequestHistory:
    """What one input of `n_rows` rows in `box` was asked: the steps, by their places the rows of
    the levels they made and the sides that were wanted of their maps, as tiles and at all.

    paired: places of maps whose pairs were wanted as lists on the device.  largest: by place, the
    rows of a level per row of the input, of inputs before.  number: of the steps, in
    `KindHistory`.
    """

    n_rows: int
    box: Box | None = None
    steps: list[Step] = dataclasses.field(default_factory=list)
    rows: dict[int, int] = dataclasses.field(default_factory=dict)
    tiled: dict[int, set[int]] = dataclasses.field(default_factory=dict)
    asked: dict[int, set[int]] = dataclasses.field(default_factory=dict)
    paired: set[int] = dataclasses.field(default_factory=set)
    largest: dict[int, float] = dataclasses.field(default_factory=dict)
    number: int = -1

    def views(self, place: int) -> Views:
        """Who hears which views of the map of a step are asked for."""
        tiled, asked = self.tiled.setdefault(place, set()), self.asked.setdefault(place, set())
        return Views(tiled, asked, self.paired, place)

    def twin(self) -> RequestHistory:
        """A record of the same input, told the same, for another history."""
        return RequestHistory(self.n_rows, None, self.steps, self.rows, self.tiled, self.asked, self.paired)

    def growth(self, place: int) -> float | None:
        """Rows that a step made, per row of the input: the most that this and earlier inputs
        had."""
        rows = self.rows.get(place)
        if rows is None:
            return None
        return max(rows / max(1, self.n_rows), _DECAY * self.largest.get(place, 0.0))

    def both_ways(self) -> RequestHistory:
        """The same with both sides of every map to coordinates of its own wanted, as tiles where
        one is."""
        made = [place for place, step in enumerate(self.steps) if step.makes]
        tiled = {**self.tiled, **{place: {0, 1} for place in made if self.tiled.get(place)}}
        asked = {**self.asked, **{place: {0, 1} for place in made}}
        return dataclasses.replace(self, tiled=tiled, asked=asked)


@dataclasses.dataclass(eq=False)
class Expectation:
    """What an input is likely to be asked: what the last one in its place was.

    attempts: at its maps, which fail for inputs that are not like the one before.
    """

    record: RequestHistory | None = None
    attempts: policy.Attempts = dataclasses.field(default_factory=lambda: policy.Attempts(policy.PREFETCH))


class KindHistory:
    """What inputs with the same first request are asked, of whatever shape they are.

    Networks that share it are told apart by turns: an input is expected to be asked what followed
    the last time that the input before was asked the same.
    """

    def __init__(self) -> None:
        self._newest: RequestHistory | None = None
        self._numbers: dict[tuple[Step, ...], int] = {}  # of lists of steps
        self._seen: collections.Counter[int] = collections.Counter()  # inputs that were asked them
        self._after: dict[int, Expectation] = {}
        # By number of their steps: levels that needed 64-bit keys; traces of their maps' launches.
        self.key64: dict[Any, set[int]] = {}
        self.traces: dict[Any, Any] = {}

    @property
    def full(self) -> bool:
        """Whether inputs are asked something else again and again: nothing is learnt from them."""
        return len(self._numbers) >= policy.REQUEST_LISTS

    def begin(self, record: RequestHistory) -> tuple[Expectation, RequestHistory | None]:
        """Enter the record of a new input: (what is expected of it, the record that says so if two
        inputs at least were asked the same and none is to be let pass)."""
        before = -1
        if self._newest is not None:
            steps = tuple(self._newest.steps)
            before = self._newest.number = self._numbers.setdefault(steps, len(self._numbers))
            self._seen[before] += 1
        expected = self._after.setdefault(before, Expectation())
        last, trusted = expected.record, expected.attempts.due()
        expected.record = self._newest = record
        if last is None:
            return expected, None
        places = {**last.largest, **last.rows}
        grown = {place: last.growth(place) or last.largest.get(place) for place in places}
        record.largest = {place: rate for place, rate in grown.items() if rate is not None}
        return expected, last if trusted and self._seen[last.number] >= policy.INPUTS_ALIKE else None

    def settled(self, record: RequestHistory) -> bool:
        """Whether another input was asked the same as this one."""
        if not 0 < len(record.steps) < policy.REQUESTS:
            return False
        seen = self._seen[self._numbers.get(tuple(record.steps), -1)]
        return seen + (record is self._newest) >= policy.INPUTS_ALIKE
