"""What runs during a call, seen by a profiler of this thread."""

from __future__ import annotations

import dis
import functools
import inspect
import sys
import threading
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

from ...refusals import Refusal, Why
from . import origins
from .layers import CONVERSIONS
from .origins import Origin
from .sources import COMPREHENSIONS, position

_IMPORTS = ("_handle_fromlist", "_lock_unlock_module")  # of what is loaded
_AROUND = ("torch._compile", "torch._dynamo")  # what wraps functions that compilers leave alone
# Methods of tensors that hand all numbers to Python, beside the `CONVERSIONS`.
_PYTHON_READS = ("__array__", "__contains__", "__format__", "__repr__", "__iter__", "__reversed__", "__hash__")


# Of a function of the program that ran: its globals, by identity; and first arguments that are no modules, by
# identity, and whether they were made in the call.
Ran = tuple[dict[int, dict[str, Any]], dict[int, bool]]


class Watch:
    """Functions that ran, and what they did that a replay would not repeat.

    rows: (file, line) where the length of a tensor was asked for.  changed: containers whose methods changed
    them, by identity, and where.  stored: (module, attribute) that was written, and where.  written: globals that
    functions may write, and what they were.  after: the line of a function at which what counts begins.
    compares_objects: methods ran that a decorator wrote, as for dataclasses, and that read attributes.
    """

    def __init__(self, modules: frozenset[int]) -> None:
        self.ran: dict[CodeType, Ran] = {}
        self.refusals: list[Refusal] = []
        self.rows: set[tuple[str, int]] = set()
        self.changed: dict[int, str] = {}
        self.stored: dict[tuple[int, str], str] = {}
        self.written: dict[tuple[int, str], tuple[dict[str, Any], Any, str]] = {}
        self.after: dict[CodeType, int] = {}
        self.compares_objects = False
        self.modules = modules
        # By identity: the hash of code takes as long as all that is in it.
        self._kinds: dict[int, Callable[[FrameType], None] | None] = {}
        self._codes: list[CodeType] = []  # which keeps these identities
        self._programs: set[int] = set()
        self._arguments: set[int] | None = None
        self._made: set[int] = set()
        self._muted: FrameType | None = None  # until this one returns
        self._generators: set[int] = set()  # frames that began in the call
        self._conversions: dict[CodeType, str] = {}

    def start(self, under_way: list[FrameType]) -> None:
        """Watch this thread, on which these functions are under way. Raises Refusal where somebody else does."""
        if sys.getprofile() is not None or _debugger():
            raise Refusal(Why.GRAPH_PROFILED)
        self.adopt(under_way)
        self._conversions = _install_conversions()
        sys.setprofile(self._event)

    def adopt(self, frames: list[FrameType]) -> None:
        """Functions that are under way, from the outermost one: what they do from now on counts."""
        for frame in frames:
            code = frame.f_code
            if origins.of_globals(frame.f_globals) is not Origin.PROGRAM:
                continue
            again = id(code) in self._programs
            self._kinds[id(code)] = self._program
            self._codes.append(code)
            self._programs.add(id(code))
            self._generators.add(id(frame))
            self._program(frame)
            self.after[code] = 0 if again else frame.f_lineno

    def _remember(self, code: CodeType, names: dict[str, Any]) -> None:
        for name in _stores_of(code):
            self.written.setdefault((id(names), name), (names, names.get(name, ABSENT), position(code)))

    def stop(self) -> None:
        """Watch no longer."""
        sys.setprofile(None)
        self._muted = None
        _remove_conversions()

    def _event(self, frame: FrameType, event: str, argument: Any) -> None:
        if self._muted is not None:
            if event == "return" and frame is self._muted:
                self._muted = None
        elif event == "call":
            code = frame.f_code
            try:
                kind = self._kinds[id(code)]
            except KeyError:
                kind = self._kinds[id(code)] = self._kind(frame)
                self._codes.append(code)
                if kind == self._program:
                    self._programs.add(id(code))
            if kind is not None:
                kind(frame)
        elif event == "c_call" and id(frame.f_code) in self._programs:
            self._c_call(frame, argument)

    def _is_program(self, frame: FrameType) -> bool:
        """Whether the frame, which may have begun before, is the program's."""
        return id(frame.f_code) in self._programs

    def _kind(self, frame: FrameType) -> Callable[[FrameType], None] | None:
        code, origin = frame.f_code, origins.of_globals(frame.f_globals)
        if code in self._conversions:
            return self._host_read
        if origin is Origin.PROGRAM:
            if origins.is_generated(code):
                self.compares_objects = self.compares_objects or code.co_name != "__init__"
                return None
            return None if _is_launcher(frame) else self._program
        if origin is Origin.LIBRARY:
            return self._import if code.co_name == "_find_and_load" else self._library
        name, owner = code.co_name, frame.f_globals.get("__name__", "")
        if name == "__len__":
            return self._length
        if owner == "torch._tensor" and name in _PYTHON_READS:
            return self._host_read
        if owner == "contextlib" and getattr(frame.f_locals.get("self"), "_stream", None) is not None:
            return self._library
        if owner == "torch.nn.modules.module" and name == "__setattr__":
            return self._set_attribute
        if owner == "collections" and name in origins.MUTATING:
            return self._change
        effects = owner.startswith("torch") and name in origins.EFFECTS
        return self._library if effects or (owner.startswith("numpy") and name in origins.FILES) else None

    def _program(self, frame: FrameType) -> None:
        code = frame.f_code
        if self._arguments is None:  # of the whole call
            values = [frame.f_locals.get(name) for name in code.co_varnames[: code.co_argcount]]
            inner = [item for value in values if type(value) in (list, tuple, dict) for item in _items(value)]
            self._arguments = {id(value) for value in (*values, *inner)} - self.modules
        if code.co_flags & inspect.CO_GENERATOR:
            if frame.f_lasti <= _start_of(code):
                self._generators.add(id(frame))
            elif id(frame) not in self._generators:
                self._refuse(Why.GRAPH_READS_STATE, frame, code.co_name, "generator")
        if code.co_name in COMPREHENSIONS:
            return
        spaces, owners = self.ran.get(code) or self.ran.setdefault(code, ({}, {}))
        if id(frame.f_globals) not in spaces:
            spaces[id(frame.f_globals)] = frame.f_globals
            self._remember(code, frame.f_globals)
        if code.co_argcount and code.co_varnames[0] in ("self", "cls"):
            owner = frame.f_locals.get(code.co_varnames[0])
            if code.co_name in ("__init__", "__new__", "__post_init__"):
                self._made.add(id(owner))
            new = id(owner) in self._made or id(owner) in self._arguments
            owners[id(owner)] = new and id(owner) not in self.modules

    def _caller(self, frame: FrameType) -> FrameType | None:
        """The function of the program that called this one of a library, by way of libraries alone."""
        caller = frame.f_back
        while caller is not None and (
            origins.of_globals(caller.f_globals) is Origin.LIBRARY
            or str(caller.f_globals.get("__name__")).startswith(_AROUND)
        ):
            caller = caller.f_back
        if caller is not None and caller.f_globals.get("__name__") in ("_collections_abc", "contextlib", "functools"):
            caller = caller.f_back
        return caller if caller is not None and self._is_program(caller) else None

    def _import(self, frame: FrameType) -> None:
        """A module is loaded: what its own code does, and what finds it, is over after this call."""
        self._library(frame)
        self._muted = frame

    def _library(self, frame: FrameType) -> None:
        caller, name = self._caller(frame), frame.f_code.co_name
        if caller is None:  # of torch or the package, as its log is: what handles it is not the model's
            self._muted = frame
        elif name not in _IMPORTS:
            self._refuse(Why.GRAPH_SIDE_EFFECT, caller, f"{frame.f_globals.get('__name__')}.{name}")

    def _direct(self, frame: FrameType) -> FrameType | None:
        """The function of the program that called this one."""
        caller = frame.f_back
        if caller is not None and caller.f_globals.get("__name__") == "torch.overrides":
            caller = caller.f_back
        return caller if caller is not None and self._is_program(caller) else None

    def _host_read(self, frame: FrameType) -> None:
        caller = self._direct(frame)
        if caller is not None and frame.f_code.co_name != "__hash__":
            name = self._conversions.get(frame.f_code, frame.f_code.co_name)
            self._refuse(Why.GRAPH_HOST_READ, caller, name)

    def _length(self, frame: FrameType) -> None:
        caller, owner = self._direct(frame), frame.f_locals.get("self")
        if caller is not None and not isinstance(owner, nn.Module):
            self.rows.add((caller.f_code.co_filename, caller.f_lineno))

    def _set_attribute(self, frame: FrameType) -> None:
        caller, owner = self._direct(frame), frame.f_locals.get("self")
        if caller is not None and id(owner) in self.modules:
            self.stored[id(owner), str(frame.f_locals.get("name"))] = position(caller.f_code, caller.f_lineno)

    def _change(self, frame: FrameType) -> None:
        caller = self._direct(frame)
        if caller is not None:
            self.changed[id(frame.f_locals.get("self"))] = position(caller.f_code, caller.f_lineno)

    def _c_call(self, frame: FrameType, function: Any) -> None:
        effect, name = origins.effect_of(function), getattr(function, "__name__", str(function))
        if effect is None or function is sys.setprofile:
            return
        if effect is Why.GRAPH_WRITES_STATE:
            self.changed[id(function.__self__)] = position(frame.f_code, frame.f_lineno)
        else:
            self._refuse(effect, frame, name if effect is Why.GRAPH_HOST_READ else _named(function))

    def _refuse(self, why: Why, frame: FrameType, name: str, *details: Any) -> None:
        if len(self.refusals) < 20:
            where = position(frame.f_code, frame.f_lineno)
            self.refusals.append(Refusal(why, name, where, *details))


