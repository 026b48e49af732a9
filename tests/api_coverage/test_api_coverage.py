"""The audit of public names: its tables, its judgement, and what it says of this project."""

from __future__ import annotations

import enum
import inspect
import json
import pathlib
import subprocess
import sys

import pytest
import torch

from sparse_bridge.errors import SettingError
from sparse_bridge.tools.api_coverage import check, table
from sparse_bridge.tools.api_coverage.command import collect
from sparse_bridge.tools.api_coverage.markdown import page
from tests.api_coverage import gaps
from tests.patience import PATIENCE

ROOT = pathlib.Path(__file__).parents[2]
# Layers that inherit torch's show its signatures; those of older releases lack an argument.
as_recorded = pytest.mark.skipif(
    "bias" not in inspect.signature(torch.nn.BatchNorm1d).parameters,
    reason="the tables are recorded with a newer torch",
)


def command(*arguments):
    """Standard output of `python -m sparse_bridge surface ...` in a process of its own."""
    call = [sys.executable, "-m", "sparse_bridge", "surface", *arguments]
    done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, check=False)
    return done.returncode, done.stdout, done.stderr


# All outputs from one look at all frameworks, which takes seconds.
ALL = """
import json, sys
from sparse_bridge.tools.api_coverage.command import collect, facts_of
from sparse_bridge.tools.api_coverage.markdown import page
from tests.api_coverage import gaps
from tests.api_coverage import gaps
found = collect([])
json.dump([[facts_of(surface) for surface in found], page(found), gaps.text(found)], sys.stdout)
"""


@pytest.fixture(scope="module")
def everything():
    done = subprocess.run([sys.executable, "-c", ALL], cwd=ROOT, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def facts(everything):
    return {(found["framework"], found["release"]): found for found in everything[0]}


@as_recorded
def test_what_is_absent_without_a_reason_is_known(everything):
    """Fails where a name is lost, and where a gap is closed: then the list gets shorter."""
    known = gaps.FILE.read_text(encoding="utf-8").splitlines()
    found = everything[2].splitlines()
    assert [line for line in found if line not in known] == [], "new gaps"
    assert [line for line in known if line not in found] == [], (
        "closed gaps: python -m tests.api_coverage.gaps takes them off the list"
    )
    assert found == known


def test_every_table_is_checked_and_has_reasons_in_words(facts):
    assert list(facts) == [(name, release) for name, release, _ in table.releases()]
    for found in facts.values():
        assert len(found[check.PRESENT]) > 50 and found["from"]
        for state in (check.EXPLAINED, check.CHANGED):
            assert all(len(reason) > 10 for reason in found.get(state, {}).values())


def test_every_reason_still_explains_something(facts):
    for framework in {name for name, _, _ in table.releases()}:
        for reason in table.reasons(framework):
            state = check.CHANGED if reason.of_parameters else check.EXPLAINED
            assert any(
                reason.fits(name) and said == reason.text
                for (owner, _), found in facts.items()
                if owner == framework
                for name, said in found.get(state, {}).items()
            ), reason


@as_recorded
def test_the_page_is_current(everything):
    assert everything[1] == (ROOT / "docs" / "surface.md").read_text(encoding="utf-8"), (
        "docs/surface.md is old: python -m sparse_bridge surface --markdown > docs/surface.md"
    )


@pytest.mark.slow
def test_one_framework_in_words():
    status, out, _ = command("minkowski")
    counts, _, names = out.partition("--all lists every name")
    assert "0.5.4" in counts and "without a reason" in counts and "spconv" not in out
    assert "on purpose" not in names, "reasons are many and long"
    missing = [int(line.split("│")[-2]) for line in counts.splitlines() if "minkowski" in line]
    assert status == any(missing)
    listed = [line for line in names.splitlines() if line.startswith("  absent ")]
    assert len(listed) == sum(missing)
    _, everything, _ = command("minkowski", "--all")
    assert "from MinkowskiEngine 0.5.4: the sdist" in everything
    assert "absent on purpose" in everything and "present" in everything
    with pytest.raises(SettingError, match="'nothing' is unknown"):
        collect(["nothing"])


@pytest.mark.parametrize(("framework", "release"), [key[:2] for key in table.releases()])
def test_a_table_says_where_it_is_from_and_how_much_it_lists(framework, release):
    """Lines that are taken out of a table, or put in, change its counts."""
    file = table.FOLDER / f"{framework}-{release}.txt"
    origins = table.origins(framework, release)
    modules: list[list[int]] = []
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            modules.append([int(line.partition("  # ")[2]), 0])
        elif line and not line.startswith("#"):
            modules[-1][1] += len(list(table.NAME.finditer(line)))
    assert origins and all(said == counted for said, counted in modules)
    assert sum(origin.modules for origin in origins) == len(modules)
    assert sum(origin.names for origin in origins) == sum(counted for _, counted in modules)


# the judgement


class Colour(enum.Enum):
    RED = CRIMSON = 1
    BLUE = 2


class Known:
    """What a table is compared with below."""

    def plain(self, a, b=1, *, c=None):
        pass

    def loose(self, a, *args, **kwargs):
        pass

    def typed(self, a, mode=check.PRESENT, sizes=(1, 1), extra=0):
        self.made = a

    def coloured(self, colour=Colour.RED):
        pass

    @property
    def asked(self):
        return 1

    def refuses(self, a):
        """Only there to be found."""
        raise NotImplementedError("no")

    class Inner:
        pass

    class Refusing:
        def __init__(self):
            raise NotImplementedError("no")


class Derived(Known):
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
        ("coloured(colour=Colour.RED)", ""),
        ("coloured(colour=elsewhere.Colour.CRIMSON)", ""),
        ("coloured(colour=Colour.BLUE)", "not Colour.BLUE"),
        ("coloured(colour=Colour.GONE)", "not Colour.GONE"),
        ("typed(*)", ""),
        ("@asked .made .asked", ""),
        ("class Inner", ""),
        ("asked(*)", "cannot be called"),
        ("@plain", "is a method"),
        (".plain", "is a method"),
        ("class plain(a, b=1, *, c=None)", "is no class"),
        (".lost", "AttributeError"),
        ("refuses(a)", "is there to refuse"),
        ("class Refusing()", "is there to refuse"),
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
    (tmp_path / "toy-1.txt").write_text(f"# toy\n[{__name__}]\nclass Known()\n    {line}\n")
    table.entries.cache_clear()
    (*_, entry) = table.entries("toy", "1")
    found = check.finding_of(entry, ())
    assert problem in found.note and (found.state == check.PRESENT) == (not problem)
    if problem:
        absent = "Error" in problem or "refuse" in problem
        assert (found.state == check.ABSENT) == absent
        kind = "" if absent else "~"
        (tmp_path / "toy-absent.txt").write_text(f"{kind}{__name__}.Known.*: it is a toy\n")
        table.reasons.cache_clear()
        found = check.finding_of(entry, table.reasons("toy"))
        assert found.state == (check.EXPLAINED if absent else check.CHANGED)
        assert found.reason == "it is a toy" and (absent or problem in found.note)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("class Derived() < Known", ""),
        ("class Derived() < sparse_bridge.tools.api_coverage.check.Gone", ""),
        ("class Derived() < sparse_bridge.tools.api_coverage.check.Surface", "is no Surface"),
    ],
)
def test_bases_are_compared(tmp_path, monkeypatch, line, problem):
    monkeypatch.setattr(table, "FOLDER", tmp_path)
    (tmp_path / "toy-3.txt").write_text(f"[{__name__}]\n{line}\n")
    table.entries.cache_clear()
    _, entry = table.entries("toy", "3")
    assert check.finding_of(entry, ()).note == problem


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, first, second=None):
        return first


