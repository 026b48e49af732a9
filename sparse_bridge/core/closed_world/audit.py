"""Whether a call of a model is all that its tensors and guarded values say: a closed world.

A replay repeats what torch computed. So an ordinary call is watched, functions of the program that ran are read,
and what they read of Python is guarded by value. What they write that outlasts the call, what they call besides,
and choices by how many rows there are leave the world open.
"""

from __future__ import annotations

import builtins
import functools
import gc
import importlib.util
import sys
import types
from types import CodeType
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from ...refusals import Refusal, Why
from . import guards, origins
from .expressions import Name
from .grid_uses import grid_uses
from .guards import Guards, is_own
from .kept import Before, before_call, refuse_kept
from .layers import guard_parameters, guard_tensors
from .origins import Origin
from .reading import Reading, readings_of, unseen_reading
from .sources import position
from .state import State, same_label
from .watch import ABSENT, Watch

_CALL = nn.Module._call_impl.__code__
_CALLS = ("__call__", "_call_to_resume_point", _CALL.co_name)  # of what stands for a model's forward
_STEP = object()  # nothing to go on from


class Audit:
    """Watches what one ordinary eager call of a model does in Python, on this thread."""

    def __init__(self, model: nn.Module, tensors: Any) -> None:
        """tensors: the framework, see `captured_model.Tensors`."""
        self.model, self.tensors = model, tensors
        name = type(model).__name__  # what the program calls a module of the model
        self._modules = {f"{name}.{path}" if path else name: module for path, module in model.named_modules()}
        self._trusted = {id(module) for module in self._modules.values() if self._is_trusted(module)}
        self._watch = Watch(frozenset(map(id, self._modules.values())))
        self._refusal: Refusal | None = None
        self._before: Before = {}

    def _is_trusted(self, module: nn.Module) -> bool:
        return bool(self.tensors.is_own(module)) and origins.of_class(type(module)) is Origin.TRUSTED

    def __enter__(self) -> Audit:
        self._before = before_call(list(self._modules.values()), self._trusted)
        self._collects, self._gradients = gc.isenabled(), torch.is_grad_enabled()
        gc.disable()  # what it would end, the model has not called
        try:
            self._watch.start(self._under_way(sys._getframe(1)))
        except Refusal as error:
            self._refusal = error
        return self

    def _under_way(self, frame: types.FrameType | None) -> list[types.FrameType]:
        """The functions that the model's call is in, from the outermost one: a call may be watched from the point on
        at which it comes to its sparse layers."""
        frames: list[types.FrameType] = []
        while frame is not None:
            owner = frame.f_locals.get("self") if frame.f_code.co_name in _CALLS else None
            if owner is self.model if frame.f_code is _CALL else getattr(owner, "model", None) is self.model:
                return frames[::-1]
            frames.append(frame)
            frame = frame.f_back
        return []

    def __exit__(self, *error: object) -> None:
        if self._refusal is None:
            self._watch.stop()
        if torch.is_grad_enabled() != self._gradients and error[0] is None:
            self._refusal = Refusal(Why.GRAPH_SIDE_EFFECT, "torch.set_grad_enabled", type(self.model).__name__)
        if self._collects:
            gc.enable()

    def guards(self) -> Guards:
        """What has to stay as it is. Raises Refusal where the world is not closed."""
        watch = self._watch
        for refusal in (self._refusal, *watch.refusals):
            if refusal is not None:
                raise refusal
        owners = {code: owners for code, (_, owners) in watch.ran.items()}
        readings = readings_of(owners, watch.rows, watch.after, watch.modules)
        refuse_kept(self._modules, self._trusted, self._before, watch.stored, watch.changed)
        for (_, name), (names, value, where) in watch.written.items():
            if names.get(name, ABSENT) is not value:
                raise Refusal(Why.GRAPH_WRITES_STATE, name, where)
        attributes = set[str]().union(*[reading.attributes for reading in readings.values()])
        optional = set[str]().union(*[reading.optional for reading in readings.values()])
        any_attribute = watch.compares_objects or any(one.any_attribute for one in readings.values())
        state = State(self.model, attributes, optional, any_attribute)
        guard_parameters(state, self.model, attributes)
        self._read_modules(state)
        functions = self._read_outside(state, readings)
        self._read_backward(state, readings)
        self._refuse_changed(state)
        _switches(state)
        _definitions(state, functions)
        guard_tensors(state.absent)
        return state.guards(grid_uses(watch.ran, watch.modules))

    def _refuse_changed(self, state: State) -> None:
        """Raise Refusal where a method changed a container that lasts longer than the call."""
        for box, where in self._watch.changed.items():
            label = state.seen.get(box)
            if label is not None:
                raise Refusal(Why.GRAPH_WRITES_STATE, label, where)

    # what was read

    def _read_modules(self, state: State) -> None:
        state.classes_and_hooks(self.model)
        for label, module in self._modules.items():
            trusted, (before, _) = id(module) in self._trusted, self._before[id(module)]
            state.own_module(module, label, trusted, before, f"attribute of {label}")

    def _read_backward(self, state: State, readings: dict[CodeType, Reading]) -> None:
        """Functions of autograd that the program defines: nobody has watched their backward passes."""
        state.unseen, done = True, set(readings)
        functions = [
            function
            for cls in state.classes.values()
            if issubclass(cls, torch.autograd.Function) and origins.of_class(cls) is Origin.PROGRAM
            for name in ("backward", "vjp", "jvp")
            if isinstance(function := getattr(cls, name, None), types.FunctionType)
        ]
        while functions:
            function = functions.pop()
            code = function.__code__
            if code in done or origins.of_globals(function.__globals__) is not Origin.PROGRAM:
                continue
            done.add(code)
            reading, known = unseen_reading(code), set(state.functions)
            _globals_of(state, code, reading, function.__globals__)
            _closure_of(state, function, reading, position(code))
            functions += [one for new in set(state.functions) - known for one in state.functions[new].values()]

    def _read_outside(self, state: State, readings: dict[CodeType, Reading]) -> list[types.FunctionType]:
        """What names of the functions stand for, their closures and defaults; functions found so may be new ones.
        Returns those that ran."""
        for code, reading in readings.items():
            for names in self._watch.ran[code][0].values():
                _globals_of(state, code, reading, names)
        unknown = [code for code in readings if _needs_function(code, readings[code]) and code not in state.functions]
        for function in gc.get_referrers(*unknown) if unknown else ():
            if isinstance(function, types.FunctionType):
                state.functions.setdefault(function.__code__, {})[id(function)] = function
        done: set[int] = set()
        ran: list[types.FunctionType] = []
        while pending := [
            (code, function)
            for code in readings
            for function in state.functions.get(code, {}).values()
            if id(function) not in done
        ]:
            for code, function in pending:
                done.add(id(function))
                ran.append(function)
                _closure_of(state, function, readings[code], position(code))
        return ran


