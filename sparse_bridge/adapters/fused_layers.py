"""Forwards of layers that `optimize` has fused: what a convolution applies already, the layers
behind it skip.

What was applied to features is noted on the tensor itself, so that a layer skips exactly then.
In graphs of `torch.compile` and `torch.export` all of them run as ever: a pass fuses there.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

from ..core.conv import fused_call
from . import fusion
from .protocol import features_of

_TAG = "_sparse_bridge_epilogue"


@dataclasses.dataclass(eq=False)
class Fused:
    """The forward of a convolution that applies a norm, or none, and an activation, or none.

    sums: features are added behind the norm; then the activation follows the sum.
    """

    module: nn.Module
    norm: nn.BatchNorm1d | None
    following: nn.Module | None = None
    sums: bool = False

    def __post_init__(self) -> None:
        self.activation: str | None = None
        self.alpha = 0.0
        kind = None if self.following is None else fusion.activation_of(self.following)
        if kind is not None:
            self.activation, self.alpha = kind

    def at(self, level: int) -> Fused | None:
        """With less fused, if anything is left. level 2: all of it, 1: no sums and what follows
        them, 0: norms only."""
        sums = self.sums and level == 2
        following = self.following if level == 2 or (level == 1 and not self.sums) else None
        if self.norm is None and following is None and not sums:
            return None
        return Fused(self.module, self.norm, following, sums)

    def skipped(self) -> list[nn.Module]:
        """The layers that this one's module stands for."""
        return [module for module in (self.norm, self.following) if module is not None]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward, norm = type(self.module).forward, self.norm
        if torch.compiler.is_compiling():
            return forward(self.module, *args, **kwargs)
        if torch.is_grad_enabled() or self.module.training or (norm is not None and norm.training):
            return forward(self.module, *args, **kwargs)
        pending = fused_call.Pending(
            None if norm is None else fusion.values_of(norm),
            self.activation,
            self.alpha,
            self._summed if self.sums else None,
        )
        out, taken = fused_call.offer(pending, forward, self.module, *args, **kwargs)
        if taken is not None:
            rows = features_of(out)
            if rows is not taken:
                raise RuntimeError(
                    f"{type(self.module).__name__} changed its features after the convolution "
                    "that optimize() fused a layer into; call sparse_bridge.restore(model)."
                )
            setattr(rows, _TAG, (norm,) if self.sums else (norm, self.following))
        return out

    def _summed(self, rows: torch.Tensor) -> None:
        setattr(rows, _TAG, (self.following,))


@dataclasses.dataclass(eq=False)
class Skipped:
    """The forward of a norm or activation that a convolution may have applied already."""

    module: nn.Module

    def __call__(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            done: tuple[Any, ...] = getattr(features_of(value), _TAG, ())
            if self.module in done:
                return value
        return type(self.module).forward(self.module, value, *args, **kwargs)
