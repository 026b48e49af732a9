"""What a program does with the grid of a sparse tensor, and with how many batch items it has.

A program may compute anything from them, by way of functions, objects and closures that nobody follows. So it counts
as a use of them to read one at all, unless that does no more than to hand it on to another sparse tensor.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Iterator, Mapping
from types import CodeType
from typing import Any

from torch import nn

from ...names import is_framework
from .origins import words
from .sources import Function, source_of
from .tags import constant
from .watch import Ran

BATCH_SIZE = "batch_size"
# Attributes of sparse tensors that change from scene to scene with the grid, and batch items.
GRID = words("spatial_shape spatial_size spatial_range sparity") | {BATCH_SIZE}
_BY_NAME = words("getattr hasattr attrgetter __getattribute__")
_ALL = words("vars asdict astuple")
_NONE = frozenset[str]()
_Predicate = Callable[[ast.expr], bool]


def grid_uses(ran: Mapping[CodeType, Ran], modules: frozenset[int]) -> frozenset[str]:
    """Which of `GRID` a program uses. Arguments: see `Watch`."""
    uses = [
        _of_function(code, spaces.values(), bool(owners) and owners.keys() <= modules)
        for code, (spaces, owners) in ran.items()
    ]
    return _NONE.union(*uses)


def _of_function(code: CodeType, spaces: Collection[dict[str, Any]], of_module: bool) -> frozenset[str]:
    """spaces: its globals.  of_module: its first argument is a module, which has a grid of its own at most."""
    source = source_of(code)
    if source is None:
        return GRID
    local = {*code.co_freevars, *_bound(source.node)}
    arguments = [*source.node.args.posonlyargs, *source.node.args.args]
    if of_module and arguments:
        local.discard(arguments[0].arg)
    return _Uses(source.node, local, lambda callee: _makes_tensor(callee, spaces)).names


class _Uses:
    """names: what is used in a function.  local: its names for what may be of the call."""

    def __init__(self, node: Function, local: set[str], makes_tensor: _Predicate) -> None:
        self._local, self._makes_tensor = local, makes_tensor
        self._handed_on: set[int] = set()
        self._variables: dict[str, frozenset[str]] = {}
        parts, known = list(ast.walk(node)), -1
        while known != len(self._handed_on):  # a variable may be bound behind its use
            known = len(self._handed_on)
            for part in parts:
                for value, target in self._harmless(part):
                    self._hand_on(value, target)
        self.names = frozenset(name for part in parts for name in self._used(part))

    def _hand_on(self, value: ast.expr, target: ast.expr | None) -> None:
        read = self._read(value)
        if read:
            self._handed_on.add(id(value))
            if isinstance(target, ast.Name):
                self._variables[target.id] = self._variables.get(target.id, _NONE) | read

    def _harmless(self, part: ast.AST) -> Iterator[tuple[ast.expr, ast.expr | None]]:
        """Values that are handed on, and the variables that they are put in."""
        if isinstance(part, ast.Call):
            if self._makes_tensor(part.func) or (isinstance(part.func, ast.Name) and part.func.id == "len"):
                yield from ((one, None) for one in (*part.args, *(keyword.value for keyword in part.keywords)))
        elif isinstance(part, ast.Assign):
            for target in part.targets if len(part.targets) == 1 else ():
                yield from _pairs(target, part.value)
        elif isinstance(part, ast.AnnAssign) and part.value is not None:
            yield from _pairs(part.target, part.value)
        elif isinstance(part, ast.Expr):
            yield part.value, None
        elif isinstance(part, ast.Compare) and all(isinstance(one, (ast.Is, ast.IsNot)) for one in part.ops):
            yield part.left, None

    def _read(self, node: ast.AST) -> frozenset[str]:
        """What is read by no more than this expression."""
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and self._is_local(node.value):
            return GRID if node.attr == "__dict__" else GRID & {node.attr}
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            return self._variables.get(node.id, _NONE)
        return _NONE

    def _used(self, part: ast.AST) -> frozenset[str]:
        if isinstance(part, ast.AugAssign) and isinstance(part.target, ast.Attribute):
            return GRID & {part.target.attr}
        if isinstance(part, ast.Call):
            return self._asked(part)
        return _NONE if id(part) in self._handed_on else self._read(part)

    def _asked(self, call: ast.Call) -> frozenset[str]:
        """Attributes that are read by name."""
        name = call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")
        if name in _ALL and any(map(self._is_local, call.args)):
            return GRID
        if name not in _BY_NAME or not call.args:
            return _NONE
        if name in ("getattr", "hasattr") and not self._is_local(call.args[0]):
            return _NONE
        names = [constant(one) for one in (call.args[1:2] if name in ("getattr", "hasattr") else call.args)]
        if not all(isinstance(one, str) for one in names):
            return GRID
        return GRID.intersection(*[str(one).split(".") for one in names]) if len(names) == 1 else GRID

    def _is_local(self, node: ast.expr) -> bool:
        """Whether an object may be of the call: none that a module or a global name leads to."""
        while isinstance(node, ast.Attribute):
            node = node.value
        return not isinstance(node, ast.Name) or node.id in self._local


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        for one, own in zip(target.elts, value.elts, strict=True):
            yield from _pairs(one, own)
    elif isinstance(target, ast.Name) or (isinstance(target, ast.Attribute) and target.attr in GRID):
        yield value, target


def _bound(node: Function) -> Iterator[str]:
    """Names of arguments and variables, of functions inside, too."""
    for part in ast.walk(node):
        if isinstance(part, ast.Name) and not isinstance(part.ctx, ast.Load):
            yield part.id
        elif isinstance(part, ast.arg):
            yield part.arg
        elif isinstance(part, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)) and part.name:
            yield part.name


def _makes_tensor(callee: ast.expr, spaces: Collection[dict[str, Any]]) -> bool:
    """Whether what is called is the class of a sparse tensor: one of a framework's, or that of an object."""
    if isinstance(callee, ast.Call):
        return isinstance(callee.func, ast.Name) and callee.func.id == "type" and len(callee.args) == 1
    chain: list[str] = []
    while isinstance(callee, ast.Attribute):
        chain.insert(0, callee.attr)
        callee = callee.value
    if chain[-1:] == ["__class__"]:
        return True
    return isinstance(callee, ast.Name) and all(_is_tensor_class(callee.id, chain, names) for names in spaces)


def _is_tensor_class(root: str, chain: list[str], names: dict[str, Any]) -> bool:
    found = names.get(root)
    for name in chain:
        found = getattr(found, name, None)
    if not isinstance(found, type) or issubclass(found, nn.Module):
        return False
    return is_framework(found.__module__.partition(".")[0])
