"""Maps built ahead: all that a network asks of one scene, queued at the first question.

Networks ask every scene for the same maps in the same order. What the last scenes asked for is
remembered by grid; when a new scene asks the first of these questions, the maps of all levels are
queued at once, the sizes of deeper levels read from the device by the kernels themselves, and the
host waits once instead of once or twice a level. Rows are numbered and ordered exactly as without.

Memory is taken by estimate: the last scene's growth from level to level, and a quarter more. Where
a scene exceeds that, or holds equal or outlying rows, what was queued is dropped and every map is
built when it is asked for.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .. import settings
from ..kernels import target as targets
from ..kernels.target import Target
from .conv_spec import Box, Offsets
from .coordinate_map import CoordinateMap, capacity_for
from .kernel_map import KernelMap, Relation
from .map_cache import MapStore

__all__ = ["Step", "Trail", "forget", "resolve"]

_ROOM = 1.25  # memory of a level over the estimate
_STEPS = 64  # questions remembered of a scene
_GRIDS = 256  # grids remembered
_LONGEST_WAIT = 1 << 10  # scenes to let pass after repeated failures


class Step(NamedTuple):
    """A question: the map of `kind` ("submanifold" or "strided") over level `level` of the scene.

    Level 0 holds the scene's own coordinates; a strided step at place i of the trail makes level i
    + 1.
    """

    level: int
    kind: str
    box: Box
    offsets: Offsets
    stride: tuple[int, ...] = ()
    out_box: Box | None = None


@dataclasses.dataclass(eq=False)
class _Record:
    """What one scene was asked: the steps, by their places the rows of the levels they made and the
    sides whose tiles were wanted of their maps."""

    n_rows: int
    steps: list[Step] = dataclasses.field(default_factory=list)
    rows: dict[int, int] = dataclasses.field(default_factory=dict)
    tiled: dict[int, set[int]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(eq=False)
class _Habit:
    """What scenes of a grid are asked."""

    record: _Record | None = None
    steps: tuple[Step, ...] = ()
    wait: int = 0  # scenes to let pass
    failures: int = 0


_habits: dict[Any, _Habit] = {}
_lock = threading.Lock()


class Trail:
    """The questions that one scene is asked, and answers that are ready, for one stream."""

    def __init__(self, record: _Record, ready: dict[Step, Any], stream: int) -> None:
        self.record, self._ready, self._stream = record, ready, stream

    def ask(self, step: Step, stream: int) -> tuple[int, Any]:
        """(place of the step, its answer if there is one)."""
        self.record.steps.append(step)
        found = self._ready.pop(step, None)
        # Another stream may run before the work that was queued here.
        return len(self.record.steps) - 1, found if stream == self._stream else None

    def answer(self, place: int, kmap: KernelMap, new: CoordinateMap | None = None) -> None:
        """Remember the map that a step got, and the level that it made."""
        self.record.tiled[place] = kmap.relation.tiled
        if new is not None:
            self.record.rows[place] = new.n_rows


def forget() -> None:
    """Drop what was learnt."""
    with _lock:
        _habits.clear()


def resolve(
    store: MapStore, cmap: CoordinateMap, build: Callable[[], Any], kind: str, offsets: Offsets,
    stride: tuple[int, ...] = (), out_box: Box | None = None,
) -> tuple[Any, tuple[Trail, int]]:  # fmt: skip
    """A map over `cmap`, the coordinates of `store`: built ahead, or by `build` now; with the place
    of the level it makes.

    kind, offsets, stride, out_box: see `Step`.  `build` returns a KernelMap ("submanifold") or the
    new coordinates and one ("strided").
    """
    level = 0 if store.trail is None else store.trail[1]
    step = Step(level, kind, cmap.box, offsets, stride, out_box)
    if store.trail is None:
        store.trail = _begin(cmap, step), 0
    trail: Trail = store.trail[0]
    if len(trail.record.steps) >= _STEPS:
        return build(), (trail, level)
    place, found = trail.ask(step, _stream(cmap.device))
    if found is None:
        found = build()
    new, kmap = found if kind == "strided" else (None, found)
    trail.answer(place, kmap, new)
    return found, (trail, place + 1)


def _begin(cmap: CoordinateMap, first: Step) -> Trail:
    """A trail for a scene that is asked its first question; answers are ready where the last two
    scenes of the grid were asked the same."""
    record = _Record(cmap.n_rows)
    target = cmap.kernel_target()
    now = settings.get()
    if target is None or not now.ahead or now.dataflow not in ("auto", "masked"):
        return Trail(record, {}, 0)
    with _lock:
        if len(_habits) >= _GRIDS:
            _habits.clear()
        habit = _habits.setdefault((cmap.device, cmap.box), _Habit())
        last = habit.record
        steps = () if last is None else tuple(last.steps)
        trusted = steps == habit.steps and habit.wait == 0
        habit.record, habit.steps = record, steps
        habit.wait = max(0, habit.wait - 1)
    if last is None or not trusted or steps[:1] != (first,) or not _worthwhile(steps):
        return Trail(record, {}, 0)
    answers = _Chain(cmap, target, steps, last).answers()
    with _lock:
        habit.failures = 0 if answers is not None else habit.failures + 1
        if answers is None:
            habit.wait = min(_LONGEST_WAIT, 1 << habit.failures)
    return Trail(record, answers or {}, _stream(cmap.device))


def _stream(device: torch.device) -> int:
    """The current stream of a GPU; 0 elsewhere."""
    if device.type != "cuda":
        return 0
    stream: int = torch._C._cuda_getCurrentRawStream(targets.device_index(device))
    return stream


def _worthwhile(steps: tuple[Step, ...]) -> bool:
    """Several maps, strided ones among them, which would each wait for the device."""
    return 1 < len(steps) < _STEPS and any(step.kind == "strided" for step in steps)


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


class _Chain:
    """All maps of a scene in one go."""

    def __init__(
        self, cmap: CoordinateMap, target: Target, steps: tuple[Step, ...], last: _Record
    ) -> None:
        self.cmap, self.target, self.steps, self.last = cmap, target, steps, last
        self.device = cmap.device
        self.levels: dict[int, _Level] = {}
        self.slots: dict[int, torch.Tensor] = {}

    def answers(self) -> dict[Step, Any] | None:
        """The answer of every step; None where this scene is not like the last."""
        rooms = self._rooms()
        if rooms is None:
            return None
        from ..kernels.hash_table import Fetched

        cmap = self.cmap
        root = cmap.table(self.target)
        self.levels[0] = _Level(cmap.coords, cmap.box, root, None)
        tables, books = self._tables(rooms)
        for place, table in tables.items():
            self._expand(place, self.steps[place], rooms[place], table)
        fetched = Fetched([books, root.flags])
        made = [self._queue(place, step) for place, step in enumerate(self.steps)]
        return self._finish(made, rooms, fetched.read())

    def _rooms(self) -> dict[int, int] | None:
        """Rows to make room for at every new level, by the place of its step."""
        from ..kernels.mask_order import SORTED_APART

        growth = _ROOM * self.cmap.n_rows / max(1, self.last.n_rows)
        rooms: dict[int, int] = {}
        for place, step in enumerate(self.steps):
            if step.kind != "strided":
                continue
            rows = self.last.rows.get(place)
            below = self.cmap.n_rows if step.level == 0 else rooms.get(step.level - 1)
            if rows is None or below is None or step.out_box is None:
                return None
            if self.cmap.kernel_target(step.out_box.key64) is None or step.out_box.oversized:
                return None
            most = min(below * len(step.offsets), max(1, step.out_box.volume))
            likely = rows * growth / _ROOM
            if likely <= SORTED_APART:  # with more room the rows would be ordered otherwise
                most = min(most, SORTED_APART)
            rooms[place] = min(most, _rounded(int(rows * growth) + 256))
        return rooms

    def _tables(self, rooms: dict[int, int]) -> tuple[dict[int, Any], torch.Tensor]:
        """(empty hash tables of the new levels, the flags of all of them)."""
        from ..kernels.hash_table import HashTable

        wanted = []
        for place, room in rooms.items():
            out_box = self.steps[place].out_box
            assert out_box is not None
            wanted.append((capacity_for(room), out_box.key64, self._counters(place, rooms)))
        tables, books = HashTable.allocate_all(wanted, self.device)
        return dict(zip(rooms, tables, strict=True)), books

    def _counters(self, place: int, rooms: dict[int, int]) -> int:
        from ..kernels.new_rows import owner_counters

        level = self.steps[place].level
        return owner_counters(self.cmap.n_rows if level == 0 else rooms[level - 1])

    def _expand(self, place: int, step: Step, room: int, table: Any) -> None:
        from ..kernels.hash_table import hash_insert
        from ..kernels.new_rows import count_owners, number_new_rows

        below, offsets, out_box = self.levels[step.level], step.offsets, step.out_box
        assert out_box is not None
        one = (1,) * offsets.dimension
        geometry = offsets.geometry(self.device, one, step.stride, -1)
        wide = below.box.wide(offsets, one) or out_box.wide(offsets, step.stride)
        slots = below.coords.new_empty((len(offsets), below.room))
        hash_insert(
            table, below.coords, geometry, out_box.bounds(self.device), None, slots, wide,
            self.target, below.count,
        )  # fmt: skip
        owned = count_owners(table, slots, self.target, below.count)
        coords = number_new_rows(
            table, slots, owned, room, below.coords, geometry, wide, self.target, below.count
        )
        self.slots[place] = slots
        self.levels[place + 1] = _Level(coords, out_box, table, table.total)

    def _queue(self, place: int, step: Step) -> tuple[Any, ...]:
        """(tiles or table of side 0, of side 1) of a step; None where there is nothing."""
        from ..kernels.mask_order import mask_order, pack_tiles
        from ..kernels.neighbor_table import neighbor_lookup
        from ..kernels.new_rows import link_new_rows

        level, target = self.levels[step.level], self.target
        if step.kind == "strided":
            new = self.levels[place + 1]
            linked, table = link_new_rows(
                new.table, self.slots[place], new.room, target, level.count, new.count
            )
        else:
            linked, offsets = None, step.offsets
            one = (1,) * offsets.dimension
            table = neighbor_lookup(
                level.table, level.room, level.coords, offsets.geometry(self.device, one, one, 1),
                level.box.bounds(self.device), None, len(offsets), offsets.center,
                level.box.wide(offsets, one), target, level.count,
            )  # fmt: skip
        wanted = self.last.tiled.get(place, ())
        sides: list[Any] = [table, linked]
        for side, found in enumerate(sides):
            if side in wanted and found is not None:
                sides[side] = pack_tiles(found, mask_order(found, target), target)
        return tuple(sides)

    def _finish(
        self, made: list[tuple[Any, ...]], rooms: dict[int, int], counters: list[list[int]]
    ) -> dict[Step, Any] | None:
        """Cut everything to size, now that the sizes are known."""
        from ..kernels.hash_table import FLAGS, live_flags
        from ..kernels.mask_order import SORTED_APART

        books, root = counters
        cmap = self.cmap
        if not cmap.checked:
            cmap.judge(*live_flags(root))
        if not cmap.unique or cmap.alive is not None:
            return None
        rows, at = {0: cmap.n_rows}, 0
        for place, room in rooms.items():
            _, _, overflow, total = books[at : at + FLAGS]
            at += 4 * -(-(FLAGS + self._counters(place, rooms)) // 4)
            n_new = total + 1
            if overflow > 0 or n_new > room or n_new <= SORTED_APART < room:
                return None
            rows[place + 1] = n_new
        answers: dict[Step, Any] = {}
        for place, (step, sides) in enumerate(zip(self.steps, made, strict=True)):
            answers[step] = self._answer(place, step, sides, rows)
        return answers

    def _answer(self, place: int, step: Step, sides: tuple[Any, ...], rows: dict[int, int]) -> Any:
        strided = step.kind == "strided"
        n_x, n_y = rows[step.level], rows[place + 1 if strided else step.level]
        symmetric, center = (
            (False, -1) if strided else (step.offsets.symmetric, step.offsets.center)
        )
        kmap = KernelMap(
            Relation(
                n_x, n_y, len(step.offsets), self.device, symmetric=symmetric, center=center,
                views=sides,
            )
        )  # fmt: skip
        if not strided:
            return kmap
        assert step.out_box is not None
        new = CoordinateMap(self.levels[place + 1].coords[:n_y], step.out_box)
        new.adopt()
        return new, kmap


def _rounded(rows: int) -> int:
    """Up to one of eight sizes per octave, so that the allocator meets few."""
    step = max(128, 1 << max(0, rows.bit_length() - 4))
    return -(-rows // step) * step
