"""The memory that all captured maps of a device share: one scene at a time passes through it.

Graphs read a scene's coordinates from an arena and leave its maps there, to be copied out; what
lies in between is in a pool of the allocator. So they hold what the largest scene needs, not a
scene each. Maps that do not all fit in a few megabytes are not captured: parts of them were, and
took more memory and time than queueing them.
"""

from __future__ import annotations

import collections
import math
import threading
from collections.abc import Iterator
from typing import Any, Protocol

import torch

from ... import state
from ...kernels.runtime import target as targets
from ..device.stream_order import capture_stream
from ..maps.coordinate_map import CoordinateMap
from .batched_builder import BatchedBuilder
from .captured_maps import CapturedMaps, Streams
from .history import RequestHistory, Step
from .padded import PaddedInput

_MOST_GRAPHS = 24  # of a device
MOST_BYTES = 24 << 20  # of a device, for all of them
_SPARE = 1.25  # arena over what its first graphs need
_ALIGNED = 64  # elements


class TooLargeError(RuntimeError):
    """Captured maps would take more memory than they may."""


class Graph(Protocol):
    """Captured maps in an arena."""

    def dropped(self) -> None:
        """They are not to be replayed any more."""


class Arena:
    """The arena of a device and the graphs that use it, the one used last at the end.

    memory: int32; its start holds a scene's coordinates.  lock: held from the start of a replay
    until its maps are copied.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.lock = device, threading.RLock()
        self.graphs: collections.OrderedDict[Graph, None] = collections.OrderedDict()
        self.memory: torch.Tensor | None = None
        self._pool: Any = None
        self._aside: torch.cuda.Stream | None = None
        self._stale: list[Graph] = []  # dropped, but their pool is still to be used
        self._streams = Streams(device)
        self._last: torch.cuda.Stream | None = None

    def pool(self) -> Any:
        """Where captures allocate. It lasts as long as its graphs."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        return self._pool

    def aside(self) -> torch.cuda.Stream:
        """Where captures are made: what one leaves free in the pool is for others of its stream."""
        if self._aside is None:
            self._aside = capture_stream(self.device)
        return self._aside

    def reserve(self, elements: int) -> torch.Tensor:
        """Memory of so many elements at least; where it has to grow, graphs that use it go."""
        if self.memory is None or len(self.memory) < elements:
            self._stale = list(self.graphs)
            for graph in self._stale:
                self.drop(graph)
            self._let_go()
            size = max(elements, min(int(_SPARE * elements), MOST_BYTES // 8))
            self.memory = torch.empty(size, dtype=torch.int32, device=self.device)
        return self.memory

    def follow(self) -> None:
        """Wait for the last replay, where that was on another stream."""
        stream = self._streams.current()
        if stream is not self._last:
            if self._last is not None:
                stream.wait_stream(self._last)
            self._last = stream

    def hold(self, graph: Graph) -> None:
        """Keep a graph, used now; others may have to go."""
        self.graphs[graph] = None
        self.graphs.move_to_end(graph)
        while len(self.graphs) > _MOST_GRAPHS:
            self.drop(next(iter(self.graphs)))

    def drop(self, graph: Graph) -> None:
        """Let go of a graph, which may be at work in another thread."""
        if graph in self.graphs:
            del self.graphs[graph]
            graph.dropped()
        self._settle()

    def release(self) -> None:
        """A capture is over; the memory of what it replaced may go."""
        self._stale.clear()
        self._settle()

    def _settle(self) -> None:
        if not self.graphs and not self._stale:
            self._pool = None

    def clear(self) -> None:
        """Give the memory back."""
        for graph in list(self.graphs):
            self.drop(graph)
        self._let_go()
        self.release()

    def _let_go(self) -> None:
        """Of the memory, once the last replay in it is through, on whatever stream."""
        if self.memory is not None and self._last is not None and self.memory.is_cuda:
            self.memory.record_stream(self._last)
        self.memory = None


_devices: dict[torch.device, Arena] = {}
_lock = threading.Lock()


def arena_of(device: torch.device) -> Arena:
    with _lock:
        if device not in _devices:
            _devices[device] = Arena(device)
        return _devices[device]


@state.owns
def forget() -> None:
    """Drop all graphs."""
    with _lock:
        held = list(_devices.values())
        _devices.clear()
    for arena in held:
        arena.clear()


class ArenaMaps(CapturedMaps):
    """Captured maps of a class of scenes, in an arena.

    parts: (elements, shape) of all that lies in the arena behind the coordinates from `first_part`
    on: coordinates of levels, then maps.  made: the sides of every step there.
    Raises TooLargeError.
    """

    def __init__(
        self, arena: Arena, cmap: CoordinateMap, capacity: int, target: targets.Target,
        steps: tuple[Step, ...], last: RequestHistory, key64: set[int], exact: bool,
    ) -> None:  # fmt: skip
        self.arena = arena
        coords = cmap.coords.new_zeros((capacity, cmap.coords.shape[1]))
        coords[: cmap.n_rows].copy_(cmap.coords)
        self.first_part = _room(coords)
        scene = PaddedInput(coords, coords.new_zeros(1), last)
        super().__init__(
            scene, cmap.box, target, steps, None, cmap.n_rows, key64=key64, exact=exact
        )
        scene.prepared = scene.counters = scene.flags = None  # with the tables they lie in
        scene.counts = {}

    def _plan(self, dry_run: BatchedBuilder) -> None:
        sizes = [
            sum(_room(part) for side in dry_run.sides(place) if side for part in side.parts)
            for place in range(len(self.steps))
        ]
        levels = sum(_room(one) for one in dry_run.coords().values())
        storages = [one.table.flags.untyped_storage() for one in dry_run.levels.values()]
        tables = sum({one.data_ptr(): one.nbytes() for one in storages}.values())
        elements = self.first_part + levels + sum(sizes)
        # What a map is made of takes about as much twice, and some is lost between segments.
        needed = 4 * (elements + 3 * max(sizes, default=0)) + tables
        if needed > MOST_BYTES:
            raise TooLargeError(f"maps of {needed} bytes; the limit is {MOST_BYTES}.")
        memory, coords = self.arena.reserve(elements), self.scene.coords
        self.scene.coords = memory.narrow(0, 0, coords.numel()).view(coords.shape).copy_(coords)
        self.pool, self.aside = self.arena.pool(), self.arena.aside()

    def _maps(self) -> list[Any]:
        builder, self.parts = self._builder, list[tuple[int, torch.Size]]()
        self._end = self.first_part
        for one in builder.coords().values():
            self._kept(one)
        self.made = [
            tuple(side and side.over(*map(self._kept, side.parts)) for side in builder.sides(place))
            for place in range(len(self.steps))
        ]
        del self._builder  # its memory may be used by other captures
        return self.made

    def _kept(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in the arena."""
        memory = self.arena.memory
        assert memory is not None
        view = memory.narrow(0, self._end, tensor.numel()).view(tensor.shape)
        self.parts.append((_room(tensor), tensor.shape))
        self._end += _room(tensor)
        return view.copy_(tensor)

    def copies(self) -> Iterator[torch.Tensor]:
        """Copies of all that the last replay left in the arena, in the order of `parts`."""
        memory, sizes = self.arena.memory, [room for room, _ in self.parts]
        assert memory is not None
        held = memory.narrow(0, self.first_part, sum(sizes)).clone()
        for one, (_, shape) in zip(held.split(sizes), self.parts, strict=True):
            yield one.narrow(0, 0, math.prod(shape)).view(shape)


def _room(tensor: torch.Tensor) -> int:
    """Elements that a tensor takes in an arena."""
    return -(-tensor.numel() // _ALIGNED) * _ALIGNED
