"""What a function that is under way still computes with: read from its bytecode, as a compiler finds live variables."""

from __future__ import annotations

import dis
import functools
import types
import weakref
from collections.abc import Collection, Hashable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from ....refusals import Refusal, Why
from .number_tensors import MOST
from .structures import PLAIN, named, tensor_constant

_LOADS = ("LOAD_FAST", "LOAD_DEREF", "LOAD_CLOSURE", "LOAD_NAME", "LOAD_CLASSDEREF")
# Instructions by what they do to the stack: put values there, put a result in the place of operands, leave nothing.
_PUSHES = (
    *_LOADS, "LOAD_GLOBAL", "LOAD_CONST", "LOAD_SMALL_INT", "LOAD_ASSERTION_ERROR", "LOAD_COMMON_CONSTANT",
    "PUSH_NULL", "RESUME", "NOP", "SETUP_FINALLY", "POP_BLOCK", "KW_NAMES", "CACHE", "EXTENDED_ARG", "NOT_TAKEN",
    "COPY_FREE_VARS", "MAKE_CELL",
)  # fmt: skip
_REPLACES = (
    "LOAD_ATTR", "LOAD_METHOD", "PRECALL", "CALL", "BUILD_", "BINARY_", "UNARY_", "COMPARE_OP", "IS_OP", "CONTAINS_OP",
    "TO_BOOL", "GET_ITER", "LIST_TO_TUPLE", "LIST_EXTEND", "DICT_MERGE", "FORMAT_",
)  # fmt: skip
_ENDS = ("POP_JUMP", "RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS")
_ALWAYS_JUMP = ("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_ABSOLUTE", "JUMP_BACKWARD_NO_INTERRUPT")
_COPIES = ("COPY", "DUP_TOP")
_STORE_LOAD = "STORE_FAST_LOAD_FAST"  # of two statements
_CALL = nn.Module._call_impl.__code__


@functools.lru_cache(maxsize=1024)
def names_after(code: types.CodeType, at: int, caught: bool = False) -> frozenset[str]:
    """Local variables whose values code may use after the instruction at byte `at`: it reads them before it writes
    them, or has read them, and what it computed of them waits on the stack or is what a loop goes through.

    Ways that end in an exception do not count, as a call that takes one is not replayed, unless it may be caught:
    here, or `caught` by a caller."""
    instructions = list(dis.get_instructions(code))
    index = max(n for n, instruction in enumerate(instructions) if instruction.offset <= at)
    following = _following(instructions)
    caught = caught or catches(code)
    names = set(_live_behind(instructions, following, caught)[index])
    if caught:
        names.update(*map(_read, _unreached(instructions, following)))  # handlers
    names.update(*_on_stack(_statement(instructions[: index + 1]))[:-1])  # but for the result
    for n, loop in enumerate(instructions[:index]):
        if loop.opname == "FOR_ITER" and loop.argval > at:
            names.update(*_on_stack(_statement(instructions[:n])))
    return frozenset(names)


@functools.lru_cache(maxsize=1024)
def catches(code: types.CodeType) -> bool:
    """Whether code has handlers of exceptions, those of `with` among them."""
    return any(instruction.opname in ("PUSH_EXC_INFO", "SETUP_FINALLY") for instruction in dis.get_instructions(code))


def _live_behind(instructions: list[dis.Instruction], following: list[list[int]], caught: bool) -> list[frozenset[str]]:
    """The variables that are live behind each instruction, by the usual backward iteration. caught: ways that end in
    an exception count."""
    before: list[frozenset[str]] = [frozenset()] * len(instructions)
    behind = list(before)
    returns = [False] * len(instructions)  # whether some way from here ends without an exception
    changed = True
    while changed:
        changed = False
        for n in range(len(instructions) - 1, -1, -1):
            instruction = instructions[n]
            ends = caught or instruction.opname.startswith("RETURN_") or any(returns[m] for m in following[n])
            after = frozenset().union(*(before[m] for m in following[n]))
            own = after.difference(_written(instruction)).union(_read(instruction)) if ends else frozenset()
            changed = changed or (own, after, ends) != (before[n], behind[n], returns[n])
            before[n], behind[n], returns[n] = own, after, ends
    return behind


def _following(instructions: list[dis.Instruction]) -> list[list[int]]:
    """By the number of each instruction, those of the ones that may come next, but for handlers of exceptions."""
    numbers, every = {instruction.offset: n for n, instruction in enumerate(instructions)}, []
    for n, instruction in enumerate(instructions):
        name, found = instruction.opname, []
        if not name.startswith(("RETURN_", "RAISE_", "RERAISE")) and name not in _ALWAYS_JUMP and n + 1 < len(numbers):
            found.append(n + 1)
        jumps = instruction.opcode in dis.hasjrel or instruction.opcode in dis.hasjabs
        if jumps and not name.startswith("SETUP_"):
            found.append(numbers[instruction.argval])
        every.append(found)
    return every


