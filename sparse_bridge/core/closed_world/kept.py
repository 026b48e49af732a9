"""What a call of a model leaves in the attributes of its modules."""

from __future__ import annotations

import collections
import contextlib
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from ...refusals import Refusal, Why
from .guards import LARGEST, PLAIN, equal, is_own

_CONTAINERS = (list, dict, set, collections.deque)
_MODULE_DICTS = ("_parameters", "_buffers", "_modules")
_ABSENT = object()

# By identity of a module: its attributes, and what is in the containers among them.
Before = dict[int, tuple[dict[str, Any], dict[str, Any]]]


def before_call(modules: Sequence[nn.Module], trusted: set[int]) -> Before:
    """The attributes of modules now. trusted: those that may keep what they like in containers."""
    return {
        id(module): (dict(module.__dict__), {} if id(module) in trusted else _contents(module)) for module in modules
    }


def refuse_kept(
    modules: Mapping[str, nn.Module],
    trusted: set[int],
    before: Before,
    stored: Mapping[tuple[int, str], str],
    changed: Mapping[int, str],
) -> None:
    """Raise Refusal where the attributes of a module of the program are not what they were.

    modules: by what the program calls them.  stored, changed: see `Watch`.
    """
    for label, module in modules.items():
        attributes, now = before[id(module)][0], module.__dict__
        if id(module) in trusted:
            _refuse_switched(module, label, attributes)
            continue
        for name in {**attributes, **now}:
            if not equal(attributes.get(name, _ABSENT), now.get(name, _ABSENT)) and not is_own(now.get(name)):
                where = stored.get((id(module), name), "in the call")
                raise Refusal(Why.GRAPH_WRITES_STATE, f"{label}.{name}", where)
        refuse_contents({label: module}, trusted, before, changed)


def refuse_contents(
    modules: Mapping[str, nn.Module], trusted: set[int], before: Before, changed: Mapping[int, str]
) -> None:
    """Raise Refusal where a container in an attribute of the program's modules holds something else than before."""
    for label, module in modules.items():
        contents = before[id(module)][1]
        for name, items in _contents(module).items() if id(module) not in trusted else ():
            if name in contents and not _same(contents[name], items):
                where = changed.get(id(module.__dict__[name]), "in the call")
                raise Refusal(Why.GRAPH_WRITES_STATE, f"{label}.{name}", where)


def _refuse_switched(module: nn.Module, label: str, before: Mapping[str, Any]) -> None:
    """Raise Refusal where the program has changed a layer of torch, or its mode."""
    now = module.__dict__
    names = now if type(module).__module__.startswith("torch.nn.") else ("training",)
    for name in names:
        if isinstance(now[name], PLAIN) and not equal(before.get(name), now[name]):
            raise Refusal(Why.GRAPH_WRITES_STATE, f"{label}.{name}", "in the call")


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


@contextlib.contextmanager
def assert_no_mutation(model: nn.Module, tensors: Any) -> Iterator[None]:
    """Raise Refusal where a model changes attributes of its modules in a trial, which are put back: a graph
    could not repeat it. The frameworks' own layers may. tensors: the framework, see `Tensors`."""
    saved = [(m, dict(m.__dict__), _shallow(m)) for m in model.modules() if not tensors.is_own(m)]
    try:
        yield
    finally:
        changed = [(m, name) for m, attributes, contents in saved for name in _changed(m, attributes, contents)]
        for module, attributes, _ in saved:
            for name in set(module.__dict__) | set(attributes):
                if module.__dict__.get(name) is not attributes.get(name):
                    module.__dict__[name] = attributes.get(name)
    if changed:
        module, name = changed[0]
        raise Refusal(Why.GRAPH_KEEPS_VALUES, type(module).__name__, name)


def _shallow(module: nn.Module) -> dict[str, Any]:
    """The contents of lists and dictionaries among the attributes of a module."""
    return {
        name: list(value.items()) if isinstance(value, dict) else list(value)
        for name, value in module.__dict__.items()
        if type(value) in (list, dict) and name not in _MODULE_DICTS
    }


def _changed(module: nn.Module, attributes: dict[str, Any], contents: dict[str, Any]) -> Iterator[str]:
    now = module.__dict__
    for name in set(now) | set(attributes):
        if now.get(name) is not attributes.get(name):
            yield name
    for name, current in _shallow(module).items():
        initial = contents.get(name)
        if initial is None or len(initial) != len(current) or not all(map(_same_item, initial, current)):
            yield name


def _same_item(value: Any, other: Any) -> bool:
    if type(value) is tuple and type(other) is tuple:
        return len(value) == len(other) and all(map(operator.is_, value, other))
    return value is other
