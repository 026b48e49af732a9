"""Parts of models that are replayed without being asked for: found when their layers want maps.

The first request for a kernel map over new coordinates comes from a layer deep inside of a model.
The calls of modules that are under way then tell who was given the sparse tensor, or made it of
something else. The outermost of these modules is tried first: its forward is replaced by a `Unit`,
which runs it until calls of a kind keep coming, and replays it from then on. A module that cannot
be replayed is left as it was, with the reason, and the next inner one is tried.

A module that makes the sparse tensor itself (of features and coordinates, in a dictionary, say)
runs ordinarily up to the first layer that takes it, the `Entrance`: what comes after is captured,
and in a replay never runs.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import nn

from ... import hooks, memory, policy, settings, state
from ...refusals import Refusal, Why
from ..maps import request as requests
from ..maps.coordinate_map import CoordinateMap
from ..maps.map_cache import MapStore
from ..maps.request import BuiltMap, MapRequest
from . import padded, prefetch
from .calls import announced_inputs
from .calls.call import Call, call_of, other_inputs, read_constants
from .calls.frames import constants_alive
from .calls.input_proxies import RESUMED, InputProxies, with_proxies
from .calls.wrappers import wraps
from .captured_model import Tensors
from .graph_capture import trying
from .graphed_module import MISSING, ReplayResult
from .replay import Replayer, Summary
from .replay_training import TrainingReplayer

_CALL = nn.Module._call_impl.__code__
_TensorsOf = Callable[[Any], "Tensors | None"]
_lock = threading.RLock()
_local = threading.local()
_units: weakref.WeakKeyDictionary[nn.Module, Unit] = weakref.WeakKeyDictionary()
_refused: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
_settled: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # outermost modules with nothing to find


def _nobody(_: Any) -> Any:
    return None


_tensors_of: _TensorsOf = _nobody
_layers_of: Callable[[nn.Module], int] = _nobody


def install(tensors_of: _TensorsOf, layers_of: Callable[[nn.Module], int]) -> None:
    """Look for parts of models when layers ask for maps.

    tensors_of: the framework of a sparse tensor, None for other objects.  layers_of: how many of
    its layers a module has.
    """
    global _tensors_of, _layers_of
    _tensors_of, _layers_of = tensors_of, layers_of
    requests.register(_provide, announced_inputs.announced)


def wanted() -> bool:
    """Whether the settings ask for it, and no limit on memory forbids it."""
    return settings.get().optimize == "graphs" and memory.limit is None


def _provide(store: MapStore, cmap: CoordinateMap, req: MapRequest) -> BuiltMap:
    if wanted() and padded.current() is None and not trying() and not hooks.traced():
        _look(sys._getframe(1))
    return prefetch.provide(store, cmap, req)


def summary() -> list[Summary]:
    """Parts that are replayed or wait for it, and those that are not, and why."""
    with _lock:
        found = [unit.replayer.summary() for unit in _units.values()]
        return found + [Summary(type(m).__name__, 0, 0, why) for m, why in _refused.items()]


@state.owns
def remove() -> None:
    """Give all modules their own forward back, and forget what was found."""
    with _lock:
        while _units:
            _units.popitem()[1].take_out()
        _refused.clear()
        _settled.clear()


class _Calling(NamedTuple):
    """A call of a module that is under way."""

    module: nn.Module
    takes: bool  # a sparse tensor


def _calls(frame: types.FrameType | None) -> Iterator[_Calling]:
    """From the innermost one outwards."""
    while frame is not None:
        if frame.f_code is _CALL:
            held = frame.f_locals
            module, args, kwargs = (held.get(name) for name in ("self", "args", "kwargs"))
            if isinstance(module, nn.Module):
                given = [*(args or ()), *(kwargs or {}).values()]
                yield _Calling(module, any(map(_holds, given)))
        frame = frame.f_back


def _is_tensor(value: Any) -> bool:
    tensors = _tensors_of(value)
    return tensors is not None and tensors.is_tensor(value)


def _holds(value: Any) -> bool:
    """Whether there is a sparse tensor in a value, or an object around one."""
    if isinstance(value, (list, tuple)):
        return any(map(_holds, value))
    if isinstance(value, dict):
        return any(map(_holds, value.values()))
    return _is_tensor(value) or wraps(value, _is_tensor)


def _look(frame: types.FrameType | None) -> None:
    """Give the largest module around a layer that may be replayed a forward that does."""
    calls = list(_calls(frame))[::-1]  # outermost first
    if not calls or calls[0].module in _settled:
        return
    with _lock:
        if any(one.module in _units for one in calls):
            return
        for place, one in enumerate(calls):
            if one.module in _refused or not _possible(one.module):
                continue
            entrance = None
            if not one.takes:
                inner = next((c.module for c in calls[place + 1 :] if c.takes), None)
                if inner is None or not hooks.plain(inner):
                    continue
                entrance = inner
            _units[one.module] = Unit(one.module, _tensors_of, entrance)
            return
        _settled.add(calls[0].module)


def _possible(module: nn.Module) -> bool:
    """Whether a module may be given another forward, and is worth it."""
    home = type(module).__module__
    if home.startswith("torch.") and not home.startswith("torch.nn.modules"):
        return False  # what spreads a model over devices, a scripted or compiled one
    return hooks.plain(module) and _layers_of(module) >= policy.LEAST_LAYERS


class _Visit:
    """One call of a module that makes its sparse tensor itself.

    given: another sparse tensor to be taken at the entrance, and copies of dictionaries, watched
    from there on.
    """

    def __init__(self, unit: Unit, args: Any, kwargs: Any, given: InputProxies | None = None) -> None:
        self.unit, self.args, self.kwargs, self.given = unit, args, kwargs, given
        self.dicts, self.parts = other_inputs(args, kwargs)
        self.before = {place: dict(own) for place, own in self.dicts.items()}
        self.entered = False
        self.result: ReplayResult | None = None


class _Replayed(BaseException):
    """Leaves a forward whose result is known already."""

    def __init__(self, visit: _Visit, value: Any) -> None:
        self.visit, self.value = visit, value


@contextlib.contextmanager
def _visiting(visit: _Visit | None) -> Iterator[None]:
    before = getattr(_local, "visit", None)
    _local.visit = visit
    try:
        yield
    finally:
        _local.visit = before


class Unit:
    """The forward of a part of a model that is replayed where calls of a kind keep coming."""

    in_place_of = None

    def __init__(self, model: nn.Module, tensors_of: _TensorsOf, entrance: nn.Module | None = None) -> None:
        """entrance: the module inside that first takes the sparse tensor that `model` makes."""
        self.model, self.tensors_of = model, tensors_of
        self.own = functools.partial(type(model).forward, model)
        self.__wrapped__ = self.own
        self.replayer = Replayer(TrainingReplayer(model, self.own, tensors_of))
        self.entrance = None if entrance is None else _Entrance(entrance)
        model.__dict__["forward"] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if hooks.traced():  # first: nobody can trace the rest
            return self.own(*args, **kwargs)
        visit: _Visit | None = getattr(_local, "visit", None)
        inside = visit is not None and visit.given is not None  # of a trial
        if inside or not wanted() or trying() or padded.current() is not None:
            return self.own(*args, **kwargs)
        if self.entrance is None:
            out = self.replayer(*args, **kwargs)
        else:
            out = self._through(args, kwargs)
        self._settle()
        return out

    def _through(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        visit = _Visit(self, args, kwargs)
        try:
            with _visiting(visit):
                out = self.own(*args, **kwargs)
        except _Replayed as found:
            if found.visit is not visit:
                raise
            return found.value
        if visit.result is not None:
            visit.result.computed(out)
        return out

    def enter(self, visit: _Visit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The entrance was called. Raises _Replayed where a graph knows what would come."""
        mode = self.replayer.mode()
        known = {id(one) for one in visit.dicts.values()}
        try:
            call = call_of(args, kwargs, self.tensors_of, set(), RESUMED)
            if call is None or not mode.ready():
                return
            dicts, parts = {**visit.dicts, **call.dicts}, {**visit.parts, **call.parts}
            alive = constants_alive(sys._getframe(1), _THROUGH, lambda one: id(one) in known or _is_tensor(one))
            constants = call.constants, alive, read_constants(dicts, mode.reads)
        except Refusal as error:
            mode.refuse(str(error))
            mode.attempts.failed()
            return
        over = functools.partial(self._over, visit)
        visit.result = mode.try_call(Call(call.x, over, constants, dicts, parts, self.tensors_of))
        if visit.result is not None and visit.result.output is not MISSING:
            raise _Replayed(visit, visit.result.output)

    def _over(self, visit: _Visit, function: Callable[..., Any], given: InputProxies) -> Any:
        again = _Visit(self, (), {}, given)
        given.before = visit.before
        args = [with_proxies(one, given, (n,)) for n, one in enumerate(visit.args)]
        kwargs = {key: with_proxies(one, given, (key,)) for key, one in visit.kwargs.items()}
        with _visiting(again):
            out = function(*args, **kwargs)
        if not again.entered:
            raise Refusal(Why.GRAPH_BRANCH)
        return out

    def _settle(self) -> None:
        modes = self.replayer, self.replayer.training
        reason = next((why for mode in modes if (why := mode.given_up()) is not None), None)
        if reason is not None and not any(mode.graphs for mode in modes):
            with _lock:
                if _units.pop(self.model, None) is not None:
                    self.take_out()
                    _refused[self.model] = reason
                    _settled.clear()  # inner ones may do

    def take_out(self) -> None:
        """Give the model its own forward back."""
        if self.model.__dict__.get("forward") is self:
            del self.model.__dict__["forward"]
        if self.entrance is not None:
            self.entrance.take_out()

    def __reduce__(self) -> Any:
        """Pickles of the model know its own forward."""
        return functools.partial, (type(self.model).forward, self.model)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        twin = memo.get(id(self.model))
        return self if twin is None else functools.partial(type(twin).forward, twin)


_THROUGH = Unit._through.__code__


class _Entrance:
    """The forward of the module that first takes the sparse tensor which its unit makes."""

    in_place_of = None

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.own = functools.partial(type(module).forward, module)
        self.__wrapped__ = self.own
        module.__dict__["forward"] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if hooks.traced():
            return self.own(*args, **kwargs)
        visit: _Visit | None = getattr(_local, "visit", None)
        if visit is None or visit.entered or visit.unit.entrance is not self:
            return self.own(*args, **kwargs)
        visit.entered = True
        if visit.given is None:
            visit.unit.enter(visit, args, kwargs)
            return self.own(*args, **kwargs)
        put, named = visit.given.resumed_arguments(args, kwargs)
        return self.own(*put, **named)

    def take_out(self) -> None:
        if self.module.__dict__.get("forward") is self:
            del self.module.__dict__["forward"]

    def __reduce__(self) -> Any:
        return functools.partial, (type(self.module).forward, self.module)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        twin = memo.get(id(self.module))
        return self if twin is None else functools.partial(type(twin).forward, twin)
