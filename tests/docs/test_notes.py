"""The notes on speed: nothing is lost, everything is in the index, every link leads there."""

from __future__ import annotations

import datetime
import re
from pathlib import Path

import pytest

from .pages import ROOT, anchor, name_of, prose

NOTES = ROOT / "benchmarks" / "notes"
PAGES = sorted(NOTES.glob("*.md"))
SUBJECTS = [page for page in PAGES if page.name not in ("README.md", "learnt.md")]
OUTCOMES = {"kept", "dropped", "not taken", "measured", "state"}
MACHINES = {"H200", "H100", "Xeon", "EPYC", "CPU", "emulated", "no GPU", "none"}
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")
MOST_BYTES = 40_000  # of a file
MOST_LINES = 80  # of the lessons


def entries(page: Path) -> list[str]:
    return re.findall(r"^## (.+)$", prose(page), flags=re.M)


def index() -> list[list[str]]:
    """The rows of all tables of the index."""
    text = (NOTES / "README.md").read_text(encoding="utf-8")
    lines = re.findall(r"^\| (\[.+) \|$", text, flags=re.M)
    return [line.split(" | ") for line in lines]


def test_every_entry_is_in_the_index() -> None:
    """In the order of its file, and no file is without entries."""
    expected = {page.name: [(one, anchor(one)) for one in entries(page)] for page in SUBJECTS}
    listed: dict[str, list[tuple[str, str]]] = {}
    for idea, *_ in index():
        name, target = LINK.fullmatch(idea).groups()
        page, _, fragment = target.partition("#")
        listed.setdefault(page, []).append((name, fragment))
    assert listed == expected
    assert all(expected.values())


def test_an_index_line_says_what_came_of_it() -> None:
    for idea, outcome, figure, date, machine in index():
        assert outcome in OUTCOMES, idea
        assert figure, idea
        assert datetime.date.fromisoformat(date).year >= 2026, idea
        assert set(machine.split(", ")) <= MACHINES, idea


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for _, target in LINK.findall(prose(page)):
        path, _, fragment = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{target}: no such file"
        if fragment:
            headings = re.findall(r"^#+ (.+)$", prose(there), flags=re.M)
            assert fragment in map(anchor, headings), f"{target}: no such heading"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_pages_stay_short_enough_to_read(page: Path) -> None:
    assert len(page.read_bytes()) <= MOST_BYTES


def test_lessons_are_one_page_and_rest_on_entries() -> None:
    """Every lesson links to an entry that it comes from."""
    text = (NOTES / "learnt.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MOST_LINES
    lessons = re.findall(r"^- (?:.+\n)(?:  .+\n)*", text, flags=re.M)
    assert len(lessons) > 20
    for lesson in lessons:
        assert any("#" in target for _, target in LINK.findall(lesson)), lesson


def test_entries_do_not_point_up_and_down() -> None:
    """An entry may be moved: what it takes from another one it links to."""
    for page in SUBJECTS:
        assert not re.findall(r"(?:as|streams?|see|found) (?:above|below)\b(?! \d)", prose(page))
