from __future__ import annotations

import importlib
import sys

import pytest

import sparse_bridge
from sparse_bridge import settings


@pytest.fixture
def ME():
    """`MinkowskiEngine` of the stand-in."""
    with sparse_bridge.enable("minkowski"):
        module = importlib.import_module("MinkowskiEngine")
        yield module
        module.set_sparse_tensor_operation_mode(
            module.SparseTensorOperationMode.SEPARATE_COORDINATE_MANAGER
        )
        module.clear_global_coordinate_manager()


@pytest.fixture(autouse=True)
def plain_settings(monkeypatch):
    """No setting of the caller's environment, and none left behind."""
    monkeypatch.setattr(settings, "_current", settings.Settings())
    before = list(sys.path), list(sys.meta_path)
    yield
    assert (list(sys.path), list(sys.meta_path)) == before
