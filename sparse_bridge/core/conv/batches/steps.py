"""What of a map is multiplied together, and what one by one. Kept with its parts."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from ...geometry.host_cells import on_host
from ..chunks import Chunks, Item, Part
from .lists import Batch, Lists, Padded
from .rule import Limits, all_alike, groups_of


class Steps(NamedTuple):
    """The pair lists of a map: one by one, and together."""

    alone: list[Item]
    batches: list[Batch]


class Whole(NamedTuple):
    """A part on the CPU.  lists: all of it.  order, starts: which of their products are whose, like
    `Part.sums`."""

    lists: Lists
    order: torch.Tensor
    starts: torch.Tensor


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


def whole_of(part: Part, limits: Limits) -> Whole | None:
    """All lists of a part on the CPU together, where the rule has them so; made once."""
    key = ("whole", limits)
    if key not in part.kept:
        part.kept[key] = _whole(part) if all_alike(part.offsets, part.sizes, limits) else None
    found: Whole | None = part.kept[key]
    return found


def _whole(part: Part) -> Whole:
    n_lists, height = len(part.sizes), max(part.sizes)
    order, starts = part.sums
    slots = np.arange(0, n_lists * height, height) + part.sizes - np.cumsum(part.sizes)
    slots = slots.repeat(part.sizes) + np.arange(part.n_pairs)
    rows = np.zeros(n_lists * height, np.int32)
    rows[slots] = on_host(part.x_rows)
    lists = Lists(part.offsets, height, torch.from_numpy(rows))
    return Whole(lists, torch.from_numpy(slots.astype(np.int32).take(on_host(order))), starts)
