"""Whether a call of a model is all that its tensors and guarded values say: a closed world.

A replay repeats what torch computed. So an ordinary call is watched, functions of the program that ran are read,
and what they read of Python is guarded by value. What they write that outlasts the call, what they call besides,
and choices by how many rows there are leave the world open.
"""

from __future__ import annotations

import ast
import collections
import gc
import sys
import types
from types import CodeType
from typing import Any

import torch
from torch import nn

from ....refusals import Refusal, Why
from . import origins
from .guards import PLAIN, Guards, equal, is_own
from .origins import Origin
from .outside import Outside
from .reading import Reading
from .sources import Source, position, source_of
from .state import LARGEST, State
from .tags import NONE, STATE, Compared, Tag
from .watch import ABSENT, Watch

_CALL = nn.Module._call_impl.__code__
_CALLS = ("__call__", "_call_to_resume_point", _CALL.co_name)  # of what stands for a model's forward
_CONTAINERS = (list, dict, set, collections.deque)
_PASSES = 5  # from function to function


class Audit:
    """Watches what one ordinary eager call of a model does in Python, on this thread."""

    def __init__(self, model: nn.Module, tensors: Any) -> None:
        """tensors: the framework, see `captured_model.Tensors`."""
        self.model, self.tensors = model, tensors
        self._modules = list(model.named_modules())
        self._trusted = {id(module) for _, module in self._modules if self._is_trusted(module)}
        self._watch = Watch(frozenset(id(module) for _, module in self._modules))
        self._refusal: Refusal | None = None
        self._before: dict[int, dict[str, Any]] = {}
        self._contents: dict[int, dict[str, Any]] = {}

    def _is_trusted(self, module: nn.Module) -> bool:
        return bool(self.tensors.is_own(module)) and origins.of_class(type(module)) is Origin.TRUSTED

    def _remember(self) -> None:
        for _, module in self._modules:
            self._before[id(module)] = dict(module.__dict__)
            if id(module) not in self._trusted:
                self._contents[id(module)] = _contents(module)

    def __enter__(self) -> Audit:
        self._remember()
        self._collects = gc.isenabled()
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
        if self._collects:
            gc.enable()

    def guards(self) -> Guards:
        """What has to stay as it is. Raises Refusal where the world is not closed."""
        if self._refusal is not None:
            raise self._refusal
        if self._watch.refusals:
            raise self._watch.refusals[0]
        readings = self._readings()
        self._refuse_kept()
        attributes: set[str] = set()
        for reading in readings.values():
            attributes |= reading.attributes
        state = State(self.model, attributes, any(one.any_attribute for one in readings.values()))
        self._read_modules(state)
        self._read_outside(state, readings)
        self._read_backward(state, readings)
        self._refuse_changed(state)
        _switches(state)
        return state.guards()

    # what was kept

    def _refuse_kept(self) -> None:
        """Raise Refusal where the attributes of a module of the program are not what they were."""
        for path, module in self._modules:
            label = self._label(path)
            if id(module) in self._trusted:
                self._refuse_switched(module, label)
                continue
            before, now = self._before[id(module)], module.__dict__
            for name in {**before, **now}:
                if not equal(before.get(name, ABSENT), now.get(name, ABSENT)) and not is_own(now.get(name)):
                    where = self._watch.stored.get((id(module), name), "in the call")
                    raise Refusal(Why.GRAPH_WRITES_STATE, f"{label}.{name}", where)
            contents = self._contents[id(module)]
            for name, items in _contents(module).items():
                if name in contents and not _same(contents[name], items):
                    where = self._watch.changed.get(id(now[name]), "in the call")
                    raise Refusal(Why.GRAPH_WRITES_STATE, f"{label}.{name}", where)

        for (_, name), (names, value, where) in self._watch.written.items():
            if names.get(name, ABSENT) is not value:
                raise Refusal(Why.GRAPH_WRITES_STATE, name, where)

    def _label(self, path: str) -> str:
        """What the program calls a module of the model."""
        name = type(self.model).__name__
        return f"{name}.{path}" if path else name

    def _refuse_switched(self, module: nn.Module, label: str) -> None:
        """Raise Refusal where the program has changed a layer of torch, or its mode."""
        before, now = self._before[id(module)], module.__dict__
        names = now if type(module).__module__.startswith("torch.nn.") else ("training",)
        for name in names:
            if isinstance(now[name], PLAIN) and not equal(before.get(name), now[name]):
                raise Refusal(Why.GRAPH_WRITES_STATE, f"{label}.{name}", "in the call")

    def _refuse_changed(self, state: State) -> None:
        """Raise Refusal where a method changed a container that lasts longer than the call."""
        for box, where in self._watch.changed.items():
            label = state.seen.get(box)
            if label is not None:
                raise Refusal(Why.GRAPH_WRITES_STATE, label, where)

    # what was read

    def _readings(self) -> dict[CodeType, Reading]:
        """The functions of the program that ran, read, until what they pass to each other is known."""
        sources: dict[CodeType, Source] = {}
        for code in self._watch.ran:
            source = source_of(code)
            if source is None:
                raise Refusal(Why.GRAPH_NO_SOURCE, code.co_name, position(code))
            sources[code] = source
        nodes = {id(source.node) for source in sources.values()}
        parameters = {code: self._parameters(code) for code in sources}
        returns: dict[str, Tag] = {}
        readings: dict[CodeType, Reading] = {}
        for _ in range(_PASSES):
            before = {code: dict(known) for code, known in parameters.items()}, dict(returns)
            for code, source in sources.items():
                inner = bool(source.outer) and id(source.outer[0]) in nodes
                lines = frozenset(line for file, line in self._watch.rows if file == code.co_filename)
                owners = self._watch.ran[code].owners
                compared = Compared.OWNER if owners and owners.keys() <= self._watch.modules else Compared.GLOBALS
                readings[code] = Reading(source, parameters[code], returns, lines, inner, compared)
            for code, reading in readings.items():
                returns[code.co_name] = returns.get(code.co_name, NONE) | reading.result
            self._pass_on(readings, sources, parameters)
            if before == (parameters, returns):
                break
        for code, reading in readings.items():
            _refuse_problems(code, reading, _first_line(sources[code].node, self._watch.after.get(code, 0)))
        return readings

    def _parameters(self, code: CodeType) -> dict[int | str, Tag]:
        owners = self._watch.ran[code].owners
        if owners and not all(owners.values()) and code.co_name not in ("__init__", "__post_init__", "__new__"):
            return {0: STATE}
        return {}

    def _pass_on(
        self,
        readings: dict[CodeType, Reading],
        sources: dict[CodeType, Source],
        parameters: dict[CodeType, dict[int | str, Tag]],
    ) -> None:
        """What arguments are known to be, to functions of that name."""
        by_name: dict[str, list[CodeType]] = collections.defaultdict(list)
        for code, source in sources.items():
            by_name[code.co_name].append(code)
            if code.co_name == "__init__" and source.owner:
                by_name[source.owner].append(code)
        for reading in readings.values():
            for function, place, tags in reading.passed.values():
                for code in by_name[function]:
                    method = bool(self._watch.ran[code].owners)
                    shift = 1 if code.co_name == "__init__" and function != "__init__" else 0
                    if isinstance(place, int):
                        place = place + shift - (0 if method or shift else _is_method_call(reading, function))
                    known = parameters[code]
                    known[place] = known.get(place, NONE) | tags

    def _read_modules(self, state: State) -> None:
        state.classes_and_hooks(self.model)
        for path, module in self._modules:
            label = self._label(path)
            trusted, before = id(module) in self._trusted, self._before[id(module)]
            state.own_module(module, label, trusted, before, f"attribute of {label}")

    def _read_backward(self, state: State, readings: dict[CodeType, Reading]) -> None:
        """Functions of autograd that the program defines: nobody has watched their backward passes."""
        outside, done = Outside(state, unseen=True), set(readings)
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
            source = source_of(code)
            if source is None:
                raise Refusal(Why.GRAPH_NO_SOURCE, code.co_name, position(code))
            reading = Reading(source, {}, {})
            _refuse_problems(code, reading)
            known = set(state.functions)
            for name in reading.names.values():
                if name.imported or name.root not in code.co_freevars:
                    outside.resolve(name, function.__globals__, position(code, name.line))
            outside.function(function, reading, position(code))
            functions += [one for new in set(state.functions) - known for one in state.functions[new].values()]

    def _read_outside(self, state: State, readings: dict[CodeType, Reading]) -> None:
        """What names of the functions stand for, their closures and defaults; functions found so may be new ones."""
        outside = Outside(state)
        for code, reading in readings.items():
            for names in self._watch.ran[code].globals.values():
                for name in reading.names.values():
                    if name.imported or name.root not in code.co_freevars:
                        outside.resolve(name, names, position(code, name.line))
        unknown = [code for code in readings if _needs_function(code, readings[code]) and code not in state.functions]
        for function in gc.get_referrers(*unknown) if unknown else ():
            if isinstance(function, types.FunctionType):
                state.functions.setdefault(function.__code__, {})[id(function)] = function
        done: set[int] = set()
        while pending := [
            (code, function)
            for code in readings
            for function in state.functions.get(code, {}).values()
            if id(function) not in done
        ]:
            for code, function in pending:
                done.add(id(function))
                outside.function(function, readings[code], position(code))


