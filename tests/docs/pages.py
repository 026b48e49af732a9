"""The Markdown pages, and what is in them."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "SUPPORT.md", *sorted((ROOT / "docs").glob("*.md"))]
NOT_RUN = re.compile(r"<!-- not run: (.+) -->")


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block.

    line: of its first line of text, from 1.  reason: why it is not run.
    """

    language: str
    text: str
    line: int
    reason: str | None


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> list[Block]:
    """All fenced blocks of a page."""
    found, lines = [], page.read_text(encoding="utf-8").splitlines()
    start = None
    for number, line in enumerate(lines):
        if not line.lstrip().startswith("```"):
            continue
        if start is None:
            start = number
            continue
        before = lines[start - 1].strip() if start else ""
        reason = NOT_RUN.fullmatch(before)
        text = "\n".join(lines[start + 1 : number]) + "\n"
        language = lines[start].strip().strip("`")
        found.append(Block(language, text, start + 2, reason and reason.group(1)))
        start = None
    assert start is None, f"{page}: a fence is left open"
    return found


def table(page: Path, header: str) -> list[list[str]]:
    """The cells of every row of the table whose first line is `header`."""
    lines = page.read_text(encoding="utf-8").splitlines()
    found = []
    for line in lines[lines.index(header) + 2 :]:
        if not line.startswith("|"):
            break
        found.append([cell.strip() for cell in line.strip("|").split("|")])
    return found


def programs(page: Path) -> list[Block]:
    """The Python blocks that are run."""
    return [block for block in blocks(page) if block.language == "python" and block.reason is None]


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)


def anchor(heading: str) -> str:
    """The fragment that links to a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
