"""The page's reasons why a faster way declines are those of the table `Why`, all of them, and each is
given somewhere; messages that the page of ways quotes from the log are in the code.

python -m tests.docs.test_refusals      # writes the table of docs/reasons.md
"""

from __future__ import annotations

import ast
import copy
import pickle
import re
from collections.abc import Iterator

from sparse_bridge.refusals import Refusal, Why

from .pages import ROOT, table

PACKAGE = ROOT / "sparse_bridge"
TABLE = PACKAGE / "refusals.py"
FIELD = re.compile(r"{[^}]*}")
PAGE, HEAD = ROOT / "docs" / "reasons.md", "| code | it says | do |"


def reasons() -> list[list[str]]:
    """The cells of the page's table."""
    return [[f"`{one.name}`", FIELD.sub("…", one.text), one.remedy or "nothing"] for one in Why]


def member(node: ast.AST) -> str | None:
    """The name where a node is `Why.NAME`."""
    own = isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "Why"
    return node.attr if own else None  # type: ignore[attr-defined]


def trees() -> Iterator[ast.AST]:
    """All nodes of the package outside of the table."""
    for path in PACKAGE.rglob("*.py"):
        if path != TABLE:
            yield from ast.walk(ast.parse(path.read_text(encoding="utf-8")))


def calls() -> Iterator[tuple[str, int]]:
    """Where a reason is given: its name, and with how many details."""
    for node in trees():
        if isinstance(node, ast.Call):
            if getattr(node.func, "attr", "") == "says" and (name := member(node.func.value)):  # type: ignore[attr-defined]
                yield name, len(node.args)
            elif node.args and (name := member(node.args[0])):
                yield name, len(node.args) - 1
        elif isinstance(node, ast.Return) and node.value is not None and (name := member(node.value)):
            yield name, 0
        elif isinstance(node, ast.Assign) and getattr(node.targets[0], "attr", "") == "refusal":
            choices = [node.value.body, node.value.orelse] if isinstance(node.value, ast.IfExp) else [node.value]
            yield from ((name, 0) for one in choices if (name := member(one)))


def test_the_page_has_every_reason_and_no_other() -> None:
    assert table(PAGE, HEAD) == reasons()


def test_the_page_explains_every_way() -> None:
    rows = table(PAGE, "| code begins with | what declined | where it says so |")
    assert [row[0].strip("`") for row in rows] == list(dict.fromkeys(one.name.partition("_")[0] for one in Why))


def test_every_reason_is_given_with_what_its_sentence_needs() -> None:
    given = list(calls())
    assert {name for name, _ in given} == {one.name for one in Why}
    assert [one for one in given if one[1] != len(FIELD.findall(Why[one[0]].text))] == []


def test_a_reason_is_one_sentence() -> None:
    for why in Why:
        assert why.text[-1] != "." and ". " not in why.text and "|" not in f"{why.text}{why.remedy}"
        assert why.says(*[0.5] * len(FIELD.findall(why.text))).endswith(f" [{why.name}]")


def test_a_refusal_can_be_copied_and_sent() -> None:
    refusal = Refusal(Why.GRAPH_READS_OBJECT, "{key}", "Thing")
    for one in (refusal, copy.copy(refusal), pickle.loads(pickle.dumps(refusal))):
        assert (str(one), one.why) == ("it reads '{key}', a Thing [GRAPH_READS_OBJECT]", Why.GRAPH_READS_OBJECT)


def test_messages_that_are_quoted_exist() -> None:
    text = (ROOT / "docs" / "which_way.md").read_text(encoding="utf-8")
    part = text.partition("## Why was a way not taken?")[2].partition("\n## ")[0]
    sources = "".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py"))
    quoted = [one for one in re.findall(r"`([^`]+)`", part) if " " in one]
    assert len(quoted) > 7
    assert [one for one in quoted if one not in sources] == []
    for name in re.findall(r"`(\w+Error)`", part):
        assert f"class {name}(" in sources


if __name__ == "__main__":
    before, _, _ = PAGE.read_text(encoding="utf-8").partition(HEAD)
    lines = [HEAD, "|---|---|---|", *("| " + " | ".join(cells) + " |" for cells in reasons())]
    PAGE.write_text(before + "\n".join(lines) + "\n", encoding="utf-8")