@pytest.mark.parametrize(("line", "problem"), [("apply(x, y=None)", ""), ("apply(x)", "takes 2 arguments, not 1")])
def test_functions_of_autograd_are_compared_by_their_number_of_arguments(tmp_path, monkeypatch, line, problem):
    monkeypatch.setattr(table, "FOLDER", tmp_path)
    (tmp_path / "toy-4.txt").write_text(f"[{__name__}]\nclass Square()\n    {line}\n")
    table.entries.cache_clear()
    (*_, entry) = table.entries("toy", "4")
    assert check.finding_of(entry, ()).note == problem


@pytest.mark.parametrize("text", ["Loose\n", "[m]\nname, name\n", "[m]\nname(a\n"])
def test_a_table_that_cannot_be_read_says_where(tmp_path, monkeypatch, text):
    monkeypatch.setattr(table, "FOLDER", tmp_path)
    (tmp_path / "toy-2.txt").write_text(text)
    table.entries.cache_clear()
    with pytest.raises(SettingError, match=r"toy-2\.txt, line"):
        table.entries("toy", "2")


def test_the_page_names_what_is_wrong():
    lost = check.Finding(table.Entry("spconv.utils", "lost"), check.ABSENT, "no such")
    other = check.Finding(table.Entry("spconv", "other"), check.DIFFERENT, "takes no 'a'")
    why = check.Finding(table.Entry("spconv", "why"), check.EXPLAINED, "no such", "it is a toy")
    how = check.Finding(table.Entry("spconv", "how"), check.CHANGED, "takes no 'b'", "so it is")
    origin = table.Origin("spconv 9", "documents, not the release", 1, 4)
    text = page([check.Surface("spconv", "9", (lost, other, why, how), (origin,))])
    assert "| spconv 9 | 4 | 0 | 1 | 1 | 2 |" in text
    assert "Listed from:\n\n- spconv 9: documents, not the release" in text
    assert "Absent without a reason:\n\n- `spconv.utils`: `lost`" in text
    assert "Taken differently without a reason:\n\n- `spconv.other`: takes no 'a'" in text
    assert "Absent on purpose:\n\n- *it is a toy*: `spconv`: `why`" in text
    assert "Taken differently on purpose:\n\n- *so it is*: `spconv.how`: takes no 'b'" in text
