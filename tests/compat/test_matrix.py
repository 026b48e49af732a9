"""The matrix files: format, selection, and that models are what they claim to be."""

from __future__ import annotations

import ast
import importlib.util
import pathlib
import sys
import types

import pytest

import compat
import sparse_bridge
from compat import matrix
from compat.cellfile import from_json, to_json
from sparse_bridge.errors import SettingError

MODELS = pathlib.Path(compat.__file__).with_name("models")


def imported(path):
    """Top-level names of everything that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield (node.module or "").partition(".")[0]


@pytest.mark.parametrize("path", sorted(MODELS.rglob("*.py")), ids=lambda path: path.stem)
def test_models_know_nothing_of_the_bridge(path):
    found = set(imported(path))
    assert not found & {"sparse_bridge", "tests"}
    inner = [
        node.module
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("compat")
    ]
    assert all(name.startswith("compat.models") for name in inner)


def test_the_package_never_imports_the_evidence():
    package = pathlib.Path(sparse_bridge.__file__).parent
    users = [path for path in package.rglob("*.py") if "compat" in imported(path)]
    assert users == []


def test_the_shipped_matrix_is_well_formed():
    models = matrix.load()
    assert models
    for model in models:
        assert importlib.util.find_spec(model.module), f"{model.name}: no {model.module}"
        assert 0 <= model.number <= 29
        for expect in model.expect:
            assert len(expect.reason) > 10, f"{model.name}: expected {expect.check} needs a reason"


def test_values_reach_the_cell(toys):
    more = 'dtypes = ["float32", "float64"]\nbatch_size = 1\n'
    more += '[[model.expect]]\ncheck = "eval"\noutcome = "fail"\nreason = "r"\ndevice = "cuda"'
    (model,) = matrix.load(toys(("toy", "width = 16", more)))
    cells = matrix.cells([model], modes=("standin", "patch"), size="tiny")
    assert [(cell.dtype, cell.mode) for cell in cells] == [
        ("float32", "standin"),
        ("float32", "patch"),
        ("float64", "standin"),
        ("float64", "patch"),
    ]
    cell = cells[0]
    assert cell.model.options == {"width": 16} and cell.model.batch_size == 1
    assert to_json(from_json(to_json(cell))) == to_json(cell)
    (expect,) = model.expect
    assert not expect.applies("eval", cell, "standin")
    on_gpu = matrix.Cell(model, "cuda", "float32", "auto", "full")
    assert expect.applies("eval", on_gpu, "patch") and not expect.applies("copy", on_gpu, "patch")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ('dtypes = ["fp32"]', "'fp32'; expected one of float32"),
        ('sizes = ["big"]', "expected one of tiny, small, full"),
        ("colour = 3", "colour"),
        ('[[model.expect]]\ncheck = "fly"\noutcome = "fail"\nreason = "r"', "check is 'fly'"),
        ('[[model.expect]]\ncheck = "eval"\noutcome = "pass"\nreason = "r"', "outcome is 'pass'"),
        ('[[model.expect]]\ncheck = "eval"\noutcome = "fail"', "reason"),
    ],
)
def test_mistakes_in_the_file_are_named(toys, more, message):
    folder = toys(("toy", "", more))
    with pytest.raises(SettingError, match=message) as caught:
        matrix.load(folder)
    assert "toys.toml" in str(caught.value) and "'toy'" in str(caught.value)


def test_names_are_unique(toys):
    with pytest.raises(SettingError, match="twice: toy"):
        matrix.load(toys(("toy", "", ""), ("toy", "", "")))


def test_selection(toys):
    models = matrix.load(toys(("SECOND", "", ""), ("UNetV2", "", 'sizes = ["small"]')))

    def names(**choice):
        return [cell.model.name for cell in matrix.cells(models, **choice)]

    assert names() == ["UNetV2", "SECOND"]  # number 0 is a smoke model: last
    assert names(names=("sec*",)) == ["SECOND"] and names(names=("1",)) == ["UNetV2"]
    assert names(names=("toy",)) == ["UNetV2", "SECOND"]  # by file
    assert names(size="tiny") == ["SECOND"]
    for nothing in ({"names": ("none",)}, {"frameworks": ("minkowski",)}, {"dtypes": ("float16",)}):
        with pytest.raises(SettingError, match="no model matches"):
            names(**nothing)


def test_without_a_reader_of_toml_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "tomllib", None)
    monkeypatch.setitem(sys.modules, "tomli", None)
    with pytest.raises(SettingError, match="pip install tomli"):
        matrix.load()
    monkeypatch.setitem(sys.modules, "tomli", types.SimpleNamespace(loads=lambda text: {}))
    assert matrix.load() == []
