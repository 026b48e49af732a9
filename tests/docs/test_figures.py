"""Figures of the README are those of a record."""

from __future__ import annotations

import re
import statistics

from benchmarks.report import headline
from benchmarks.results import load_run

from .pages import ROOT

RECORD = ROOT / "benchmarks" / "results" / "h100_stream.json"


def test_the_speed_table_is_the_records() -> None:
    table = headline(load_run(RECORD))
    assert len(table.splitlines()) > 4
    assert table in (ROOT / "README.md").read_text(encoding="utf-8")


def test_no_other_figure_of_speed_stands_in_the_readme() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8").replace(headline(load_run(RECORD)), "")
    assert not re.findall(r"\d+(?:\.\d+)? ?(?:ms|us|GB|MB|x|times|%)\b", text)


# Rows of the memory table in docs/speed.md: suite of the records, peer, words.
MEMORY = {
    ("networks", "bridge"): "one scene again and again, networks",
    ("layers", "bridge"): "single layers, LiDAR scenes",
    ("scale", "bridge"): "single layers, sheets of 1k to 8M voxels",
    ("shells", "bridge"): "single layers, shells, up to 1024 channels",
    ("networks", "bridge_replayed"): "networks, `optimize(model, graphs=True)`",
}


def test_the_memory_table_is_that_of_all_records() -> None:
    ratios: dict[tuple[str, str], list[float]] = {}
    for path in sorted(RECORD.parent.glob("h200_*.json")):
        for one in load_run(path).comparisons():
            for other in one.others:
                ratio = one.memory(other)
                if ratio:  # 0: nothing was allocated beyond what was there, not a size
                    ratios.setdefault((one.base.suite, other.peer), []).append(ratio)
    page = (ROOT / "docs" / "speed.md").read_text(encoding="utf-8")
    for key, words in MEMORY.items():
        found = ratios[key]
        figures = (min(found), statistics.median(found), max(found))
        row = " | ".join([words, str(len(found)), *(f"{value:.2f}" for value in figures)])
        assert f"| {row} |" in page, f"expected the row: | {row} |"
