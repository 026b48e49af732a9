"""Results on disk, merged, as Markdown and as a page."""

from __future__ import annotations

import dataclasses
import re
from html.parser import HTMLParser

import pytest

from compat import markdown, matrix, page, projects, replays, report
from compat.cli import RESULTS, ROOT
from compat.results import Results, merge
from sparse_bridge import __main__ as command_line
from sparse_bridge import __version__
from sparse_bridge.errors import SettingError

from .conftest import cell, facts


def records():
    """Of replays."""
    return replays.read(), replays.on_gpus()


def test_results_survive_the_disk(results, tmp_path):
    path = tmp_path / "new" / "results.json"
    results.save(path)
    assert Results.read(path) == results


@pytest.mark.parametrize("text", ["", "[]", '{"schema": 99}', '{"schema": 1, "runs": []}'])
def test_other_files_are_refused(text, tmp_path):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(SettingError, match=r"other\.json holds no results"):
        Results.read(path)


def test_merging_keeps_the_latest_of_each_cell(results):
    again = Results((facts(date="later"),), (cell("UNet", 3, forward="pass"),))
    found = merge([results, again])
    assert len(found.cells) == 4
    unet = next(one for one in found.cells if one.model == "UNet" and one.device == "cpu")
    assert unet.outcome == "pass" and found.runs[unet.run]["date"] == "later"
    assert merge([found]) == found
    # a run of which nothing is left is not mentioned
    replaced = dataclasses.replace(results, cells=results.cells[1:2])
    assert [run["date"] for run in merge([replaced, again]).runs] == ["later"]


def test_merging_goes_check_by_check():
    first = Results((facts(),), (cell(forward="pass", eval=("fail", "old"), native="pass"),))
    second = Results((facts(date="later"),), (cell(eval="pass", copy="pass"),))
    (found,) = merge([first, second]).cells
    assert [(one.check, one.outcome) for one in found.checks] == [
        ("forward", "pass"),
        ("eval", "pass"),
        ("copy", "pass"),
        ("native", "pass"),
    ]


def test_merging_keeps_no_check_of_another_version():
    first = Results((facts(version="0.0.9"),), (cell(forward="pass", native="pass"),))
    second = Results((facts(),), (cell(forward="pass"),))
    found = merge([first, second])
    assert [one.check for one in found.cells[0].checks] == ["forward"]
    assert len(found.runs) == 1


def test_a_cell_is_as_good_as_its_worst_check():
    assert cell(forward="pass", native=("not run", "")).outcome == "pass"
    assert cell(forward="pass", eval=("unsupported", "")).outcome == "unsupported"
    assert cell(forward=("fail", ""), eval=("unsupported", "")).outcome == "fail"
    assert cell(forward=("not run", "")).outcome == "not run"
    listed = ("fail", "as the original", True)
    assert cell(forward="pass", eval=listed).outcome == "known"
    assert cell(forward=("fail", ""), eval=listed).outcome == "fail"


def test_nothing_is_said_of_older_cells_where_there_are_none():
    ours = Results((facts(version=__version__),), (cell(forward="pass"),))
    assert report.older(ours) == ""
    for writer in (markdown, page):
        assert "not run again" not in writer.render(ours, [])


def test_every_model_links_to_its_project():
    for model in matrix.load():
        assert (projects.address(model.name) or "").startswith("https://"), model.name
    assert projects.address("TRELLIS.2 shape VAE").endswith("/TRELLIS.2")
    assert projects.address("another") is None


def test_every_check_is_explained():
    assert tuple(report.ABOUT) == matrix.CHECKS


def test_runs_of_one_machine_are_one_line():
    found = Results((facts(date="b"), facts("H200"), facts(date="a"), facts(date="c")), ())
    rest = "sparse_bridge 0.1.0, torch 2.9.0"
    assert report.runs(found) == [f"CPU, a to c: {rest}", f"H200, 2026-01-02 03:04 UTC: {rest}"]


