"""What the documentation site does to pages that are also read in the repository."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_OUTSIDE = re.compile(r"\[([^\]]*)\]\((?:\.\./)+([^)\s]+)\)")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Links to files outside the site become file names; the changelog is the repository's."""
    if page.file.src_path == "changelog.md":
        return (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").replace("](docs/", "](")
    return _OUTSIDE.sub(_named, markdown)


def _named(link: re.Match[str]) -> str:
    text, path = link[1], link[2].partition("#")[0]
    return f"{text} (`{path}` in the repository)"
