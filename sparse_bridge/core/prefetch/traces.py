"""The launches of an input's maps, repeated from a trace: the compiled helper computes sizes and
addresses in straight lines, instead of Python going through all that decides about them, see
`kernels.runtime.launch_trace`. Without the helper nothing is traced.

What stays is what no trace can know: how large levels may get, their bounds, and what the counters
say. A trace serves inputs with the same requests and keys of the same widths, for which its guards
hold; other inputs are queued step by step, and may be traced, too.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ... import log, native, policy, settings
from ...errors import KernelError
from ...kernels.runtime import target as targets
from ...kernels.runtime.fetched import Fetched
from ...kernels.runtime.host_program import Steps
from ...kernels.runtime.launch_trace import Trace, Traced, TracedTarget
from ...kernels.runtime.symbolic import Sym
from ...refusals import Refusal, Why
from ..device.kernels import hash_table
from ..geometry.boxes import Box, KeyLayout
from ..maps.coordinate_map import table_of
from .level_layouts import LevelLayouts
from .recording import BuiltSteps, Views

if TYPE_CHECKING:
    from .batched_builder import BatchedBuilder

_FAR = 1 << 24  # coordinates of inputs that traces serve

# The number of a set of views that products asked the maps for; by level, whether keys have 64 bits,
# and whether they can be sorted.
_Key = tuple[int, tuple[tuple[bool, bool], ...]]


_local = threading.local()


@contextlib.contextmanager
def untraced() -> Iterator[None]:
    """In this block no input of this thread is traced: a captured graph will soon queue the maps of inputs like it."""
    outer, _local.untraced = getattr(_local, "untraced", False), True
    try:
        yield
    finally:
        _local.untraced = outer


class NoOperations(TorchDispatchMode):
    """Nothing of torch runs while symbols are at work: it would not be repeated."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise Refusal(Why.TRACE_OPERATION, func)


class _Root:
    """Stands for the coordinates of an input in a trace."""

    rows = type("_AllRows", (), {"device": None})

    def __init__(self, coords: Any) -> None:
        self.coords, self.n_rows, self.device = coords, coords.shape[0], coords.device

    def table(self, target: Any, layout: KeyLayout) -> Any:
        return table_of(self.coords, target, layout, None)[0]


class _Traced:
    """Inputs whose coordinates are queued by one program. steps: of it.  maps: programs that queue
    the maps over them, with their steps."""

    def __init__(self, traced: Traced) -> None:
        self.steps, self.coordinates = traced.first, traced.first.loaded()
        self.maps: list[tuple[Steps, Any]] = []
        self._keep_alive = list[Any]()
        self.add(traced)

    def add(self, traced: Traced) -> None:
        """Learn to queue maps like these, too."""
        if not any(steps.same(traced.second) for steps, _ in self.maps):
            self.maps.append((traced.second, traced.second.loaded()))
            self._keep_alive += traced.keep_alive


class Traces:
    """The traces of one list of requests."""

    def __init__(self) -> None:
        self._traces: dict[_Key, list[_Traced]] = {}
        self._attempts: dict[_Key, policy.Attempts] = {}
        self._of: Any = None  # what else the traces are of
        self._number, self._lock = 0, threading.Lock()
        self._failed = False

    def repeated(self, builder: BatchedBuilder, capacities: dict[int, int]) -> tuple[BuiltSteps | None] | None:
        """The maps of an input, queued from a trace, or (None,) where it is not like the last; None
        where no trace serves it, and it is to be queued step by step."""
        built = self._repeated(builder, capacities)
        if built is None:
            builder.level_bounds = []
        return built

    def _repeated(self, builder: BatchedBuilder, capacities: dict[int, int]) -> tuple[BuiltSteps | None] | None:
        key = self._key(builder)
        traces = None if key is None else self._traces.get(key)
        if not traces or not _undisturbed(builder):
            return None
        cmap = builder.cmap
        stream = targets.current_stream(builder.device)
        numbers = [stream, *_numbers(builder, capacities)]
        for traced in traces:
            first = traced.coordinates(None, (cmap.coords,), numbers)
            if first is not None:
                break
        else:
            return None
        (counters, flags, lengths, level_bounds), state = first
        builder.level_bounds = list(level_bounds)
        read = Fetched.now([counters, flags.view(), *builder.extra_readbacks()])
        if not _distinct(read[1], cmap.n_rows):
            return None
        rows = builder.sizes(capacities, read, lengths)
        if rows is None:
            return (None,)
        exact = [rows[index + 1] for index in capacities]
        for _, maps in list(traced.maps):  # another thread may learn more
            result = maps(state, (), exact)
            if result is not None:
                break
        else:
            return None
        sides, coords = result[0]
        levels = dict(zip([index + 1 for index in capacities], coords, strict=True))
        return (builder.assembled(list(sides), rows, levels),)

    def learn(self, builder: BatchedBuilder, capacities: dict[int, int], rows: dict[int, int]) -> None:
        """Trace an input that has just been queued, where inputs like it keep coming: less and less
        often, as each time costs as much as the maps of several."""
        key = self._key(builder)
        if key is None or self._failed or not _undisturbed(builder, queued=True):
            return
        if getattr(_local, "untraced", False):
            return
        if native.module() is None:  # it may come: its compiler may be slow, or it is turned off
            return
        if not self._attempts.setdefault(key, policy.Attempts(policy.TRACE)).due():
            return
        try:
            self._enter(key, _traced(builder, capacities, rows))
        except KernelError:
            raise
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        """Tracing raised this. Nothing ran: inputs like that one are queued step by step from now on, unless
        a kernel was still being compiled."""
        self._failed = not (isinstance(error, Refusal) and error.why is Why.TRACE_NOT_COMPILED)
        log.logger.debug("maps are not traced: %r", error)

    def _enter(self, key: _Key, traced: Traced) -> None:
        traces = self._traces.setdefault(key, [])
        for earlier in traces:
            if earlier.steps.same(traced.first):
                return earlier.add(traced)
        traces.append(_Traced(traced))

    def _key(self, builder: BatchedBuilder) -> _Key | None:
        """What the traces of an input are found by; None where it is not traced."""
        if not builder.target.takes_addresses:
            return None
        if max([box.furthest for box in builder.boxes.values()]) > _FAR:
            return None
        keys = tuple([(layout.key64, layout.steps is not None) for layout in builder.layouts.values()])
        of = settings.generation, builder.last.views
        with self._lock:
            if of != self._of:
                copies = [Views(set(tiled), set(requested)) for tiled, requested in of[1]]
                self._of, self._number = (of[0], copies), self._number + 1
                self._traces.clear()
                self._attempts.clear()
            return self._number, keys


