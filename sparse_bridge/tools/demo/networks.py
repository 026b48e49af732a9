"""The two networks that the demo times, made ready for a scan."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ...core.conv.deferred import materialize
from .voxels import VoxelGrid

CLASSES = 20


@dataclasses.dataclass(frozen=True)
class Network:
    """A network, the head that training puts on it, and the name of both."""

    title: str
    model: nn.Module
    head: nn.Module


def make_networks(device: torch.device, seed: int, small: bool) -> list[Network]:
    """SECOND's encoder and a residual U-Net, thinner if `small`; the same for the same seed."""
    import spconv.pytorch as spconv

    from ..networks.spconv import ResidualUNet, Second

    torch.manual_seed(seed)
    thin: dict[str, Any] = {}
    if small:
        thin = {"encoder": (16, 24, 32, 48), "decoder": (48, 32, 24, 24), "blocks": (1, 1, 1, 1)}
        thin["stem"] = 16
    second, unet = Second(spconv), ResidualUNet(spconv, classes=CLASSES, **thin)
    return [
        Network("SECOND encoder", second.to(device), nn.Linear(128, CLASSES).to(device)),
        Network("residual U-Net", unet.to(device), nn.Identity()),
    ]


def forward_of(network: Network, grid: VoxelGrid, dtype: torch.dtype) -> Callable[[], Any]:
    """A function that runs the network on a new sparse tensor, so that nothing is cached."""
    import spconv.pytorch as spconv

    device = grid.features.device.type

    def forward() -> Any:
        x = spconv.SparseConvTensor(grid.features, grid.indices, list(grid.shape), batch_size=1)
        with torch.autocast(device, dtype, enabled=dtype != torch.float32):
            return network.model(x)

    return forward


@torch.no_grad()
def calibrate(model: nn.Module, forward: Callable[[], Any]) -> None:
    """Give the batch norms the statistics of one pass: random weights then keep a sane scale.

    A level that holds one voxel has no variance; there the norm keeps a variance of 1. The model is
    in eval mode afterwards.
    """
    model.eval()
    hooks = [
        norm.register_forward_pre_hook(_take_statistics) for norm in model.modules() if isinstance(norm, nn.BatchNorm1d)
    ]
    try:
        forward()
    finally:
        for hook in hooks:
            hook.remove()


def _take_statistics(norm: Any, args: tuple[Any, ...]) -> None:
    x = materialize(args[0]).float()
    norm.running_mean.copy_(x.mean(0))
    if len(x) > 1:
        norm.running_var.copy_(x.var(0, unbiased=False))
    else:
        norm.running_var.fill_(1.0)
