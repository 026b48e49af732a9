"""Patches replace methods of live objects and go away without a trace."""

from __future__ import annotations

import inspect
import logging
import types

import pytest

from sparse_bridge.adapters.base import Patch
from sparse_bridge.adapters.patching import PatchSet
from sparse_bridge.errors import LifecycleError


@pytest.fixture
def library():
    class Base:
        def forward(self, x, *, scale=1):
            """Upstream's doc."""
            return ("original", x * scale)

        @staticmethod
        def shape(x):
            return ("original", x)

        @classmethod
        def build(cls):
            return ("original", cls.__name__)

        @property
        def size(self):
            return "original"

    class Derived(Base):
        pass

    module = types.ModuleType("invented")
    module.Base, module.Derived = Base, Derived
    module.gather = lambda x: ("original", x)
    return module


def patch(owner, name, replacement, wraps=False):
    return Patch(owner, name, replacement, reason="test", versions="any", wraps=wraps)


def all_seams(library):
    return [
        patch(library.Base, "forward", lambda self, x, *, scale=1: ("bridged", x * scale)),
        patch(library.Derived, "forward", lambda f: lambda self, x: ("outer", f(self, x)), True),
        patch(library.Base, "shape", lambda f: lambda x: ("bridged", f(x)), True),
        patch(library.Base, "build", lambda cls: ("bridged", cls.__name__)),
        patch(library.Base, "size", property(lambda self: "bridged")),
        patch(library, "gather", lambda x: ("bridged", x)),
    ]


def everything(library):
    return [dict(vars(owner)) for owner in (library, library.Base, library.Derived)]


def test_live_objects_and_every_kind_of_attribute_are_reached(library):
    live, child = library.Base(), library.Derived()
    patches = PatchSet(all_seams(library))
    patches.apply()
    assert live.forward(2, scale=3) == ("bridged", 6)
    assert child.forward(1) == ("outer", ("bridged", 1))
    assert live.shape(1) == library.Base.shape(1) == ("bridged", ("original", 1))
    assert library.Derived.build() == ("bridged", "Derived")
    assert live.size == "bridged"
    assert library.gather(1) == ("bridged", 1)
    patches.undo()
    assert live.forward(1) == child.forward(1) == ("original", 1)


def test_undo_is_exact_and_repeatable(library):
    before = everything(library)
    patches = PatchSet(all_seams(library))
    for _ in range(3):
        patches.apply()
        patches.apply()
        assert "forward" in vars(library.Derived)
        patches.undo()
        patches.undo()
        after = everything(library)
        assert [list(d) for d in after] == [list(d) for d in before]  # same keys, same order
        assert all(a[key] is b[key] for a, b in zip(after, before, strict=True) for key in b)


def test_replacements_carry_the_originals_metadata_and_stay_unchanged_themselves(library):
    def ours(self, x, *, scale=2):
        return scale

    def also(self):
        return None

    original = library.Base.forward
    patches = PatchSet([patch(library.Base, "forward", ours), patch(library.Derived, "also", ours)])
    library.Derived.also = also
    patches.apply()
    installed = library.Base.forward
    assert (installed.__name__, installed.__doc__) == ("forward", "Upstream's doc.")
    assert installed.__qualname__ == original.__qualname__
    assert installed.__wrapped__ is original
    assert inspect.signature(installed) == inspect.signature(original)
    assert library.Derived().forward(0) == 2, "defaults of keyword-only arguments are kept"
    assert library.Derived.also.__name__ == "also"
    assert ours.__name__ == "ours" and not hasattr(ours, "__wrapped__")
    patches.undo()


def test_a_foreign_wrapper_is_left_alone_with_a_warning(library, caplog):
    patches = PatchSet(all_seams(library))
    patches.apply()
    ours = library.Base.forward
    library.Base.forward = theirs = lambda self, x: ("theirs", ours(self, x))
    with caplog.at_level(logging.WARNING, logger="sparse_bridge"):
        patches.undo()
    assert vars(library.Base)["forward"] is theirs
    assert "Base.forward was replaced by other code" in caplog.text
    assert len(caplog.records) == 1
    assert library.gather(1) == ("original", 1), "the other patches are undone"


def test_a_foreign_deletion_is_left_alone(library, caplog):
    patches = PatchSet(all_seams(library))
    patches.apply()
    del library.gather
    with caplog.at_level(logging.WARNING, logger="sparse_bridge"):
        patches.undo()
    assert not hasattr(library, "gather")
    assert "invented.gather was replaced" in caplog.text


def test_a_missing_attribute_undoes_the_rest(library):
    before = everything(library)
    seams = [*all_seams(library), patch(library.Base, "vanished", lambda self: None)]
    with pytest.raises(LifecycleError, match=r"Base\.vanished does not exist.*versions any"):
        PatchSet(seams).apply()
    assert everything(library) == before
