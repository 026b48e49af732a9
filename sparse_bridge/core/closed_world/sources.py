"""The syntax tree of a function that ran, found by its code."""

from __future__ import annotations

import ast
import functools
import linecache
import os
import time
from collections.abc import Iterator
from types import CodeType
from typing import NamedTuple

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")
_STARTED = time.time()


class Source(NamedTuple):
    """node: of a function.  owner: the class around it.  outer: the functions around it, from the inside."""

    node: Function
    owner: str | None
    outer: tuple[Function, ...]


def source_of(code: CodeType) -> Source | None:
    """The source of a function; None where there is none, or another one."""
    for source in _functions(code.co_filename).get((code.co_name, code.co_firstlineno), ()):
        if _fits(code, source.node):
            return source
    return None


def position(code: CodeType, line: int | None = None) -> str:
    """'file:line' of code."""
    return f"{os.path.basename(code.co_filename)}:{code.co_firstlineno if line is None else line}"


@functools.lru_cache(maxsize=4096)
def private_names(code: CodeType) -> frozenset[str]:
    """The names `_Class__name` in code that says `__name`."""
    inner = [private_names(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    own = {name for name in code.co_names if name[:1] == "_" != name[1:2] and "__" in name and name[-2:] != "__"}
    return frozenset(own).union(*inner)


@functools.lru_cache(maxsize=512)
def _functions(filename: str) -> dict[tuple[str, int], list[Source]]:
    """The functions of a file by name and first line; {} where the file cannot be read or has changed since."""
    try:
        if os.path.getmtime(filename) > _STARTED and linecache.getlines(filename) != _lines(filename):
            return {}
    except OSError:
        pass  # cells of notebooks are known to `linecache` alone
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except (SyntaxError, ValueError):
        return {}
    functions: dict[tuple[str, int], list[Source]] = {}
    for source in _walk(tree, None, ()):
        node = source.node
        name = "<lambda>" if isinstance(node, ast.Lambda) else node.name
        decorators = [] if isinstance(node, ast.Lambda) else node.decorator_list
        line = min([node.lineno, *(one.lineno for one in decorators)])
        functions.setdefault((name, line), []).append(source)
    return functions


def _lines(filename: str) -> list[str]:
    with open(filename, encoding="utf-8") as file:
        return file.read().splitlines(keepends=True)


def _walk(node: ast.AST, owner: str | None, outer: tuple[Function, ...]) -> Iterator[Source]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield Source(child, owner, outer)
            yield from _walk(child, None, (child, *outer))
        else:
            yield from _walk(child, child.name if isinstance(child, ast.ClassDef) else owner, outer)


def _fits(code: CodeType, node: Function) -> bool:
    """Whether the names in the code are those of the source."""
    arguments = node.args
    names = [one.arg for one in (*arguments.posonlyargs, *arguments.args)]
    if list(code.co_varnames[: code.co_argcount]) != names:
        return False
    words: set[str] = set()
    for part in ast.walk(node):
        if isinstance(part, ast.Name):
            words.add(part.id)
        elif isinstance(part, ast.Attribute):
            words.add(part.attr)
        elif isinstance(part, ast.alias):
            words.update((part.name, *part.name.split(".")))
        elif isinstance(part, ast.ImportFrom):
            words.add(part.module or "")
    return all(word in words or word.startswith("_") or word == "AssertionError" for word in code.co_names)