def _needs_function(code: CodeType, reading: Reading) -> bool:
    """Whether its closure or its defaults matter."""
    return bool(set(code.co_freevars) - {"__class__"}) or reading.has_defaults


def _globals_of(state: State, code: CodeType, reading: Reading, names: dict[str, Any]) -> None:
    """Guard what the names from outside of a function stand for, with these globals. Raises Refusal."""
    for key, name in reading.names.items():
        if name.imported or name.root not in code.co_freevars:
            resolve(state, name, names, position(code, name.line), key in reading.handed)


def resolve(state: State, name: Name, names: dict[str, Any], where: str, handed: bool) -> None:
    """A name of a function with these globals. handed: what it stands for may be called unseen. Raises Refusal."""
    if name.imported:
        module = _module(name.root, names)
        if module is not None:
            _follow(state, module, name.chain, name.root, where, handed)
    elif name.root in names:
        label = f"{names.get('__name__', '')}.{name.root}".removeprefix("__main__.")
        _follow(state, state.key(names, name.root, label), name.chain, label, where, handed)
    else:
        state.absent(names, [name.root], str(names.get("__name__", "")))
        own = vars(builtins)
        if name.root in own:
            value = state.key(own, name.root, name.root)
            if (state.unseen or handed) and not isinstance(value, type) and origins.effect_of(value) is not None:
                raise Refusal(Why.GRAPH_SIDE_EFFECT, name.root, where)


def _closure_of(state: State, function: types.FunctionType, reading: Reading, where: str) -> None:
    """The closure and the defaults of a function. Raises Refusal."""
    code = function.__code__
    for variable, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        if variable == "__class__":
            continue
        label = f"{function.__name__}.{variable}"
        if id(cell) not in state.seen:
            state.seen[id(cell)] = label
            try:
                cell.cell_contents  # noqa: B018
            except ValueError:
                continue
            state.entry(_cell_contents, cell, functools.partial(same_label, label))
        chains = [name.chain for name in reading.names.values() if name.root == variable and not name.imported]
        for chain in chains or [()]:
            _follow(state, cell.cell_contents, chain, label, where)
    for value in (*(function.__defaults__ or ()), function.__kwdefaults__):
        state.value(value, f"a default of {function.__name__}", where)


