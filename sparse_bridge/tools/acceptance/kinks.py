"""Networks whose gradients can be compared: no ReLU of theirs reads a value near 0.

There two precisions may take different sides, and gradients over a few hundred rows differ by a
per cent, whoever is right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def values_of(x: Any) -> torch.Tensor:
    """The features of any framework's tensor, or of torch's."""
    return x if isinstance(x, torch.Tensor) else x.F


def middles(x: torch.Tensor) -> torch.Tensor:
    """x: [N, C], N > 0. The middle of the widest gap among the middle half of each column: [C]."""
    beyond = x.amin(0, keepdim=True) - 1, x.amax(0, keepdim=True) + 1
    values = torch.cat([x, *beyond]).sort(0).values
    rest = len(values) // 4
    values = values[rest : len(values) - rest]
    widest = values.diff(dim=0).argmax(0, keepdim=True)
    return (values.gather(0, widest) + values.gather(0, widest + 1))[0] / 2


def away_from_kinks(model: nn.Module, forward: Callable[[], Any]) -> None:
    """Give the model's norms biases with which each ReLU reads values of both signs, none near 0.

    forward: runs the model in fp64 on the CPU. The norm that ran last before a ReLU must be part of
    what the ReLU reads, alone or in a sum. The biases are numbers of fp32.
    """
    last: list[nn.BatchNorm1d] = []

    def normed(norm: nn.BatchNorm1d, args: Any, y: Any) -> None:
        last[:] = [norm]

    def moved(relu: nn.Module, args: Any) -> None:
        x, bias = values_of(args[0]), last[0].bias
        if len(x):
            before = bias.clone()
            bias.copy_((bias - middles(x)).float())
            x += bias - before

    hooks = []
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            hooks.append(module.register_forward_hook(normed))
        elif isinstance(module, nn.ReLU):
            hooks.append(module.register_forward_pre_hook(moved))
    with torch.no_grad():
        forward()
    for hook in hooks:
        hook.remove()
