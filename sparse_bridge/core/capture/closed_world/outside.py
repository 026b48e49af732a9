"""What the names in functions of a program stand for: globals, closures and default arguments."""

from __future__ import annotations

import builtins
import functools
import importlib.util
import sys
import types
from typing import Any

import torch
from torch import nn

from ....refusals import Refusal, Why
from . import origins
from .guards import is_own
from .origins import Effect, Origin
from .reading import Reading
from .state import State
from .tags import Name

_STEP = object()  # nothing to go on from


class Outside:
    """Guards what names stand for, in `state`."""

    def __init__(self, state: State, unseen: bool = False) -> None:
        """unseen: nobody has watched what the functions call."""
        self.state, self.unseen = state, unseen

    def resolve(self, name: Name, names: dict[str, Any], where: str) -> None:
        """A name of a function with these globals. Raises Refusal."""
        state = self.state
        if name.imported:
            module = _module(name.root, names)
            if module is not None:
                self._follow(module, name.chain, name.root, where)
        elif name.root in names:
            label = f"{names.get('__name__', '')}.{name.root}".removeprefix("__main__.")
            self._follow(state.key(names, name.root, label), name.chain, label, where)
        else:
            state.absent(names, [name.root], str(names.get("__name__", "")))
            own = vars(builtins)
            if name.root in own:
                value = state.key(own, name.root, name.root)
                if self.unseen and not isinstance(value, type) and origins.effect_of(value) is not Effect.NONE:
                    raise Refusal(Why.GRAPH_SIDE_EFFECT, name.root, where)

    def function(self, function: types.FunctionType, reading: Reading, where: str) -> None:
        """The closure and the defaults of a function. Raises Refusal."""
        state, code = self.state, function.__code__
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
                state.entry(_contents, cell, functools.partial(_same, label))
            chains = [name.chain for name in reading.names.values() if name.root == variable and not name.imported]
            for chain in chains or [()]:
                self._follow(cell.cell_contents, chain, label, where)
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            state.value(value, f"a default of {function.__name__}", where)

    def _follow(self, value: Any, chain: tuple[str, ...], label: str, where: str) -> None:
        """The value, by way of these attributes."""
        for name in chain:
            step = self._step(value, name, f"{label}.{name}", where)
            if step is _STEP:
                break
            value, label = step, f"{label}.{name}"
        else:
            if not isinstance(value, types.ModuleType):
                self.state.value(value, label, where)

    def _step(self, value: Any, name: str, label: str, where: str) -> Any:
        """An attribute, which is guarded; _STEP where `value` as a whole is, or need not be."""
        state = self.state
        if isinstance(value, types.ModuleType):
            return self._of_module(value, name, label, where)
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

    def _of_module(self, module: types.ModuleType, name: str, label: str, where: str) -> Any:
        own, origin = vars(module), origins.of_module(module.__name__)
        if name not in own:
            return getattr(module, name, _STEP) if origin is not Origin.PROGRAM else _STEP
        item = self.state.key(own, name, label)
        if isinstance(item, types.ModuleType):
            return item
        if origin is Origin.TRUSTED and not isinstance(item, (torch.Generator, list, dict, set)):
            return _STEP
        if origin is Origin.LIBRARY and callable(item):
            if self.unseen or module.__name__.startswith("numpy.random"):
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


def _same(label: str, place: int) -> str:
    return label


def _contents(cell: Any) -> tuple[Any, ...]:
    return (cell.cell_contents,)
