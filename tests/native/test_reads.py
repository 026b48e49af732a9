"""What the helper reads of Python is there, under the names that C uses: a rename on one side alone is refused."""

from __future__ import annotations

import inspect
import re
import sys
import types
from typing import NamedTuple
from unittest import mock

import pytest
from torch import nn

pytest.importorskip("triton")
pytest.importorskip("sparse_bridge.core.prefetch")

import sparse_bridge.core.prefetch.recording  # noqa: F401 - of which the helper reads
from sparse_bridge import native
from sparse_bridge.core.conv import history, layers  # noqa: F401 - which hands the helper what it reads
from sparse_bridge.native import build, reads
from sparse_bridge.refusals import Refusal, Why
from tests.native.recording import helper

OWNERS = reads.OWNERS
NAMES = [
    (owner, name.rstrip("?"), kind)
    for owner, it in OWNERS.items()
    for kind in ("slots", "names", "fields")
    for name in getattr(it, kind).split()
]
SOURCE = re.sub(r"/\*.*?\*/", "", "".join(part.read_text() for part in build.PARTS), flags=re.S)


def ours(owner):
    """The class of this package that an owner is; None where it is none."""
    where = OWNERS[owner].where
    made = reads.resolved(where) if where.startswith(".") else None
    return made if isinstance(made, type) else None


def used():
    """The names that C uses, as (letter, owner, name)."""
    macros = {"SLOT": "o", "PUT": "o", "GET": "s", "CALL": "s", "FIELD": "i"}
    found = set(re.findall(r"\b([goi])_([A-Za-z]\w*)", SOURCE)) | set(re.findall(r"\b(s)_([A-Z_a-z]\w*)", SOURCE))
    text = re.sub(r"\s+", " ", SOURCE)
    for macro, letter in macros.items():
        for at in (match.end() for match in re.finditer(rf"\b{macro}\(", text)):
            parts, depth, start = [], 0, at
            while depth >= 0:
                depth += (text[at] in "(") - (text[at] in ")")
                if (text[at] == "," and depth == 0) or depth < 0:
                    parts.append(text[start:at].strip())
                    start = at + 1
                at += 1
            found.add((letter, f"{parts[1]}_{parts[2]}"))
    return found


def test_c_uses_what_is_listed_and_nothing_else():
    """Fields are listed whole, since their order is what counts; slots are reached through their class."""
    kinds = {"slots": "o", "names": "s", "fields": "i"}
    listed = {(kinds[kind], f"{owner}_{name}") for owner, name, kind in NAMES}
    listed |= {("g", owner) for owner, it in OWNERS.items() if it.handed}
    fields = {one for one in listed if one[0] == "i"}
    of_macros = {("o", "type_name"), ("s", "owner_name"), ("i", "owner_name"), ("g", "type"), ("s", "scope")}
    by_slots = {("g", owner) for owner, it in OWNERS.items() if it.slots}
    assert used() - of_macros - listed == set()
    assert listed - fields - by_slots - used() == set()


def test_python_has_all_of_it():
    for owner, it in OWNERS.items():
        if it.where:
            reads.check(owner, it, reads.resolved(it.where))
    assert reads.handed().keys() == {owner for owner, it in OWNERS.items() if it.handed}


def test_what_calls_bring_has_it_too():
    from triton import knobs

    norm = nn.BatchNorm1d(4)
    examples = {
        "HookChain": knobs.HookChain(),
        "BatchNorm1d": norm,
        "NormVectors": types.SimpleNamespace(**norm._parameters, **norm._buffers),
    }
    assert examples.keys() == {owner for owner, it in OWNERS.items() if not it.where}
    for owner, example in examples.items():
        lacking = [name for name in OWNERS[owner].names.split() if not hasattr(example, name)]
        assert not lacking, (owner, lacking)


def renamed(cls, name):
    """A class of the package, made of its sources and its bases', with another name for `name`; None where they do
    not have it."""
    made: dict[str, type] = {}
    changed = False
    for base in reversed(cls.__mro__):
        if not base.__module__.startswith("sparse_bridge"):
            continue
        text = inspect.getsource(base)
        other = re.sub(rf"\b{name}\b", f"{name}_renamed", text)
        changed |= other != text
        space = {**vars(sys.modules[base.__module__]), **made}
        exec(compile("from __future__ import annotations\n" + other, base.__name__, "exec"), space)
        made[base.__name__] = space[base.__name__]
    return made[cls.__name__] if changed else None


@pytest.mark.parametrize("owner", [owner for owner in OWNERS if ours(owner)])
def test_a_rename_in_a_class_alone_is_refused(owner):
    it, cls, seen = OWNERS[owner], ours(owner), 0
    for kind in ("slots", "names", "fields"):
        for name in getattr(it, kind).split():
            if name in dir(NamedTuple("Any", ())) or (other := renamed(cls, name)) is None:
                continue  # what Python gives every class
            with pytest.raises(Refusal, match=rf"reads of .*{cls.__name__}.*\b{name}\b") as refusal:
                reads.check(owner, it, other)
            assert refusal.value.why is Why.HELPER_READS
            seen += 1
    assert seen or not (it.slots or it.names or it.fields)


@pytest.mark.parametrize("owner", [owner for owner, it in OWNERS.items() if ":" not in it.where and it.where])
def test_a_rename_in_a_module_alone_is_refused(owner):
    there = reads.resolved(OWNERS[owner].where)
    for name in OWNERS[owner].names.split():
        if not name.endswith("?"):
            with pytest.raises(Refusal, match=name):
                reads.check(owner, OWNERS[owner], {key: value for key, value in there.items() if key != name})


@pytest.mark.parametrize("name", reads.VALUES)
def test_another_value_is_refused(monkeypatch, name):
    where, value = reads.VALUES[name]
    module, attribute = where.split(":")
    monkeypatch.setattr(sys.modules[f"sparse_bridge{module}"], attribute, value * 2 + type(value)(1))
    with pytest.raises(Refusal, match=attribute):
        reads.handed()


def test_an_object_that_is_gone_is_refused(monkeypatch):
    monkeypatch.delattr(history, "histories")
    with pytest.raises(Refusal, match=r"core.conv.history.*histories"):
        reads.handed()


@pytest.mark.parametrize("late", [False, True])
def test_a_program_goes_on_without_the_helper(monkeypatch, late):
    """Whether what reads of Python comes before or after it."""
    helper()
    library, heard = build.load(), []
    monkeypatch.setattr(native, "_module", library if late else None)
    monkeypatch.setattr(native, "_reason", "")
    monkeypatch.setattr(native, "_listeners", [])
    monkeypatch.setattr(native, "_thread", native._thread if late else None)
    monkeypatch.setattr(native.atexit, "register", lambda *args: None)
    monkeypatch.setattr(native.os, "register_at_fork", lambda **hooks: None)
    monkeypatch.setattr(build, "load", lambda: library)

    def use(module):
        heard.append(module)
        reads.handed()

    with mock.patch.object(history, "History", renamed(history.History, "alone")):
        native.when_ready(use)
        assert native.module() is None
    assert heard == [library]
    assert "[HELPER_READS]" in native._reason and "history:History" in native._reason and "alone" in native._reason
