"""How tests meet the spconv models of the matrix: imported once, on the wheel or the stand-in."""

from __future__ import annotations

import contextlib
import importlib.util

import pytest

from tests.adapters.spconv import apis
from tests.compat.loading import imported_anew

PATCHED = ("_version", "_load_from_state_dict", "_save_to_state_dict")


@contextlib.contextmanager
def put_back(owner, names):
    """Attributes of a class as they were, whatever models assign."""
    before = {name: vars(owner)[name] for name in names if name in vars(owner)}
    try:
        yield
    finally:
        for name in names:
            if name in before:
                setattr(owner, name, before[name])
            elif name in vars(owner):
                delattr(owner, name)


@pytest.fixture(scope="module")
def loaded():
    """(spconv as models import it, its API): the wheel where there is one, else the stand-in."""
    installed = importlib.util.find_spec("spconv") is not None
    with contextlib.ExitStack() as stack:
        sp = apis.wheel() if installed else stack.enter_context(apis.standin())
        stack.enter_context(put_back(sp.SparseModule, PATCHED))
        stack.enter_context(imported_anew("spconv"))
        yield sp, "patch" if installed else "standin"


@pytest.fixture
def library(loaded):
    """`spconv.pytorch`, bridged."""
    sp, api = loaded
    with apis.patched() if api == "patch" else contextlib.nullcontext():
        yield sp
