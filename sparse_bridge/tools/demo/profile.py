"""A network, timed: whole passes, and what each of its sparse layers does in them."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator

import torch
from torch import nn

from ..profiling.recorder import profile
from ..profiling.results import LayerProfile


@dataclasses.dataclass(frozen=True)
class NetworkProfile:
    """All sparse layers of one network, in the order in which they ran.

    `passes` are the milliseconds of whole forward passes without probes. `peak_memory` is how far
    such a pass raised the allocated bytes, on CUDA only.
    """

    title: str
    layers: list[LayerProfile]
    passes: tuple[float, ...]
    parameters: int
    peak_memory: int | None = None

    @property
    def ms(self) -> float:
        """The median pass."""
        return statistics.median(self.passes)


@contextlib.contextmanager
def stopwatch(device: torch.device, into: list[float]) -> Iterator[None]:
    """Append the milliseconds of the block, the device's work included, to `into`."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    yield
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    into.append((time.perf_counter() - start) * 1e3)


def profile_network(
    title: str, model: nn.Module, forward: Callable[[], object], device: torch.device, repeats: int, probed: int
) -> NetworkProfile:
    """Run `forward` (one inference of `model`, from a fresh tensor each time) and report on it.

    The first pass is the warm-up: it never counts. After `repeats` timed ones come `probed` ones
    in which every layer is timed.
    """
    forward()
    cuda = device.type == "cuda"
    allocated = 0
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
        allocated = torch.cuda.memory_allocated(device)
    whole: list[float] = []
    for _ in range(repeats):
        with stopwatch(device, whole):
            forward()
    peak = torch.cuda.max_memory_allocated(device) - allocated if cuda else None
    with profile(model) as measured:
        for _ in range(probed):
            forward()
    layers = [layer for layer in measured.layers if layer.framework not in ("", "torch")]
    parameters = sum(p.numel() for p in model.parameters())
    return NetworkProfile(title, layers, tuple(whole), parameters, peak)
