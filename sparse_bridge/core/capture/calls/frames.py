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
# Instructions by what they do to the stack: put values there, put a result in the place of operands, leave nothing.
_PUSHES = (
    *_LOADS, "LOAD_GLOBAL", "LOAD_CONST", "LOAD_SMALL_INT", "LOAD_ASSERTION_ERROR", "LOAD_COMMON_CONSTANT",
    "PUSH_NULL", "RESUME", "NOP", "KW_NAMES", "CACHE", "EXTENDED_ARG", "NOT_TAKEN", "COPY_FREE_VARS", "MAKE_CELL",
)  # fmt: skip
_REPLACES = (
    "LOAD_ATTR", "LOAD_METHOD", "PRECALL", "CALL", "BUILD_", "BINARY_", "UNARY_", "COMPARE_OP", "IS_OP", "CONTAINS_OP",
    "TO_BOOL", "LIST_TO_TUPLE", "LIST_EXTEND", "DICT_MERGE", "FORMAT_",
)  # fmt: skip
_ENDS = ("POP_JUMP", "RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS")
_COPIES = ("COPY", "DUP_TOP")
_STORE_LOAD = "STORE_FAST_LOAD_FAST"  # of two statements
_CALL = nn.Module._call_impl.__code__
_CODE = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, type)


@functools.lru_cache(maxsize=1024)
def names_after(code: types.CodeType, at: int) -> frozenset[str]:
    """Local variables that code may read after the instruction at byte `at`, or has read and not used yet."""
    instructions = list(dis.get_instructions(code))
    if any(
        instruction.offset > at
        and "JUMP" in instruction.opname
        and isinstance(instruction.argval, int)
        and instruction.argval <= at
        for instruction in instructions
    ):  # a loop around it
        return frozenset().union(*map(_read, instructions))
    later = [instruction for instruction in instructions if instruction.offset > at]
    statement = _statement([instruction for instruction in instructions if instruction.offset <= at])
    return frozenset().union(*map(_read, later), *_on_stack(statement))


def _read(instruction: dis.Instruction) -> tuple[str, ...]:
    """The local variables that an instruction reads."""
    value = instruction.argval
    if instruction.opname == _STORE_LOAD:
        return value[1:]  # type: ignore[no-any-return]
    if not instruction.opname.startswith(_LOADS):
        return ()
    return value if isinstance(value, tuple) else (value,)


def _statement(instructions: list[dis.Instruction]) -> list[dis.Instruction]:
    """The instructions of the statement that ends with the last one, or of more."""
    for index in range(len(instructions) - 1, 0, -1):
        name, before = instructions[index].opname, instructions[index - 1].opname
        # `y := f()` stores a copy, and `x or y` drops x behind a jump: what was loaded before is still to be used.
        inside = before in _COPIES if name.startswith("STORE") else "JUMP" in before or before == "NOT_TAKEN"
        if name.startswith(("STORE", "POP_TOP")) and not inside:
            return instructions[index if name == _STORE_LOAD else index + 1 :]
    return instructions


def _on_stack(statement: list[dis.Instruction]) -> list[tuple[str, ...]]:
    """The local variables from which the values are computed that wait for the last instruction's result; where that
    cannot be told, all that the statement has read."""
    every = [_read(instruction) for instruction in statement]
    stack: list[tuple[str, ...]] = []
    for instruction, names in zip(statement, every, strict=True):
        name = instruction.opname
        effect = dis.stack_effect(instruction.opcode, instruction.arg, jump=False)
        ends, pushes = name.startswith(_ENDS), name.startswith(_PUSHES) or name == _STORE_LOAD
        if not (ends or pushes or name.startswith(_REPLACES)) or (instruction.is_jump_target and stack):
            return every
        if pushes:
            stack += [names] * (1 if name == _STORE_LOAD else effect)
            continue
        taken = -effect if ends else 1 + max(0, -effect)
        if taken > len(stack):
            return every
        used = sum(stack[len(stack) - taken :], ())
        del stack[len(stack) - taken :]
        if ends and stack:  # a jump inside of an expression
            return every
        if not ends:
            stack += [used] * (1 + max(0, effect))
    return stack[:-1]


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
