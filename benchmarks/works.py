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
from .workloads import Scan

__all__ = ["TORCH_DTYPES", "Work", "build"]

TORCH_DTYPES = {
    "fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "tf32": torch.float32
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Work:
    """One timed call.

    Attributes:
        run: the call; returns features or a loss.
        clear: drops what the last call left behind (gradients).
        parts: layers that one call runs, for times per layer; 1 otherwise.
    """

    run: Callable[[], torch.Tensor]
    clear: Callable[[], None]
    parts: int = 1


def build(peer: Peer, case: Case, scan: Scan) -> Work:
    """Raises NotImplementedError where the peer has no such thing, and whatever the peer raises."""
    peer.allow_tf32(case.dtype == "tf32")
    if case.network:
        # SECOND's axes are z, y, x.
        coords, shape = scan.zyx() if case.network == "second" else (scan.coords, scan.shape)
        scan = dataclasses.replace(scan, coords=coords, shape=tuple(shape))
        return _network(peer, case, scan)
    return _layer(peer, case, scan)


def _fill(peer: Peer, model: nn.Module) -> None:
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
        elif name.endswith("norm2.weight"):
            nn.init.constant_(parameter, 0.3)  # or residual sums outgrow fp16 in eval mode


def _random(
    shape: Sequence[int],
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
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
    _fill(peer, layer)
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


def _layer_for_training(
    peer: Peer, case: Case, scan: Scan, layer: nn.Module, feats: torch.Tensor
) -> Work:
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


def _network(peer: Peer, case: Case, scan: Scan) -> Work:
    dtype, device = TORCH_DTYPES[case.dtype], scan.coords.device
    model = peer.network(case.network).to(device)
    _fill(peer, model)
    layers = sum(parameter.dim() >= 2 for parameter in model.parameters())
    if case.trains:
        return _training_step(peer, case, scan, peer.for_training(model.train()))
    if case.work == "autocast":
        model, feats, casting = model.eval(), scan.feats, _autocast(device, dtype)
    else:
        model, feats, casting = model.eval().to(dtype), scan.feats.to(dtype), _no_autocast

    model = peer.for_inference(model)

    def run() -> torch.Tensor:
        with torch.no_grad(), casting():
            return peer.call(model, feats, scan)

    return Work(run, _nothing, layers if case.work == "issue-network" else 1)


def _training_step(peer: Peer, case: Case, scan: Scan, model: nn.Module) -> Work:
    """Mixed precision as projects write it: fp32 weights, autocast, a scaler for fp16, SGD."""
    dtype, device = TORCH_DTYPES[case.dtype], scan.coords.device
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    casting = _autocast(device, dtype)

    def clear() -> None:
        optimizer.zero_grad(set_to_none=True)

    def step() -> torch.Tensor:
        clear()
        with casting():
            y = peer.call(model, scan.feats, scan)
        loss = y.float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return Work(step, clear)


def _autocast(
    device: torch.device, dtype: torch.dtype
) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    if dtype == torch.float32:
        return _no_autocast
    return lambda: torch.autocast(device.type, dtype)


_no_autocast = contextlib.nullcontext


def _nothing() -> None:
    """Inference leaves nothing behind."""
