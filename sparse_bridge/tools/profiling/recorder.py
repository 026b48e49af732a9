"""`sparse_bridge.profile`: hooks on modules, and what the engine and the adapters say meanwhile."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from ... import hooks
from ...adapters import call_stats, protocol
from ...adapters.enabling import model_layers
from ...core.device import trace
from ...errors import DataTypeError, LifecycleError, require_type
from . import results
from .calls import Call, Layer, layers_of, totals_of
from .clock import Interval, Peak
from .gradients import Gradients

__all__ = ["ModelProfile", "profile"]


class ModelProfile:
    """What each layer of a model did and cost between `start` and `stop`; a context manager.

    Readable once it has stopped: `layers`, `totals`, `to_dict()`, `to_json()`, `print`, and as a
    table in notebooks. Started again, it goes on counting.

    Args:
        model: whose modules are watched; None: of every module that this thread calls.
        memory: ask a GPU for the peak of every call. It resets torch's peak statistics.
        calls: how many calls of the model, or of outermost modules, are counted; the profile ends
            by itself where the next one begins. None: all.

    Raises:
        DataTypeError: `model` is no torch module.
    """

    def __init__(self, model: nn.Module | None = None, *, memory: bool = True, calls: int | None = None) -> None:
        if model is not None:
            expected = "a torch.nn.Module, or nothing to profile every module that is called"
            require_type("profile()", model, nn.Module, expected)
        self._memory, self._most = memory, calls
        self._held: Any = None if model is None else weakref.ref(model)
        self._model = model  # until it has run
        self._layers: list[Layer] = []
        self._known: weakref.WeakKeyDictionary[nn.Module, Layer] = weakref.WeakKeyDictionary()
        self._roots: list[Call] = []
        self._open: list[Call] = []
        self._stack: contextlib.ExitStack | None = None
        self._thread = 0
        self._events: list[trace.Event] = []
        self._notes: list[call_stats.Call] = []
        self._gradients = Gradients()
        self._title = "all modules" if model is None else type(model).__name__
        self._results: tuple[tuple[results.LayerProfile, ...], results.Totals] | None = None

    # the block

    def start(self) -> ModelProfile:
        """Begin. Raises LifecycleError where it has begun already, or the model is gone."""
        if self._stack is not None:
            raise LifecycleError("this profile runs already; call stop() first, or make another.")
        if self._held is not None and self._model is None:
            self._model = self._held()
            if self._model is None:
                raise LifecycleError("the model of this profile is gone; make another.")
        self._thread, self._results = threading.get_ident(), None
        self._gradients = Gradients()
        with contextlib.ExitStack() as stack:
            self._events = stack.enter_context(trace.record())
            self._notes = stack.enter_context(call_stats.listen())
            stack.callback(self._gradients.stop)
            for remove in self._hooks():
                stack.callback(remove)
            self._stack = stack.pop_all()
        return self

    def stop(self) -> None:
        """End: remove every hook, wait for the GPU, add up. Does nothing where it has ended."""
        if self._stack is None:
            return
        stack, self._stack = self._stack, None
        stack.close()
        self._open.clear()
        for owner, interval in self._gradients.times:
            while owner.part_of is not None:
                owner = owner.part_of
            owner.backward.append(interval)
        devices = {interval.device for layer in self._layers for interval in layer.used()}
        for device in devices - {None}:
            torch.cuda.synchronize(device)
        for layer in self._layers:
            layer.settle()
        layers = layers_of(self._layers)
        self._results = layers, totals_of(layers, self._roots)
        model, self._model = self._model, None
        if model is not None:
            model_layers.keep_measured(model, layers)

    def __enter__(self) -> ModelProfile:
        return self.start()

    def __exit__(self, *exception: object) -> None:
        self.stop()

    # what was found

    def _ended(self) -> tuple[tuple[results.LayerProfile, ...], results.Totals]:
        if self._results is None:
            raise LifecycleError("this profile has not ended; read it after its `with` block, or call stop().")
        return self._results

    @property
    def layers(self) -> tuple[results.LayerProfile, ...]:
        """In the order of their first calls. Raises LifecycleError before the end."""
        return self._ended()[0]

    @property
    def totals(self) -> results.Totals:
        """Of the whole model. Raises LifecycleError before the end."""
        return self._ended()[1]

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON values: model, layers with their shares, totals."""
        return results.values(self._title, *self._ended())

    def to_json(self, path: str | Path | None = None) -> str:
        """The text of `to_dict()`, written to `path` where one is given."""
        text = results.as_json(self.to_dict())
        if path is not None:
            Path(path).write_text(text + "\n", encoding="utf-8")
        return text

    def __str__(self) -> str:
        if self._results is None:
            return repr(self)
        return results.table(self._title, *self._results).plain()

    def __repr__(self) -> str:
        if self._results is not None:
            return str(self)  # what a terminal shows
        state = "running" if self._stack is not None else "not started: use it as `with profile(...)`"
        return f"<sparse_bridge.profile of {self._title}, {state}>"

    def _repr_html_(self) -> str | None:
        if self._results is None:
            return None
        return results.table(self._title, *self._results).html()

    # hooks

    def _hooks(self) -> Iterator[Any]:
        """Register them; how each is removed."""
        if self._model is None:
            yield torch_module.register_module_forward_pre_hook(self._before_any).remove
            after = torch_module.register_module_forward_hook(self._after_any, always_call=True)
            yield after.remove
            return
        for name, module in self._model.named_modules():
            if isinstance(module, torch.jit.ScriptModule):
                continue  # runs without Python; its time belongs to what calls it
            self._name(module, name or type(module).__name__)
            yield module.register_forward_pre_hook(self._before, with_kwargs=True).remove
            hook = self._after
            yield module.register_forward_hook(hook, with_kwargs=True, always_call=True).remove

    def _name(self, module: nn.Module, name: str) -> Layer:
        if module not in self._known:
            self._known[module] = Layer(module, name)
            self._layers.append(self._known[module])
        return self._known[module]

    def _layer(self, module: nn.Module) -> Layer:
        """The layer of a module; an outermost one names all that it holds."""
        layer = self._known.get(module)
        if layer is not None:
            return layer
        root = type(module).__name__
        if self._open:
            return self._name(module, f"{self._open[-1].layer.name}.{root}")
        count = sum(name.partition("#")[0] == root for name in self._root_names())
        root = f"{root}#{count + 1}" if count else root
        for name, submodule in module.named_modules():
            self._name(submodule, f"{root}.{name}" if name else root)
        return self._known[module]

    def _root_names(self) -> set[str]:
        return {call.layer.name for call in self._roots}

    def _elsewhere(self) -> bool:
        """Whether this call is none of ours: another thread's, or one that is only traced."""
        return hooks.traced() or self._stack is None or threading.get_ident() != self._thread

    def _before_any(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._before(module, args, {})

    def _after_any(self, module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        self._after(module, args, {}, out)

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._elsewhere():
            return
        if module is self._model:
            self._open.clear()  # of a call that Ctrl-C has ended
        if self._most is not None and not self._open and len(self._roots) >= self._most:
            self.stop()  # not sooner: the last call's gradients came after it
            return
        layer = self._layer(module)
        features = list(_features_in((args, kwargs)))
        around = self._open[-1] if self._open else None
        device = _device_of(features, module)
        call = Call(layer, around, len(self._events), len(self._notes))
        call.shape_in = tuple(features[0].shape) if features else None
        call.began = self._gradients.now
        call.stops = [tensor.grad_fn for tensor in features if tensor.grad_fn is not None]
        if self._memory:
            call.peak = Peak(device, around.peak if around else None)
        self._open.append(call)
        call.interval = Interval(device).start()

    def _after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        if self._elsewhere() or not any(call.layer.module() is module for call in self._open):
            return
        self._open[-1].interval.stop()
        call = self._open.pop()
        while call.layer.module() is not module:  # left by exceptions of which nobody told
            call = self._open.pop()
            call.interval.stop()
        call.end(self._events[call.events_at :], self._notes[call.notes_at :])
        del self._events[call.events_at :], self._notes[call.notes_at :]
        features = list(_features_in(out))
        call.see(features[0] if features else None)
        if call.around is None:
            self._roots.append(call)
        if call.listed and torch.is_grad_enabled():
            device = features[0].device if features else None
            self._gradients.watch(call.layer, call.began, features, call.stops, device)
        call.stops = []


def profile(model: nn.Module | None = None, *inputs: Any, memory: bool = True) -> ModelProfile:
    """What each layer of a model does and costs: a context manager around its calls.

        with sparse_bridge.profile(model) as p:
            model(x)
        print(p)

    or, with the model's inputs, of one call: `print(sparse_bridge.profile(model, x))`. On a GPU
    call the model before, or the times are those of compiling.

    Layers run one after another meanwhile, as with any hooks: none is fused with the next, none
    waits for what follows, captured graphs are not replayed. Inference computes the same bits, and training
    those of the layers: a replayed step adds its gradients up in another order. Outside of the block nothing
    is added.
    Layers inside of what `torch.compile` has compiled are not seen.

    Args:
        model: whose modules are watched; None: every module that this thread calls.
        inputs: what the model is called with; none: the program calls it.
        memory: ask a GPU for the peak of every call. It resets torch's peak statistics.

    Returns: a `ModelProfile`, with `layers`, `totals`, `to_dict()` and `to_json()` at the end.
    Raises: DataTypeError where `model` is no torch module.
    """
    measured = ModelProfile(model, memory=memory)
    if not inputs:
        return measured
    if model is None:
        raise DataTypeError("profile() got inputs and no model; expected profile(model, *inputs).")
    with measured:
        model(*inputs)
    return measured


def _features_in(value: Any) -> Iterator[torch.Tensor]:
    """Features of the sparse tensors, and the tensors of numbers, in arguments or a result."""
    if isinstance(value, (tuple, list)):
        for part in value:
            yield from _features_in(part)
    elif isinstance(value, dict):
        yield from _features_in(tuple(value.values()))
    else:
        features = protocol.features_of(value)
        if features is not None and features.is_floating_point():
            yield features


def _device_of(inputs: Iterable[torch.Tensor], module: nn.Module) -> torch.device | None:
    """Where a call computes: with its inputs, else with its parameters."""
    first = next(iter(inputs), None)
    if first is None:
        first = next(module.parameters(), None)
    return None if first is None else first.device