def _is_launcher(frame: FrameType) -> bool:
    """Whether trusted code wrote the function, as Triton does: it belongs to no module."""
    caller = frame.f_back
    nameless = frame.f_code.co_filename.startswith("<") and "__name__" not in frame.f_globals
    return nameless and caller is not None and origins.of_globals(caller.f_globals) is Origin.TRUSTED


@functools.lru_cache(maxsize=512)
def _start_of(code: CodeType) -> int:
    """The instruction at which a generator starts; it goes on at later ones."""
    return next((one.offset for one in dis.get_instructions(code) if one.opname == "RESUME"), -1)


@functools.lru_cache(maxsize=4096)
def _stores_of(code: CodeType) -> tuple[str, ...]:
    """The globals that a function may write."""
    names = {one.argval for one in dis.get_instructions(code) if one.opname in ("STORE_GLOBAL", "DELETE_GLOBAL")}
    return tuple(names)


ABSENT = object()


def _items(value: Any) -> Any:
    return list(value.values()) if isinstance(value, dict) else list(value)


def _named(function: Any) -> str:
    owner = getattr(function, "__self__", None)
    if owner is None or isinstance(owner, type(sys)):
        module = getattr(function, "__module__", None) or "builtins"
        return str(function.__name__) if module == "builtins" else f"{module}.{function.__name__}"
    return f"{type(owner).__name__}.{function.__name__}"


