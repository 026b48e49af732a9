"""The window of versions: what is in it, who is warned, and that every list of it agrees."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import pathlib
import re
import sys
import warnings

import pytest

import sparse_bridge
from sparse_bridge import releases
from tests.docs.pages import table

ROOT = pathlib.Path(__file__).parents[1]
PY = (3, 12)


@pytest.mark.parametrize(
    ("python", "torch", "triton", "words"),
    [
        (PY, (2, 4), (3, 0), None),
        (PY, (2, 4), (3, 1), "torch 2.4 is not tested with Triton 3.1, but with 3.0."),
        (PY, (2, 5), (3, 0), None),
        (PY, (2, 5), (3, 1), None),
        (PY, (2, 5), (3, 2), None),
        (PY, (2, 5), (3, 3), "torch 2.5 is not tested with Triton 3.3, but with 3.0 to 3.2."),
        (PY, (2, 13), (3, 6), None),
        (PY, (2, 13), (3, 9), None),
        (PY, (2, 13), None, None),
        (PY, (2, 13), (3, 5), "torch 2.13 is not tested with Triton 3.5, but with 3.6 to 3.9."),
        (PY, (2, 13), (3, 10), "torch 2.13 is not tested with Triton 3.10"),
        (PY, (2, 14), (3, 8), None),
        (PY, (2, 3), None, "torch 2.3 is not tested: 2.4 to 2.15 are."),
        (PY, (2, 16), (3, 9), "torch 2.16 is not tested"),
        (PY, (3, 0), None, "torch 3.0 is not tested"),
        ((3, 10), (2, 13), None, None),
        ((3, 13), (2, 13), None, None),
        ((3, 14), (2, 13), None, "Python 3.14 is not tested: 3.10 to 3.13 are."),
    ],
)
def test_the_window(python, torch, triton, words):
    found = releases.untested(python, torch, triton)
    assert found is None if words is None else found.startswith(words), found


@pytest.mark.parametrize(
    ("text", "found"), [("2.13.0+cpu", (2, 13)), ("2.4.1", (2, 4)), ("2.16.0.dev20261101+rocm7.2", (2, 16))]
)
def test_versions(text, found):
    assert releases.release(text) == found


@pytest.fixture
def installed(monkeypatch):
    """installed(torch="2.13.0", ...): what the packages of this installation say."""
    releases.reset()
    assert sparse_bridge.enable  # imports ask for the true version of Python

    def pretend(**versions):
        named = {name.replace("_", "-"): version for name, version in versions.items()}

        def version(name):
            if name not in named:
                raise importlib.metadata.PackageNotFoundError(name)
            return named[name]

        monkeypatch.setattr(importlib.metadata, "version", version)
        monkeypatch.setattr(sys, "version_info", (*PY, 1, "final", 0))

    yield pretend
    releases.reset()


@pytest.mark.parametrize(
    ("versions", "words"),
    [
        ({"torch": "2.13.0", "triton": "3.7.1"}, None),
        ({"torch": "2.13.0", "triton": "3.2.0"}, "Triton 3.2"),
        ({"torch": "2.13.0+cpu", "triton": "3.2.0"}, None),  # there for the compile check
        ({"torch": "2.13.0+rocm7.1", "pytorch_triton_rocm": "3.2.0"}, "Triton 3.2"),
        ({"torch": "2.13.0"}, None),
        ({"torch": "2.16.0"}, "torch 2.16"),
        ({}, None),  # built by hand: nothing is known
    ],
)
def test_what_an_installation_says(installed, versions, words):
    installed(**versions)
    found = releases.here()
    assert found is None if words is None else words in found


@pytest.mark.parametrize("name", ["triton", "triton-windows", "pytorch-triton-xpu", None])
def test_the_package_that_triton_comes_from(installed, name):
    installed(**({name: "3.6.0"} if name else {}))
    assert releases.triton_build() == (name and f"{name} 3.6.0")


def test_enable_warns_once_and_names_its_caller(installed):
    installed(torch="2.16.0", triton="3.9.0")
    with pytest.warns(UserWarning, match=r"torch 2\.16 is not tested.*prove") as found:
        for _ in range(3):
            sparse_bridge.enable("minkowski").disable()
    (warning,) = found
    assert warning.filename == __file__


def test_enable_is_silent_within_the_window(installed):
    installed(torch="2.13.0", triton="3.9.0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sparse_bridge.enable("minkowski").disable()


def pythons():
    """Every release of the window."""
    first, last = (releases.release(one)[1] for one in releases.PYTHONS)
    return [f"3.{minor}" for minor in range(first, last + 1)]


def test_support_md_says_the_same():
    page = ROOT / "SUPPORT.md"
    rows = {row[0]: row[1:] for row in table(page, "| | oldest | newest | tested |")}
    assert rows["Python"] == [*releases.PYTHONS, ", ".join(pythons())]
    assert rows["torch"][:2] == [next(iter(releases.TRITONS)), list(releases.TRITONS)[-1]]
    shown = {row[0]: row[1] for row in table(page, "| torch | Triton |")}
    ranges = {torch: " to ".join(dict.fromkeys(both)) for torch, both in releases.TRITONS.items()}
    assert shown == ranges


def test_the_package_says_the_same():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'requires-python = ">={releases.PYTHONS[0]}"' in text
    assert f'"torch>={next(iter(releases.TRITONS))}"' in text
    assert re.findall(r'"Programming Language :: Python :: (3\.\d+)"', text) == pythons()


def test_the_pairs_of_noxfile_are_inside():
    tree = ast.parse((ROOT / "noxfile.py").read_text(encoding="utf-8"))
    named = (node for node in tree.body if isinstance(node, ast.Assign))
    values = {ast.unparse(node.targets[0]): node.value for node in named}
    pairs = ast.literal_eval(values["PAIRS"])
    assert pairs.keys() >= releases.TRITONS.keys() - {"2.11"}  # an H200's
    for torch, (triton, _, _) in pairs.items():
        assert releases.untested(PY, releases.release(torch), releases.release(triton)) is None
    tried = ast.literal_eval(values["TRITONS"])
    assert set(tried) <= {triton for triton, *_ in pairs.values()}
    ends = [min(tried, key=releases.release), max(tried, key=releases.release)]
    assert [one.rpartition(".")[0] for one in ends] == list(releases.TRITONS["2.13"])
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    assert f"triton: {json.dumps(tried)}" in workflow
