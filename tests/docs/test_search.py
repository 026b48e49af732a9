"""The documentation builds without a warning, and its search finds what readers ask."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import sparse_bridge
from sparse_bridge import export
from sparse_bridge.core import functional
from tests.patience import PATIENCE

from .pages import ROOT
from .questions import FIRST, QUESTIONS

pytest.importorskip("material", reason="the extra `docs` is not installed")
lunr = pytest.importorskip("lunr")


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    return folder


class Search:
    """The site's own index, ranked as the theme ranks it.

    A page counts twice, a section that holds all words of the query once more; then pages are
    ordered by their best section.
    """

    def __init__(self, site: Path) -> None:
        content = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
        # The theme's separator as Python has it; lunr's own is blanks and hyphens.
        self.separator = re.compile(content["config"]["separator"])
        self.documents = {one["location"]: one for one in content["docs"]}
        fields = [{"field_name": "title", "boost": 1000}, {"field_name": "text", "boost": 1}]
        rows = [
            {**one, "title": self._words(one["title"]), "text": self._words(_plain(one["text"]))}
            for one in content["docs"]
        ]
        self.index = lunr.lunr(ref="location", fields=fields, documents=rows)

    def _words(self, text: str) -> str:
        return self.separator.sub(" ", text)

    def pages(self, query: str) -> list[str]:
        words = self._words(query).lower().split()
        scores: dict[str, float] = {}
        for hit in self.index.search(" ".join(words)):
            place = hit["ref"]
            found = {word for word in words if self._holds(place, word)}
            boost = ("#" not in place) + (len(found) == len(words))
            page = place.partition("#")[0].strip("/") or "index"
            scores[page] = max(scores.get(page, 0.0), hit["score"] * (1 + boost**2))
        return sorted(scores, key=scores.__getitem__, reverse=True)

    def _holds(self, place: str, word: str) -> bool:
        one = self.documents[place]
        return word in (one["title"] + " " + _plain(one["text"])).lower()


def _plain(html: str) -> str:
    return re.sub(r"<[^>]+>", " ", html)


@pytest.fixture(scope="module")
def search(site: Path) -> Search:
    return Search(site)


@pytest.mark.parametrize("query", QUESTIONS)
def test_one_query_finds_the_page(search: Search, query: str) -> None:
    first = search.pages(query)[:3]
    assert QUESTIONS[query] & set(first), f"{query!r} finds {first}"


@pytest.mark.parametrize("query", FIRST)
def test_one_query_finds_the_page_first(search: Search, query: str) -> None:
    assert search.pages(query)[0] == FIRST[query], search.pages(query)[:4]


def test_nothing_finds_what_is_not_there(search: Search) -> None:
    assert search.pages("gardening zucchini") == []


def test_no_page_links_to_what_the_site_lacks(site: Path) -> None:
    for page in site.rglob("*.html"):
        for target in re.findall(r'href="([^"#?:]+)"', page.read_text(encoding="utf-8")):
            start = site if target.startswith("/") else page.parent
            found = (start / target.lstrip("/")).resolve()
            assert page.name == "404.html" or found.exists(), f"{page.name}: {target}"


def test_the_site_has_five_groups() -> None:
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    assert len(re.findall(r"^  - [^:]+:$", nav, flags=re.M)) == 5
    assert not re.findall(r"^  - .+\.md$", nav, flags=re.M), "a page outside of the groups"


def test_the_matrix_has_a_button_on_top(site: Path) -> None:
    html = (site / "compatibility" / "index.html").read_text(encoding="utf-8")
    button = re.search(r'<a class="md-button[^"]*" href="([^"]+)"', html)
    assert button and button.start() < html.index("<h2")
    target = (site / "compatibility" / button[1]).resolve()
    assert '<form id="filters"' in target.read_text(encoding="utf-8")


def test_the_api_page_has_public_names_only(site: Path) -> None:
    """Those of its lists of members, and of modules that are listed as a whole."""
    html = (site / "api" / "index.html").read_text(encoding="utf-8")
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    listed = set()
    for name, members in re.findall(r"^::: (\S+)(?:\n    options:\n      members: \[(.*)\])?", text, re.M):
        listed |= {name, *(f"{name}.{one}" for one in members.split(", ") if one)}
    errors = importlib.import_module("sparse_bridge.errors")
    listed |= {f"{errors.__name__}.{name}" for name in vars(errors) if name.endswith("Error")}
    assert set(re.findall(r'id="(sparse_bridge[^"]*)"', html)) == listed


def test_the_api_page_has_all_public_names() -> None:
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    words = set(re.findall(r"\w+", text))
    assert {*functional.__all__, *export.__all__, "to_core", "from_core"} <= words
    assert "`sparse_bridge.settings.get()`" in text
    table = text.partition("| name | what it gives |")[2].partition("\n\n")[0]
    assert set(functional.__all__) <= set(re.findall(r"`(\w+)`", table))
    # Types that functions return, values, and modules.
    others = {"FrameworkStatus", "Handle", "__version__", "adapters", "settings"}
    assert set(sparse_bridge.__all__) - others <= words


def test_wide_tables_are_cards_on_a_phone(site: Path) -> None:
    """No table of more columns than a phone shows is left as it is."""
    for page in site.rglob("index.html"):
        html = re.sub(r'<div class="cards">.*?</table></div>', "", page.read_text("utf-8"), flags=re.S)
        for table in re.findall(r"<table>.*?</table>", html, flags=re.S):
            words = [re.split(r"[\s/,]+", _plain(cell)) for cell in re.findall(r"<th.*?</th>", table)]
            assert sum(max(map(len, cell)) for cell in words) < 36, f"{page}: {words}"
