"""One test over many files or names: it tells of every one that breaks a rule. A test for each would cost more than the
rule."""

from __future__ import annotations

import ast
import functools
import pathlib
from collections.abc import Callable, Iterable
from typing import TypeVar

import pytest

Value = TypeVar("Value")


def each_of(
    values: Iterable[Value], name: Callable[[Value], str] = str
) -> Callable[[Callable[[Value], None]], Callable[[], None]]:
    """Of the check of one value a test of all. A check returns where a value is none of its own."""
    values = list(values)

    def over_all(check: Callable[[Value], None]) -> Callable[[], None]:
        def test() -> None:
            assert values, "nothing to look at"
            broken = []
            for value in values:
                try:
                    check(value)
                except pytest.skip.Exception as skipped:
                    raise AssertionError(f"{name(value)}: return instead of a skip") from skipped
                except Exception as error:
                    broken.append(f"{name(value)}: {type(error).__name__}: {error}")
            if broken:
                pytest.fail(f"{check.__doc__ or check.__name__}\n" + "\n".join(broken), pytrace=False)

        test.__name__, test.__doc__, test.__module__ = check.__name__, check.__doc__, check.__module__
        test.__qualname__ = check.__qualname__
        return test

    return over_all


@functools.cache
def text_of(path: pathlib.Path) -> str:
    return path.read_text(encoding="utf-8")


@functools.cache
def tree_of(path: pathlib.Path) -> ast.Module:
    """Its syntax tree, to be read alone: every rule gets the same."""
    return ast.parse(text_of(path))
