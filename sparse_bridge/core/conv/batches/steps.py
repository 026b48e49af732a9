"""What of a map is multiplied together, and what one by one. Kept with its parts."""

from __future__ import annotations

from typing import NamedTuple

from ..chunks import Chunks, Item, Part
from .lists import Batch, Padded
from .rule import Limits, groups_of


class Steps(NamedTuple):
    """The pair lists of a map: one by one, and together."""

    alone: list[Item]
    batches: list[Batch]


def steps_of(chunks: Chunks, limits: Limits | None) -> Steps:
    """All lists, together as the rule has them; None: one by one."""
    if limits is None:
        return Steps(list(chunks.items()), [])
    steps = Steps([], [])
    for part in chunks.parts():
        part.follow()
        found, padded = _split(part, limits)
        if padded is not None:
            padded.follow()
        steps.alone.extend(found.alone)
        steps.batches.extend(found.batches)
    return steps


def _split(part: Part, limits: Limits) -> tuple[Steps, Padded | None]:
    """The lists of a part; made once for the same limits."""
    key = ("steps", limits)
    found: tuple[Steps, Padded | None] | None = part.kept.get(key)
    if found is None:
        groups = groups_of(part.sizes, limits)
        together = {place for group in groups for place in group}
        alone = [item for place, item in enumerate(part.items) if place not in together]
        padded = Padded(part, groups) if groups else None
        found = Steps(alone, [] if padded is None else padded.batches()), padded
        part.kept[key] = found
    return found