def _follow(state: State, value: Any, chain: tuple[str, ...], label: str, where: str, handed: bool = False) -> None:
    """The value, by way of these attributes. Raises Refusal."""
    if handed and (isinstance(value, types.ModuleType) or not chain):
        called: Any = value
        for name in chain:
            called = getattr(called, name, None)
        if isinstance(called, types.BuiltinFunctionType) and origins.effect_of(called) is Why.GRAPH_SIDE_EFFECT:
            raise Refusal(Why.GRAPH_SIDE_EFFECT, ".".join((label, *chain)), where)
    for place, name in enumerate(chain):
        step = _step(state, value, name, f"{label}.{name}", where)
        if step is _STEP:
            _setting_of(state, value, chain[place:], label)
            break
        value, label = step, f"{label}.{name}"
    else:
        state.value(value, label, where)


def _setting_of(state: State, module: Any, chain: tuple[str, ...], label: str) -> None:
    """Guard a number or a text that trusted code keeps behind a module, as torch its switches."""
    if not isinstance(module, types.ModuleType) or origins.of_module(module.__name__) is not Origin.TRUSTED:
        return
    if len(chain) > 1 or chain[0] not in vars(module):
        get = guards.slot(".".join(chain))
        try:
            (value,) = get(module)
        except AttributeError:
            return
        if isinstance(value, guards.PLAIN):
            state.entry(get, module, functools.partial(same_label, ".".join((label, *chain))))


def _step(state: State, value: Any, name: str, label: str, where: str) -> Any:
    """An attribute, which is guarded; _STEP where `value` as a whole is, or need not be."""
    if isinstance(value, types.ModuleType):
        return _of_module(state, value, name, label, where)
    if isinstance(value, type):
        state.methods_of(value, where)
        for base in value.__mro__:
            if name in vars(base) and origins.of_class(base) is Origin.PROGRAM:
                item = state.key(vars(base), name, label)
                return _STEP if hasattr(type(item), "__get__") else item
        return _STEP
    if isinstance(value, nn.Module):
        state.value(value, label.rpartition(".")[0], where)
        return _STEP
    own = getattr(value, "__dict__", None)
    cls = type(value)
    if is_own(value) or not isinstance(own, dict) or name not in own:
        state.value(value, label.rpartition(".")[0], where)
        return _STEP
    if any("__getattribute__" in vars(base) for base in cls.__mro__[:-1]):
        state.value(value, label.rpartition(".")[0], where)
        return _STEP
    state.methods_of(cls, where)
    return state.key(own, name, label)


def _of_module(state: State, module: types.ModuleType, name: str, label: str, where: str) -> Any:
    own, origin = vars(module), origins.of_module(module.__name__)
    if name not in own:
        return getattr(module, name, _STEP) if origin is Origin.LIBRARY else _STEP
    item = state.key(own, name, label)
    if isinstance(item, types.ModuleType):
        return item
    if origin is Origin.TRUSTED and not isinstance(item, (torch.Generator, list, dict, set)):
        return _STEP
    if origin is Origin.LIBRARY and callable(item):
        if state.unseen or module.__name__.startswith("numpy.random"):
            raise Refusal(Why.GRAPH_SIDE_EFFECT, label, where)
        return _STEP  # that it is called would have been seen
    return item


def _module(root: str, names: dict[str, Any]) -> Any:
    """A module that a function imports, if it is loaded."""
    if root.startswith("."):
        try:
            root = importlib.util.resolve_name(root, names.get("__package__") or "")
        except ImportError:
            return None
    return sys.modules.get(root)


def _cell_contents(cell: Any) -> tuple[Any, ...]:
    return (cell.cell_contents,)


def _definitions(state: State, functions: list[types.FunctionType]) -> None:
    """The code and the defaults of functions, which tools that reload modules replace, and the bases of classes."""
    if functions:
        state.entry(guards.code_of, functions, lambda n: f"the code or a default of {functions[n // 3].__name__}")
    classes = list(state.classes.values())
    state.entry(guards.bases_of, classes, lambda n: f"the bases of {classes[n].__name__}")


def _switches(state: State) -> None:
    """torch's own, as far as no key of a graph has them."""

    def switches(_: Any) -> tuple[Any, ...]:
        return (
            torch.get_default_dtype(),
            torch.are_deterministic_algorithms_enabled(),
            sys.intern(_precision()),
            torch.backends.cudnn.enabled,
            parametrize._cache_enabled > 0,
            *map(len, _HOOKS),
        )

    names = ["torch's default dtype", "torch's deterministic algorithms"]
    names += ["torch's matmul precision", "torch.backends.cudnn.enabled", "torch.nn.utils.parametrize.cached"]
    names += ["torch's global hooks"] * len(_HOOKS)
    state.entry(switches, None, names.__getitem__)


def _precision() -> str:
    """How precise torch's fp32 products are; those of cuBLAS stand in keys."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # the program has set `fp32_precision`, a name of torch 2.9
        return str(torch.backends.mkldnn.matmul.fp32_precision)  # type: ignore[attr-defined]


_HOOKS = [
    value for name, value in vars(nn.modules.module).items() if name.startswith("_global_") and hasattr(value, "items")
]
