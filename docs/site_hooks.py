"""What the documentation site does to pages that are also read in the repository."""

from __future__ import annotations

import re
import runpy
from html import unescape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_REPOSITORY = runpy.run_path(str(ROOT / "setup.py"))["REPOSITORY"]
_VERSION = runpy.run_path(str(ROOT / "sparse_bridge" / "_version.py"))["__version__"]
_PHONE = 39  # letters of usual size that a phone of 390 pixels shows beside margins
_PADDING = 3  # of a cell, in letters
_BUTTON = re.compile(r"^(\[[^\]]+\]\([\w./-]+\.html\))$", flags=re.M)
_TABLE = re.compile(r"<table>.*?</table>", flags=re.S)
_ROW = re.compile(r"<tr\b[^>]*>.*?</tr>", flags=re.S)
_CELL = re.compile(r"<(t[hd])([^>]*)>(.*?)</t[hd]>", flags=re.S)
_BESIDE = re.compile(r"\[([^\]]*)\]\((?!docs/|https?:|#)([^)\s]+)\)")  # of files in the root
_OUTSIDE = re.compile(r"\[([^\]]*)\]\((?:\.\./)+([^)\s]+)\)")


def on_config(config: Any) -> None:
    """The link to the repository, where its address is known; the version stands below every page."""
    config.repo_url = _REPOSITORY or None
    config.copyright = f"sparse_bridge {_VERSION}"


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Links to files outside the site lead to the repository; the changelog is the repository's; a
    link to an HTML file that stands alone is a button."""
    if page.file.src_path == "changelog.md":
        text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
        return _BESIDE.sub(_outside, text).replace("](docs/", "](")
    return _BUTTON.sub(r"\1{ .md-button .md-button--primary }", _OUTSIDE.sub(_outside, markdown))


def on_page_content(html: str, **_: Any) -> str:
    """Tables that a phone is too narrow for get the names of their columns in every cell, so that
    the style sheet can show each row as a card."""
    return _TABLE.sub(lambda table: _as_cards(table[0]), html)


def _as_cards(table: str) -> str:
    head, *rows = [_CELL.findall(row) for row in _ROW.findall(table)]
    columns = list(zip(*([text for _, _, text in row] for row in (head, *rows)), strict=True))
    if sum(max(map(_longest_word, column)) + _PADDING for column in columns) <= _PHONE:
        return table
    names = [re.sub(r"<[^>]+>", "", name).strip() for _, _, name in head]
    body = "".join(
        "<tr>"
        + "".join(
            f'<td{attributes} data-head="{name}">{text}</td>'
            for name, (_, attributes, text) in zip(names, row, strict=True)
        )
        + "</tr>\n"
        for row in rows
    )
    before = table[: table.index("<tbody>")]
    return f'<div class="cards">{before}<tbody>\n{body}</tbody>\n</table></div>'


def _longest_word(text: str) -> int:
    """Letters that a cell cannot be narrower than."""
    words = re.split(r"[\s,]+", unescape(re.sub(r"<[^>]+>", "", text)))
    return max(map(len, words))


def _outside(link: re.Match[str]) -> str:
    """A link into the repository, or the file's name where its address is not known."""
    text, path = link[1], link[2].partition("#")[0]
    if _REPOSITORY:
        return f"[{text}]({_REPOSITORY}/blob/main/{path})"
    return f"`{path}`" if path.endswith(text.strip("`")) else f"{text} (`{path}`)"
