"""All maps of an input in one batch: the coordinates of all levels are queued without knowing how
many rows each will have.

Kernels read these numbers and the bounds of all levels from the device. The host waits once, for
the counters of all levels, and then queues maps that are as large as they have to be. See
`prefetch` for when this is done; `core.capture.padded` leaves them as large as the estimate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...kernels.runtime.fetched import Fetched
from ...kernels.runtime.parts import Slab
from ...kernels.runtime.target import Target
from ..device.device_support import kernel_target
from ..device.kernels import hash_table, new_rows, tile_batch
from ..geometry.boxes import Box, KeyLayout, laid_out
from ..geometry.data_bounds import box_of
from ..maps.coordinate_map import CoordinateMap, capacity_for
from ..maps.expansion import Expansion, look_up
from ..maps.kernel_map import KernelMap
from ..maps.pair_groups import count_pairs
from ..maps.rows import Rows
from ..maps.rulebook import Rulebook
from .input_memory import NO_SLABS, InputMemory, Slabs, room_for, rule_of
from .level_layouts import Level, LevelLayouts
from .recording import PAIRS, BuiltStep, BuiltSteps, Recording, Step, boxes_of, levels_with_unknown_bounds

_ROOM = 1.25  # memory of a level over the estimate
_SPARE = 256  # rows of it besides


Sides = tuple[Any, ...]  # tiles, table or None for side 0 and for side 1 of a step


class BatchedBuilder:
    """All maps of an input in one batch."""

    def __init__(
        self,
        cmap: CoordinateMap,
        target: Target,
        steps: tuple[Step, ...],
        last: Recording,
        slack: float = _ROOM,
        where: LevelLayouts | None = None,
        boxes: dict[int, Box] | None = None,
    ) -> None:
        """slack: memory of a level over the estimate.  where: layouts of levels that are not those
        of their boxes.  boxes: where the input's is to be learnt."""
        self.cmap, self.target, self.steps, self.last = cmap, target, steps, last
        self.slack, self.where, self.unknown_levels = slack, where, levels_with_unknown_bounds(steps)
        self.memory = InputMemory(steps, last, cmap.device)
        self.layouts: dict[int, KeyLayout] = {} if where is None else where.layouts
        self.device = cmap.device
        self.levels: dict[int, Level] = {}
        self.room: dict[int, int] = {}  # rows that levels had memory for when they were expanded
        self.expansions: dict[int, Expansion] = {}
        self.level_bounds: list[torch.Tensor] = []  # of `levels_with_unknown_bounds`, see `DataBounds`
        self.exact_boxes: dict[int, Box] = {}  # the same, once they are known
        self.boxes = boxes_of(cmap.box, steps) if boxes is None else boxes

    def build(self) -> BuiltSteps | None:
        """The map of every step, queued; None where this input is not like the last."""
        if (capacities := self.reserved_capacities()) is None:
            return None
        self.memory.sharing = True  # of a capture, the memory would be kept
        self.lay_levels_out()
        counters, root = self.expanded(capacities)
        read = Fetched.now([counters, root.flags, *self.extra_readbacks()])
        rows = self.sizes(capacities, read)
        if rows is None:
            return None
        self.cut(rows)
        return self.assembled(self.queued(), rows, self.coords())

    def extra_readbacks(self) -> list[torch.Tensor]:
        """What else the host reads: bounds."""
        return [bounds.flatten() for bounds in self.level_bounds]

    def queued(self) -> list[Sides]:
        """Queue the maps over these coordinates: the sides of every step."""
        rows = {number: level.capacity for number, level in self.levels.items()}
        slabs, sides = self.memory.tables(rows, self.room), list[list[Any]]()
        for indices in self.memory.batches(rows):
            sides += [self._linked(index, slabs[index]) for index in indices]
            self._tile(sides, indices)
            for index in indices:
                slabs[index] = NO_SLABS
        return [tuple(pair) for pair in sides]

    def _tile(self, sides: list[list[Any]], indices: range) -> None:
        """Queue the tiles of these steps, which take the place of their tables."""
        tiled = [(index, side) for index in indices for side in self._tiled(index, sides[index])]
        tiles = tile_batch.tile_batch([sides[index][side] for index, side in tiled], self.target)
        for (index, side), side_tiles in zip(tiled, tiles, strict=True):
            sides[index][side] = side_tiles

    def coords(self) -> dict[int, torch.Tensor]:
        """The coordinates of the new levels, by level."""
        return {number: level.coords for number, level in self.levels.items() if number}

    def root(self) -> Any:
        """Queue the table of the input's own coordinates, all that maps among them need."""
        cmap, layout = self.cmap, self.layouts.get(0) or self.cmap.box.layout(self.device)
        table = cmap.table(self.target, layout)
        self.levels[0] = Level(cmap.coords, layout, table, cmap.rows.device)
        return table

    def lay_levels_out(self) -> None:
        """Have the bounds of all levels on the device, as far as they are known."""
        if not self.layouts:
            layouts = laid_out(list(self.boxes.values()), self.device)
            self.layouts = dict(zip(self.boxes, layouts, strict=True))

    def expanded(self, capacities: dict[int, int]) -> tuple[torch.Tensor, Any]:
        """Queue the coordinates of all levels; (counters of the new tables, table of the root)."""
        root, tables = self.root(), self._tables(capacities)
        rows = {index + 1: capacity for index, capacity in capacities.items()}
        slab = self.memory.scratch({0: self.cmap.n_rows, **rows})
        for index, table in tables.items():
            self._expand(index, self.steps[index], capacities[index], table, slab)
            if index + 1 in self.unknown_levels:
                assert self.where is not None
                self.level_bounds.append(self.levels[index + 1].bounds(self.target))
                self.where.derive(self.level_bounds[-1], self.steps, self.target, index + 1)
        if not tables:
            return root.flags[:0], root
        memory = next(iter(tables.values())).total.memory  # where these come first
        return memory[: sum(self.counter_lengths())], root

    def reserved_capacities(self) -> dict[int, int] | None:
        """Rows to reserve at every new level, by the index of its step; None where that is not
        known."""
        capacities: dict[int, int] = {}
        if self.boxes[0].oversized or kernel_target(self.device, self._key64) is None:
            return None
        if self.where is None and self.unknown_levels:
            self.where = LevelLayouts(self.boxes, (), self.device)
            self.layouts = self.where.layouts
            if not self.where.serves(self.boxes):
                return None
            self.where.upload(self.boxes)
        for index, step in enumerate(self.steps):
            if not step.makes:
                continue
            if step.request.order == "by_offset":
                return None  # no launches make it
            growth = self.last.growth(index)
            below = self.cmap.n_rows if step.level == 0 else capacities.get(step.level - 1)
            out_box = self.boxes.get(index + 1)
            if growth is None or below is None or out_box is None or out_box.oversized:
                return None
            layout = self.layouts.get(index + 1)
            key64 = out_box.key64 if layout is None else layout.key64
            if kernel_target(self.device, key64 or self._key64, True) is None:
                return None
            cells = (out_box if layout is None else layout.limits).volume
            most = min(below * len(step.request.offsets), max(1, cells))
            capacities[index] = min(most, self.room_of_step(index, self.slack * growth * self.cmap.n_rows))
        return capacities

    def room_of_step(self, index: int, estimate: float) -> int:
        """Rows to reserve for those that a step makes, by an estimate from the rows of the input."""
        return room_for(int(estimate) + _SPARE)

    @property
    def _key64(self) -> bool:
        """Whether keys of the input's own coordinates have 64 bits."""
        layout = self.layouts.get(0)
        return self.boxes[0].key64 if layout is None else layout.key64

    def _tables(self, capacities: dict[int, int]) -> dict[int, Any]:
        """Empty hash tables of the new levels, by the indices of their steps."""
        sizes = []
        for index, capacity in capacities.items():
            # Half full at worst; for the capacity alone it would be a third.
            level = self.steps[index].level
            counters = new_rows.owner_counters(self.cmap.n_rows if level == 0 else capacities[level - 1])
            key64 = self.layouts[index + 1].key64
            sizes.append((capacity_for(-(-2 * capacity // 3)), key64, counters))
        tables = hash_table.HashTable.allocate_all(sizes, self.device)
        return dict(zip(capacities, tables, strict=True))

    def counter_lengths(self) -> list[int]:
        """Lengths of the new tables' flags and counters, which lie one after another."""
        return [level.table.own[2].shape[0] for number, level in self.levels.items() if number]

    def _expand(self, index: int, step: Step, capacity: int, table: Any, slab: Slab | None) -> None:
        """slab: see `InputMemory.scratch`."""
        below, out, req = self.levels[step.level], self.layouts[index + 1], step.request
        slab = slab if self.memory.passing(index) else None
        expansion = Expansion(below.source(), req.offsets, *rule_of(req), out, self.target, slab)
        expansion.insert(table)
        coords = expansion.number(capacity, req.order, True)
        if self.cmap.rows.device is not None:  # programs may read them as they are
            new_rows.repeat_first(coords, table.total, self.target)
        self.expansions[index] = expansion
        self.room[step.level] = below.capacity
        self.levels[index + 1] = Level(coords, out, table, table.total)

    def _linked(self, index: int, slabs: Slabs) -> list[Any]:
        """Queue the tables of one step."""
        step = self.steps[index]
        level, target, offsets = self.levels[step.level], self.target, step.request.offsets
        if step.makes:
            new, both = self.levels[index + 1], self.memory.both(index)
            return [*self.expansions[index].link(new.capacity, new.count, both, slabs[1])]
        out, stride, center = level, (1,) * offsets.dimension, offsets.center
        if step.out is not None:
            out, stride, center = self.levels[step.out], step.request.stride, -1
        table = look_up(
            out.source(), level.table, level.capacity, level.layout, offsets, stride, target, center, slabs[0]
        )
        return [table, None]

    def _tiled(self, index: int, sides: Sequence[Any]) -> list[int]:
        """Which sides of a step products want in tiles."""
        tiled = self.memory.tiled
        return [s for s, table in enumerate(sides) if table is not None and tiled(index, s)]

    def sizes(self, capacities: dict[int, int], read: list[list[int]]) -> dict[int, int] | None:
        """Rows of every level, from what the host has read; None where this input is not like the last."""
        counters, root, *bounds = read
        cmap = self.cmap
        if not cmap.checked:
            cmap.validate(*hash_table.live_flags(root))
        if not cmap.unique or cmap.alive is not None:
            return None
        levels = {index + 1: capacity for index, capacity in capacities.items()}
        rows = level_rows(counters, self.counter_lengths(), levels)
        if rows is not None:
            self.learn(bounds, rows)
        return None if rows is None else {0: cmap.n_rows, **rows}

    def cut(self, rows: dict[int, int]) -> None:
        """Cut the new levels to size."""
        for number, level in self.levels.items():
            if number:
                coords = level.coords.narrow(0, 0, rows[number])
                self.levels[number] = Level(coords, level.layout, level.table, None)

    def learn(self, bounds: Sequence[list[int]], rows: dict[int, int]) -> None:
        """Learn the bounds of `levels_with_unknown_bounds`, of which there are so many rows, and with that all."""
        levels = zip(self.unknown_levels, bounds, strict=True)
        self.exact_boxes = {level: box_of(values) for level, values in levels if rows[level]}
        if self.exact_boxes or self.boxes.get(0) is not self.cmap.box:
            self.boxes = boxes_of(self.cmap.box, self.steps, self.exact_boxes)

    def assembled(self, sides: list[Sides], rows: dict[int, int], coords: dict[int, torch.Tensor]) -> BuiltSteps:
        """The steps as maps, made of these sides and the new levels' coordinates, cut to `rows` of every level."""
        built: BuiltSteps = {}
        maps, rulebooks = {0: self.cmap}, list[Rulebook]()
        row_counts = self.row_counts(rows)
        for index, (step, pair) in enumerate(zip(self.steps, sides, strict=True)):
            kmap = self._kernel_map(index, step, pair, row_counts)
            new = None
            if step.makes:
                new = maps[index + 1] = self.new_coordinates(index + 1, coords[index + 1], row_counts[index + 1])
                new.loose = step.request.loose
            out_coords = None if step.out is None else maps[step.out]
            built[step] = BuiltStep(maps[step.level], out_coords, kmap, new)
            rulebooks.append(kmap.rulebook)
        self.give_pairs(rulebooks)
        return built

    def row_counts(self, rows: dict[int, int]) -> dict[int, Rows]:
        """The rows of every level, by level."""
        return {level: Rows.of(count) for level, count in rows.items()}

    def listed(self, rulebooks: list[Rulebook]) -> list[Rulebook]:
        """Of the maps, one for every step, those of which the last input's pairs were requested."""
        views = self.last.views
        return [book for index, book in enumerate(rulebooks) if PAIRS in views[index].requested]

    def give_pairs(self, rulebooks: list[Rulebook]) -> None:
        """Have the pairs of the maps counted, one for every step."""
        count_pairs(self.listed(rulebooks), self.target)

    def new_coordinates(self, level: int, coords: torch.Tensor, rows: Rows) -> CoordinateMap:
        """The coordinates of a new level. coords: int32 [rows or more, 1 + D]."""
        own_coords = coords if len(coords) == rows.capacity else coords[: rows.capacity]
        new = CoordinateMap(own_coords, self.boxes[level], rows, own=True)
        new.adopt()
        new.tight = self.exact_boxes.get(level)
        return new

    def _kernel_map(self, index: int, step: Step, sides: Sides, rows: dict[int, Rows]) -> KernelMap:
        out = step.out_level(index)
        offsets, same = step.request.offsets, out == step.level
        symmetric, center = same and offsets.symmetric, offsets.center if same else -1
        x, y = rows[step.level], rows[out]
        return KernelMap(Rulebook(x, y, len(offsets), self.device, symmetric=symmetric, center=center, views=sides))


def level_rows(counters: Sequence[int], lengths: Sequence[int], capacities: dict[int, int]) -> dict[int, int] | None:
    """Rows of new levels, by level, from the flags and counters of their tables, which lie one
    after another; None where one has more than there is capacity for.

    lengths: of the flags and counters of each.
    """
    from ...kernels.maps.hash_table import FLAGS

    rows, at = {}, 0
    for (level, capacity), length in zip(capacities.items(), lengths, strict=True):
        _, _, overflow, last = counters[at : at + FLAGS]
        at += length
        if overflow > 0 or last + 1 > capacity:
            return None
        rows[level] = last + 1
    return rows
