"""What is known of values of expressions, as tags, and what follows for parts of them and around them."""

from __future__ import annotations

import ast
import enum
import functools
import operator
import re
from collections.abc import Iterable


class Tag(enum.IntFlag):
    """OLD: it may have been there before the call.  HOLDS: what lies in it may.  ROWS: a number that
    follows from how many rows there are.  SHAPE: a shape, whose first number is one."""

    NONE = 0
    OLD = 1
    HOLDS = 2
    ROWS = 4
    SHAPE = 8


NONE, OLD, HOLDS, ROWS, SHAPE = Tag.NONE, Tag.OLD, Tag.HOLDS, Tag.ROWS, Tag.SHAPE
STATE = OLD | HOLDS
COUNTS = ROWS | SHAPE
_ITERATORS = {"modules", "children", "parameters", "buffers"}
_LOOKUP = re.compile(r"\{[^}:!]*\.")


def joined(several: Iterable[Tag]) -> Tag:
    """Of what may be any of these."""
    return functools.reduce(operator.or_, several, NONE)


def element_of(tags: Tag) -> Tag:
    """Of something in a value."""
    return (STATE if tags & STATE else NONE) | (ROWS if tags & COUNTS else NONE)


def container_of(tags: Tag) -> Tag:
    """Of a new container with this in it."""
    return (HOLDS if tags & STATE else NONE) | (tags & COUNTS)


def of_axis(base: Tag, index: ast.expr, index_tags: Tag) -> Tag:
    """Of an entry of a shape: any but the first are channels or fixed."""
    if not base & SHAPE:
        return element_of(base)
    if isinstance(index, ast.Slice):
        lower = constant(index.lower)
        return NONE if isinstance(lower, int) and (lower >= 1 or lower == -1) else SHAPE
    return NONE if is_channel(index) else ROWS


def is_channel(index: ast.expr | None) -> bool:
    """Whether an axis is not that of rows."""
    value = constant(index)
    return isinstance(value, int) and (value >= 1 or value == -1)


def constant(node: ast.expr | None) -> object:
    """The number or text that an expression is; None for others."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = constant(node.operand)
        return -value if isinstance(value, (int, float)) else None
    return node.value if isinstance(node, ast.Constant) else None


def operands(arguments: list[ast.expr]) -> list[ast.expr]:
    """What `min` or `max` compares: its arguments, or the entries of the only one."""
    only = arguments[0] if len(arguments) == 1 else None
    return only.elts if isinstance(only, (ast.List, ast.Tuple, ast.Set)) else arguments


def text_of(node: ast.expr) -> str:
    """An expression as the program has it."""
    text = ast.unparse(node)
    return text if len(text) <= 60 else f"{text[:57]}..."


def asks_for_attributes(method: ast.Attribute) -> bool:
    """Whether a method is `format` of a text that may ask for attributes."""
    text = constant(method.value)
    return method.attr == "format" and not (isinstance(text, str) and _LOOKUP.search(text) is None)


def makes_iterator(node: ast.expr) -> bool:
    """Whether an iterator is a new one over parts of a module: to take from it writes nothing."""
    method = node.func if isinstance(node, ast.Call) else None
    return isinstance(method, ast.Attribute) and method.attr.removeprefix("named_") in _ITERATORS


def defaults_of(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> list[ast.expr]:
    """What an inner function takes for arguments that it is called without: read where it is defined."""
    return [*node.args.defaults, *[one for one in node.args.kw_defaults if one is not None]]
