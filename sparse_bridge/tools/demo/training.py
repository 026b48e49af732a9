"""A few training steps on a task that any scan can pose: tell a voxel's height from features."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .profile import stopwatch


@dataclasses.dataclass(frozen=True)
class TrainingResult:
    """Loss per step, and the milliseconds (`passes`) of forward, backward and SGD update."""

    title: str
    losses: list[float]
    passes: tuple[float, ...]

    @property
    def ms(self) -> float:
        """The median step."""
        return statistics.median(self.passes)


def height_bands(indices: torch.Tensor, bands: int) -> torch.Tensor:
    """Class of each voxel by its rank in height: [N] int64 in [0, bands), about equally many each.

    `indices` is [N, 4] int32: batch, z, y, x.
    """
    z = indices[:, 1].long()
    below = torch.bincount(z).cumsum(0) - torch.bincount(z)
    return (below * bands // len(z))[z]


def train(
    title: str,
    model: nn.Module,
    head: nn.Module,
    forward: Callable[[], Any],
    classes: int,
    steps: int,
    dtype: torch.dtype,
) -> TrainingResult:
    """Teach `head` of `model` the height bands, in place; both are back in eval mode afterwards.

    Args:
        forward: runs the model on a fresh tensor, under autocast where `dtype` asks for it, and
            returns a sparse tensor.
        head: maps its features to `classes` logits; `nn.Identity` where they already are.
        steps: SGD updates; the first is the warm-up and counts as time only if it is the only one.
    """
    device = next(model.parameters()).device
    parameters = [*model.parameters(), *head.parameters()]
    optimiser = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    # Half precision has too few exponents for small gradients.
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    model.train(), head.train()
    losses: list[float] = []
    times: list[float] = []
    for _ in range(steps):
        with stopwatch(device, times):
            optimiser.zero_grad()
            out = forward()
            logits = head(out.features.float())
            loss = nn.functional.cross_entropy(logits, height_bands(out.indices, classes))
            scaler.scale(loss).backward()
            scaler.step(optimiser)
            scaler.update()
        losses.append(float(loss.detach()))
    model.eval(), head.eval()
    return TrainingResult(title, losses, tuple(times[1:] or times))
