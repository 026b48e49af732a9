"""Switches of MinkowskiEngine: docs/minkowski.md lists every one, and each does what it says."""

from __future__ import annotations

import ast
import enum
import importlib
import inspect
import pathlib
import re
import sys

import pytest
import torch

from . import inert
from .switch_effects import EFFECTS, REFUSALS
from .switch_idle import WITHOUT_MEANING

PAGE = pathlib.Path(__file__).parents[3] / "docs" / "minkowski.md"


def rows():
    """(first cell, kind) of every row of the table."""
    section = PAGE.read_text(encoding="utf-8").split("\n## Switches\n")[1].split("\n## ")[0]
    cells = [line.strip("| ").split(" | ") for line in section.splitlines() if line[:3] == "| `"]
    return [(row[0], row[1]) for row in cells]


def key(cell):
    """How the cases below call a row: its first switch."""
    return cell.split(", ")[0].replace("`", "")


LISTED = {name for cell, _ in rows() for name in re.findall(r"`([^`]+)`", cell)}


# the list


def standin_modules():
    return [sys.modules[name] for name in sorted(sys.modules) if name.startswith("Minkowski")]


def test_every_global_and_enumeration_is_listed(ME):
    importlib.import_module("MinkowskiEngine.Common")
    for module in standin_modules():
        for name, value in vars(module).items():
            is_global = inspect.isfunction(value) and name.startswith(("set_", "clear_"))
            is_enum = isinstance(value, type) and issubclass(value, enum.Enum)
            if is_global or (is_enum and not name.startswith("_")):
                assert name in LISTED, f"{module.__name__}.{name}"


def test_every_argument_that_reaches_nothing_is_listed(ME):
    everything = inert.trees().values()
    standin = inert.trees(inert.HOME / "standin").values()
    found = inert.inert(standin, inert.attributes_read(everything))
    found = {(function, name) for function, name in found if not function.startswith("set_")}
    assert {("spmm", "is_sorted"), ("__init__", "allocator_type")} <= found
    assert {f"{name}=" for _, name in found} <= LISTED, found


def test_every_argument_that_is_dropped_is_listed(ME):
    dropped = set()
    for module in standin_modules():
        for value in list(vars(module).values()):
            for call in (value, *(vars(value).values() if isinstance(value, type) else ())):
                dropped |= {f"{name}=" for name in getattr(call, "dropped", ())}
    assert {"hash_type=", "allow_duplicate_coords=", "D="} <= dropped <= LISTED


def test_every_name_of_the_list_exists(ME):
    names = {"OMP_NUM_THREADS"}
    for tree in inert.trees().values():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                names.add(node.name)
            elif isinstance(node, ast.arg):
                names.add(f"{node.arg}=")
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                names |= {f"{word.partition('=')[0]}=" for word in node.value.split()}
    assert {name for name in LISTED if name not in names and not hasattr(ME, name)} <= {
        "DEFAULT",
        "KERNEL",
        "PYTORCH_INDEX",
    }


def test_what_is_unused_is_found():
    source = """
class Layer:
    def __init__(self, used, kept, chosen, shown, never, checks, guarded=None):
        checked("checks", checks, int)
        if guarded is None:
            guarded = 1
        if not isinstance(guarded, int):
            raise TypeError(guarded)
        if not checked("chosen", chosen, bool):
            self.kept = [kept]
        self.shown = shown
        self.read = used

    def abstract(self, other):
        raise NotImplementedError

    def refuse(self, other):
        'Only that.'
        if other is None:
            raise TypeError
"""
    tree = ast.parse(source)
    found = {name for _, name in inert.inert([tree], {"read"})}
    assert found == {"shown", "never", "checks", "guarded"}
    assert inert.attributes_read([ast.parse("self.a = x.b.c")]) == {"b", "c"}


# what they do


@pytest.mark.parametrize("case", EFFECTS)
def test_effects(ME, case, monkeypatch):
    function = EFFECTS[case]
    takes = inspect.signature(function).parameters
    function(ME, *([monkeypatch] if "monkeypatch" in takes else []))


@pytest.mark.parametrize(("case", "value"), list(zip(REFUSALS, (False, 1, 2), strict=True)))
def test_refusals(ME, case, value):
    with pytest.raises(Exception, match=f"{case.partition('=')[0]}.*{value}") as refused:
        REFUSALS[case](ME, value)
    assert "SparseBridgeError" in [kind.__name__ for kind in type(refused.value).__mro__]


@pytest.mark.parametrize("case", WITHOUT_MEANING)
def test_what_has_no_meaning_changes_nothing(ME, case):
    found = list(WITHOUT_MEANING[case](ME))
    assert len(found) > 1
    for result in found:
        assert torch.equal(result, found[0])


@pytest.mark.parametrize(
    ("kind", "cases"), [("effect", EFFECTS), ("refused", REFUSALS), ("no meaning", WITHOUT_MEANING)]
)
def test_every_row_has_its_case(kind, cases):
    assert [key(cell) for cell, here in rows() if here == kind] == list(cases)
    assert all(here in ("effect", "refused", "no meaning") for _, here in rows())
