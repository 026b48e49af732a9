from __future__ import annotations

import itertools
import sys

import pytest

import sparse_bridge
from sparse_bridge.adapters import base, call_stats, lifecycle

from .fakes import FakeAdapter, write_real, write_standin

_numbers = itertools.count()


class World:
    """Invented frameworks that exist for one test."""

    def __init__(self, folder):
        self.site = folder / "site"
        self.standins = folder / "standins"
        self.site.mkdir()

    def framework(self, real=None) -> FakeAdapter:
        """Register one. real: None (absent), "working" or "broken"."""
        name = f"fake{next(_numbers)}"
        if real is not None:
            write_real(self.site, name, broken=real == "broken")
        write_standin(self.standins, name)
        adapter = FakeAdapter(name, self.standins)
        base.register_for_testing(adapter)
        return adapter


@pytest.fixture
def world(tmp_path, monkeypatch, plain_settings):
    found = World(tmp_path)
    monkeypatch.syspath_prepend(str(found.site))
    monkeypatch.setattr(base, "ADAPTERS", {})
    monkeypatch.setattr(base, "_loaded", {})
    monkeypatch.setattr(lifecycle, "_left_out", {})
    call_stats.reset()
    finders = list(sys.meta_path)
    yield found
    sparse_bridge.disable()
    assert sys.meta_path == finders
    for name in [name for name in sys.modules if name.startswith("fake")]:
        del sys.modules[name]
    call_stats.reset()
