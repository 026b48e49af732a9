"""All maps of a scene in one go: queued without knowing how many rows each level will have.

Kernels read these numbers from the device; memory is taken by estimate; the host waits once, for
the counters of all levels. See `ahead` for when this is done.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ...kernels.runtime.target import Target
from ..geometry.boxes import Box
from ..maps.coordinate_map import CoordinateMap, capacity_for
from ..maps.expansion import Expansion, Source, look_up
from ..maps.kernel_map import KernelMap
from ..maps.request import MapRequest
from ..maps.rows import Rows
from ..maps.rulebook import Rulebook
from .padded import PaddedScene, rows_found

__all__ = ["Answer", "Answers", "Chain", "Record", "Sides", "Step", "ordered_alike"]

_ROOM = 1.25  # memory of a level over the estimate


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
class Record:
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

    def both_ways(self) -> Record:
        """The same with both sides of every strided map wanted, as tiles where one is."""
        strided = [place for place, step in enumerate(self.steps) if step.strided]
        tiled = {**self.tiled, **{place: {0, 1} for place in strided if self.tiled.get(place)}}
        asked = {**self.asked, **{place: {0, 1} for place in strided}}
        return dataclasses.replace(self, tiled=tiled, asked=asked)


@dataclasses.dataclass(eq=False)
class _Level:
    """Coordinates with room for more rows than there are: `count` on the device is one less than
    there are (None: all)."""

    coords: torch.Tensor
    box: Box
    table: Any
    count: torch.Tensor | None

    @property
    def room(self) -> int:
        return self.coords.shape[0]

    def source(self) -> Source:
        return Source(self.coords, self.box, None, self.count)


class Answer(NamedTuple):
    """kmap: the map of a step over the coordinates `over`, whose outputs are `given`, or the `new`
    ones that it made."""

    over: CoordinateMap
    given: CoordinateMap | None
    kmap: KernelMap
    new: CoordinateMap | None


Answers = dict[Step, Answer]

# Tiles or table of side 0 and of side 1 of a step; None where there is nothing.
Sides = tuple[Any, ...]


class Chain:
    """All maps of a scene in one go."""

    def __init__(
        self, cmap: CoordinateMap, target: Target, steps: tuple[Step, ...], last: Record,
        slack: float = _ROOM, n_rows: int | None = None,
    ) -> None:  # fmt: skip
        """slack: memory of a level over the estimate.  n_rows: rows of `cmap` that scenes use,
        about, if not all."""
        self.cmap, self.target, self.steps, self.last = cmap, target, steps, last
        self.slack, self.n_rows = slack, cmap.n_rows if n_rows is None else n_rows
        self.device = cmap.device
        self.levels: dict[int, _Level] = {}
        self.expansions: dict[int, Expansion] = {}
        self.boxes: dict[int, Box | None] = {0: cmap.box}
        for place, step in enumerate(steps):
            box = self.boxes.get(step.level)
            if step.strided and box is not None:
                self.boxes[place + 1] = step.request.out_box(box)

    def answers(self) -> Answers | None:
        """The answer of every step; None where this scene is not like the last."""
        rooms = self._rooms()
        if rooms is None:
            return None
        from ...kernels.maps.hash_table import Fetched

        books, root = self._expanded(rooms)
        fetched = Fetched([books, root.flags])
        made = self.queued()
        return self._finish(made, rooms, fetched.read())

    def lay_out(self, scene: PaddedScene, distinct: bool = False) -> bool:
        """Queue the coordinates of all levels of a padded scene, which learns where its counters
        are; False where the last scene does not tell how large they get.

        distinct: rows tell which level they are of.
        """
        from ...kernels.maps.mask_order import SORTED_APART

        rooms = self._rooms()
        if rooms is None:
            return False
        taken = {self.cmap.n_rows}
        for place in rooms:
            step = -8 if rooms[place] == SORTED_APART else 8
            while distinct and rooms[place] in taken:
                rooms[place] += step
            taken.add(rooms[place])
        scene.books, root = self._expanded(rooms)
        scene.lengths, scene.flags = tuple(self._books()), root.flags
        scene.rooms = {0: self.cmap.n_rows, **{place + 1: room for place, room in rooms.items()}}
        scene.counts = {
            level: scene.count if made.count is None else made.count
            for level, made in self.levels.items()
        }
        return True

    def queued(self) -> list[Sides]:
        """Queue the maps over these coordinates: the sides of every step."""
        return [self._queue(place, step) for place, step in enumerate(self.steps)]

    def queued_apart(self, streams: Sequence[torch.cuda.Stream]) -> list[Sides]:
        """The same, side by side on these streams (none: the current one): a map keeps few
        multiprocessors busy. What one stream makes, others read only after all have joined the
        current one, and what they all read stays."""
        if not streams:
            return self.queued()
        here, made = torch.cuda.current_stream(self.device), []
        kept = [(expansion, expansion.slots) for expansion in self.expansions.values()]
        for stream in streams:
            stream.wait_stream(here)
        for place, step in enumerate(self.steps):
            with torch.cuda.stream(streams[place % len(streams)]):
                made.append(self._queue(place, step))
        for stream in streams:
            here.wait_stream(stream)
        for expansion, slots in kept:
            expansion.slots = slots
        return made

    def coords(self) -> dict[int, torch.Tensor]:
        """The coordinates of the new levels, by level."""
        return {level: made.coords for level, made in self.levels.items() if level}

    def _expanded(self, rooms: dict[int, int]) -> tuple[torch.Tensor, Any]:
        """Queue the coordinates of all levels; (counters of the new tables, table of the root)."""
        cmap = self.cmap
        root = cmap.table(self.target)
        self.levels[0] = _Level(cmap.coords, cmap.box, root, cmap.rows.device)
        tables, memory = self._tables(rooms)
        for place, table in tables.items():
            self._expand(place, self.steps[place], rooms[place], table)
        return memory.narrow(0, 0, sum(self._books())), root

    def _rooms(self) -> dict[int, int] | None:
        """Rows to make room for at every new level, by the place of its step."""
        from ...kernels.maps.mask_order import SORTED_APART

        growth = self.cmap.n_rows / max(1, self.last.n_rows)
        rooms: dict[int, int] = {}
        for place, step in enumerate(self.steps):
            if not step.strided:
                continue
            rows = self.last.rows.get(place)
            below = self.cmap.n_rows if step.level == 0 else rooms.get(step.level - 1)
            out_box = self.boxes.get(place + 1)
            if rows is None or below is None or out_box is None or out_box.oversized:
                return None
            if self.cmap.kernel_target(out_box.key64) is None:
                return None
            if step.request.order == "sorted" and out_box.steps(self.device) is None:
                return None
            most = min(below * len(step.request.offsets), max(1, out_box.volume))
            likely = rows * growth
            # With more room the rows would be ordered otherwise.
            if rows * self.n_rows <= SORTED_APART * max(1, self.last.n_rows):
                most = min(most, SORTED_APART)
            rooms[place] = min(most, _rounded(int(self.slack * likely) + 256))
        return rooms

    def _tables(self, rooms: dict[int, int]) -> tuple[dict[int, Any], torch.Tensor]:
        """(empty hash tables of the new levels, their memory)."""
        from ...kernels.maps.hash_table import HashTable
        from ...kernels.maps.new_rows import owner_counters

        wanted = []
        for place, room in rooms.items():
            out_box = self.boxes[place + 1]
            assert out_box is not None
            # Half full at worst; for the room alone it would be a third.
            level = self.steps[place].level
            counters = owner_counters(self.cmap.n_rows if level == 0 else rooms[level - 1])
            wanted.append((capacity_for(-(-2 * room // 3)), out_box.key64, counters))
        tables, memory = HashTable.allocate_all(wanted, self.device)
        return dict(zip(rooms, tables, strict=True)), memory

    def _books(self) -> list[int]:
        """Lengths of the new tables' flags and counters, which lie one after another."""
        return [len(level.table.flags) for place, level in self.levels.items() if place]

    def _expand(self, place: int, step: Step, room: int, table: Any) -> None:
        below, out_box, req = self.levels[step.level], self.boxes[place + 1], step.request
        assert out_box is not None
        one, zeroed = (1,) * len(req.stride), self.cmap.rows.device is not None
        expansion = Expansion(
            below.source(), req.offsets, one, req.stride, -1, out_box, self.target
        )
        expansion.insert(table)
        coords = expansion.number(room, req.order, True, zeroed)
        self.expansions[place] = expansion
        self.levels[place + 1] = _Level(coords, out_box, table, table.total)

    def _queue(self, place: int, step: Step) -> Sides:
        from ...kernels.maps.mask_order import mask_order, pack_tiles

        level, target, offsets = self.levels[step.level], self.target, step.request.offsets
        if step.strided:
            new = self.levels[place + 1]
            # Inference has no use for the other side, which is as large.
            both = 1 in self.last.asked.get(place, ())
            sides: list[Any] = [*self.expansions[place].link(new.room, new.count, both)]
        else:
            here, stride, center = level, (1,) * offsets.dimension, offsets.center
            if step.out is not None:
                here, stride, center = self.levels[step.out], step.request.stride, -1
            table = look_up(
                here.source(), level.table, level.room, level.box, offsets, stride, target, center
            )
            sides = [table, None]
        wanted = self.last.tiled.get(place, ())
        for side, found in enumerate(sides):
            if side in wanted and found is not None:
                sides[side] = pack_tiles(found, mask_order(found, target), target)
        return tuple(sides)

    def _finish(
        self, made: list[Sides], rooms: dict[int, int], counters: list[list[int]]
    ) -> Answers | None:
        """Cut everything to size, now that the sizes are known."""
        from ...kernels.maps.hash_table import live_flags

        books, root = counters
        cmap = self.cmap
        if not cmap.checked:
            cmap.judge(*live_flags(root))
        if not cmap.unique or cmap.alive is not None:
            return None
        levels = {place + 1: room for place, room in rooms.items()}
        rows = rows_found(books, self._books(), levels)
        if rows is None or not ordered_alike(rows, levels):
            return None
        return self.assembled(made, {0: cmap.n_rows, **rows}, self.coords())

    def assembled(
        self, made: list[Sides], rows: dict[int, int], coords: dict[int, torch.Tensor],
        scene: PaddedScene | None = None,
    ) -> Answers:  # fmt: skip
        """The answers made of these sides and the new levels' coordinates, cut to `rows`.

        scene: the padded scene whose they are, if they are cut to its rooms.
        """
        answers: Answers = {}
        maps = {0: self.cmap}
        for place, (step, sides) in enumerate(zip(self.steps, made, strict=True)):
            kmap, new = self._answer(place, step, sides, rows, coords, scene)
            if new is not None:
                maps[place + 1] = new
            given = None if step.out is None else maps[step.out]
            answers[step] = Answer(maps[step.level], given, kmap, new)
        return answers

    def _answer(
        self, place: int, step: Step, sides: Sides, rows: dict[int, int],
        coords: dict[int, torch.Tensor], scene: PaddedScene | None,
    ) -> tuple[KernelMap, CoordinateMap | None]:  # fmt: skip
        out = place + 1 if step.strided else step.level if step.out is None else step.out
        x, y = (
            Rows.of(rows[level]) if scene is None else scene.rows(level)
            for level in (step.level, out)
        )  # fmt: skip
        offsets = step.request.offsets
        symmetric, center = offsets.symmetric, offsets.center
        if out != step.level:
            symmetric, center = False, -1
        kmap = KernelMap(
            Rulebook(
                x, y, len(offsets), self.device, symmetric=symmetric, center=center, views=sides
            )
        )
        if not step.strided:
            return kmap, None
        box = self.boxes[out]
        assert box is not None
        new = CoordinateMap(coords[out][: y.capacity], box, y)
        new.adopt()
        return kmap, new


def ordered_alike(rows: dict[int, int], rooms: dict[int, int]) -> bool:
    """Whether the rows of every level are ordered as they would be without room to spare."""
    from ...kernels.maps.mask_order import SORTED_APART

    return not any(rows[level] <= SORTED_APART < rooms[level] for level in rows)


def _rounded(rows: int) -> int:
    """Up to one of eight sizes per octave, so that the allocator meets few."""
    step = max(128, 1 << max(0, rows.bit_length() - 4))
    return -(-rows // step) * step
