from __future__ import annotations

import pytest
import torch

import sparse_bridge

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True)
def flex_gemm():
    """The stand-in, with its switches as they were made."""
    torch.manual_seed(0)
    sparse_bridge.disable()
    with sparse_bridge.enable("flex_gemm", mode="standin"):
        import flex_gemm

        yield flex_gemm
        flex_gemm.ops.spconv.set_algorithm("masked_implicit_gemm_splitk")
        flex_gemm.ops.spconv.SERIALIZATION_MODE = 0
        flex_gemm.kernels.triton.spconv.config.allow_tf32 = None