def _distinct(flags: list[int], n_rows: int) -> bool:
    """Whether all rows of a table live, and no two are equal."""
    return hash_table.live_flags(flags) == (n_rows, n_rows, False)


@functools.cache
def _listeners() -> tuple[Any, Any]:
    """Who may want to hear of launches."""
    from ...kernels.runtime import precompile
    from ...kernels.runtime.triton_compat import HOOKS

    return HOOKS, precompile


def _undisturbed(builder: BatchedBuilder, queued: bool = False) -> bool:
    """Whether launches may go by their addresses now. queued: the input is."""
    hooks, precompile = _listeners()
    hook = hooks.launch_enter_hook
    return (
        (queued or not builder.cmap.tabled)
        and not (precompile.dry_runs and precompile.futures() is not None)
        and targets.is_current(builder.device)
        and not getattr(hook, "calls", hook)
        and not targets.capturing(builder.device)
    )


def _numbers(builder: BatchedBuilder, capacities: dict[int, int]) -> list[int]:
    """What a trace is given: address and rows of the coordinates, rows to reserve at every new
    level, and where the bounds and the steps of all levels are, and those still to be derived."""
    cmap = builder.cmap
    numbers = [cmap.coords.data_ptr(), cmap.n_rows, *capacities.values()]
    for layout in builder.layouts.values():
        numbers.append(layout.bounds.at)
        if layout.steps is not None:
            numbers.append(layout.steps.at)
    if builder.unknown_levels and builder.where is not None:
        numbers.append(builder.where.records.data_ptr())
    return numbers


def _traced(builder: BatchedBuilder, capacities: dict[int, int], rows: dict[int, int]) -> Traced:
    """The programs that repeat the launches of an input."""
    cmap, device = builder.cmap, builder.device
    trace = Trace(device)
    numbers = iter(_numbers(builder, capacities))
    at, n_rows = trace.number(next(numbers)), trace.number(next(numbers))
    coords = trace.tensor((n_rows, cmap.coords.shape[1]), torch.int32, at)
    room: dict[int, Any] = {index: trace.number(next(numbers)) for index in capacities}
    layouts = {level: _layout(trace, layout, numbers) for level, layout in builder.layouts.items()}
    root: Any = _Root(coords)
    target = TracedTarget.of(builder.target, trace)
    copy = builder.copy_over(root, target)
    copy.layouts, copy.memory.sharing = layouts, True
    if builder.unknown_levels:
        copy.where = LevelLayouts.at(_Address(trace.number(next(numbers))), layouts)
    with NoOperations():
        counters, table = copy.expanded(room)
        outputs = counters, table.own[2], tuple(copy.counter_lengths()), tuple(copy.level_bounds)
        exact: list[Any] = trace.waits(outputs, [rows[index + 1] for index in capacities])
        level_rows: dict[int, Any] = dict(zip([index + 1 for index in capacities], exact, strict=True))
        level_rows[0] = n_rows
        copy.cut(level_rows)
        sides = tuple(copy.queued())
        return trace.traced((sides, tuple(copy.coords().values())))


def _layout(trace: Trace, layout: KeyLayout, numbers: Any) -> KeyLayout:
    """A layout whose bounds and steps are where the next numbers say."""
    columns = len(layout.limits.size)
    limits = Box.spanning((-_FAR,) * columns, (2 * _FAR,) * columns)
    bounds: Any = _Address(trace.number(next(numbers)))
    steps: Any = None if layout.steps is None else _Address(trace.number(next(numbers)))
    return KeyLayout(limits, layout.key64, bounds, steps)


class _Address:
    """Device memory that is read at an address."""

    def __init__(self, at: Sym) -> None:
        self.at = at

    def data_ptr(self) -> Sym:
        return self.at