def _first_line(node: ast.AST, line: int) -> int:
    """The line at which what is done after `line` of a function begins: that of the loop around it."""
    loops = [part for part in ast.walk(node) if isinstance(part, (ast.For, ast.While))]
    return min([part.lineno for part in loops if part.lineno <= line <= (part.end_lineno or line)], default=line)


def _refuse_problems(code: CodeType, reading: Reading, after: int = 0) -> None:
    for why, what, line in reading.problems.values():
        if line < after:
            continue
        raise Refusal(why, what, position(code, line))


def _is_method_call(reading: Reading, function: str) -> int:
    return 1 if any(name == function for _, chain in reading.names for name in chain[-1:]) else 0


def _needs_function(code: CodeType, reading: Reading) -> bool:
    """Whether its closure or its defaults matter."""
    return bool(set(code.co_freevars) - {"__class__"}) or reading.has_defaults


def _contents(module: nn.Module) -> dict[str, Any]:
    """Containers among the attributes of a module, and what is in them, as deep as it goes."""
    return {name: _copied(value, 0) for name, value in module.__dict__.items() if isinstance(value, _CONTAINERS)}


def _copied(value: Any, depth: int) -> Any:
    if depth > 4 or not isinstance(value, _CONTAINERS) or len(value) > LARGEST:
        return value
    if isinstance(value, dict):
        return [(key, _copied(item, depth + 1)) for key, item in value.items()]
    return [_copied(item, depth + 1) for item in value]


def _same(value: Any, other: Any) -> bool:
    if type(value) in (list, tuple) and type(other) is type(value):
        return len(value) == len(other) and all(map(_same, value, other))
    return value is other


def _switches(state: State) -> None:
    """torch's own, as far as no key of a graph has them."""

    def switches(_: Any) -> tuple[Any, ...]:
        return (
            torch.get_default_dtype(),
            torch.are_deterministic_algorithms_enabled(),
            sys.intern(torch.get_float32_matmul_precision()),
            torch.backends.cudnn.enabled,
            torch.backends.cuda.matmul.allow_tf32,
            *map(len, _HOOKS),
        )

    names = ["torch's default dtype", "torch's deterministic algorithms", "torch's matmul precision"]
    names += ["torch.backends.cudnn.enabled", "torch.backends.cuda.matmul.allow_tf32"]
    names += ["torch's global hooks"] * len(_HOOKS)
    state.entry(switches, None, names.__getitem__)


_HOOKS = [
    value for name, value in vars(nn.modules.module).items() if name.startswith("_global_") and hasattr(value, "items")
]
