"""Launches recorded as a graph, and what must not happen anywhere meanwhile.

A graph that is destroyed by the thread that captures spoils the capture, and so does pinned memory
that goes while a stream that has used it is captured. Nobody knows who lets go of them, and when:
the garbage collector, a model that drops another one in its forward, a cache that is full. So they
stay until no thread captures. The allocator cannot empty its cache meanwhile, either.

cuBLAS has a workspace per stream, and graphs hold its address. torch frees it when a program compiles
with `mode="reduce-overhead"`, and after 2.11 with the first graph of that stream that is destroyed
(pytorch/pytorch#193402). So nothing but captures runs on their streams, whose workspace lies in a pool
then, and graphs of one stream go together. Those that come later on the stream take the same workspace,
so its pool stays.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from ... import policy
from ...kernels.runtime.target import device_index
from ...kernels.runtime.uploads import uploaded, uploads_later
from ...refusals import Refusal, Why
from ..conv.deferred import conv as deferred_conv
from ..device import expandable_segments
from ..device.rocm import linear
from ..device.stream_order import Streams, alone_on, capture_stream, waiting

_local = threading.local()
_Result = TypeVar("_Result")


def in_trial() -> bool:
    """Whether this thread captures a model, or runs a trial of one."""
    return getattr(_local, "in_trial", False)


@contextlib.contextmanager
def trial() -> Iterator[None]:
    """In this block the thread does."""
    _local.in_trial = True
    try:
        yield
    finally:
        _local.in_trial = False


class Captures:
    """The captures that are under way, of all threads; the garbage collector is off meanwhile.

    expandable: they take expandable segments.
    """

    def __init__(self) -> None:
        self._lock, self._number, self._was_on = threading.Lock(), 0, False
        self.expandable = self._expanding = False
        self._alive: list[Any] = []

    def begin(self) -> None:
        """A capture begins."""
        with self._lock:
            if not self._number:
                self._was_on, self._expanding = gc.isenabled(), self.expandable
                gc.disable()
                if self._expanding:
                    expandable_segments.turn(True)
            self._number += 1

    def end(self) -> None:
        """One has ended, or failed."""
        released: list[Any] = []
        with self._lock:
            self._number -= 1
            if not self._number:
                released, self._alive = self._alive, released
                if self._expanding:
                    expandable_segments.turn(False)
                if self._was_on:
                    gc.enable()
        released.clear()  # with the lock free, as their end may let go of more

    def keep_alive(self, things: Any) -> None:
        """Hold them while anything is captured. Takes no lock: any line may let go of something."""
        if self._number:
            self._alive.append(things)

    def empty_cache(self) -> None:
        """Give free memory back to the device, unless anything is captured."""
        with self._lock:
            if not self._number:
                torch.cuda.empty_cache()


_captures = Captures()
empty_cache = _captures.empty_cache


class KeepAlive:
    """Keeps things alive as long as their owner, or until the captures end that are under way then."""

    def __init__(self, *things: Any) -> None:
        self._things = things

    def __del__(self, keep_alive: Callable[[Any], None] = _captures.keep_alive) -> None:
        keep_alive(self._things)


class _StreamGraphs(list[Any]):
    """torch's graphs that were captured on one stream: each of them keeps all others alive."""

    def __init__(self) -> None:
        super().__init__()
        self._threads: set[int] = set()

    def keep_workspace(self, device: torch.device) -> None:
        """Have this thread's cuBLAS, which is in use, take its workspace on the current stream from memory that stays,
        unless it has one."""
        if threading.get_ident() in self._threads:
            return
        before, pool = torch.cuda.memory_allocated(device), torch.cuda.graph_pool_handle()
        captured(lambda: linear(*[torch.zeros((8, 8), device=device)] * 2), pool)
        if torch.cuda.memory_allocated(device) > before:
            _with_workspaces.append(self[-1])
        self._threads.add(threading.get_ident())


_graphs_on: weakref.WeakValueDictionary[Any, _StreamGraphs] = weakref.WeakValueDictionary()  # by stream
_with_workspaces: list[Any] = []  # torch's graphs, at most one per thread and stream unless programs free workspaces


class CapturedGraph(KeepAlive):
    """A graph of what is launched on the current stream inside of it.

    torch's own context manager would collect garbage and empty the allocator's cache before.
    """

    def __init__(self, pool: Any, *buffers: Any) -> None:
        """buffers: what its launches read."""
        self._graph, self._pool = torch.cuda.CUDAGraph(), pool
        together = _graphs_on.setdefault(torch.cuda.current_stream(), _StreamGraphs())
        together.append(self._graph)
        super().__init__(together, *buffers)
        self.replay = self._graph.replay

    def __enter__(self) -> None:
        _captures.begin()
        try:
            # Other threads cannot wait for this stream while it captures, see `StreamOrder.wait`.
            torch.cuda.current_stream().synchronize()
            with waiting:
                self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        except BaseException:
            _captures.end()
            raise

    def __exit__(self, exception_type: Any, error: Any, traceback: Any) -> None:
        try:
            self._end(error)
        finally:
            _captures.end()

    def _end(self, error: Any) -> None:
        if error is None:
            try:
                self._graph.capture_end()
                return
            except BaseException:
                _abandon(self._graph, self._pool)
                raise
        _abandon(self._graph, self._pool)


