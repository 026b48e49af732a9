"""Launches captured as graphs, and the maps of a padded scene captured so."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ...kernels.runtime import target as targets
from ..geometry.boxes import Box
from ..maps.coordinate_map import CoordinateMap
from ..maps.rows import Rows
from .batched_builder import BatchedBuilder, ordered_alike
from .history import RequestHistory, Step
from .padded import PaddedInput

_STREAMS = 4  # on which maps are built side by side
_SLACK = 1.125  # capacity of the levels over the estimate


class Streams:
    """The current stream of a GPU, for whoever asks in every call: torch takes microseconds to make
    the object, and none to tell its number."""

    def __init__(self, device: torch.device) -> None:
        self.index = targets.device_index(device)
        self._number: int | None = None
        self._stream: torch.cuda.Stream | None = None

    def current(self) -> torch.cuda.Stream:
        number = torch._C._cuda_getCurrentRawStream(self.index)
        if self._stream is None or number != self._number:
            self._stream = torch.cuda.current_stream(self.index)
            self._number = number
        return self._stream


class CapturedMaps:
    """The maps of a padded scene as two graphs, of the coordinates of all levels and of the maps
    over them: the host learns how many rows there are as soon as the first is through.

    scene: with the `n_rows` coordinates of a scene like those to come in place; its maps are
    `prepared`. box: of the coordinates.  distinct: see `BatchedBuilder.lay_out`.  abreast: maps
    side by side
    on several streams, faster for the GPU, at up to twice the memory.  Raises RuntimeError where
    nothing can be captured.

    bytes: of memory taken for the graphs, about.
    """

    def __init__(
        self, scene: PaddedInput, box: Box, target: targets.Target, steps: tuple[Step, ...],
        pool: Any, n_rows: int, distinct: bool = False, abreast: bool = True,
    ) -> None:  # fmt: skip
        self.scene = scene
        dry_run = builder_over(scene, box, target, steps, n_rows)  # compiles and loads beforehand
        if not dry_run.lay_out(scene, distinct):
            raise RuntimeError("the last scene does not tell how large the levels get")
        dry_run.queued()
        assert scene.counters is not None and scene.flags is not None
        self.lengths = [len(scene.counters), len(scene.flags)]
        self.host = torch.empty(sum(self.lengths), dtype=torch.int32, pin_memory=True)
        del dry_run
        device = scene.coords.device
        torch.cuda.current_stream(device).synchronize()
        before = torch.cuda.memory_reserved(device)
        # Its tables are read by the second graph.
        self._builder = builder_over(scene, box, target, steps, n_rows)
        streams = [torch.cuda.Stream(device) for _ in range(_STREAMS)] if abreast else []
        with apart(device):
            self.first, _ = captured(lambda: self._coordinates(distinct), pool)
            self.second, made = captured(lambda: self._builder.queued_apart(streams), pool)
        taken = torch.cuda.memory_reserved(device) - before
        self.bytes = max(0, taken) + scene.coords.nbytes
        scene.prepared = made, self._builder.coords()
        self.event, self._stream = torch.cuda.Event(), Streams(device)

    def _coordinates(self, distinct: bool) -> None:
        scene = self.scene
        self._builder.lay_out(scene, distinct)
        assert scene.counters is not None and scene.flags is not None
        mine = self.host.split(self.lengths)
        mine[0].copy_(scene.counters, non_blocking=True)
        mine[1].copy_(scene.flags, non_blocking=True)

    def start(self, coords: torch.Tensor) -> None:
        """Queue the maps over these coordinates, of which there must be capacity for."""
        n_rows = coords.shape[0]
        self.scene.coords.narrow(0, 0, n_rows).copy_(coords)
        self.scene.count.fill_(n_rows - 1)
        self.first.replay()
        self.event.record(self._stream.current())
        self.second.replay()

    def rows(self, n_rows: int) -> dict[int, int] | None:
        """Rows of every level; None where the scene cannot be served, or would be ordered
        otherwise. Waits for the first graph."""
        self.event.synchronize()
        read, n_counters = self.host.tolist(), self.lengths[0]
        rows = self.scene.validated(read[:n_counters], read[n_counters:], n_rows)
        return rows if rows is not None and ordered_alike(rows, self.scene.capacities) else None


def builder_over(
    scene: PaddedInput, box: Box, target: targets.Target, steps: tuple[Step, ...], n_rows: int
) -> BatchedBuilder:
    """The builder of a padded scene, of whose coordinates about `n_rows` are used."""
    root = CoordinateMap(scene.coords, box, Rows(None, scene.count, scene.coords.shape[0]))
    root.adopt()
    return BatchedBuilder(root, target, steps, scene.record, _SLACK, n_rows)


def padded_input(coords: torch.Tensor, capacity: int, record: RequestHistory) -> PaddedInput:
    """A scene with capacity for `capacity` rows, and `coords` [N, 1 + D] in place."""
    wide = coords.new_zeros((capacity, coords.shape[1]))
    wide[: coords.shape[0]].copy_(coords)
    return PaddedInput(wide, coords.new_full((1,), coords.shape[0] - 1), record)


@contextlib.contextmanager
def apart(device: torch.device) -> Iterator[None]:
    """A stream of its own, between what came before and what comes after, and other random
    numbers."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    try:
        with _random_numbers_apart(device), torch.cuda.stream(stream):
            yield
    finally:
        torch.cuda.current_stream(device).wait_stream(stream)


def captured(work: Callable[[], Any], pool: Any) -> tuple[torch.cuda.CUDAGraph, Any]:
    """(the graph of what `work` launches on the current stream, what it returns).

    torch's own context manager would collect garbage and empty the allocator's cache before.
    """
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        made = work()
        graph.capture_end()
    except BaseException:
        _abandon(graph, pool)
        raise
    return graph, made


def _abandon(graph: torch.cuda.CUDAGraph, pool: Any) -> None:
    """End a capture that failed, in the allocator as well, which torch leaves out then."""
    from ...kernels.runtime.triton_compat import end_pool

    with contextlib.suppress(RuntimeError):
        graph.capture_end()
    with contextlib.suppress(RuntimeError):
        end_pool(torch.cuda.current_device(), pool)


@contextlib.contextmanager
def _random_numbers_apart(device: torch.device) -> Iterator[None]:
    """A GPU's random numbers from another generator: a capture that fails leaves the one that was
    in use unusable, and trials must not move the user's."""
    generator = torch.cuda.default_generators[targets.device_index(device)]
    own = generator.graphsafe_get_state()
    generator.graphsafe_set_state(torch.Generator(device).graphsafe_get_state())
    try:
        yield
    finally:
        generator.graphsafe_set_state(own)
