"""Speed: kernels against torch's own operations and against the framework, if it is installed."""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable, Iterator

import torch

import sparse_bridge

from ... import settings
from ...adapters.import_hook import installed
from ...core import functional
from ..demo.voxels import street_voxels
from ..networks.spconv import Second
from .setup import SKIPPED, Outcome, Setup, synchronize, verdict

_REPEATS = 7


def milliseconds(work: Callable[[], object], device: torch.device) -> float:
    """Median of a few calls, after two that are not counted."""
    times = []
    for turn in range(_REPEATS + 2):
        synchronize(device)
        begin = time.perf_counter()
        work()
        synchronize(device)
        if turn > 1:
            times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times)


def speed(setup: Setup) -> Iterator[Outcome]:
    """Figures without a verdict: whatever runs, passes."""
    if setup.device.type != "cuda":
        yield Outcome("speed", SKIPPED, "needs a GPU")
        return
    for channels, dtype in ((64, torch.float16), (64, torch.float32), (128, torch.float16)):
        yield _layer(setup, channels, dtype)
    yield _network(setup)


def _layer(setup: Setup, channels: int, dtype: torch.dtype) -> Outcome:
    """A submanifold layer, forward and backward: kernels and torch's own operations."""
    coords, shape, batch = street_voxels(100_000)
    cmap = functional.coordinate_map(coords.to(setup.device), shape, batch)
    kmap = functional.submanifold(cmap, functional.kernel_offsets((3, 3, 3)))
    x = torch.randn(len(coords), channels, device=setup.device, dtype=dtype).requires_grad_()
    weight = torch.randn(27, channels, channels, device=setup.device, dtype=dtype) * 0.02
    weight.requires_grad_()
    dy = torch.randn_like(x)

    def step() -> None:
        y = functional.conv(x, weight, None, kmap)
        torch.autograd.grad(y, [x, weight], dy)

    ours = milliseconds(step, setup.device)
    with settings.override(dataflow="per_offset"):
        torchs = milliseconds(step, setup.device)
    short = str(dtype).removeprefix("torch.float")
    detail = f"{ours:.2f} ms, torch's own operations {torchs:.2f} ms ({torchs / ours:.1f} x)"
    name = f"speed, layer {channels} channels fp{short}"
    return verdict(name, None, detail, milliseconds=ours, torch_milliseconds=torchs)


def _second_step(setup: Setup) -> Callable[[], object]:
    module = importlib.import_module("spconv.pytorch")
    coords, shape, batch = street_voxels(60_000)
    torch.manual_seed(0)
    model = Second(module).to(setup.device)
    indices = coords.to(setup.device)
    features = torch.randn(len(coords), 4, device=setup.device)

    def step() -> None:
        x = module.SparseConvTensor(features, indices, list(shape), batch)
        with torch.autocast("cuda", torch.float16):
            y = model(x).features
        (2.0**10 * y.float().square().mean()).backward()

    return step


def _network(setup: Setup) -> Outcome:
    """A training step of SECOND; the framework itself beside it where it is installed."""
    original: float | str | None = None
    if installed("spconv"):
        try:
            original = milliseconds(_second_step(setup), setup.device)
        except Exception as error:  # a build without this GPU fails in its own ways
            original = f"{type(error).__name__}"
    with sparse_bridge.enable("spconv"):
        ours = milliseconds(_second_step(setup), setup.device)
        with settings.override(dataflow="per_offset"):
            torchs = milliseconds(_second_step(setup), setup.device)
    words = {float: "spconv itself {:.1f} ms", str: "spconv itself fails ({})"}
    beside = "spconv is not installed"
    if original is not None:
        beside = words[type(original)].format(original)
    detail = f"training step {ours:.1f} ms, torch's own operations {torchs:.1f} ms, {beside}"
    return verdict(
        "speed, SECOND",
        None,
        detail,
        milliseconds=ours,
        torch_milliseconds=torchs,
        spconv_milliseconds=original if isinstance(original, float) else None,
    )
