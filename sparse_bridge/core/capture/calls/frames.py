"""What a function that is under way still computes with: read from its bytecode."""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from ....refusals import Refusal, Why
from .number_tensors import MOST
from .structures import PLAIN, named

_LOADS = ("LOAD_FAST", "LOAD_DEREF", "LOAD_CLOSURE", "LOAD_NAME", "LOAD_CLASSDEREF")
_CALL = nn.Module._call_impl.__code__
_CODE = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, type)


@functools.lru_cache(maxsize=1024)
def names_after(code: types.CodeType, at: int) -> frozenset[str]:
    """Local variables that code may read after the instruction at byte `at`."""
    instructions = list(dis.get_instructions(code))
    if any(
        instruction.offset > at
        and "JUMP" in instruction.opname
        and isinstance(instruction.argval, int)
        and instruction.argval <= at
        for instruction in instructions
    ):  # a loop around it
        later = instructions
    else:
        later = [instruction for instruction in instructions if instruction.offset > at]
        for instruction in reversed([instruction for instruction in instructions if instruction.offset <= at]):
            if instruction.opname.startswith(("STORE", "POP_TOP")):  # of this statement, loaded before
                break
            later.append(instruction)
    names: set[str] = set()
    for instruction in later:
        if instruction.opname.startswith(_LOADS):
            names.update(instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,))
    return frozenset(names)


def calls_under_way(frame: types.FrameType | None) -> Iterator[tuple[nn.Module, list[Any]]]:
    """Modules whose calls are under way, from the innermost one outwards, and what each was given."""
    while frame is not None:
        if frame.f_code is _CALL:
            variables = frame.f_locals
            module, args, kwargs = (variables.get(name) for name in ("self", "args", "kwargs"))
            if isinstance(module, nn.Module):
                yield module, [*(args or ()), *(kwargs or {}).values()]
        frame = frame.f_back


def frames_between(inner: types.FrameType | None, outer: types.CodeType) -> Iterator[types.FrameType]:
    """The frames from `inner` to the first one that runs `outer`, without both ends and without
    torch's calls of modules."""
    frame = None if inner is None else inner.f_back
    while frame is not None and frame.f_code is not outer:
        if frame.f_globals.get("__name__") != nn.Module.__module__:
            yield frame
        frame = frame.f_back


def constants_alive(inner: types.FrameType | None, outer: types.CodeType, is_input: Callable[[Any], bool]) -> Hashable:
    """The numbers and text, by name, that the frames between two still compute with.

    is_input: whether a value is an input, which is looked at elsewhere.  Raises Refusal for other objects.
    """
    constants: list[Any] = []
    for frame in frames_between(inner, outer):
        variables = frame.f_locals
        for name in sorted(names_after(frame.f_code, frame.f_lasti)):
            if name in variables:
                constants.append((name, _constant(name, variables[name], is_input)))
    return tuple(constants)


def _constant(name: str, value: Any, is_input: Callable[[Any], bool]) -> Hashable:
    if isinstance(value, PLAIN):
        return type(value), value
    own = type(value) is np.ndarray or isinstance(value, np.generic)  # others hold more: which values are masked
    if own and value.size <= MOST and value.dtype.kind in "biuf":
        return type(value), str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, (torch.Tensor, nn.Module, *_CODE)) or is_input(value):
        category: type = type(value)
        return category
    if isinstance(value, (list, tuple)):
        return type(value), tuple([_constant(name, item, is_input) for item in value])
    if type(value) is dict:
        parts = [(str(key), _constant(name, item, is_input)) for key, item in value.items()]
        return dict, tuple(parts)
    raise Refusal(Why.GRAPH_LOCAL, name, named(value))
