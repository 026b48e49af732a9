"""Fused inference: normalisation and activation in the convolution's own store.

In eval mode a BatchNorm is a multiplication and an addition per channel. Behind a convolution both,
and an activation, cost nothing: the kernel applies them to its fp32 sums. That happens only where
nobody could notice but by the clock: no gradients, no hooks, no overridden `forward`, running
statistics in use.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from ..core.dataflows import Norm

__all__ = ["Tail", "allowed", "plain", "tail_after", "values_of"]

_NORM_FORWARD = nn.BatchNorm1d.forward
_ACTIVATIONS: dict[type, tuple[str, Any]] = {
    nn.ReLU: ("relu", nn.ReLU.forward),
    nn.LeakyReLU: ("leaky_relu", nn.LeakyReLU.forward),
    nn.Sigmoid: ("sigmoid", nn.Sigmoid.forward),
}


@dataclasses.dataclass(frozen=True)
class Tail:
    """What follows a convolution: a BatchNorm, then perhaps an activation; `length` modules in
    all."""

    norm: nn.BatchNorm1d
    activation: str | None = None
    alpha: float = 0.0

    @property
    def values(self) -> Norm:
        """The norm's present statistics and parameters."""
        return values_of(self.norm)

    @property
    def length(self) -> int:
        return 1 if self.activation is None else 2


def values_of(norm: nn.BatchNorm1d) -> Norm:
    """The present statistics and parameters of a foldable norm. (Attributes of a module are looked
    up five times slower than its dictionaries.)"""
    buffers: dict[str, Any] = norm._buffers
    parameters = norm._parameters
    return Norm(
        buffers["running_mean"], buffers["running_var"], parameters["weight"], parameters["bias"],
        norm.eps,
    )  # fmt: skip


def allowed() -> bool:
    """Whether inference may be fused now: no gradients, no tracing, no hooks on every module."""
    return not (
        torch.is_grad_enabled()
        or torch._C._get_tracing_state()
        or torch.compiler.is_compiling()
        or torch_module._global_forward_hooks
        or torch_module._global_forward_pre_hooks
    )


def plain(module: nn.Module) -> bool:
    """Whether nothing watches or replaces this module's forward."""
    return not (module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__)


def foldable(norm: nn.Module) -> bool:
    """A BatchNorm1d that only scales and shifts: eval mode, running statistics, no hooks."""
    return (
        isinstance(norm, nn.BatchNorm1d)
        and not norm.training
        and norm.running_mean is not None
        and norm.running_mean.dtype != torch.float64
        and plain(norm)
    )


def activation_of(module: nn.Module) -> tuple[str, float] | None:
    """(name, slope) of an activation that kernels apply, or None."""
    known = _ACTIVATIONS.get(type(module))
    if known is None or type(module).forward is not known[1] or not plain(module):
        return None
    return known[0], float(getattr(module, "negative_slope", 0.0))


def tail_after(modules: Sequence[nn.Module], index: int) -> Tail | None:
    """The tail that starts at `modules[index]`, if torch's own BatchNorm1d is there."""
    if index >= len(modules):
        return None
    norm = modules[index]
    if type(norm) is not nn.BatchNorm1d or type(norm).forward is not _NORM_FORWARD:
        return None
    if not foldable(norm):
        return None
    following = activation_of(modules[index + 1]) if index + 1 < len(modules) else None
    return Tail(norm) if following is None else Tail(norm, *following)
