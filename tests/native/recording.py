"""The same calls with the compiled helper, without, and with one that refuses at random: what is
launched, with which values, what comes out and what is remembered of it."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch

from sparse_bridge import hooks, native, settings, state
from sparse_bridge.core.conv import (
    activations,
    convolution,
    layers,  # noqa: F401 - which hands the helper what it reads
)
from sparse_bridge.core.conv.deferred.conv import DeferredConv
from sparse_bridge.core.conv.history import histories
from sparse_bridge.core.maps.rulebook import Rulebook
from sparse_bridge.native import calls as native_calls
from tests import walk_apis
from tests.fake_driver import Driver, Launch, kinds_of_values

Told = Callable[[str], tuple[list[Any], dict[str, int]]]
# (share of the helper's questions that are refused, seed); None: without the helper.
WAYS = {"on": (0.0, 1), "off": None}
RANDOM = {f"refused {share:.1%}, {seed}": (share, seed) for share in (0.005, 0.02, 0.1) for seed in (1, 2)}
_TYPES = {
    "P": ctypes.c_uint64,
    "l": ctypes.c_int64,
    "i": ctypes.c_int32,
    "h": ctypes.c_int16,
    "b": ctypes.c_int8,
    "f": ctypes.c_float,
    "d": ctypes.c_double,
}


def helper() -> Any:
    """The helper; skips where it cannot be compiled."""
    made = native.module()
    if made is None:
        pytest.skip(f"no helper: {native.reason()}")
    return made


def values_of(launch: Launch, kinds: str) -> list[Any]:
    """What the memory of a launch's parameters holds."""
    kinds = kinds.replace("x", "")
    return [_TYPES[kind].from_address(launch.parameters[place]).value for place, kind in enumerate(kinds)]


class Recorder:
    """Launches that arrive at the driver, with names for addresses: of parameters, of maps, of
    results by their number. Those stay, so that two of them never have one address.

    lines: launches, and what was told.  before: called with the name of a kernel before each, for
    tests that have launches fail: its result is the driver's.
    """

    def __init__(self) -> None:
        self.lines: list[Any] = []
        self.before: Callable[[str], int] = lambda name: 0
        self._names: list[tuple[str, str]] = []
        self._places: dict[int, str] = {}
        self._seen = 0
        self._held: list[Any] = []
        self._books: list[Rulebook] = []
        self._numbers: dict[int, int] = {}  # of those that were seen
        self._driver = Driver(self._launched)

    def entry(self, kernel: Any) -> Any:
        """`tests.fake_driver.entry_of`, whose launches arrive here."""
        kinds = kinds_of_values(kernel)
        self._names.append((kernel.name, kinds))
        launcher = helper().Launcher(self._driver.address, len(self._names), 128, 7, kinds)
        return launcher, (), ()

    def _launched(self, launch: Launch) -> int:
        name, kinds = self._names[launch.function - 1]
        code = self.before(name)
        if not code:
            others: dict[int, str] = {}
            pointers = [kind == "P" for kind in kinds if kind != "x"]
            found = zip(pointers, values_of(launch, kinds), strict=True)
            values = [self._place(value, others) if at else value for at, value in found]
            self.lines.append((name, launch.grid, launch.threads, launch.shared, values))
        return code

    def name(self, net: torch.nn.Module) -> None:
        """Name what a network holds."""
        for name, one in (*net.named_parameters(), *net.named_buffers()):
            self._places[one.data_ptr()] = name
            self._held.append(one.untyped_storage())

    def keep(self, tensor: torch.Tensor) -> None:
        """Have a result numbered, once it is seen."""
        at = tensor.data_ptr()
        if at and at not in self._places:
            self._places[at] = ""
            self._held.append(tensor.untyped_storage())

    def _place(self, address: int, others: dict[int, str]) -> str:
        """others: addresses of the same launch that nobody knows."""
        name = self._places.get(address)
        if name is not None:
            if not name:
                name = self._places[address] = f"result {self._seen}"
                self._seen += 1
            return name
        for book in self._books:
            for side, view in enumerate((*book._tiles, *book._tables)):
                for part in () if view is None else view.parts:
                    start = part.untyped_storage().data_ptr()
                    if 0 <= address - start < part.untyped_storage().nbytes():
                        number = self._numbers.setdefault(id(book), len(self._numbers))
                        return f"map {number}, view {side}, {address - start}"
        return others.setdefault(address, f"other {len(others)}")

    def tell(self, run: Callable[[], Any]) -> Any:
        """Run it, and note its result or its exception."""
        try:
            made = run()
        except Exception as error:
            self.lines.append((type(error).__name__, str(error)))
            return None
        features = getattr(made, "features", made)
        if isinstance(features, torch.Tensor):
            kind = type(features).__name__
            self.lines.append((kind, list(features.shape), features.dtype))
            if kind == "Tensor" and features.numel():
                self.lines.append(self._place(features.data_ptr(), {}))
        return made

    @contextlib.contextmanager
    def recording(self, *modules: Any) -> Iterator[None]:
        """Tensors and maps that are made inside stay."""

        def kept(own: Any) -> Any:
            @functools.wraps(own)
            def made(*args: Any, **named: Any) -> Any:
                it = own(*args, **named)
                if type(it) is torch.Tensor:
                    self.keep(it)
                return it

            return made

        native.module()  # which looks in `__init__` for the names that it reads: before that is replaced
        built = Rulebook.__init__

        def init(book: Any, *args: Any, **named: Any) -> None:
            self._books.append(book)
            built(book, *args, **named)

        with contextlib.ExitStack() as stack:
            makers = [(torch.Tensor, "new_empty"), *[(torch, name) for name in ("cat", "empty", "empty_like")]]
            for owner, name in makers:
                stack.enter_context(mock.patch.object(owner, name, kept(getattr(owner, name))))
            relu = kept(torch.relu)  # which is known as torch's own, or nothing would be fused
            for owner, name in ((torch, "relu"), (hooks, "TORCHS_RELU"), (activations, "TORCHS_RELU")):
                stack.enter_context(mock.patch.object(owner, name, relu))
            stack.enter_context(mock.patch.object(Rulebook, "__init__", init))
            for module in (walk_apis, *modules):
                stack.enter_context(mock.patch.object(module, "entry_of", self.entry))
            yield


