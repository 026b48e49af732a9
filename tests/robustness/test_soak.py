"""Training over many different scenes: memory stays flat, whatever is kept for a scene goes with
it, and no cache of the process follows the number of scenes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import sparse_bridge
from tests.robustness import watch
from tests.robustness.networks import FRAMEWORKS, features_of, network, scene, tensor_of

ROOT = Path(__file__).parents[2]
WIDTHS = ((4, 4), (3, 8), (1, 5))  # (input channels, hidden channels)
BLOCK = 512  # bytes: the smallest piece of device memory
# The allocator's own unrest, with a GPU also what its driver loads late; the maps of all scenes,
# kept, would be more.
RESIDENT_MB = {"cpu": 24, "cuda": 64}
FEW = 20  # kernels that a new number of rows, tile or alignment may still ask for
KERNEL_MB = 4  # of memory, each
KERNELS = ("launch keys", "compiled kernels")


class Training:
    """Every framework's networks and their optimisers, which live all along."""

    def __init__(self, device: str):
        self.device = device
        self.parts = {}
        for framework in FRAMEWORKS:
            with sparse_bridge.enable(framework):
                for c_in, c in WIDTHS:
                    net = network(framework, c_in, c, device)
                    self.parts[framework, c_in] = net, torch.optim.Adam(net.parameters(), 1e-3)

    def step(self, number: int, largest: int, full: bool = False) -> None:
        """One scene: forward, backward, optimiser."""
        framework = FRAMEWORKS[number % len(FRAMEWORKS)]
        c_in = WIDTHS[number // len(FRAMEWORKS) % len(WIDTHS)][0]
        net, optimiser = self.parts[framework, c_in]
        with sparse_bridge.enable(framework):
            made = scene(number, c_in, self.device, largest, full)
            x = made.x.requires_grad_()
            optimiser.zero_grad()
            y = features_of(net(tensor_of(framework, made, x)))
            y.square().mean().backward()
            optimiser.step()
            assert torch.isfinite(y).all() and torch.isfinite(x.grad).all()


def snapshot(device: str) -> dict:
    """What the process holds. Boxes of coordinates are remembered in a cache with a limit, so the
    bounds that they keep on the device are not counted."""
    bounds, memories = watch.box_bounds(device)
    found = {
        "tensors": watch.live_tensors() - bounds,
        "resident": watch.resident_bytes(),
        "caches": watch.cache_sizes(),
        "device": 0,
    }
    if device == "cuda":
        torch.cuda.synchronize()
        found["device"] = torch.cuda.memory_allocated() - memories * BLOCK
    return found


def soak(scenes: int, device: str, largest: int) -> tuple[dict, dict]:
    """What the process holds after warming up and at the end."""
    torch.manual_seed(0)
    training = Training(device)
    for number in range(len(FRAMEWORKS) * len(WIDTHS)):
        training.step(number, largest, full=True)  # the most that a scene here takes
    for number in range(scenes // 5):
        training.step(number, largest)
    before = snapshot(device)
    for number in range(scenes // 5, scenes):
        training.step(number, largest)
    return before, snapshot(device)


def run_apart(*arguments: str) -> dict:
    """`soak` in a process of its own, whose memory nothing else touches."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "SPARSE_BRIDGE_TUNE": "off"}
    command = [sys.executable, "-m", "tests.robustness.test_soak", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def check(found: dict, scenes: int, device: str) -> None:
    before, after = found["before"], found["after"]
    print(json.dumps({key: [before[key], after[key]] for key in ("resident", "device", "tensors")}))
    print(json.dumps(after["caches"]))
    kernels = 0
    for name, (size, most) in after["caches"].items():
        grown = size - before["caches"].get(name, (0, most))[0]
        if most is not None:  # it forgets what was not used for long
            assert size <= most
        elif name in KERNELS:
            kernels = max(kernels, grown)
            assert grown <= max(FEW, scenes // 20), f"{name} grew by {grown} to {size}"
        else:
            assert grown == 0, f"{name} grew by {grown} to {size} over {scenes} scenes"
    assert after["tensors"] <= before["tensors"]
    assert after["device"] <= before["device"]
    if before["resident"]:
        grown = (after["resident"] - before["resident"]) >> 20
        limit = RESIDENT_MB[device] + kernels * KERNEL_MB
        assert grown <= limit, f"{grown} MB more in RAM after {scenes} scenes"


@pytest.mark.parametrize("scenes, largest", [(60, 8), pytest.param(1000, 12, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_on_the_cpu(scenes, largest):
    check(run_apart(str(scenes), "cpu", str(largest)), scenes, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("scenes, largest", [(90, 16), pytest.param(1000, 24, marks=pytest.mark.slow)])
def test_on_a_gpu(scenes, largest):
    check(run_apart(str(scenes), "cuda", str(largest)), scenes, "cuda")


if __name__ == "__main__":
    first, last = soak(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
    print(json.dumps({"before": first, "after": last}))
