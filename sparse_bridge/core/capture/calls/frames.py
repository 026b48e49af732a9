"""What a function that is under way still computes with: read from its bytecode."""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from torch import nn

from ....refusals import Refusal, Why
from ..padded import named
from .input_proxies import PLAIN

_LOADS = ("LOAD_FAST", "LOAD_DEREF", "LOAD_CLOSURE", "LOAD_NAME", "LOAD_CLASSDEREF")
_CODE = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, type)


@functools.lru_cache(maxsize=1024)
def names_after(code: types.CodeType, at: int) -> frozenset[str]:
    """Local variables that code may read after the instruction at byte `at`."""
    instructions = list(dis.get_instructions(code))
    if any(
        one.offset > at and "JUMP" in one.opname and isinstance(one.argval, int) and one.argval <= at
        for one in instructions
    ):  # a loop around it
        later = instructions
    else:
        later = [one for one in instructions if one.offset > at]
        for one in reversed([one for one in instructions if one.offset <= at]):
            if one.opname.startswith(("STORE", "POP_TOP")):  # of this statement, loaded before
                break
            later.append(one)
    found: set[str] = set()
    for one in later:
        if one.opname.startswith(_LOADS):
            found.update(one.argval if isinstance(one.argval, tuple) else (one.argval,))
    return frozenset(found)


def frames_between(inner: types.FrameType | None, outer: types.CodeType) -> Iterator[types.FrameType]:
    """The frames from `inner` to the first one that runs `outer`, without both ends and without
    torch's calls of modules."""
    frame = None if inner is None else inner.f_back
    while frame is not None and frame.f_code is not outer:
        if frame.f_globals.get("__name__") != nn.Module.__module__:
            yield frame
        frame = frame.f_back


def constants_alive(inner: types.FrameType | None, outer: types.CodeType, known: Callable[[Any], bool]) -> Hashable:
    """The numbers and text, by name, that the frames between two still compute with.

    known: whether a value is looked at elsewhere.  Raises Refusal for what is none.
    """
    found: list[Any] = []
    for frame in frames_between(inner, outer):
        held = frame.f_locals
        for name in sorted(names_after(frame.f_code, frame.f_lasti)):
            if name in held:
                found.append((name, _constant(name, held[name], known)))
    return tuple(found)


def _constant(name: str, value: Any, known: Callable[[Any], bool]) -> Hashable:
    if isinstance(value, PLAIN):
        return type(value), value
    if isinstance(value, (torch.Tensor, nn.Module, *_CODE)) or known(value):
        kind: Any = type(value)
        return kind
    if isinstance(value, (list, tuple)):
        return type(value), tuple([_constant(name, one, known) for one in value])
    if type(value) is dict:
        parts = [(str(key), _constant(name, one, known)) for key, one in value.items()]
        return dict, tuple(parts)
    raise Refusal(Why.GRAPH_LOCAL, name, named(value))
