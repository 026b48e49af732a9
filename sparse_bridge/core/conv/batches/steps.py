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
        split, padded = _split(part, limits)
        if padded is not None:
            padded.follow()
        steps.alone.extend(split.alone)
        steps.batches.extend(split.batches)
    return steps


def _split(part: Part, limits: Limits) -> tuple[Steps, Padded | None]:
    """The lists of a part; made once for the same limits."""
    key = ("steps", limits)
    cached: tuple[Steps, Padded | None] | None = part.cache.get(key)
    if cached is None:
        groups = groups_of(part.sizes, limits)
        together = {index for group in groups for index in group}
        alone = [item for index, item in enumerate(part.items) if index not in together]
        padded = Padded(part, groups) if groups else None
        cached = Steps(alone, [] if padded is None else padded.batches()), padded
        part.cache[key] = cached
    return cached
