"""No temporary of V x N x C, forward or backward."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sparse_bridge import settings
from sparse_bridge.core import functional
from sparse_bridge.core.device import workspace
from tests.clouds import cloud, features

CHANNELS, SHAPE, LARGE = 64, (24, 24, 24), (40, 40, 40)


class Largest(TorchDispatchMode):
    """Remembers the largest storage that an operator returned, and the operator."""

    def __init__(self):
        super().__init__()
        self.size, self.operator = 0, ""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for one in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(one, torch.Tensor) and one.untyped_storage().nbytes() > self.size:
                self.size, self.operator = one.untyped_storage().nbytes(), str(func)
        return result


def step(kind, device, share=0.3, shape=SHAPE):
    """(the call that runs a training step, V x N x C bytes)."""
    coords = cloud(shape, 1, share, device=device)
    cmap = functional.coordinate_map(coords, shape, 1)
    offsets = functional.kernel_offsets((3, 3, 3))
    if kind == "submanifold":
        kmap = functional.submanifold(cmap, offsets)
    else:
        kmap = functional.strided(cmap, offsets, 2)[1]
        kmap = functional.inverse(kmap) if kind == "inverse" else kmap
    x = features(kmap.n_in, CHANNELS, device=device).requires_grad_()
    weight = torch.randn(27, CHANNELS, CHANNELS, device=device, requires_grad=True)
    dy = features(kmap.n_out, CHANNELS, device=device)

    def run():
        functional.conv(x, weight, None, kmap).backward(dy)

    return run, 27 * max(kmap.n_in, kmap.n_out) * CHANNELS * x.element_size()


@pytest.mark.parametrize("kind", ["submanifold", "strided", "inverse"])
def test_no_tensor_grows_with_the_kernel_volume(kind):
    workspace.reset()
    workspace.keep_heap()  # tunes the allocator with one large block, once per process
    run, forbidden = step(kind, "cpu", shape=LARGE)
    with settings.override(dataflow="per_offset"), Largest() as largest:
        run()
    assert largest.size < forbidden / 4, f"{largest.operator} made {largest.size} bytes"
    workspace.reset()


def test_the_measure_sees_such_a_tensor():
    """The explicit dataflow gathers all neighbours, slice by slice: what the test above forbids."""
    run, forbidden = step("submanifold", "cpu", 0.1)
    with settings.override(dataflow="explicit"), Largest() as largest:
        run()
    assert largest.size >= forbidden / 2


def test_pools_stay_small():
    coords = cloud(SHAPE, 1, 0.3)
    cmap = functional.coordinate_map(coords, SHAPE, 1)
    kmap = functional.strided(cmap, functional.kernel_offsets((3, 3, 3)), 2)[1]
    x = features(kmap.n_in, CHANNELS).requires_grad_()
    for mode in ("max", "avg"):
        with Largest() as largest:
            functional.pool(x, kmap, mode).sum().backward()
        assert largest.size <= 2 * max(kmap.n_in, kmap.n_out) * CHANNELS * 4


@pytest.mark.gpu
@pytest.mark.parametrize("flow", ["masked", "unmasked", "per_offset"])
@pytest.mark.parametrize("kind", ["submanifold", "strided", "inverse"])
def test_peak_of_a_training_step_on_a_gpu(kind, flow, monkeypatch):
    monkeypatch.undo()  # poisoned memory is filled through temporaries of its own
    with settings.override(dataflow=flow):
        run, forbidden = step(kind, "cuda", shape=LARGE)
        run()  # maps and plans are there afterwards
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        peak = torch.cuda.max_memory_allocated() - before
    assert peak < forbidden / 2, f"{peak} bytes beside {forbidden} of V x N x C"
