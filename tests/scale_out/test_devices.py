"""Layers run where their tensors are, whatever the current device is."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from sparse_bridge.errors import DeviceError
from tests.patience import PATIENCE

from .networks import cloud, run

TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def test_the_networks_depend_on_the_cloud_and_give_gradients(network) -> None:
    first, second = (run(network, cloud(seed), "cpu") for seed in (0, 1))
    assert first[0].shape[1] == 8 and first[0].shape != second[0].shape
    for value in first:
        assert value.isfinite().all() and value.abs().max() > 0


@pytest.mark.gpu
@TWO_GPUS
@pytest.mark.parametrize("current", [0, 1])
def test_the_other_gpu_computes_the_same_bits(network, current: int) -> None:
    points = cloud(0, 3000)
    other = 1 - current
    with torch.cuda.device(current):
        expected = run(network, points, f"cuda:{current}")
        found = run(network, points, f"cuda:{other}")
        assert torch.cuda.current_device() == current
    for one, two in zip(found, expected, strict=True):
        assert one.device == torch.device("cuda", other)
        assert torch.equal(one.cpu(), two.cpu())
    reference = run(network, points, "cpu")
    for one, two in zip(found, reference, strict=True):
        torch.testing.assert_close(one.cpu(), two, rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
@TWO_GPUS
def test_two_gpus_from_two_threads(network) -> None:
    """As nn.DataParallel does it: one thread per device."""
    points = cloud(1, 3000)
    gate = threading.Barrier(2)

    def work(device: int) -> list[list[torch.Tensor]]:
        gate.wait(timeout=PATIENCE)
        return [run(network, points, f"cuda:{device}") for _ in range(5)]

    with ThreadPoolExecutor(2) as pool:
        found = [tensors for rounds in pool.map(work, (0, 1)) for tensors in rounds]
    assert len(found) == 10
    for tensors in found:
        for one, two in zip(tensors, found[0], strict=True):
            assert torch.equal(one.cpu(), two.cpu())


@pytest.mark.gpu
@TWO_GPUS
def test_memory_is_taken_on_the_tensors_device(network) -> None:
    torch.cuda.set_device(0)
    run(network, cloud(0), "cuda:1")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats(0)
    before = torch.cuda.memory_allocated(0)
    run(network, cloud(2, 3000), "cuda:1")
    assert torch.cuda.max_memory_allocated(0) == before


@pytest.mark.gpu
def test_mixed_devices_are_refused_by_name(network) -> None:
    network.to("cuda:0")
    coords, x = cloud(0)
    with pytest.raises((DeviceError, RuntimeError), match=r"cuda:0|cpu"):
        network(coords, x)
