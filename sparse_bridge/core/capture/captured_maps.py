"""Launches captured as graphs, and the maps of a padded input captured so."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch

from ...errors import SparseBridgeError
from ...kernels.runtime import target as targets
from ...refusals import Refusal, Why
from ..device.device_support import kernel_target
from ..device.kernels import new_rows
from ..device.stream_order import Streams, alone_on
from ..geometry.boxes import Box, record_of
from ..geometry.data_bounds import DataBounds, Root
from ..maps.coordinate_map import CoordinateMap
from ..maps.rows import Rows
from ..ops.pointwise import row_numbers
from ..prefetch.level_layouts import LevelLayouts
from ..prefetch.recording import Recording, Step, boxes_of
from .graph_capture import GraphMemory, KeepAlive, captured
from .padded import PaddedBuilder, PaddedInput


class CapturedMaps:
    """The maps of a padded input as two graphs, of the coordinates of all levels and of the maps
    over them: the host learns how many rows there are as soon as the first is through.

    padded_input: holds the `n_rows` coordinates of an input like those to come; its maps are
    `prepared`.  box: of the coordinates.  exact: it holds their exact bounds, and those of others
    are found on the device.  memory: what the captures take, and the stream they are made on.  whole: inputs must have
    rows of every batch item.
    Raises RuntimeError where nothing can be captured.
    """

    def __init__(
        self,
        padded_input: PaddedInput,
        box: Box,
        target: targets.Target,
        steps: tuple[Step, ...],
        memory: GraphMemory,
        n_rows: int,
        exact: bool = False,
        whole: bool = False,
    ) -> None:
        self.padded_input, self.box, self.steps, self.target = padded_input, box, steps, target
        self.exact, self.memory, self.whole = exact, memory, whole
        self.makes_levels = any(step.makes for step in steps)
        self._relative = all(step.relative for step in steps)
        self._nonnegative = [step.level for step in steps if step.request.nonnegative]
        from ...kernels.maps import pair_batch, tile_batch

        device, boxes = padded_input.coords.device, boxes_of(box, steps)
        self._cached_boxes = box, boxes
        self.layouts = LevelLayouts(boxes, (), device)  # launches read them, and the number of rows
        self.ends: torch.Tensor | None = None  # the bounds of the coordinates, of which the others follow
        if exact:
            self.ends = torch.zeros((2, len(box.size)), dtype=torch.int32, device=device)
        size = 2 if exact else len(self.layouts.sent)
        self._written = torch.empty(size, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
        padded_input.count = self.layouts.count.view()
        if self.ends is not None:
            DataBounds(padded_input.coords[:n_rows]).find(self.ends)
        self._write(boxes, n_rows)
        self._send()
        dry_run = self._laid_out()  # compiles and loads beforehand
        dry_run.queued()
        assert padded_input.counters is not None and padded_input.flags is not None
        ends = 0 if self.ends is None else self.ends.numel()
        self.lengths = [len(padded_input.counters), len(padded_input.flags), ends, int(whole)]
        size = sum(self.lengths)
        self.host = torch.empty(size, dtype=torch.int32, device="cpu", pin_memory=True)
        del dry_run
        torch.cuda.current_stream(device).synchronize()
        numbers = tile_batch.room_for_records(2 * len(steps)) + pair_batch.room_for_records(len(steps))
        records = torch.empty(numbers, dtype=torch.int64, device=device)
        with on_own_stream(device, memory.stream):
            self.first, coords = captured(self._coordinates, memory.pool)
            self.second, sides = captured(self._maps, memory.pool, records)
        padded_input.prepared = sides, coords
        self.event, self._stream = torch.cuda.Event(), Streams(device)
        self._keep_alive = KeepAlive(self.host, self._written, self.event)

    def _write(self, boxes: dict[int, Box], n_rows: int) -> None:
        """Leave the number of rows, and bounds of all levels, where `_send` finds them."""
        values = [n_rows - 1, 0]
        if self.ends is None:
            for box in boxes.values():
                values += record_of(box)
        self._written.copy_(torch.tensor(values, dtype=torch.int64, device="cpu"))

    def _send(self) -> None:
        self.layouts.sent.narrow(0, 0, len(self._written)).copy_(self._written, non_blocking=True)
        if self.ends is not None:
            self.layouts.derive(self.ends, self.steps, self.target)

    def _laid_out(self) -> PaddedBuilder:
        """A builder that has queued the coordinates of all levels. Raises Refusal."""
        builder = builder_over(self.padded_input, self.box, self.target, self.steps, self.layouts)
        if not builder.lay_out():
            raise Refusal(Why.GRAPH_NO_SIZES)
        return builder

    def _coordinates(self) -> dict[int, torch.Tensor]:
        padded_input = self.padded_input
        self._send()
        new_rows.repeat_first(padded_input.coords, padded_input.count, self.target)
        self._builder = self._laid_out()  # its tables are read by the second graph
        assert padded_input.counters is not None and padded_input.flags is not None
        mine = self.host.split(self.lengths)
        mine[0].copy_(padded_input.counters, non_blocking=True)
        mine[1].copy_(padded_input.flags, non_blocking=True)
        if self.ends is not None:
            mine[2].copy_(self.ends.flatten(), non_blocking=True)
        if self.whole:
            mine[3].copy_(self._absent_items(), non_blocking=True)
        return self._builder.coords()

    def _maps(self) -> list[Any]:
        sides = self._builder.queued()
        self._builder.count_pairs(sides)
        return sides

    def _absent_items(self) -> torch.Tensor:
        """int32 [1]: batch items without rows. What lies behind the last row is a copy of the first."""
        low, n_items = self.padded_input.batch
        items = (self.padded_input.coords[:, 0].long() - low).clamp(0, n_items - 1)  # see `serves` for others
        seen = torch.zeros(n_items, dtype=torch.int32, device=items.device).scatter_(0, items, 1)
        return n_items - seen.sum(0, keepdim=True, dtype=torch.int32)

    def serves(self, box: Box) -> bool:
        """Whether inputs in `box` can be served, if there is capacity for them."""
        self.padded_input.refusal = None
        if self.whole and (box.lo[0], box.size[0]) != self.padded_input.batch:
            return False
        if box is self.box or not self._relative:  # whatever agreed in smaller boxes ends where this one does
            return box is self.box
        try:
            boxes = self._boxes(box)
        except SparseBridgeError:  # a layer would make an empty grid, and says so if it is called
            return False
        if not all(level in boxes and min(boxes[level].lo[1:]) >= 0 for level in self._nonnegative):
            self.padded_input.refusal = Why.GRAPH_NEGATIVE
            return False
        return self.layouts.serves(boxes)

    def _boxes(self, box: Box) -> dict[int, Box]:
        """Of all levels over inputs in `box`."""
        cached = self._cached_boxes
        if box is not cached[0]:  # another thread may ask for another box meanwhile
            cached = self._cached_boxes = box, boxes_of(box, self.steps)
        return cached[1]

    def start(self, coords: torch.Tensor, bounds: Box | DataBounds | None = None) -> None:
        """Queue the maps over these coordinates, of which there must be capacity for.

        bounds: of them, which must be served; None: those at capture. Where maps are `exact`,
        bounds that are still to be learnt: whether they are served turns out in `rows`.
        """
        n_rows = coords.shape[0]
        self.event.synchronize()  # what was written for the last input has been read
        if self.ends is None:
            box = self.box if bounds is None else Root(coords, bounds).box
            self._write(self._boxes(box), n_rows)
        else:
            self._write({}, n_rows)
            DataBounds(coords).find(self.ends)
        self.padded_input.coords.narrow(0, 0, n_rows).copy_(coords)
        self.first.replay()
        self.event.record(self._stream.current())
        self.second.replay()

    def rows_over(self, root: Root) -> dict[int, int] | None:
        """`rows` of an input that was started over. Where nothing is to be learnt, as of a part of a model at one
        level, the host does not wait."""
        n_rows = len(root.coords)
        nothing = root.distinct and not (self.makes_levels or self.whole)
        return {0: n_rows} if nothing else self.rows(n_rows)

    def rows(self, n_rows: int, bounds: DataBounds | None = None) -> dict[int, int] | None:
        """Rows of every level; None where the input cannot be served. Waits for the first graph.

        bounds: learn what they are.
        """
        self.event.synchronize()
        values = iter(self.host.tolist())
        counters, flags, ends, absent = (list(itertools.islice(values, length)) for length in self.lengths)
        if bounds is not None and not self.serves(bounds.learn(ends)):
            return None
        rows = self.padded_input.validated(counters, flags, n_rows)
        if rows is not None and any(absent):
            self.padded_input.refusal, rows = Why.GRAPH_BATCH_ITEMS, None
        return rows

    def learn(self, root: Root) -> bool:
        """Learn the bounds of an input that exact maps were started over; whether it is served."""
        assert isinstance(root.bounds, DataBounds)
        return self.rows(len(root.coords), root.bounds) is not None


def maps_like(
    root: Root, recording: Recording, capacity: int, memory: GraphMemory, whole: bool = False
) -> tuple[CapturedMaps, dict[int, int]] | None:
    """(captured maps, built for `root`, with memory for `capacity` rows; the rows of its levels); None
    where this input is not like the recorded one. Raises Refusal where its rows are equal, or lie outside.  whole: or
    where a batch item has none."""
    root = root.for_steps(any(step.makes for step in recording.steps))
    coords, box = root.coords, root.box
    target = kernel_target(coords.device)
    if target is None:
        return None
    padded_input = pad_input(coords, capacity, recording)
    padded_input.batch = box.lo[0], box.size[0]
    steps, n_rows = tuple(recording.steps), coords.shape[0]
    exact = root.bounds is not box and all(step.derivable for step in steps)
    maps = CapturedMaps(padded_input, box, target, steps, memory, n_rows, exact, whole)
    maps.start(coords)
    rows = maps.rows(n_rows)
    if padded_input.refusal is not None:
        raise Refusal(padded_input.refusal)
    if rows is None:
        return None
    padded_input.estimates = rows
    row_numbers(coords.device, max(padded_input.capacities.values()))  # waits for them, which a capture must not
    return maps, rows


def builder_over(
    padded_input: PaddedInput,
    box: Box,
    target: targets.Target,
    steps: tuple[Step, ...],
    where: LevelLayouts | None = None,
) -> PaddedBuilder:
    """The builder of a padded input."""
    root = CoordinateMap(padded_input.coords, box, Rows(None, padded_input.count, padded_input.coords.shape[0]))
    root.adopt()
    return PaddedBuilder(padded_input, root, target, steps, where)


def pad_input(coords: torch.Tensor, capacity: int, recording: Recording) -> PaddedInput:
    """An input with capacity for `capacity` rows, whose first are `coords` [N, 1 + D]."""
    # Behind them lies one of their own, so that a trial sees whatever goes by items or cells: what earlier inputs leave
    # there is of any item.
    wide = coords.new_zeros((capacity, coords.shape[1]))
    wide[: coords.shape[0]].copy_(coords)
    if coords.shape[0]:
        wide[coords.shape[0] :].copy_(coords[:1])
    return PaddedInput(wide, coords.new_full((1,), coords.shape[0] - 1), recording)


@contextlib.contextmanager
def on_own_stream(device: torch.device, stream: torch.cuda.Stream) -> Iterator[None]:
    """This stream between what came before and what comes after, with `own_random_numbers`."""
    with alone_on(stream):
        stream.wait_stream(torch.cuda.current_stream(device))
        try:
            with own_random_numbers(device), torch.cuda.stream(stream):
                yield
        finally:
            torch.cuda.current_stream(device).wait_stream(stream)


@contextlib.contextmanager
def own_random_numbers(device: torch.device) -> Iterator[None]:
    """Random numbers of a GPU from another generator. Those of the CPU go on afterwards as if there had been none."""
    with torch.random.fork_rng(devices=[]), _own_generator(device):
        yield


@contextlib.contextmanager
def _own_generator(device: torch.device) -> Iterator[None]:
    """A capture that fails leaves the one that was in use unusable, and trials must not move the user's."""
    generator = torch.cuda.default_generators[targets.device_index(device)]
    own = generator.graphsafe_get_state()
    generator.graphsafe_set_state(torch.Generator(device).graphsafe_get_state())
    try:
        yield
    finally:
        generator.graphsafe_set_state(own)
