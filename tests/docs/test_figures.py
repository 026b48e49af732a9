"""Figures of the README are those of a record."""

from __future__ import annotations

import re

from benchmarks.report import headline
from benchmarks.results import load_run

from .pages import ROOT

RECORD = ROOT / "benchmarks" / "results" / "h200_stream.json"


def test_the_speed_table_is_the_records() -> None:
    table = headline(load_run(RECORD))
    assert len(table.splitlines()) > 4
    assert table in (ROOT / "README.md").read_text(encoding="utf-8")


def test_no_other_figure_of_speed_stands_in_the_readme() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8").replace(headline(load_run(RECORD)), "")
    assert not re.findall(r"\d+(?:\.\d+)? ?(?:ms|us|GB|MB|x|times|%)\b", text)
