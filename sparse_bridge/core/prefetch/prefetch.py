"""Prefetched maps: all maps that a network needs of one input, queued at its first request.

Networks request the same maps in the same order over every input, whatever its shape. The requests
over the last inputs are recorded relative to their coordinates; at the first of these requests over
a new input, the maps of all levels are queued at once, the sizes of deeper levels read from the
device by the kernels themselves, and the host waits once instead of once or twice a level. Rows are
numbered and ordered exactly as without.

Memory is taken by estimate: the largest growth of the last inputs from level to level, and some
more. Where an input exceeds that, or holds equal or outlying rows, the queued maps are dropped and
every map is built at its request.

`install` registers all this as the provider of `core.maps.request`.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Protocol

import torch

from ... import log, memory, policy, settings, state
from ...errors import KernelError, SparseBridgeError
from ...kernels.runtime import target as targets
from ...kernels.runtime.target import Target
from ...refusals import Why
from ..device.device_support import kernel_target
from ..geometry.boxes import Box
from ..maps import request as requests
from ..maps.coordinate_map import CoordinateMap
from ..maps.map_cache import MapStore
from ..maps.request import BuiltMap, MapRequest
from .batched_builder import BatchedBuilder
from .level_layouts import LevelLayouts
from .recording import BuiltSteps, Recording, Step, boxes_of

__all__ = ["Step", "forget", "install", "provide", "recording_of"]

_PREFETCHED = ("submanifold", "strided", "generative", "between")

# Of the last inputs, by device, number of columns and first request, or kind of announcement.
_newest: dict[tuple[torch.device, int, Hashable], Recording] = {}
_by_box: dict[tuple[torch.device, Box], Recording] = {}  # of the last inputs in a box
_counts = dict.fromkeys(("prefetched", "requeued", "dropped"), 0)  # inputs
_lock = threading.Lock()
_local = threading.local()  # .recording: see `recorded`


class UnboundedBuilder(BatchedBuilder):
    """All maps of an input whose bounds the host has not seen: it learns them with the sizes of the
    levels.

    outgrown: the bounds turned out to be none that the launches could take.
    """

    def __init__(
        self, cmap: CoordinateMap, target: Target, steps: tuple[Step, ...], last: Recording, key64: set[int]
    ) -> None:
        """key64: levels that needed 64-bit keys so far; those of this input are added."""
        assert cmap.data_bounds is not None and last.box is not None
        guess = boxes_of(last.box, steps)
        self.data_bounds, self.key64, self.outgrown = cmap.data_bounds, key64, False
        self.guessed = LevelLayouts(guess, key64, cmap.device)
        super().__init__(cmap, target, steps, last, where=self.guessed, boxes=guess)

    def lay_levels_out(self) -> None:
        self.guessed.derive(self.data_bounds.bounds, self.steps, self.target)

    def extra_readbacks(self) -> list[torch.Tensor]:
        return [*super().extra_readbacks(), self.data_bounds.bounds.flatten()]

    def sizes(self, capacities: dict[int, int], read: list[list[int]]) -> dict[int, int] | None:
        *read, bounds = read
        boxes = boxes_of(self.data_bounds.learn(bounds), self.steps)
        self.key64 |= {level for level, box in boxes.items() if box.key64}
        self.outgrown = not self.guessed.serves(boxes)
        if self.outgrown:
            self.cmap.drop_table()
            return None
        return super().sizes(capacities, read)


class PreparedMaps(Protocol):
    """Maps that were built before anybody asks for them, which are taken in place of queued ones, see
    `core.capture.padded`."""

    @property
    def steps(self) -> Sequence[Step]:
        """All requests over the input that they are of."""

    def built_steps(self, cmap: CoordinateMap) -> BuiltSteps:
        """The maps over `cmap`; none where it is not the coordinates of that input."""


def _no_maps() -> PreparedMaps | None:
    return None


prepared_maps: Callable[[], PreparedMaps | None] = _no_maps  # of this thread: folders above set it


def counts() -> dict[str, int]:
    """Inputs whose maps were prefetched, those of them that were queued twice as their bounds had
    grown, and those whose maps were dropped."""
    with _lock:
        return dict(_counts)


def install() -> None:
    """Have requests for maps answered here."""
    requests.register(provide, announced)


@state.owns
def forget() -> None:
    """Drop what was learnt."""
    with _lock:
        _newest.clear()
        _by_box.clear()
        _counts.update(dict.fromkeys(_counts, 0))


def provide(store: MapStore, cmap: CoordinateMap, req: MapRequest) -> BuiltMap:
    """A map over `cmap`, the coordinates of `store`: prefetched, or built now."""
    if req.map_type not in _PREFETCHED:
        return requests.build(cmap, req)
    recording: Recording | None = store.recording
    if recording is None or not (recording.prepared or recording.steps):
        if _target(cmap) is None and prepared_maps() is None:
            return requests.build(cmap, req)  # nothing is ever queued on the host
        if recording is None:
            recording = Recording(cmap.n_rows)
        recording.levels[cmap] = 0
        first = recording.step_of(cmap, req)
        if first is None:
            return requests.build(cmap, req)
        recording = store.recording = _begin(cmap, first, recording)
    built = recording.request(cmap, req)
    if built.store is not None:
        built.store.recording = recording
    return built


def announced(store: MapStore, cmap: CoordinateMap, name: Hashable) -> None:
    """Prepare the maps that inputs announced under this name need, before the first request."""
    if prepared_maps() is None:
        recording = _begin(cmap, name, Recording(cmap.n_rows))
        if recording.prepared or store.recording is None:
            store.recording = recording


@contextlib.contextmanager
def recorded() -> Iterator[Recording]:
    """The recording of the next input over which this thread asks for maps, of which nobody learns."""
    outer = getattr(_local, "recording", None)
    _local.recording = recording = Recording(0)
    try:
        yield recording
    finally:
        _local.recording = outer


def _begin(cmap: CoordinateMap, first: Hashable, recording: Recording) -> Recording:
    """The recording of an input, `recording`, with steps prepared where inputs with the same first
    request have had the same requests."""
    alone: Recording | None = getattr(_local, "recording", None)
    if alone is not None and not alone.levels:
        recording, alone.n_rows = alone, cmap.n_rows
    recording.levels[cmap], recording.stream = 0, targets.current_stream(cmap.device)
    if alone is not None:
        return recording
    if (maps := prepared_maps()) is not None:
        recording.prepared = maps.built_steps(cmap)
        # Layers in front of the module may have asked first: levels are those of all requests over the input.
        for index, step in enumerate(maps.steps):
            built = recording.prepared.get(step)
            if built is not None and built.new_coords is not None:
                recording.levels[built.new_coords] = index + 1
        return recording
    target, now = _target(cmap), settings.get()
    allowed = now.capture != "off" and memory.limit is None  # all maps of an input are queued together
    if target is None or not allowed or now.dataflow not in settings.TILED:
        return recording
    shared = recording.shared()
    last = _learn(cmap, shared, first)
    if last is not None:
        recording.prepared = _expected_steps(shared, last, cmap, target) or {}
    shared.box = cmap.box  # known or needed now
    with _lock:
        _by_box.pop((cmap.device, cmap.box), None)
        _by_box[cmap.device, cmap.box] = shared
        if len(_by_box) > policy.BOXES:
            del _by_box[next(iter(_by_box))]
    return recording


def _target(cmap: CoordinateMap) -> Target | None:
    """The target whose kernels search `cmap`, as far as can be told without its bounds."""
    return kernel_target(cmap.device) if cmap.unbounded else cmap.kernel_target()


def _learn(cmap: CoordinateMap, shared: Recording, first: Hashable) -> Recording | None:
    """The recording that a new input is expected to follow, see `Recording.link_previous`."""
    with _lock:
        key = cmap.device, cmap.coords.shape[1], first
        previous = _newest.get(key)
        if previous is None and len(_newest) >= policy.FIRST_REQUESTS:
            _newest.clear()
        _newest[key] = shared
        return shared.link_previous(previous)


def _expected_steps(shared: Recording, last: Recording, cmap: CoordinateMap, target: Target) -> BuiltSteps | None:
    """The steps of the last input, built for this one; None where it is not like the last."""
    assert shared.expected is not None and last.next_expectation is not None
    steps = tuple(last.steps)
    if len(steps) >= policy.REQUESTS:
        return None
    unbounded = cmap.unbounded and last.box is not None
    if unbounded:
        steps = tuple(itertools.takewhile(lambda step: step.derivable, steps))
    elif cmap.box is not last.box:
        steps = tuple(itertools.takewhile(lambda step: step.relative, steps))
    if not (_several(steps) or (unbounded and steps)):
        return None
    key64 = last.next_expectation.key64.setdefault(len(steps), set())
    built = _built(cmap, target, steps, last, key64)
    with _lock:
        shared.expected.attempts.learn(built is not None)
        _counts["dropped" if built is None else "prefetched"] += 1
    return built


def _built(
    cmap: CoordinateMap, target: Target, steps: tuple[Step, ...], last: Recording, key64: set[int]
) -> BuiltSteps | None:
    """The maps of an input, queued; None where this input is not like the last."""
    try:
        return _queued(cmap, target, steps, last, key64)
    except KernelError:
        raise
    except SparseBridgeError as error:  # of a layer that this input may never reach: it will say so
        log.logger.debug("no prefetch: %s", Why.PREFETCH_LAYER.says(error))
        return None
    except torch.cuda.OutOfMemoryError:  # map by map it takes less
        log.logger.debug("no prefetch: %s", Why.PREFETCH_MEMORY.says())
        return None


def _queued(
    cmap: CoordinateMap, target: Target, steps: tuple[Step, ...], last: Recording, key64: set[int]
) -> BuiltSteps | None:
    """The maps of an input, queued; again where its bounds are not those expected."""
    if cmap.unbounded and last.box is not None:
        unbounded = UnboundedBuilder(cmap, target, steps, last, key64)
        built = unbounded.build()
        if not unbounded.outgrown:
            return built
        with _lock:
            _counts["requeued"] += 1
        if cmap.kernel_target() is None:
            return None
    return BatchedBuilder(cmap, target, steps, last).build()


def recording_of(device: torch.device, box: Box, training: bool = False, n_rows: int | None = None) -> Recording | None:
    """Of the last input in `box`, if maps are prefetched there, and if this thread asked for them: another one may be
    in the middle of it.

    training: with the requests of a backward pass as well, which the last input has still to make.  n_rows: of the
    input that is meant, as less may have been asked of another one so far; None: any.
    """
    with _lock:
        last = _by_box.get((device, box))
        own = last is not None and last.threads <= {threading.get_ident()} and n_rows in (None, last.n_rows)
        recording = last.snapshot() if last is not None and own else None
        if recording is None or not recording.is_stable():
            return None
        return recording.with_backward_views() if training else recording


def _several(steps: tuple[Step, ...]) -> bool:
    """Several maps, and new coordinates among them, which would each wait for the device."""
    return len(steps) > 1 and any(step.makes for step in steps)
