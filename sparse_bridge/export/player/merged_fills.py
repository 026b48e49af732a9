"""Fills of tensors with the same value as one step: the tensors lie side by side, and are filled when the first of
them is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .memory_plan import Life, plan
from .package_file import FILL, Step


class Merged(NamedTuple):
    """lives: of every storage, with those that are filled earlier.  groups: storages that lie one behind another.
    steps: the number of the step that fills each group, and those that are left out, whose place is None."""

    lives: dict[int, Life]
    groups: list[list[int]]
    steps: dict[int, int | None]


def merged_fills(steps: Sequence[Step], lives: Mapping[int, Life], begins: Mapping[int, int]) -> Merged:
    """Fills that are one, as far as the block of memory does not grow by that.

    steps: their `to` is 2^48 times the index of a storage, plus an offset.  lives, begins: by storage, where its bytes
        are needed, and the first step that names it.
    """
    own = dict(lives)
    groups: list[list[int]] = []
    values: list[tuple[int, int]] = []  # of each group: the step that fills it, and with what
    left_out = set[int]()
    most = _size(own, [])
    for number, step in enumerate(steps):
        index = step.to >> 48
        if step.kind != FILL or step.to != index << 48 or begins[index] != number or step.size < lives[index].size:
            continue
        for group, (first, value) in zip(groups, values, strict=True):
            earlier = {**own, index: own[index]._replace(begin=min(own[index].begin, first))}
            if value == step.value:
                group.append(index)
                if _size(earlier, groups) <= most:
                    own = earlier
                    left_out.add(number)
                    break
                group.pop()
        else:
            groups.append([index])
            values.append((number, step.value))
    places: dict[int, int | None] = dict.fromkeys(left_out)
    places.update({first: i for i, (first, _) in enumerate(values) if len(groups[i]) > 1})
    return Merged(own, groups, places)


def _size(lives: Mapping[int, Life], groups: Sequence[Sequence[int]]) -> int:
    indices = {index: place for place, index in enumerate(lives)}
    together = [[indices[index] for index in group] for group in groups if len(group) > 1]
    return plan(list(lives.values()), together).size
