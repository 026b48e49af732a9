"""The networks, with their frameworks answered by the bridge."""

from __future__ import annotations

import pytest
import torch

import sparse_bridge

from .networks import NETWORKS


@pytest.fixture(params=NETWORKS)
def network(request):
    """One network with fixed weights; its framework is enabled while the test runs."""
    torch.manual_seed(0)
    if request.param == "functional":
        yield NETWORKS[request.param]()
        return
    with sparse_bridge.enable(request.param):
        if request.param == "torchsparse":
            import torchsparse

            torchsparse.backends.allow_tf32 = False  # the CPU multiplies in full precision
            yield NETWORKS[request.param]()
            torchsparse.backends.init()
        else:
            yield NETWORKS[request.param]()
