"""DataLoader workers after `enable()` in the parent."""

from __future__ import annotations

import multiprocessing

import pytest

from ..examples.launch import start, wait


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_voxelise_and_build_sparse_tensors(method: str) -> None:
    if method not in multiprocessing.get_all_start_methods():
        pytest.skip(f"this platform has no {method}")
    assert f"same batches {method}" in wait(start("-m", "tests.scale_out.loading", method))
