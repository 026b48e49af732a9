"""Maps of a program: the engine's objects themselves, without handles and copies.

For graphs that write to no tensor; others run the operators of `coordinates`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ...maps import map_cache
from ...maps.kernel_map import KernelMap
from ...ops import pointwise
from ...ops.row_matrix import RowMatrix
from .. import handles
from ..coordinates import BuilderResult, Sites, build, check_least


def sites(coords: torch.Tensor) -> Sites:
    """The coordinates int32 [N, 1 + D] that a program was handed, with the maps that eager layers
    built over them."""
    return Sites(coords, map_cache.store_of(coords))


def sites_of_handle(handle: torch.Tensor) -> Sites:
    """The coordinates behind a handle, int64 [1], that another operator made. Raises LifecycleError where it is
    gone."""
    return handles.value_of(handle, Sites)


def map_over(
    coords: torch.Tensor, over: Sites, then: int, now: int, builder: str, numbers: Sequence[int]
) -> KernelMap | RowMatrix:
    """The map of a builder onto coordinates that are known; coords int32 [N, 1 + D] and their versions are not read,
    as the graph writes to none. Raises UnsupportedError for a builder that is not registered."""
    return build(over, builder, numbers).kmap


def new_map(
    coords: torch.Tensor, over: Sites, then: int, now: int, builder: str, numbers: Sequence[int], least: int
) -> tuple[KernelMap | RowMatrix, torch.Tensor, Sites]:
    """The map onto new coordinates, those, int32 [M, 1 + D], and their sites. Raises ShapeError for fewer than `least`
    rows; else as `map_over`."""
    kmap, outer = build(over, builder, numbers)
    assert outer is not None
    check_least(outer, least)
    return kmap, outer.store.alias(outer.coords), outer


def same_rows(x: torch.Tensor, listed: bool) -> KernelMap:
    """The map of every row of x [N, C], of any dtype, onto itself. listed: with pair lists, for gradients."""
    n_rows, device = x.shape[0], x.device
    return pointwise.identity(n_rows, device, listed) or pointwise.build_identity(n_rows, device, listed)


# What runs an operator, and which of its results are objects: None: the only one.
MAPS: dict[str, tuple[Any, tuple[int, ...] | None]] = {
    "coordinates": (sites, None),
    "map": (map_over, None),
    "new_map": (new_map, (0, 2)),
    "same_rows": (same_rows, None),
}


class MapNode(NamedTuple):
    """A map of a program. source: what made the coordinates that it is over, -1: the program's own.
    numbers: of the builder, or where they stand in the arguments.  least: rows of new coordinates,
    None for known ones.  returns_coords: the new coordinates are read, as a tensor."""

    source: int
    builder: str
    numbers: tuple[tuple[bool, int], ...]  # whether it is an argument's place; which
    least: int | None
    returns_coords: bool


class MapsStep:
    """All maps over the coordinates that a program was handed. A call with those, int32 [N, 1 + D], and with the
    numbers that differ from scene to scene returns, for each, (map, coordinates int32 [M, 1 + D], sites). It raises
    ShapeError for fewer new rows than the graph serves.

    A program has the same requests over every input: where all maps of one are prefetched, the steps of
    the last input tell which map is which.
    """

    __name__ = __qualname__ = "maps"

    def __init__(self, nodes: Sequence[MapNode]) -> None:
        self._nodes = tuple(nodes)
        self._steps: list[Any] | None = None  # by map: its step, or the map that it equals

    def __call__(self, coords: torch.Tensor, *numbers: int) -> list[tuple[Any, Any, Any]]:
        root = sites(coords)
        first = self._built(0, root, numbers)
        answers, recording = [first], root.store.recording
        steps = self._steps
        if steps is not None and recording is not None and len(recording.steps) == 1:
            for number in range(1, len(self._nodes)):
                again = self._again(number, steps[number], recording, answers)
                if again is None:
                    break
                answers.append(again)
        learnt: list[Any] | None = None
        if len(answers) == 1 and recording is not None and len(recording.steps) == 1:
            learnt = [recording.steps[0]]
        for number in range(len(answers), len(self._nodes)):
            node = self._nodes[number]
            over = root if node.source < 0 else answers[node.source].sites
            count = 0 if recording is None else len(recording.steps)
            answer = self._built(number, over, numbers)
            answers.append(answer)
            if learnt is not None:
                learnt.append(_learnt(recording, count, answer, answers))
        if learnt is not None:
            self._steps = None if None in learnt else learnt
        return [self._results_of(node, answer) for node, answer in zip(self._nodes, answers, strict=True)]

    def _built(self, number: int, over: Any, arguments: Sequence[int]) -> BuilderResult:
        """The result of a node's builder."""
        node = self._nodes[number]
        numbers = [arguments[value] if placed else value for placed, value in node.numbers]
        answer = build(over, node.builder, numbers)
        if node.least is not None and answer.sites is not None:
            check_least(answer.sites, node.least)
        return answer

    def _again(self, number: int, step: Any, recording: Any, answers: list[BuilderResult]) -> BuilderResult | None:
        """The prefetched map of a step, or the earlier one that it equals; None where there is none."""
        if isinstance(step, int):
            return answers[step]
        built = recording.again(step)
        if built is None:
            return None
        if built.coords is None:
            return BuilderResult(built.kmap)
        built.store.recording = recording
        outer = Sites(built.coords.coords, built.store)
        check_least(outer, self._nodes[number].least or 0)
        return BuilderResult(built.kmap, outer)

    @staticmethod
    def _results_of(node: MapNode, answer: BuilderResult) -> tuple[Any, Any, Any]:
        if answer.sites is None:
            return answer.kmap, None, None
        coords = answer.sites.store.alias(answer.sites.coords) if node.returns_coords else None
        return answer.kmap, coords, answer.sites


def _learnt(recording: Any, count: int, answer: BuilderResult, answers: Sequence[BuilderResult]) -> Any:
    """The one step that a map has taken, or the number of the map that it equals; None: neither."""
    steps = recording.steps
    if len(steps) == count + 1:
        return steps[-1]
    same = [at for at, other in enumerate(answers[:-1]) if other.kmap is answer.kmap]
    return same[0] if same and len(steps) == count else None
