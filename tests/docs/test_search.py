"""The documentation builds without a warning, and its search finds what readers ask."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import PATIENCE

from .pages import ROOT
from .questions import QUESTIONS

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
        self.documents = {one["location"]: one for one in content["docs"]}
        fields = [{"field_name": "title", "boost": 1000}, {"field_name": "text", "boost": 1}]
        rows = [{**one, "text": _plain(one["text"])} for one in content["docs"]]
        self.index = lunr.lunr(ref="location", fields=fields, documents=rows)

    def pages(self, query: str) -> list[str]:
        words = query.lower().split()
        scores: dict[str, float] = {}
        for hit in self.index.search(query):
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


def test_nothing_finds_what_is_not_there(search: Search) -> None:
    assert search.pages("gardening zucchini") == []


def test_no_page_links_to_what_the_site_lacks(site: Path) -> None:
    for page in site.rglob("*.html"):
        for target in re.findall(r'href="([^"#?:]+)"', page.read_text(encoding="utf-8")):
            start = site if target.startswith("/") else page.parent
            found = (start / target.lstrip("/")).resolve()
            assert page.name == "404.html" or found.exists(), f"{page.name}: {target}"
