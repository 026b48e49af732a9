"""The page's reasons why a model is not replayed are those that the code gives, all of them; and
the messages that the page of ways quotes from the log are in the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from .pages import ROOT, table

PACKAGE = ROOT / "sparse_bridge"
REASONS = "| reason | it means | do |"
GIVE = {"UnpaddedError", "MixedRowsError", "UndecidedError", "UnknownRowsError", "refuse"}


def text_of(node: ast.expr) -> str:
    """Of a string; {} for what is known later."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(map(text_of, node.values))
    if isinstance(node, ast.BoolOp):
        return text_of(node.values[-1])
    return "{}"


def given(source: str) -> Iterator[str]:
    """Texts of refusals, and what `given_up` returns."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and node.args:
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            if name in GIVE:
                yield text_of(node.args[0])
        if isinstance(node, ast.FunctionDef) and node.name == "given_up":
            returned = [one.value for one in ast.walk(node) if isinstance(one, ast.Return)]
            yield from (text_of(one) for one in returned if one is not None)


def reasons() -> list[str]:
    paths = [*sorted((PACKAGE / "core" / "capture").rglob("*.py")), PACKAGE / "core/maps/rows.py"]
    texts = [one for path in paths for one in given(path.read_text(encoding="utf-8"))]
    return sorted({one for one in texts if re.search("[a-z]", one)})


def test_the_page_has_every_reason_and_no_other() -> None:
    rows = table(ROOT / "docs" / "troubleshooting.md", REASONS)
    phrases = [phrase for row in rows for phrase in re.findall(r"`([^`]+)`", row[0])]
    given_now = reasons()
    assert len(given_now) > 35
    missing = [one for one in given_now if not any(phrase in one for phrase in phrases)]
    assert missing == [], "without a row"
    assert [one for one in phrases if not any(one in text for text in given_now)] == []


def test_messages_that_are_quoted_exist() -> None:
    text = (ROOT / "docs" / "which_way.md").read_text(encoding="utf-8")
    part = text.partition("## Why was a way not taken?")[2].partition("\n## ")[0]
    sources = "".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py"))
    quoted = [one for one in re.findall(r"`([^`]+)`", part) if " " in one]
    assert len(quoted) > 7
    assert [one for one in quoted if one not in sources] == []
    for name in re.findall(r"`(\w+Error)`", part):
        assert f"class {name}(" in sources
