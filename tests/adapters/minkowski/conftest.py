from __future__ import annotations

import importlib
import sys

import pytest
import torch

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
    """No setting of the caller's environment, and none left behind; one thread for tiny tensors."""
    monkeypatch.setattr(settings, "_current", settings.Settings())
    before, threads = (list(sys.path), list(sys.meta_path)), torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    assert (list(sys.path), list(sys.meta_path)) == before
