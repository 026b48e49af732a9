"""The audit of public names: its tables, its judgement, and what it says of this project."""

from __future__ import annotations

import inspect
import json
import pathlib
import subprocess
import sys

import pytest
import torch

from sparse_bridge.errors import SettingError
from sparse_bridge.surface import check, table
from sparse_bridge.surface.command import collect
from sparse_bridge.surface.markdown import page

ROOT = pathlib.Path(__file__).parents[2]
# Layers that inherit torch's show its signatures; those of older releases lack an argument.
as_recorded = pytest.mark.skipif(
    "bias" not in inspect.signature(torch.nn.BatchNorm1d).parameters,
    reason="the tables are recorded with a newer torch",
)


def command(*arguments):
    """Standard output of `python -m sparse_bridge surface ...` in a process of its own."""
    call = [sys.executable, "-m", "sparse_bridge", "surface", *arguments]
    done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    return done.returncode, done.stdout, done.stderr


# Both outputs from one look at all frameworks, which takes seconds.
BOTH = """
import json, sys
from sparse_bridge.surface.command import collect, facts_of
from sparse_bridge.surface.markdown import page
found = collect([])
json.dump([[facts_of(surface) for surface in found], page(found)], sys.stdout)
"""


@pytest.fixture(scope="module")
def everything():
    done = subprocess.run(
        [sys.executable, "-c", BOTH], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def facts(everything):
    return {(found["framework"], found["release"]): found for found in everything[0]}


@as_recorded
def test_no_name_is_absent_without_a_reason(facts):
    assert list(facts) == [(name, release) for name, release, _ in table.releases()]
    for key, found in facts.items():
        assert check.ABSENT not in found and check.DIFFERENT not in found, key
        assert len(found[check.PRESENT]) > 50
        for state in (check.EXPLAINED, check.CHANGED):
            assert all(len(note) > 10 for note in found.get(state, {}).values())


def test_every_reason_still_explains_something(facts):
    for framework in {name for name, _, _ in table.releases()}:
        for reason in table.reasons(framework):
            state = check.CHANGED if reason.of_parameters else check.EXPLAINED
            assert any(
                reason.fits(name) and note == reason.text
                for (owner, _), found in facts.items()
                if owner == framework
                for name, note in found.get(state, {}).items()
            ), reason


@as_recorded
def test_the_page_is_current(everything):
    assert everything[1] == (ROOT / "docs" / "surface.md").read_text(encoding="utf-8"), (
        "docs/surface.md is old: python -m sparse_bridge surface --markdown > docs/surface.md"
    )


def test_one_framework_in_words():
    status, out, _ = command("minkowski")
    assert status == 0 and out.startswith("minkowski 0.5.4: ") and "spconv" not in out
    assert "absent on purpose" in out and "0 without" in out
    with pytest.raises(SettingError, match="'nothing' is unknown"):
        collect(["nothing"])


@as_recorded
def test_the_table_of_spconv_is_that_of_the_wheel():
    constants = pytest.importorskip("spconv.cppconstants")
    if not constants.CPU_ONLY_BUILD:
        pytest.skip("the table is that of a build for CPUs")
    code = "from tests.surface.record import record; import sys; sys.stdout.write(record())"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    version = done.stdout.split()[2].rstrip(",")
    stored = (table.FOLDER / f"spconv-{version}.txt").read_text(encoding="utf-8")
    assert done.stdout == stored, "python -m tests.surface.record writes it anew"


# the judgement


class Known:
    """What a table is compared with below."""

    def plain(self, a, b=1, *, c=None):
        pass

    def loose(self, a, *args, **kwargs):
        pass

    def typed(self, a, mode=check.PRESENT, sizes=(1, 1), extra=0):
        pass


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("plain(a, b=1, *, c=None)", ""),
        ("plain(a)", ""),
        ("plain(a, b=...)", ""),
        ("loose(a, b=3, c=4)", ""),
        ("typed(a, mode='present', sizes=[1, 1])", ""),
        ("typed", ""),
        ("plain(b, a=1)", "place 1 is 'a', not 'b'"),
        ("plain(a, b=2)", "'b' defaults to 1, not 2"),
        ("plain(a, b=True)", "'b' defaults to 1, not True"),
        ("plain(a, b=1, d=2)", "takes no 'd'"),
        ("plain(a, b=1, *, d=2)", "takes no keyword 'd'"),
        ("plain(a=1)", "'a' is needed"),
        ("plain()", "needs a further 'a'"),
        ("gone", "AttributeError"),
        ("gone.further(a)", "AttributeError"),
    ],
)
def test_names_and_parameters_are_compared(tmp_path, monkeypatch, line, problem):
    monkeypatch.setattr(table, "FOLDER", tmp_path)
    (tmp_path / "toy-1.txt").write_text(f"# toy\n[{__name__}]\nKnown\n    {line}\n")
    table.entries.cache_clear()
    (*_, entry) = table.entries("toy", "1")
    found = check.finding_of(entry, ())
    assert problem in found.note and (found.state == check.PRESENT) == (not problem)
    if problem:
        kind = "" if "Error" in problem else "~"
        (tmp_path / "toy-absent.txt").write_text(f"{kind}{__name__}.Known.*: it is a toy\n")
        table.reasons.cache_clear()
        found = check.finding_of(entry, table.reasons("toy"))
        assert found.state in (check.EXPLAINED, check.CHANGED) and found.note == "it is a toy"


@pytest.mark.parametrize("text", ["Loose\n", "[m]\nname, name\n", "[m]\nname(a\n"])
def test_a_table_that_cannot_be_read_says_where(tmp_path, monkeypatch, text):
    monkeypatch.setattr(table, "FOLDER", tmp_path)
    (tmp_path / "toy-2.txt").write_text(text)
    table.entries.cache_clear()
    with pytest.raises(SettingError, match=r"toy-2\.txt, line"):
        table.entries("toy", "2")


def test_the_page_names_what_is_wrong():
    entry = table.Entry("spconv", "gone")
    text = page([check.Surface("spconv", "9", (check.Finding(entry, check.ABSENT, "no such"),))])
    assert "| spconv 9 | 1 | 0 | 0 | 0 | 1 |" in text and "- no such: `spconv.gone`" in text
