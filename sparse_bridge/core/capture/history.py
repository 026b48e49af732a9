"""Request histories: which maps an input was asked for, in which order, and which views of them."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from ..maps.request import MapRequest


class Step(NamedTuple):
    """A request over level `level`; out: the level of its output coordinates, where those are given
    (and then no part of the request).

    Level 0 holds the input's own coordinates; a strided step at place i of the history makes level
    i + 1.
    """

    level: int
    request: MapRequest
    out: int | None = None

    @property
    def strided(self) -> bool:
        return self.request.kind == "strided"


class Views(NamedTuple):
    """The sides of a map that were asked for, as tiles and at all: an observer of its rulebook."""

    tiled: set[int]
    asked: set[int]

    def wanted(self, side: int, tiles: bool) -> None:
        self.asked.add(side)
        if tiles:
            self.tiled.add(side)


@dataclasses.dataclass(eq=False)
class RequestHistory:
    """What one scene was asked: the steps, by their places the rows of the levels they made and the
    sides that were wanted of their maps, as tiles and at all."""

    n_rows: int
    steps: list[Step] = dataclasses.field(default_factory=list)
    rows: dict[int, int] = dataclasses.field(default_factory=dict)
    tiled: dict[int, set[int]] = dataclasses.field(default_factory=dict)
    asked: dict[int, set[int]] = dataclasses.field(default_factory=dict)

    def views(self, place: int) -> Views:
        """Who hears which views of the map of a step are asked for."""
        return Views(self.tiled.setdefault(place, set()), self.asked.setdefault(place, set()))

    def both_ways(self) -> RequestHistory:
        """The same with both sides of every strided map wanted, as tiles where one is."""
        strided = [place for place, step in enumerate(self.steps) if step.strided]
        tiled = {**self.tiled, **{place: {0, 1} for place in strided if self.tiled.get(place)}}
        asked = {**self.asked, **{place: {0, 1} for place in strided}}
        return dataclasses.replace(self, tiled=tiled, asked=asked)
