"""Memory of weight gradients: laid out as the weight, and found without heavy imports."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest
import torch

from sparse_bridge.core.geometry.weights import fills_its_memory
from tests.patience import PATIENCE


def test_a_layout_without_gaps_is_kept_by_torch():
    dice, dense = random.Random(0), 0
    for _ in range(500):
        shape = [dice.randint(1, 3) for _ in range(dice.randint(1, 4))]
        strides, step = [0] * len(shape), 1
        for axis in dice.sample(range(len(shape)), len(shape)):
            strides[axis], step = step, step * shape[axis]
        if dice.random() < 0.5:
            strides[dice.randrange(len(shape))] += dice.randint(0, 2)
        x = torch.empty_strided(shape, strides)
        if fills_its_memory(x):
            dense += 1
            assert torch.empty_like(x).stride() == x.stride()
        else:
            assert torch.empty_like(x).stride() != x.stride()
    assert 250 < dense < 500


@pytest.mark.slow
def test_a_first_backward_imports_no_computer_algebra():
    """It took the first training step of every process two seconds."""
    program = (
        "import sys, torch\n"
        "from sparse_bridge.core import functional as F\n"
        "c = torch.tensor([[0, 1, 1, 1], [0, 1, 1, 2]], dtype=torch.int32)\n"
        "m = F.submanifold(F.coordinate_map(c, (4, 4, 4), 1), F.kernel_offsets((3, 3, 3)))\n"
        "w = torch.ones(27, 8, 8, requires_grad=True)\n"
        "x = torch.ones(2, 8, requires_grad=True)\n"
        "F.conv(x, w, None, m).sum().backward()\n"
        "assert w.grad is not None and 'sympy' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=PATIENCE)