def captured(work: Callable[[], _Result], pool: Any, room: torch.Tensor | None = None) -> tuple[CapturedGraph, _Result]:
    """(the graph of what `work` launches on the current stream, what it returns).

    room: for numbers that launches read, see `uploads_later`.
    """
    graph = CapturedGraph(pool, room)
    with uploads_later(room) as writes, graph:
        result = work()
    for destination, values in writes:
        destination.copy_(uploaded(values, destination.device))
    return graph, result


def captured_from(work: Callable[[Sequence[Any]], _Result], pool: Any) -> tuple[CapturedGraph, _Result]:
    """The same from where `work` enters the context that it is given."""
    graph = CapturedGraph(pool)
    return graph, work([graph])


@contextlib.contextmanager
def preserved_statistics(model: torch.nn.Module) -> Iterator[None]:
    """Buffers of a model have the same values afterwards."""
    # Not the buffers themselves: their versions are of interest to backward passes still to come.
    buffers = [buffer.data for buffer in model.buffers()]
    values = copies_of(buffers)
    try:
        yield
    finally:
        copy_each(buffers, values)


def copies_of(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Of each tensor."""
    copies = [torch.empty_like(tensor) for tensor in tensors]
    copy_each(copies, tensors)
    return copies


def copy_each(destinations: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each tensor to another one, in few launches: torch has one for many tensors, if all are of one dtype."""
    by_dtype: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for destination, source in zip(destinations, sources, strict=True):
        pair = by_dtype.setdefault(destination.dtype, ([], []))
        pair[0].append(destination)
        pair[1].append(source)
    for pair in by_dtype.values():
        torch._foreach_copy_(*pair)


def check_room(peak: int, reserved: int, under_way: int = 0) -> int:
    """Bytes that were captured. Raises Refusal unless the GPU has memory for them and, beside it, for all that the
    program has used at once so far, `peak` bytes: what serves the layers' results in an eager call serves other parts
    of the program between two calls.

    reserved: bytes before the capture.  under_way: bytes in use, where a backward pass is still to come.
    """
    held = torch.cuda.memory_reserved()
    graph, there = held - reserved, torch.cuda.mem_get_info()[0] + held
    if under_way:  # the backward pass adds less than half of what a whole step takes
        peak = max(peak, under_way + graph // 2)
    if peak + graph > there:
        raise Refusal(Why.GRAPH_NO_ROOM)
    return graph


def free_beside(graph: int) -> int:
    """Bytes that layers can have beside a graph of so many: the GPU's, and those that torch's allocator keeps."""
    kept = torch.cuda.memory_reserved() - torch.cuda.memory_allocated() - graph
    return int(torch.cuda.mem_get_info()[0]) + max(0, kept)


class GraphMemory:
    """The memory of a model's graphs, of which one is replayed at a time.

    What one of them has freed serves the next one, if that is captured on the same stream and asks
    for no larger block. So all are captured on `stream`, where nothing else runs.

    pool: of the allocator, as captures take it. It gives memory back, or to others, once `stream` has come to an end.
    multiplies: whether operators of torch multiply matrices in there.
    """

    def __init__(self, device: torch.device, before: GraphMemory | None = None) -> None:
        """before: the same model's, which this one replaces."""
        self.device = device
        self.multiplies: bool = before is not None and before.multiplies
        self.pool, self.stream = torch.cuda.graph_pool_handle(), capture_stream(device, _graphs_on)
        self._used, self._streams = torch.cuda.Event(), Streams(device)
        _captures.expandable = expandable_segments.possible(device_index(device))

    def used(self) -> None:
        """The memory is used until what has been queued on the current stream so far is over."""
        with alone_on(self.stream):
            self._used.record(self._streams.current())
            self.stream.wait_event(self._used)

    def full(self) -> bool:
        """Whether so many graphs have been captured here that all should go, for those that serve no more to go."""
        return len(_graphs_on.get(self.stream, ())) >= policy.STREAM_GRAPHS

    def captured(self, capture: Callable[[Any], _Result]) -> _Result:
        """The graph that `capture` makes in the pool that it is given. Where the capture learnt what
        follows layers, it is made again: a graph must not launch them twice."""
        together = _graphs_on.setdefault(torch.cuda.current_stream(), _StreamGraphs())
        if self.multiplies:
            together.keep_workspace(self.device)
        tries = deferred_conv.tries
        graph = capture(self.pool)
        if deferred_conv.tries > tries:
            del graph  # before the next one wants memory
            graph = capture(self.pool)
        return graph


def _abandon(graph: torch.cuda.CUDAGraph, pool: Any) -> None:
    """End a capture that failed, in the allocator as well, which torch leaves out then."""
    from ...kernels.runtime.triton_compat import end_pool

    with contextlib.suppress(RuntimeError):
        graph.capture_end()
    with contextlib.suppress(RuntimeError):
        end_pool(torch.cuda.current_device(), pool)
