"""What the maps of a scene are handed over as."""

from __future__ import annotations

from typing import NamedTuple

from ..maps.coordinate_map import CoordinateMap
from ..maps.kernel_map import KernelMap
from .history import Step


class Answer(NamedTuple):
    """kmap: the map of a step over the coordinates `over`, whose outputs are `given`, or the `new`
    ones that it made."""

    over: CoordinateMap
    given: CoordinateMap | None
    kmap: KernelMap
    new: CoordinateMap | None


Answers = dict[Step, Answer]


class Repeated(NamedTuple):
    """answers: of a scene that was queued from a trace; None where it is not like the last."""

    answers: Answers | None
