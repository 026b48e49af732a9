from __future__ import annotations

import importlib
import sys

import pytest
import torch

import sparse_bridge


@pytest.fixture
def ME():
    """`MinkowskiEngine` of the stand-in."""
    with sparse_bridge.enable("minkowski"):
        module = importlib.import_module("MinkowskiEngine")
        yield module
        module.set_sparse_tensor_operation_mode(module.SparseTensorOperationMode.SEPARATE_COORDINATE_MANAGER)
        module.clear_global_coordinate_manager()


@pytest.fixture
def ME4():
    """`MinkowskiEngine` of the stand-in, as 0.4."""
    with sparse_bridge.enable("minkowski", profile="0.4"):
        module = importlib.import_module("MinkowskiEngine")
        yield module
        modes = module.SparseTensorOperationMode
        module.set_sparse_tensor_operation_mode(modes.SEPARATE_COORDS_MANAGER)
        module.clear_global_coords_man()


@pytest.fixture(autouse=True)
def _plain_settings(plain_settings):
    """No setting of the caller's environment, and none left behind; one thread for tiny tensors."""
    before, threads = (list(sys.path), list(sys.meta_path)), torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    assert (list(sys.path), list(sys.meta_path)) == before
