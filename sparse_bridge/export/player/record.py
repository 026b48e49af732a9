"""A network as a program for one target: recorded over a padded input, with a place for everything."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ... import settings
from ...core.capture import padded
from ...core.capture.captured_maps import builder_over, pad_input
from ...core.capture.padded import GRID, PaddedInput
from ...core.conv.deferred import materialize
from ...core.device import selection
from ...core.device.device_support import kernel_target
from ...core.geometry.boxes import Box
from ...core.maps.coordinate_map import CoordinateMap
from ...core.maps.rows import Rows
from ...core.prefetch.level_layouts import LevelLayouts
from ...core.prefetch.recording import Step as MapStep
from ...core.prefetch.recording import boxes_of
from ...core.warmup import preload
from ...kernels.maps.hash_table import FLAGS
from ...kernels.maps.row_bounds import row_bounds
from ...kernels.runtime.architectures import MADE, compiled, generation_of
from ...kernels.runtime.target import Target, described
from ...refusals import Refusal
from ..package_scenes import tensors_of
from ..plugin_checks import ExportError
from . import operations
from .changes import kept_by, require_kept
from .dependencies import Access, edges
from .entry import Entry, entry_of, require_inside, require_playable
from .kernel_writes import BEHIND_TABLES
from .learning import LayerError, learn, rows_of_levels
from .memory_plan import Life, Plan, plan
from .merged_fills import merged_fills
from .package_file import ADDRESS, DTYPES, LAUNCH, MOST_DIMS, Arg, Constant, Kernel, Level, Program, Step, Tensor
from .recorder import Recorder, Storage
from .row_views import require_rows_first
from .stand_in import driving

_CPU = torch.device("cpu")
_OFFSET = (1 << 48) - 1
KEY_BITS, ITEM_BITS = 62, 8  # of coordinates together, and of batch items, where the data alone bound them
_LONGER = 32  # steps
_one_at_a_time = threading.Lock()  # Triton's driver and the plans of layers are the process's


def target_of(name: str) -> Target:
    """The target of a name like "cuda:87" or "hip:gfx942". Raises: ExportError, also where no kernel is for it."""
    backend, _, arch = name.partition(":")
    if backend not in ("cuda", "hip") or not arch or (backend == "cuda") != arch.isdigit():
        raise ExportError(f"target {name!r}; expected cuda: with a compute capability (cuda:87), or hip:gfx942.")
    own = f"sm_{arch}" if backend == "cuda" else arch
    if own not in MADE or generation_of(backend, own).family == "generic":  # LLVM may end the process
        like = ", ".join(f"cuda:{it[3:]}" if it.startswith("sm_") else f"hip:{it}" for it in compiled())
        raise ExportError(f"target {name!r}: no kernel is for such a GPU; expected one like {like}.")
    return described(own)


def record(model: nn.Module, inputs: Sequence[Any], rows: int, name: str, scenes: Sequence[Entry] = ()) -> Program:
    """The program of a model for the target `name`, with memory for inputs of `rows` rows.

    model: in eval mode, from `inputs`, see `entry_of`, to tensors.  inputs: of an example, by which levels
        are taken to grow.  scenes: others that will be played.
    Raises: ExportError for what the model computes that no kernel does, with its line.
    """
    own, entry = target_of(name), entry_of(model, inputs)
    require_playable((entry, *scenes), rows)
    preload.finish()  # or a driver of this machine's GPU that is being made would take the stand-in's place
    with _one_at_a_time, torch.no_grad(), selection.standing_in(name):
        it = Recorder(own, model, operations.lower)
        with driving(own, it):
            target = kernel_target(_CPU)
            if target is None:
                dataflow = settings.get().dataflow
                raise ExportError(f"the dataflow {dataflow} is forced, which is not for GPUs; expected auto.")
            try:
                recording, unbounded = learn(entry)
            except LayerError as error:
                raise ExportError(f"{it.where(error.__cause__ or error)} {error}") from error
            assert recording.box is not None
            if not unbounded:
                require_inside((entry, *scenes), recording.box)
            padded_input = pad_input(entry.coords[:0], rows, recording)
            given = torch.zeros_like(padded_input.coords) if entry.reordered else padded_input.coords
            wide = torch.zeros((rows, entry.features.shape[1]), dtype=entry.features.dtype)
            for tensor in (wide, given, padded_input.coords, padded_input.count):
                it.index_of(tensor, written=True)
            padded_input.estimates = rows_of_levels(recording, rows)
            padded_input.items = recording.box.lo[0] + recording.box.size[0]
            kept = kept_by(model)
            try:
                outputs = _run(it, entry, padded_input, given, wide, target, unbounded)
            except Refusal as refusal:
                raise ExportError(f"{it.where(refusal)} cannot be recorded: {refusal}") from refusal
            require_kept(it, model, kept)
            require_rows_first(it, outputs)
        return _program(it, name, padded_input, list(zip(entry.names, (given, wide), strict=True)), outputs)


def _run(
    it: Recorder,
    entry: Entry,
    padded_input: PaddedInput,
    given: torch.Tensor,
    wide: torch.Tensor,
    target: Target,
    unbounded: bool,
) -> list[torch.Tensor]:
    """Record the maps and the model; its outputs."""
    box = padded_input.recording.box
    assert box is not None
    with it:
        for column, source in enumerate(entry.order):
            if entry.reordered:
                padded_input.coords[:, column].copy_(given[:, source])
        steps = tuple(padded_input.recording.steps)
        where = _bounds_of_data(padded_input, box, steps, target) if unbounded else None
        builder = builder_over(padded_input, box, target, steps, where)
        if not builder.lay_out():
            raise ExportError("how large the levels of the network get cannot be told from the example.")
        padded_input.prepared = builder.queued(), builder.coords()
        it.rows = {capacity: level for level, capacity in padded_input.capacities.items()}
        it.holds_rows([wide])

        def root() -> CoordinateMap:
            own = CoordinateMap(padded_input.coords, box, Rows(None, padded_input.count, len(wide)))
            own.adopt()
            return own

        with padded.using(padded_input):
            outputs = [materialize(tensor) for tensor in tensors_of(entry.call(wide, given.detach(), root))]
            outputs = [output.contiguous() for output in outputs]
        it.settle(*outputs)
        return outputs


def _bounds_of_data(padded_input: PaddedInput, box: Box, steps: tuple[MapStep, ...], target: Target) -> LevelLayouts:
    """Bounds of all levels, found on the device for every input anew. Rows too far out for keys of 64 bits, or below 0
    where the rules of levels are others there, count as outside of the grid."""
    boxes, dimension = boxes_of(box, steps), box.dimension
    where = LevelLayouts(boxes, tuple(boxes), padded_input.coords.device)
    far = 1 << (KEY_BITS - ITEM_BITS) // dimension - 1
    least = 0 if any(step.request.nonnegative for step in steps) else -far
    bounds = row_bounds(padded_input.coords, padded_input.count, target, 1 << ITEM_BITS, far, least)
    where.derive(bounds, steps, target)
    return where


def _spread(lives: Sequence[Life], groups: Sequence[Sequence[int]]) -> Plan:
    """A plan in which small storages keep their memory, as far as the block does not grow by that: what comes next in
    the same memory would wait for the last step that reads it, in a graph."""
    best, sizes = plan(lives, groups), sorted({life.size for life in lives})
    least, low, high = best.size, 0, len(sizes)
    while low < high:
        middle = (low + high) // 2
        longer = [life._replace(end=life.end + _LONGER * (life.size <= sizes[middle])) for life in lives]
        planned = plan(longer, groups)
        if planned.size <= least:
            best, low = planned, middle + 1
        else:
            high = middle
    return best


class _Places:
    """Where storages lie in the block."""

    def __init__(self, it: Recorder, kept: set[int]) -> None:
        """kept: storages that are the caller's before or after a run."""
        last = len(it.steps)
        lives: dict[int, Life] = {}
        for index, storage in enumerate(it.storages):
            if storage.begin < 0 and index not in kept:
                continue
            always = index in kept or not storage.written
            lives[index] = Life(storage.size, 0 if always else storage.begin, last if always else storage.end)
        begins = {index: it.storages[index].begin for index in lives}
        self._fills = merged_fills(it.steps, lives, begins)
        numbers = {index: number for number, index in enumerate(lives)}
        groups = [[numbers[index] for index in group] for group in self._fills.groups]
        planned = _spread(list(self._fills.lives.values()), groups)
        self.at, self.size = dict(zip(lives, planned.offsets, strict=True)), planned.size
        self._it, self._index = it, {id(storage): index for index, storage in enumerate(it.storages)}

    def of(self, address: int) -> int:
        """The offset in the block of what a recorder calls so."""
        return self.at[address >> 48] + (address & _OFFSET)

    def steps(self) -> Iterator[tuple[Step, list[Access]]]:
        """The steps with their places, and what each of them accesses."""
        for number, step in enumerate(self._it.steps):
            args = tuple(Arg(*arg[:2], self.of(arg.value)) if arg.kind == ADDRESS else arg for arg in step.args)
            own = step._replace(args=args, to=self.of(step.to) if step.size else 0)
            group = self._fills.steps.get(number, -1)
            if group is None:
                continue
            if group >= 0:
                *_, last = self._fills.groups[group]
                size = self.at[last] + self._fills.lives[last].size - own.to
                own = own._replace(size=-(-size // 4) * 4)
            filled = [Access(own.to, own.to + own.size, True)] if own.size else []
            yield own, filled + list(self._launched(step))

    def _launched(self, step: Step) -> Iterator[Access]:
        """What a launch accesses of memory that steps write."""
        storages, written = self._it.storages, self._it.writes[step.kernel] if step.kind == LAUNCH else ()
        for number, arg in enumerate(step.args):
            if arg.kind != ADDRESS:
                continue
            storage = storages[arg.value >> 48]
            if storage.written:
                start = self.of(arg.value)
                yield Access(start, start + self._it.extents[arg.value], number in written)
            for other in storage.reaches:
                start = self.at[self._index[id(other)]]
                yield Access(start, start + other.size, BEHIND_TABLES in written)


def _program(
    it: Recorder,
    name: str,
    padded_input: PaddedInput,
    inputs: Sequence[tuple[str, torch.Tensor]],
    outputs: Sequence[torch.Tensor],
) -> Program:
    assert padded_input.counters is not None and padded_input.flags is not None
    kept = [*[tensor for _, tensor in inputs], *outputs, padded_input.count, padded_input.flags]
    if padded_input.lengths:
        kept.append(padded_input.counters)
    places = _Places(it, {it.index_of(tensor) for tensor in kept})

    def at(tensor: torch.Tensor) -> int:
        index = it.index_of(tensor)
        return places.at[index] + tensor.data_ptr() - it.storages[index].base

    constants, relocations = _constants(it, places)
    levels, counters_at = [], at(padded_input.counters) if padded_input.lengths else 0
    deeper = [(level, capacity) for level, capacity in padded_input.capacities.items() if level]
    for (level, capacity), length in zip(deeper, padded_input.lengths, strict=True):
        levels.append(Level(level, capacity, counters_at))
        counters_at += 4 * length
    assert FLAGS == 4
    steps, accesses = zip(*places.steps(), strict=True)
    return Program(
        name,
        places.size,
        len(padded_input.coords),
        at(padded_input.count),
        at(padded_input.flags),
        *_used([kernel for _, kernel in it.kernels.values()], steps),
        constants,
        relocations,
        tuple(_tensor(label, tensor, 0, at(tensor)) for label, tensor in inputs),
        tuple(_output(i, tensor, padded_input, at(tensor)) for i, tensor in enumerate(outputs)),
        tuple(levels),
        tuple(edges(accesses)),
    )


def _used(kernels: Sequence[Kernel], steps: Sequence[Step]) -> tuple[tuple[Kernel, ...], tuple[Step, ...]]:
    """The kernels that steps launch, and the steps with their numbers among those."""
    numbers = sorted({step.kernel for step in steps if step.kind == LAUNCH})
    places = {number: place for place, number in enumerate(numbers)}
    moved = [step._replace(kernel=places[step.kernel]) if step.kind == LAUNCH else step for step in steps]
    return tuple(kernels[number] for number in numbers), tuple(moved)


def _constants(it: Recorder, places: _Places) -> tuple[tuple[Constant, ...], tuple[tuple[int, int], ...]]:
    """(what lies in the block beforehand, addresses among that)."""
    constants, relocations = [], list[tuple[int, int]]()
    for index, place in places.at.items():
        storage = it.storages[index]
        if storage.written or not storage.size:
            continue
        content = storage.content()
        if storage.reaches:
            content = _relocated(it, storage, content, place, places, relocations)
        constants.append(Constant(place, content))
    return tuple(constants), tuple(relocations)


def _relocated(
    it: Recorder, storage: Storage, content: bytes, place: int, places: _Places, relocations: list[tuple[int, int]]
) -> bytes:
    """The same with zeros for addresses, which are added to `relocations`."""
    values = storage.values(torch.int64).tolist()
    for i, value in enumerate(values):
        target = it.storage_at(value)
        if target is not None and it.storages[target[0]] in storage.reaches:
            relocations.append((place + 8 * i, places.at[target[0]] + target[1]))
            content = content[: 8 * i] + bytes(8) + content[8 * i + 8 :]
    return content


def _tensor(label: str, tensor: torch.Tensor, level: int, place: int) -> Tensor:
    if tensor.dtype not in DTYPES or not 1 <= tensor.ndim <= MOST_DIMS or not tensor.numel():
        raise ExportError(f"{label} is {tensor.dtype} {list(tensor.shape)}, which a GPU package does not hand out.")
    return Tensor(label, tensor.dtype, level, tuple(tensor.shape), place)


def _output(number: int, tensor: torch.Tensor, padded_input: PaddedInput, place: int) -> Tensor:
    try:
        level = padded_input.level_of(tensor)
    except Refusal as refusal:
        raise ExportError(f"output {number} of the model: {refusal}") from refusal
    return _tensor(f"output{number}", tensor, -1 if level == GRID else level, place)