def _debugger() -> bool:
    """Whether a debugger follows this thread; measuring which lines run is no matter."""
    trace = sys.gettrace()
    if trace is not None and not (getattr(trace, "__module__", None) or type(trace).__module__).startswith("coverage"):
        return True
    monitoring = getattr(sys, "monitoring", None)
    return monitoring is not None and monitoring.get_tool(monitoring.DEBUGGER_ID) is not None


_watched, _lock = 0, threading.Lock()  # by how many threads


def _install_conversions() -> dict[CodeType, str]:
    """Functions in Python in the place of those of tensors that operators call unseen."""
    global _watched
    with _lock:
        _watched += 1
        for name, function in _FUNCTIONS.items():
            setattr(torch.Tensor, name, function)
    return {function.__code__: name for name, function in _FUNCTIONS.items()}


def _remove_conversions() -> None:
    global _watched
    with _lock:
        _watched -= 1
        if not _watched:
            for name in _FUNCTIONS:
                delattr(torch.Tensor, name)


def _convert_bool(self: Any) -> Any:
    return torch._C.TensorBase.__bool__(self)


def _convert_int(self: Any) -> Any:
    return torch._C.TensorBase.__int__(self)


def _convert_float(self: Any) -> Any:
    return torch._C.TensorBase.__float__(self)


def _convert_index(self: Any) -> Any:
    return torch._C.TensorBase.__index__(self)


def _convert_complex(self: Any) -> Any:
    return torch._C.TensorBase.__complex__(self)


_FUNCTIONS: dict[str, Any] = dict(
    zip(CONVERSIONS, (_convert_bool, _convert_int, _convert_float, _convert_index, _convert_complex), strict=True)
)
