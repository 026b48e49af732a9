"""Models that are replayed from graphs, or regions of them: asked for, or chosen when layers want maps.

The first request for a kernel map over new coordinates comes from a layer deep inside of a model.
The calls of modules on the stack then tell which modules took the sparse tensor or made it of
something else. The outermost of these is tried first: a `GraphRegion` is called in place of its forward. The region
runs that until calls of a kind keep coming, and replays it from then on. A module that cannot
be replayed is left as it was, with the reason, and the next inner one is tried.

A module that makes the sparse tensor itself (of features and coordinates, in a dictionary, say)
runs ordinarily up to the first layer that takes it, the resume point. What comes after is captured,
and in a replay never runs.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import types
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ... import hooks, memory, policy, settings, state
from ...refusals import Refusal, Why
from .. import served_forward
from ..device import rocm
from ..device.device_support import kernel_target
from ..maps import request as requests
from ..maps.coordinate_map import CoordinateMap
from ..maps.map_cache import MapStore
from ..maps.request import BuiltMap, MapRequest
from ..prefetch import prefetch
from . import padded
from .call_frame import CallFrame, ShortCircuit
from .calls.call import call_of, read_constants, rows_of
from .calls.frames import calls_under_way, constants_alive
from .calls.input_proxies import RESUMED, Call, InputProxies, with_proxies
from .calls.structures import MISSING, Tensors, wraps
from .graph_capture import in_trial
from .model_graphs import announced
from .refused_modules import RefusedModules
from .replay import Replayer, Summary
from .replay_training import TrainingReplayer

_TensorsOf = Callable[[Any], "Tensors | None"]
_lock = threading.RLock()
_local = threading.local()
_regions: MutableMapping[nn.Module, GraphRegion] = WeakIdKeyDictionary()  # modules may be equal to others
_refused = RefusedModules()


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
    requests.register(_provide, announced)


def enabled() -> bool:
    """Whether the settings want calls like this one replayed, and no limit on memory forbids it."""
    wanted = settings.get().optimize
    if memory.limit is not None or wanted not in ("auto", "inference", "graphs"):
        return False
    return wanted == "graphs" or (rocm.replays_graphs() and not (wanted == "inference" and torch.is_grad_enabled()))


def _provide(store: MapStore, cmap: CoordinateMap, req: MapRequest) -> BuiltMap:
    # Without kernels nothing is captured.
    possible = enabled() and padded.current() is None and kernel_target(cmap.device) is not None
    if possible and not in_trial() and not hooks.traced():
        _install_region(sys._getframe(1))
    return prefetch.provide(store, cmap, req)


def tried() -> list[tuple[nn.Module, Replayer | str]]:
    """Modules that were tried: with what serves their calls, or with why none is replayed."""
    with _lock:
        return [*((module, region.replayer) for module, region in _regions.items()), *_refused.reasons()]


def region_of(module: nn.Module) -> GraphRegion | None:
    """What serves the calls of a module."""
    return _regions.get(module)


def summary() -> list[Summary]:
    """Regions that are replayed or wait for it, and those that are not, and why."""
    return [
        Summary(type(module).__name__, 0, 0, found) if isinstance(found, str) else found.summary()
        for module, found in tried()
    ]


def serve(model: nn.Module, tensors_of: _TensorsOf) -> GraphRegion:
    """Replay calls of a model, as its program asks for it. Raises UnsupportedError."""
    with _lock:
        end(model)
        _regions[model] = region = GraphRegion(model, tensors_of, asked=True)
        return region


def end(model: nn.Module) -> None:
    """Have the model's own forward called again."""
    with _lock:
        _refused.forget(model)
        if (found := _regions.pop(model, None)) is not None:
            found.uninstall()


@contextlib.contextmanager
def uninstalled() -> Iterator[None]:
    """In this block all modules have their own forward. Behind it only regions serve that were asked for, and the
    others are forgotten."""
    with _lock, served_forward.uninstalled():
        for module in [module for module, region in _regions.items() if not region.asked]:
            del _regions[module]
        _refused.clear()
        yield


