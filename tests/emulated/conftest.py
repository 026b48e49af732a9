"""These tests are about kernels on CPU tensors; a real GPU has tests of its own, and an access out
of bounds would end its context."""

import pytest


@pytest.fixture
def kernel_lane(kernel_lane):
    if kernel_lane.device == "cuda":
        pytest.skip("for kernels that run on CPU tensors")
    return kernel_lane
