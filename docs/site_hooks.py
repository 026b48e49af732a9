"""What the documentation site does to pages that are also read in the repository."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_REPOSITORY = runpy.run_path(str(ROOT / "setup.py"))["REPOSITORY"]
_OUTSIDE = re.compile(r"\[([^\]]*)\]\((?:\.\./)+([^)\s]+)\)")


def on_config(config: Any) -> None:
    """The link to the repository, where its address is known."""
    config.repo_url = _REPOSITORY or None


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Links to files outside the site lead to the repository; the changelog is the repository's."""
    if page.file.src_path == "changelog.md":
        return (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").replace("](docs/", "](")
    return _OUTSIDE.sub(_outside, markdown)


def _outside(link: re.Match[str]) -> str:
    """A link into the repository, or the file's name where its address is not known."""
    text, path = link[1], link[2].partition("#")[0]
    if _REPOSITORY:
        return f"[{text}]({_REPOSITORY}/blob/main/{path})"
    return f"`{path}`" if path.endswith(text.strip("`")) else f"{text} (`{path}`)"
