"""What each sparse layer of a network did: rows, channels, dataflow, time and memory."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ..core.conv.waiting import settled
from ..core.device import trace


@dataclasses.dataclass
class LayerProfile:
    """One layer of a forward pass.

    Attributes:
        name: the module's path in the network.
        kind: SubM, conv, inverse, transposed, 1x1 or pool.
        kernel, stride: per axis (z, y, x).
        n_in, n_out, c_in, c_out: rows and channels.
        dataflow: what computed it; "original" where the framework did, not the bridge.
        ms: median milliseconds of the layer alone, the building of kernel maps included; a whole
            pass takes less where norms and activations are fused into the convolutions.
        memory: bytes. CUDA: rise of the peak during the layer. CPU: size of the output.
    """

    name: str
    kind: str
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    n_in: int = 0
    n_out: int = 0
    c_in: int = 0
    c_out: int = 0
    dataflow: str = "-"
    ms: float = 0.0
    memory: int = 0


@dataclasses.dataclass(frozen=True)
class NetworkProfile:
    """All sparse layers of one network, in the order in which they ran.

    `ms` is the median of whole forward passes without probes. `peak_memory` is how far such a pass
    raised the allocated bytes, on CUDA only.
    """

    title: str
    layers: list[LayerProfile]
    ms: float
    parameters: int
    peak_memory: int | None = None


def sparse_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The convolutions and pools of `model` by name."""
    import spconv.pytorch as spconv

    kinds: list[type[nn.Module]] = [spconv.conv.SparseConvolution]
    for name in ("SparseMaxPool", "SparseAvgPool"):
        pool = getattr(getattr(spconv, "pool", None), name, None)
        if isinstance(pool, type):
            kinds.append(pool)
    wanted = tuple(kinds)
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, wanted)}


def _kind(layer: Any) -> str:
    if not hasattr(layer, "in_channels"):
        return "pool"
    if layer.inverse:
        return "inverse"
    if layer.transposed:
        return "transposed"
    if all(k == 1 for k in layer.kernel_size) and (layer.subm or all(s == 1 for s in layer.stride)):
        return "1x1"
    return "SubM" if layer.subm else "conv"


def _describe(name: str, layer: Any) -> LayerProfile:
    return LayerProfile(name, _kind(layer), tuple(layer.kernel_size), tuple(layer.stride))


@contextlib.contextmanager
def _hooks(
    layers: dict[str, nn.Module],
    before: Callable[[str, Any], None],
    after: Callable[[str, Any], None],
) -> Iterator[None]:
    """Call `before(name, input)` and `after(name, output)` around every layer."""
    handles = []
    for name, layer in layers.items():

        def pre(_: nn.Module, args: tuple, name: str = name) -> None:
            before(name, args[0])

        def post(_: nn.Module, args: tuple, output: Any, name: str = name) -> None:
            after(name, output)

        handles += [layer.register_forward_pre_hook(pre), layer.register_forward_hook(post)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _collect_facts(
    forward: Callable[[], object], layers: dict[str, nn.Module], device: torch.device
) -> list[LayerProfile]:
    """One pass that notes rows, channels, dataflow and memory; time is left at 0."""
    seen: dict[str, LayerProfile] = {}
    first_event, allocated = 0, 0
    cuda = device.type == "cuda"

    def before(name: str, x: Any) -> None:
        nonlocal first_event, allocated
        layer = seen[name] = _describe(name, layers[name])
        layer.n_in, layer.c_in = x.features.shape
        first_event = len(events)
        if cuda:
            torch.cuda.reset_peak_memory_stats(device)
            allocated = torch.cuda.memory_allocated(device)

    def after(name: str, y: Any) -> None:
        layer = seen[name]
        layer.n_out, layer.c_out = y.features.shape
        flows = dict.fromkeys(event.dataflow for event in events[first_event:])
        layer.dataflow = ", ".join(flows) or ("mm" if layer.kind == "1x1" else "original")
        if cuda:
            layer.memory = torch.cuda.max_memory_allocated(device) - allocated
        else:
            layer.memory = y.features.numel() * y.features.element_size()

    with trace.record() as events, _hooks(layers, before, after):
        forward()
    return list(seen.values())


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


def _time_layers(
    forward: Callable[[], object], layers: dict[str, nn.Module], device: torch.device
) -> dict[str, float]:
    """Milliseconds per layer of one pass."""
    marks: dict[str, list[Any]] = {name: [] for name in layers}

    def mark(name: str, x: Any) -> None:
        settled(x.features)  # else a convolution waits for the norm behind it, outside its layer
        if device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            marks[name].append(event)
        else:
            marks[name].append(time.perf_counter())

    with _hooks(layers, mark, mark):
        forward()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return {name: m[0].elapsed_time(m[1]) for name, m in marks.items() if len(m) == 2}
    return {name: (m[1] - m[0]) * 1e3 for name, m in marks.items() if len(m) == 2}


def profile_network(
    title: str,
    model: nn.Module,
    forward: Callable[[], object],
    device: torch.device,
    repeats: int,
) -> NetworkProfile:
    """Run `forward` (one inference of `model`, from a fresh tensor each time) and report on it.

    The first pass, which also notes the facts, is the warm-up: it never counts as time.
    """
    layers = sparse_layers(model)
    facts = _collect_facts(forward, layers, device)
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
    rounds = [_time_layers(forward, layers, device) for _ in range(repeats)]
    for layer in facts:
        layer.ms = statistics.median(times[layer.name] for times in rounds)
    parameters = sum(p.numel() for p in model.parameters())
    return NetworkProfile(title, facts, statistics.median(whole), parameters, peak)
