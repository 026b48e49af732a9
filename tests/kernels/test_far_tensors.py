"""Kernels over tensors of more than 2 GiB on AMD: right, and without buffer operations."""

from __future__ import annotations

import ctypes
import os

import pytest
import torch

from sparse_bridge.core import functional
from sparse_bridge.kernels.runtime import triton_compat
from tests.checks import assert_close
from tests.core.layers import layer, tensors

pytestmark = pytest.mark.emulated
EXTENT = (1 << 31) + (1 << 16)  # bytes


@pytest.fixture
def emulator(kernel_lane):
    if not kernel_lane.arch:
        pytest.skip("reads the machine code of an emulated GPU")
    return pytest.importorskip("amd_emulator")


def buffer_operations(emulator):
    """Whether the kernel that was launched last has any."""
    from amd_emulator.entries import entry

    code = emulator.last.kernel.code
    raw, word = ctypes.string_at(code.code, 4 * code.words) + bytes(16), 0
    found = set()
    while word < code.words:
        try:
            one, instruction = entry(raw[4 * word : 4 * word + 16], code.gfx)
        except emulator.Unsupported:
            word += 1
            continue
        found.add(str(instruction).lower().partition("(")[0])
        word += one.size // 4
    return any(name.startswith(("buffer_load", "buffer_store")) for name in found)


@pytest.mark.parametrize("far", [False, True], ids=["near", "far"])
def test_products(kernel_lane, emulator, far):
    made = layer("submanifold", 2, device=kernel_lane.device)
    x, weight, bias, _ = tensors(made, 16, 32, dtype=torch.float16)
    memory = torch.empty(EXTENT if far else x.nbytes, dtype=torch.uint8)  # pages come when touched
    placed = memory[memory.numel() - x.nbytes :].view(torch.float16).view(x.shape).copy_(x)
    y = functional.conv(placed, weight, bias, made.kmap)
    assert_close(y, made.truth(x, weight) + bias.double(), torch.float16)
    assert buffer_operations(emulator) is not far


def test_the_switch_leaves_nothing_behind(monkeypatch):
    name = "AMDGCN_USE_BUFFER_OPS"
    for before in (None, "1", "0"):
        monkeypatch.delenv(name, raising=False)
        if before is not None:
            monkeypatch.setenv(name, before)
        switch = triton_compat.without_buffer_operations
        with switch(), pytest.raises(RuntimeError), switch():
            assert os.environ[name] == "0"
            raise RuntimeError
        assert os.environ.get(name) == before
