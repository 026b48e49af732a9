"""Loops long enough that a pipelined one goes round its stages of shared memory.

gfx950 copies from memory to shared memory directly, into as many stages as the pipeliner takes: a
stage beyond them is an access out of bounds, which ends the launch here.
"""

from __future__ import annotations

import pytest
import torch

from sparse_bridge import settings
from sparse_bridge.core import functional
from tests.checks import assert_close
from tests.conftest import EMULATED, INTERPRETED
from tests.core.layers import layer, leaves, tensors

amd_emulator = pytest.importorskip("amd_emulator")
pytestmark = [pytest.mark.emulated, pytest.mark.skipif(INTERPRETED or bool(EMULATED), reason="has a driver of its own")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("arch", ["gfx950", "gfx1201"])
def test_many_pairs_of_an_offset(arch, dtype):
    """Some 350 pairs an offset, 11 rounds of the loop of wgrad."""
    made = layer("submanifold", 2, 3, shape=(20, 22), share=0.9, batch_size=1, seed=5)
    *operands, dy = tensors(made, 16, 24, dtype=dtype)

    def run():
        x, weight, bias = leaves(operands, "cpu")
        y = functional.conv(x, weight, bias, made.kmap)
        y.backward(dy)
        return [y.detach(), x.grad, weight.grad]

    expected = run()
    with amd_emulator.patch_triton(arch), settings.override(dataflow="masked"):
        got = run()
    for mine, truth in zip(got, expected, strict=True):
        assert_close(mine, truth, dtype)
