"""Which code serves devices that nobody here has: Intel's and Apple's GPUs, Windows."""

from __future__ import annotations

import sys
import types

import pytest
import torch

from sparse_bridge import settings
from sparse_bridge.core.device import selection
from sparse_bridge.kernels.runtime import target as targets

XPU, MPS = torch.device("xpu", 0), torch.device("mps", 0)


class Driver:
    """Triton's active driver on a machine with one GPU."""

    def __init__(self, backend):
        self.backend = backend

    def get_current_target(self):
        if self.backend is None:
            raise RuntimeError("0 active drivers")
        return types.SimpleNamespace(backend=self.backend, arch={"version": 20}, warp_size=16)


@pytest.fixture
def drive(fake_gpu):
    """Make Triton's driver one of a backend."""
    pytest.importorskip("triton.runtime")
    properties = types.SimpleNamespace(gpu_subslice_count=64, max_compute_units=512)
    fake_gpu.has(intel=properties)

    def set_backend(backend):
        fake_gpu.has(driver=types.SimpleNamespace(active=Driver(backend)))

    targets.reset()
    yield set_backend
    targets.reset()


def test_an_intel_gpu_is_served_by_kernels_through_tritons_own_launcher(drive):
    drive("xpu")
    target, problem = selection.select(XPU)
    assert problem is None
    assert (target.backend, target.family, target.raw) == ("xpu", "generic", False)
    assert (target.warp_size, target.compute_units, target.shared_memory) == (16, 64, 64 << 10)
    assert target.has_bf16 and not target.has_tf32 and not target.splits_fp32
    with settings.override(dataflow="per_offset"):
        assert selection.select(XPU) == (None, None)


@pytest.mark.parametrize("backend, words", [("cuda", "drives 'cuda'"), (None, "0 active drivers")])
def test_an_intel_gpu_without_its_backend_is_served_by_torch(drive, backend, words):
    drive(backend)
    target, problem = selection.select(XPU)
    assert target is None and words in problem


def test_an_apple_gpu_is_served_by_torch():
    target, problem = selection.select(MPS)
    assert target is None and "'mps'" in problem


@pytest.mark.parametrize(
    "platform, words", [("win32", "pip install triton-windows"), ("darwin", "macOS"), ("linux", "reinstall torch")]
)
def test_without_triton_the_message_fits_the_platform(fake_gpu, monkeypatch, platform, words):
    fake_gpu.has(triton=None)
    monkeypatch.setattr(sys, "platform", platform)
    assert words in targets.unavailable(torch.device("cuda", 0))