def in_threads(count: int, work: Callable[[int], Any]) -> list[Any]:
    """What `work` returns of every number, by threads that take turns often."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(count) as pool:
            return list(pool.map(work, range(count)))
    finally:
        sys.setswitchinterval(interval)


@contextlib.contextmanager
def way(name: str) -> Iterator[None]:
    """The helper as `WAYS` and `RANDOM` say."""
    made, chosen = helper(), (WAYS | RANDOM)[name]
    with contextlib.ExitStack() as stack:
        if chosen is None:
            for function in native_calls.FUNCTIONS:
                stack.enter_context(mock.patch.object(native_calls, function, None))
        else:
            stack.callback(made.refuse, 0.0)
            made.refuse(*chosen)
        yield


@contextlib.contextmanager
def served() -> Iterator[dict[str, int]]:
    """How often each function of the helper did it, inside."""
    found = dict.fromkeys(native_calls.FUNCTIONS, 0)

    def counted(name: str, own: Any) -> Any:
        def call(*args: Any) -> Any:
            made = own(*args)
            found[name] += made is not NotImplemented
            return made

        return call

    with contextlib.ExitStack() as stack:
        for name in found:
            own = getattr(native_calls, name)
            if own is not None:
                stack.enter_context(mock.patch.object(native_calls, name, counted(name, own)))
        yield found


def check_alike(
    told: Callable[[str], tuple[list[Any], dict[str, int]]],
    ways: list[str],
    least: int,
    functions: set[str],
    times: int,
) -> None:
    """The same is recorded in every way as without the helper.

    told: of a way, (what was recorded, how often each function of the helper did it).  least: lines.  functions: that
    the helper does at least so many times, where it refuses nothing.
    """
    want, by_helper = told("off")
    assert len(want) > least and not any(by_helper.values())
    for chosen in ways:
        lines, by_helper = told(chosen)
        for place, (one, other) in enumerate(zip(lines, want, strict=False)):
            assert one == other, (chosen, place)
        assert len(lines) == len(want), chosen
        if chosen == "on":
            assert min(by_helper[one] for one in functions) >= times, by_helper


def remembered(net: torch.nn.Module) -> list[Any]:
    """What is known of what follows each layer of a network."""
    found: list[Any] = []
    for name, owner in (*net.named_modules(), *net.named_parameters()):
        held = histories.get(id(owner))
        if held is None or held[0]() is not owner:
            continue
        it = held[1]
        plans = [plan and (plan.steps, plan.lookups) for plan in (it.plan, it.full_plan)]
        found.append((name, it.seen, it.most, it.alone, it.disabled, it.launches.failures, it.plans.tries, *plans))
    return found


def state_of(conv: DeferredConv) -> list[Any]:
    """What a deferred convolution and the call of its layer have come to."""
    call = conv.call
    there = [one is not None for one in (conv.result, conv.fallback, call.launched)]
    between = getattr(call, "between", None)
    return [
        conv.steps,
        conv._used,
        conv._version,
        *there,
        call.target,
        call.shape,
        call.dtype,
        call.stream,
        call.fused is not None,
        None if between is None else between[1:3],
        conv.epilogue[1:3],
        [one is None for one in conv.epilogue],
    ]


@contextlib.contextmanager
def anew() -> Iterator[None]:
    """A process that knows nothing, on a GPU that is not there, where every layer is deferred."""
    state.reset()
    with settings.override(), mock.patch.object(convolution, "MIN_DEFERRED_ELEMENTS", [0, 0]):
        yield
    state.reset()
