"""Norms as operators: the numbers and gradients of the layer, on every device's own kernels."""

from __future__ import annotations

import pytest
import torch

import sparse_bridge.compile  # noqa: F401
from sparse_bridge.core.ops import batch_norm as engine
from tests.checks import assert_close
from tests.clouds import features

ops = torch.ops.sparse_bridge
pytestmark = [pytest.mark.interpreted, pytest.mark.emulated]


@pytest.mark.parametrize("relu", (False, True))
@pytest.mark.parametrize("affine", (False, True))
def test_the_operator_is_the_layer(map_lane, relu, affine):
    x = features(211, 18, 0, torch.float32, map_lane.device)
    dy = features(211, 18, 1, torch.float32, map_lane.device)
    weight, bias = (features(1, 18, seed, torch.float32, map_lane.device)[0] if affine else None for seed in (2, 3))
    running = torch.zeros(2, 18, device=map_lane.device)
    given = [None if t is None else t.clone().requires_grad_() for t in (x, weight, bias)]
    want = engine.batch_norm(given[0], (*given[1:], running[0], running[1], None), momentum=1.0, eps=1e-3, relu=relu)
    wanted = torch.autograd.grad(want, [t for t in given if t is not None], dy)
    mine = [None if t is None else t.detach().clone().requires_grad_() for t in given]
    y, seen, _ = ops.batch_norm(*mine, 1e-3, relu)
    grads = torch.autograd.grad(y, [t for t in mine if t is not None], dy, retain_graph=True)
    again = torch.autograd.grad(y, [t for t in mine if t is not None], dy)
    assert_close(y, want, torch.float32, "y")
    assert_close(seen, running, torch.float32, "statistics")
    for one, two, theirs in zip(grads, again, wanted, strict=True):
        assert torch.equal(one, two)
        assert_close(one, theirs, torch.float32, "gradient")


def test_the_memory_is_large_enough():
    pytest.importorskip("triton")
    from sparse_bridge.core.ops.norm_operators import MEMORY_ROWS
    from sparse_bridge.kernels.ops.norm_spec import PARTS

    assert MEMORY_ROWS == 2 + 2 * PARTS