def _unreached(instructions: list[dis.Instruction], following: list[list[int]]) -> list[dis.Instruction]:
    """The instructions that none but an exception leads to."""
    reached, waiting = {0}, [0]
    while waiting:
        new = set(following[waiting.pop()]) - reached
        reached |= new
        waiting += new
    return [instruction for n, instruction in enumerate(instructions) if n not in reached]


def _written(instruction: dis.Instruction) -> tuple[str, ...]:
    """The local variables that an instruction writes."""
    value = instruction.argval
    if instruction.opname == _STORE_LOAD:
        return value[:1]  # type: ignore[no-any-return]
    if not instruction.opname.startswith(("STORE_FAST", "STORE_NAME", "DELETE_FAST")):
        return ()
    return value if isinstance(value, tuple) else (value,)


def _read(instruction: dis.Instruction) -> tuple[str, ...]:
    """The local variables that an instruction reads."""
    value = instruction.argval
    if instruction.opname == _STORE_LOAD:
        return value[1:] if value[0] != value[1] else ()
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
    """The local variables from which each value is computed that a statement has on the stack, its result last; where
    that cannot be told, all that it has read, and nothing."""
    every = [*map(_read, statement), ()]
    stack: list[tuple[str, ...]] = []
    for instruction, names in zip(statement, every, strict=False):
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
    return stack


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


def constants_alive(
    inner: types.FrameType | None, outer: types.CodeType, inputs: Collection[int], n_rows: int
) -> Hashable:
    """Where the frames between two are, and what they still compute with, by name: numbers, text, modules,
    functions, and what tensors are besides their values.

    inputs: the ids of inputs, which are looked at elsewhere.  n_rows: of the sparse tensor; what has as many
    is taken to follow it.  Raises Refusal for other objects."""
    constants: list[Any] = []
    frames = list(frames_between(inner, outer))
    caught = any(catches(frame.f_code) for frame in frames)
    for frame in frames:
        code, variables = frame.f_code, frame.f_locals
        constants.append((code.co_filename, code.co_firstlineno, frame.f_lasti))  # one way of several
        for name in sorted(names_after(code, frame.f_lasti, caught)):
            if name in variables:
                constants.append((name, _Values(name, inputs, n_rows).constant(variables[name])))
    return tuple(constants)


class _Identity:
    """An object in a key, which does not keep it."""

    def __init__(self, value: Any) -> None:
        self._value, self._number = weakref.ref(value), id(value)

    def __hash__(self) -> int:
        return self._number

    def __eq__(self, other: object) -> bool:
        value = self._value()
        return isinstance(other, _Identity) and value is not None and value is other._value()


class _Values:
    """The constants of one local variable."""

    def __init__(self, name: str, inputs: Collection[int], n_rows: int) -> None:
        self._name, self._inputs, self._n_rows = name, inputs, n_rows
        self._under_way: list[Any] = []  # functions, which may hold themselves

    def constant(self, value: Any) -> Hashable:
        """Raises Refusal."""
        if isinstance(value, (*PLAIN, types.ModuleType, type)):
            return type(value), value
        own = type(value) is np.ndarray or isinstance(value, np.generic)  # others hold more: which values are masked
        if own and value.size <= MOST and value.dtype.kind in "biuf":
            return type(value), str(value.dtype), value.shape, value.tobytes()
        if isinstance(value, torch.Tensor):
            return type(value), value.device, *tensor_constant(value, self._n_rows)
        if isinstance(value, nn.Module):
            return _Identity(value)
        if id(value) in self._inputs:
            return "input"
        if isinstance(value, (list, tuple)):
            return type(value), tuple([self.constant(item) for item in value])
        if type(value) is dict:
            return dict, tuple([(str(key), self.constant(item)) for key, item in value.items()])
        return self._of_code(value)

    def _of_code(self, value: Any) -> Hashable:
        """A function by what it does: a program may define it anew in every call."""
        owner = getattr(value, "__self__", None)
        if isinstance(value, types.MethodType) and isinstance(owner, (nn.Module, type)):
            return types.MethodType, self.constant(owner), self.constant(value.__func__)
        if isinstance(value, types.BuiltinFunctionType) and isinstance(owner, (types.ModuleType, type(None))):
            return types.BuiltinFunctionType, value
        if not isinstance(value, types.FunctionType) or value.__dict__:
            raise Refusal(Why.GRAPH_LOCAL, self._name, named(value))
        if any(one is value for one in self._under_way):
            return "itself"
        self._under_way.append(value)
        cells = [cell.cell_contents for cell in value.__closure__ or () if _filled(cell)]
        held = cells, value.__defaults__ or (), value.__kwdefaults__ or {}
        return types.FunctionType, value.__module__, value.__code__, self.constant(held)


def _filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False
