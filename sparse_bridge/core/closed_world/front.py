"""Whether what a model does in front of its sparse tensor may run once more: a trial and a capture repeat it.

Its results are no part of a graph, and an ordinary call computes them anew. So it may read what it likes. What it
writes that outlasts the call, prints, draws or sends would be there twice.
"""

from __future__ import annotations

import ast
import contextlib
import itertools
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

import numpy as np

from ...refusals import Refusal, Why
from .audit import Audit, resolve
from .kept import refuse_contents
from .origins import words
from .reading import Reading, read
from .sources import position, source_of
from .state import State
from .watch import ABSENT, Watch

# Functions that only look, by what the watch calls them.
_LOOKS = words(
    "time.time time.time_ns time.perf_counter time.perf_counter_ns time.monotonic time.monotonic_ns time.process_time "
    "time.process_time_ns time.thread_time time.thread_time_ns os.getenv os.__getitem__ os.__contains__ os.encode "
    "os.decode os.getcwd posix.getcwd os.getpid posix.getpid os.fspath posix.fspath sys.getsizeof "
    "sys._getframe id "
    "torch.cuda.synchronize torch.cuda.memory.memory_allocated torch.cuda.memory.max_memory_allocated "
    "torch.cuda.memory.memory_reserved torch.cuda.memory.memory_stats torch.cuda.memory.mem_get_info "
    "torch.random.initial_seed torch.random.get_rng_state"
)


class _FrontWatch(Watch):
    def _import(self, frame: FrameType) -> None:
        self._muted = frame  # it is loaded once

    def _refuse(self, why: Why, frame: FrameType, name: str, *details: Any) -> None:
        if why is not Why.GRAPH_HOST_READ and name not in _LOOKS:
            super()._refuse(why, frame, name, *details)


class _Reached(State):
    """drawn: numbers that numpy draws, which nothing sees as they are drawn, and where."""

    drawn: tuple[str, str] | None = None

    def _object(self, value: Any, label: str, where: str) -> None:
        if type(value).__module__.startswith("numpy.random"):
            self.drawn = label, where
        self.count = 0  # nothing is kept
        super()._object(value, label, where)


class FrontAudit(Audit):
    """Watches a call of a model until it comes to its sparse layers."""

    def __init__(self, model: Any, tensors: Any) -> None:
        super().__init__(model, tensors)
        self._watch = _FrontWatch(frozenset(map(id, self._modules.values())))
        self._lines: dict[CodeType, int] = {}  # at which functions are under way that went on
        self._watching = False
        self._drawn: Any = False  # how far numpy's random numbers are; then whether that has changed

    def __enter__(self) -> FrontAudit:
        self._watching = True
        self._drawn = _numpy_numbers()
        super().__enter__()
        return self

    def stop(self, frame: FrameType | None) -> None:
        """The sparse layers begin, in a function that `frame` has called."""
        for one in self._under_way(frame):
            self._lines[one.f_code] = one.f_lineno
        self.__exit__()

    def __exit__(self, *error: object) -> None:
        if self._watching:
            self._watching = False
            super().__exit__(*error)
            self._drawn = self._drawn != _numpy_numbers()

    def refuse_effects(self) -> None:
        """Raise Refusal where something outlasts the call."""
        if self._refusal is not None:
            raise self._refusal
        watch = self._watch
        if watch.refusals:
            raise watch.refusals[0]
        if self._drawn:
            raise Refusal(Why.GRAPH_SIDE_EFFECT, "numpy.random", "in front of its sparse layers")
        for (_, name), (names, value, where) in watch.written.items():
            if names.get(name, ABSENT) is not value:
                raise Refusal(Why.GRAPH_WRITES_STATE, name, where)
        owners = {code: owners for code, (_, owners) in watch.ran.items()}
        readings = read(owners, watch.rows, watch.modules)
        for code, reading in readings.items():
            self._refuse_writes(code, reading)
        refuse_contents(self._modules, self._trusted, self._before, watch.changed)
        self._refuse_counters(readings)
        reached = self._reached(readings)
        self._refuse_changed(reached)
        if reached.drawn is not None:
            label, where = reached.drawn
            raise Refusal(Why.GRAPH_SIDE_EFFECT, label, where)

    def _refuse_writes(self, code: CodeType, reading: Reading) -> None:
        """Raise Refusal where a function writes elsewhere."""
        last = self._lines.get(code)
        for why, what, line in reading.problems.values():
            if why is Why.GRAPH_WRITES_STATE and (last is None or line <= last):
                raise Refusal(why, what, position(code, line))

    def _refuse_counters(self, readings: dict[CodeType, Reading]) -> None:
        """Raise Refusal where an attribute of a module has got a value that follows from the one before."""
        counters = {name: (code, line) for code in readings for name, line in _counters(code)}
        for label, module in self._modules.items():
            before, now = self._before[id(module)][0], module.__dict__
            for name in counters.keys() & now.keys() if id(module) not in self._trusted else ():
                if before.get(name, ABSENT) is not now[name]:
                    raise Refusal(Why.GRAPH_WRITES_STATE, f"{label}.{name}", position(*counters[name]))

    def _reached(self, readings: dict[CodeType, Reading]) -> _Reached:
        """What names and attributes of the functions lead to."""
        attributes = {name for reading in readings.values() for name in reading.attributes}
        state = _Reached(self.model, attributes, set(), False)
        for label, module in self._modules.items():
            state.count = 0
            with contextlib.suppress(Refusal):  # it may be read
                state.own_module(module, label, id(module) in self._trusted, {}, label)
        for code, reading in readings.items():
            own = [name for name in reading.names.values() if name.imported or name.root not in code.co_freevars]
            for name, names in itertools.product(own, self._watch.ran[code][0].values()):
                state.count = 0
                with contextlib.suppress(Refusal):
                    resolve(state, name, names, position(code), False)
        return state


def _numpy_numbers() -> tuple[Any, ...]:
    name, keys, *rest = np.random.get_state()
    return name, np.asarray(keys).tobytes(), *rest


def _counters(code: CodeType) -> Iterator[tuple[str, int]]:
    """Attributes that a function writes and computes from what they were, and the lines."""
    source = source_of(code)
    for node in ast.walk(source.node) if source is not None else ():
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Attribute):
            yield node.target.attr, node.lineno
        elif isinstance(node, ast.Assign):
            loaded = {part.attr for part in ast.walk(node.value) if isinstance(part, ast.Attribute)}
            for target in node.targets:
                for part in ast.walk(target):
                    if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store) and part.attr in loaded:
                        yield part.attr, node.lineno