@state.owns
def remove() -> None:
    """Forget all regions but those that were asked for."""
    with uninstalled():
        pass


def _is_tensor(value: Any) -> bool:
    tensors = _tensors_of(value)
    return tensors is not None and tensors.is_tensor(value)


def _holds_sparse(value: Any) -> bool:
    """Whether there is a sparse tensor in a value, or an object around one."""
    if isinstance(value, (list, tuple)):
        return any(map(_holds_sparse, value))
    if isinstance(value, dict):
        return any(map(_holds_sparse, value.values()))
    return _is_tensor(value) or wraps(value, _is_tensor)


def _install_region(frame: types.FrameType | None) -> None:
    """Have the largest module around a layer that may be replayed served by a region."""
    calls = [(one, any(map(_holds_sparse, inputs))) for one, inputs in calls_under_way(frame)][::-1]  # outermost first
    if not calls or _refused.exhausted(calls[-1][0]):
        return
    with _lock:
        if any(one in _regions or served_forward.asked(one) or not hooks.may_be_replayed(one) for one, _ in calls):
            return
        for depth, (module, takes_sparse) in enumerate(calls):
            if not (_possible(module) and _refused.may_be_tried(module, _regions)):
                continue
            resume_point = None
            if not takes_sparse:
                resume_point = next((inner for inner, takes in calls[depth + 1 :] if takes), None)
                if resume_point is None or not _servable(resume_point):
                    continue
            _regions[module] = GraphRegion(module, _tensors_of, resume_point, part=depth > 0)
            return
        _refused.exhaust([one for one, _ in calls])


def _possible(module: nn.Module) -> bool:
    """Whether a module may be served by a region, and is worth it."""
    home = type(module).__module__
    if home.startswith("torch.") and not home.startswith("torch.nn.modules"):
        return False  # what spreads a model over devices, a scripted or compiled one
    return _servable(module) and _layers_of(module) >= policy.LEAST_LAYERS


def _servable(module: nn.Module) -> bool:
    """Replicas, by which torch spreads one call over devices, are dropped after it."""
    return hooks.plain(module) and served_forward.possible(module) and "_is_replica" not in module.__dict__


@contextlib.contextmanager
def _entered(call_frame: CallFrame | None) -> Iterator[None]:
    outer = getattr(_local, "call_frame", None)
    _local.call_frame = call_frame
    try:
        yield
    finally:
        _local.call_frame = outer


