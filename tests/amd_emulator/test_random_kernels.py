"""Random kernels give the same bits on the emulator and in Triton's interpreter, and consist of
LLVM's instructions: see `amd_emulator.fuzz`."""

from __future__ import annotations

import pytest
import torch

from tests.releases import triton_since

from .cases import ARCHS

fuzz = pytest.importorskip("amd_emulator.fuzz")
pytestmark = [pytest.mark.emulated, triton_since(3, 9, "the interpreter has integers that do not wrap")]
BATCH = 100


@pytest.mark.slow
def test_a_few():
    found = dict(fuzz.differences(0, 6, ("gfx942", "gfx1100")))
    assert found == dict.fromkeys(range(6))


def test_what_differs_is_told():
    """A wrong answer of either witness."""
    (values, counts), arch = fuzz.interpreted([1])[0], ("gfx942",)
    assert fuzz.difference(1, values, counts, arch) is None
    bad = values.clone()
    bad[20, 3] ^= 1
    assert fuzz.difference(1, bad, counts, arch).startswith("seed 1 on gfx942: v20 differs first")
    assert "atomics differ" in fuzz.difference(1, values, torch.ones_like(counts) + counts, arch)


@pytest.mark.slow
@pytest.mark.parametrize("batch", range(10))
def test_a_thousand(batch):
    found = dict(fuzz.differences(1000 + batch * BATCH, BATCH, ARCHS))
    assert len(found) == BATCH and not any(found.values())
