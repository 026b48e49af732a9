"""A case made ready to run on one peer: the layer or network, its input, and one call to time."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from .peers import Peer
from .registry import Case
from .workloads import Scan, stream

__all__ = ["TORCH_DTYPES", "Work", "build", "fill"]

TORCH_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "tf32": torch.float32}


@dataclasses.dataclass(frozen=True)
class Work:
    """One timed call.

    Attributes:
        run: the call; returns features or a loss.
        clear: drops what the last call left behind (gradients).
        prepare: makes the input of the next call, outside the time that counts.
        parts: layers that one call runs, for times per layer; 1 otherwise.
    """

    run: Callable[[], torch.Tensor]
    clear: Callable[[], None]
    parts: int = 1
    prepare: Callable[[], None] = lambda: None


class Scenes:
    """The input of a network: one scan, or a stream of which `next` takes another."""

    def __init__(self, case: Case, scans: Sequence[Scan]) -> None:
        self._turned = case.network == "second"  # its axes are z, y, x
        fixed = case.work.startswith("stream-fixed")
        self._stream = stream(scans, case.batch, fixed) if case.streams else iter(scans)
        self.streams = case.streams
        self.next()

    def next(self) -> None:
        """Take another scene."""
        scan = next(self._stream)
        coords, shape = scan.zyx() if self._turned else (scan.coords, scan.shape)
        self.scan = dataclasses.replace(scan, coords=coords, shape=tuple(shape))


def build(peer: Peer, case: Case, scans: Sequence[Scan]) -> Work:
    """scans: one, or those that a stream takes its scenes from.

    Raises NotImplementedError where the peer has no such thing, and whatever the peer raises.
    """
    peer.allow_tf32(case.dtype == "tf32")
    if not case.network:
        return _layer(peer, case, scans[0])
    scenes = Scenes(case, scans)
    work = _network(peer, case, scenes)
    return dataclasses.replace(work, prepare=scenes.next) if scenes.streams else work


# Of residual blocks, as the networks of every API call the weight.
_LAST_NORMS = ("norm2.weight", "norm2.bn.weight", "main.4.weight")


def fill(peer: Peer, model: nn.Module) -> None:
    """The same weights for every peer of one API, of a size that keeps activations in range."""
    for index, (name, parameter) in enumerate(model.named_parameters()):
        if parameter.dim() >= 2:
            c_in, volume = peer.fans(parameter)
            # About volume ** 0.6 of the kernel's offsets are occupied in these scenes.
            scale = (2 / (c_in * volume**0.6)) ** 0.5
            with torch.no_grad():
                parameter.copy_(_random(parameter.shape, parameter.device, seed=index) * scale)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
        elif name.endswith(_LAST_NORMS):
            nn.init.constant_(parameter, 0.3)  # or residual sums outgrow fp16 in eval mode


def _random(
    shape: Sequence[int], device: torch.device, dtype: torch.dtype = torch.float32, seed: int = 0
) -> torch.Tensor:
    """The same normal numbers in every process, made on the device that needs them."""
    random = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=random, device=device, dtype=dtype)


def _layer(peer: Peer, case: Case, scan: Scan) -> Work:
    """A layer in training mode, as modules begin, also where it runs without gradients; a block in
    eval mode, for its norm."""
    dtype, device = TORCH_DTYPES[case.dtype], scan.coords.device
    block = case.work == "issue-block"
    layer = (peer.block if block else peer.layer)(case.channels).to(device)
    fill(peer, layer)
    layer = layer.to(dtype).train(not block)
    feats = _random((len(scan.coords), case.channels), device, dtype)
    if case.work in ("train", "issue-train"):
        return _layer_for_training(peer, case, scan, layer, feats)
    with torch.no_grad():
        fresh = case.work in ("fresh", "issue-fresh")
        maps = None if fresh else peer.maps(layer, feats, scan)

    def run() -> torch.Tensor:
        with torch.no_grad():
            return peer.call(layer, feats, scan, maps)

    return Work(run, _nothing)


def _layer_for_training(peer: Peer, case: Case, scan: Scan, layer: nn.Module, feats: torch.Tensor) -> Work:
    feats.requires_grad_(True)
    maps = peer.maps(layer, feats, scan)
    dy = _random(feats.shape, feats.device, feats.dtype, seed=1)

    def clear() -> None:
        feats.grad = None
        layer.zero_grad(set_to_none=True)

    def step() -> torch.Tensor:
        clear()
        y = peer.call(layer, feats, scan, maps)
        y.backward(dy)
        return y.detach()

    def forward() -> torch.Tensor:
        return peer.call(layer, feats, scan, maps)

    return Work(step if case.work == "train" else forward, clear)


def _network(peer: Peer, case: Case, scenes: Scenes) -> Work:
    dtype, device = TORCH_DTYPES[case.dtype], scenes.scan.coords.device
    model = peer.network(case.network).to(device)
    fill(peer, model)
    layers = sum(parameter.dim() >= 2 for parameter in model.parameters())
    if case.trains:
        return _training_step(peer, case, scenes, peer.for_training(model.train()))
    if case.work == "autocast":
        model, kept, casting = model.eval(), torch.float32, _autocast(device, dtype)
    else:
        model, kept, casting = model.eval().to(dtype), dtype, _no_autocast

    model = peer.for_inference(model)

    def run() -> torch.Tensor:
        scan = scenes.scan
        with torch.no_grad(), casting():
            return peer.call(model, scan.feats.to(kept), scan)

    return Work(run, _nothing, layers if case.work == "issue-network" else 1)


def _training_step(peer: Peer, case: Case, scenes: Scenes, model: nn.Module) -> Work:
    """Mixed precision as projects write it: fp32 weights, autocast, a scaler for fp16, SGD."""
    dtype, device = TORCH_DTYPES[case.dtype], scenes.scan.coords.device
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    casting = _autocast(device, dtype)

    def clear() -> None:
        optimizer.zero_grad(set_to_none=True)

    def step() -> torch.Tensor:
        clear()
        scan = scenes.scan
        with casting():
            y = peer.call(model, scan.feats, scan)
        loss = y.float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return Work(step, clear)


def _autocast(device: torch.device, dtype: torch.dtype) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    if dtype == torch.float32:
        return _no_autocast
    return lambda: torch.autocast(device.type, dtype)


_no_autocast = contextlib.nullcontext


def _nothing() -> None:
    """Inference leaves nothing behind."""