class GraphRegion(served_forward.Server):
    """The forward of a part of a model that is replayed where calls of a kind keep coming."""

    def __init__(
        self,
        model: nn.Module,
        tensors_of: _TensorsOf,
        resume_point: nn.Module | None = None,
        asked: bool = False,
        part: bool = False,
    ) -> None:
        """resume_point: the module inside that first takes the sparse tensor that `model` makes.  asked: the program
        wants this model replayed, whatever the settings.  part: another module calls it."""
        self.tensors_of, self.asked = tensors_of, asked
        self.replayer = Replayer(TrainingReplayer(model, tensors_of, asked), asked, part)
        self.other_modes = 0  # calls whose resume point records gradients where the model does not, or the other way
        self.resume_point = None if resume_point is None else _ResumePoint(resume_point)
        super().__init__(model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if hooks.traced():  # first: nobody can trace the rest
            return self.run_layers(*args, **kwargs)
        call_frame: CallFrame | None = getattr(_local, "call_frame", None)
        inside = call_frame is not None and call_frame.proxies is not None  # of a trial
        if inside or not (self.asked or enabled()) or in_trial() or padded.current() is not None:
            return self.run_layers(*args, **kwargs)
        if self.resume_point is None:
            out = self.replayer(*args, **kwargs)
        else:
            out = self._call_to_resume_point(args, kwargs)
        self._stop_if_given_up()
        return out

    def _call_to_resume_point(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call_frame = CallFrame(self, args, kwargs)
        try:
            with _entered(call_frame), call_frame.watches:
                call_frame.watch_front(self.replayer.modes())
                out = self.run_layers(*args, **kwargs)
            if call_frame.result is not None:
                call_frame.result.computed(out)
        except ShortCircuit as short:
            if short.call_frame is not call_frame:
                raise
            return short.value
        finally:
            # It knows the frame, and both would wait for the garbage collector.
            call_frame.result = call_frame.front = None
        return out

    def enter(self, call_frame: CallFrame, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The resume point was called. Raises ShortCircuit where a graph has the result."""
        call_frame.end_front()
        mode = self.replayer.mode()
        if torch.is_grad_enabled() != call_frame.records_gradients:  # what follows may have gradients, or none
            self.other_modes += 1
            mode.decline(Why.GRAPH_OTHER_MODE)
            return
        dict_ids = {id(entries) for entries in call_frame.dicts.values()}
        try:
            call = call_of(args, kwargs, self.tensors_of, set(), RESUMED)
            if call is None or not mode.may_replay():
                return
            dicts, parts = {**call_frame.dicts, **call.dicts}, {**call_frame.parts, **call.parts}
            n_rows = rows_of(call.x, self.tensors_of)
            alive = constants_alive(sys._getframe(1), _OUTER_CODE, {id(call.x), *dict_ids}, n_rows)
            constants = call.constants, alive, read_constants(dicts, mode.reads, n_rows)
        except Refusal as error:
            mode.refuse(str(error))
            mode.attempts.failed()
            return
        rerun = functools.partial(self._rerun, call_frame)
        whole = Call(call.x, rerun, constants, dicts, parts, self.tensors_of, repeatable=call_frame.repeatable)
        call_frame.result = mode.try_call(whole)
        if call_frame.result is None:
            return
        if call_frame.result.output is not MISSING:
            raise ShortCircuit(call_frame, call_frame.result.output)
        call_frame.watches.enter_context(call_frame.result.watch)

    def _rerun(self, call_frame: CallFrame, function: Callable[..., Any], proxies: InputProxies) -> Any:
        rerun_frame = CallFrame(self, (), {}, proxies)
        proxies.initial = call_frame.initial
        args = [with_proxies(argument, proxies, (n,)) for n, argument in enumerate(call_frame.args)]
        kwargs = {key: with_proxies(argument, proxies, (key,)) for key, argument in call_frame.kwargs.items()}
        with _entered(rerun_frame):
            out = function(*args, **kwargs)
        if not rerun_frame.entered:
            raise Refusal(Why.GRAPH_BRANCH)
        return out

    def _stop_if_given_up(self) -> None:
        modes, hindered = (self.replayer, self.replayer.training), False
        reason = next((why for mode in modes if (why := mode.given_up()) is not None), None)
        if reason is None and self.replayer.hindered.over and not self.asked:
            reason, hindered = Why.GRAPH_HOOKS.says(), True
        if reason is not None and any(mode.graphs for mode in modes):
            reason = None
        if self.other_modes >= policy.HINDERED.failures and self.other_modes > sum(mode.hits for mode in modes):
            reason, hindered = Why.GRAPH_OTHER_MODE.says(), False
        if reason is not None:
            with _lock:
                if _regions.pop(self.model, None) is not None:
                    self.uninstall()
                    _refused.refuse(self.model, reason, hindered)  # inner ones may do

    def uninstall(self) -> None:
        """The same, and of its resume point."""
        super().uninstall()
        if self.resume_point is not None:
            self.resume_point.uninstall()


_OUTER_CODE = GraphRegion._call_to_resume_point.__code__


class _ResumePoint(served_forward.Server):
    """The forward of the module that first takes the sparse tensor which its region makes."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if hooks.traced():
            return self.run_layers(*args, **kwargs)
        call_frame: CallFrame | None = getattr(_local, "call_frame", None)
        if call_frame is None or call_frame.entered or call_frame.region.resume_point is not self:
            return self.run_layers(*args, **kwargs)
        call_frame.entered = True
        if call_frame.proxies is None:
            call_frame.region.enter(call_frame, args, kwargs)
            return self.run_layers(*args, **kwargs)
        put, named = call_frame.proxies.resumed_arguments(args, kwargs)
        return self.run_layers(*put, **named)