@pytest.fixture
def models(toys):
    return [*matrix.load(toys(("untried", "", "")))]


def test_markdown(results, models):
    text = markdown.render(results, models)
    row = "| spconv | CPU | 1 pass, 1 fail, 1 not run | 2 pass, 1 fail, 1 not run |"
    assert row in text
    assert "| spconv | NVIDIA H200 | 1 pass, 1 not run | 1 pass, 1 not run |" in text
    assert "| MinkowskiEngine | CPU | 1 unsupported | 1 unsupported |" in text
    assert f"**Cells not run again with {__version__}: 3 on CPU (version 0.1.0), 1 on " in text
    assert "- CPU, 2026-01-02 03:04 UTC: sparse_bridge 0.1.0, torch 2.9.0\n" in text
    assert "- CPU: of the 29 listed models 3 have run, 1 of them without any check failed" in text
    assert text.count("Cells by the size of their scenes: ") == 2
    assert "or unsupported. Cells by the size of their scenes: 1 small.\n" in text
    assert "| SECOND | 1 | pass 2/2 | not run |" in text
    assert "| untried | smoke | not run | not run |" in text
    (note,) = re.findall(r"\*\*fail\*\* 0/1<sup>\[(\d+)\]\(#note-\1\)</sup>", text)
    assert f'{note}. <a id="note-{note}"></a>forward: rows &lt;differ> \\| by \\*3\\*' in text
    assert all(
        line.count("|") == other.count("|")
        for line, other in zip(text.splitlines(), text.splitlines()[1:], strict=False)
        if line.startswith("|") and other.startswith("|") and "\\|" not in line + other
    )


class Outline(HTMLParser):
    """Tags with attributes; fails on tags that do not close."""

    def __init__(self):
        super().__init__()
        self.tags, self._open = [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in ("meta", "input", "link", "img", "br"):
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag


def test_page_is_self_contained_and_well_formed(results, models):
    text = page.render(results, models)
    outline = Outline()
    outline.feed(text)
    outline.close()
    assert not outline._open
    assert not [tag for tag, _ in outline.tags if tag in ("link", "img", "iframe")]
    assert {tag for tag, a in outline.tags if a.get("src") or a.get("href")} == {"a"}
    assert "url(" not in text and "@import" not in text
    rows = [a for tag, a in outline.tags if tag == "tr" and "data-framework" in a]
    assert len(rows) == 4 and {row["data-outcome"] for row in rows} == {"pass", "fail", "unsupported"}
    assert "rows &lt;differ&gt; | by *3*" in text and "<differ>" not in text
    ids = [a["id"] for _, a in outline.tags if "id" in a]
    assert len(ids) == len(set(ids))


def test_report_command_merges_files(results, tmp_path, capsys):
    first, second = tmp_path / "cpu.json", tmp_path / "h200.json"
    dataclasses.replace(results, cells=results.cells[:2]).save(first)
    dataclasses.replace(results, cells=results.cells[2:]).save(second)
    arguments = ["compat", "report", str(first), str(second), "--docs", str(tmp_path)]
    assert command_line.main(arguments) == 0
    assert not (tmp_path / "compatibility.md").exists()
    assert command_line.main([*arguments, "--write"]) == 0
    assert "FCGF" in capsys.readouterr().out
    stored = merge([results])
    assert (tmp_path / "compatibility.md").read_text() == markdown.render(stored, matrix.load(), *records())
    assert (tmp_path / "compatibility.html").read_text() == page.render(stored, matrix.load())


def test_pages_are_those_of_the_stored_results():
    stored = merge(map(Results.read, sorted(RESULTS.glob("*.json"))))
    models = matrix.load()
    texts = {"md": markdown.render(stored, models, *records()), "html": page.render(stored, models)}
    for ending, text in texts.items():
        kept = (ROOT / "docs" / f"compatibility.{ending}").read_text(encoding="utf-8")
        assert kept == text, f"compatibility.{ending} is old: {report.COMMAND}"
