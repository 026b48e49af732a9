"""Ordinary layers that are left out where a sparse tensor has no rows."""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["left_out"]


def left_out(module: nn.Module, features: torch.Tensor) -> torch.Tensor:
    """features [0, C], which the module does not see, but with zeros as gradients of its
    parameters: DDP waits for each parameter on every rank, also of a rank with an empty scene.

    Joint statistics are taken: the other ranks wait for this one's.
    """
    if isinstance(module, nn.SyncBatchNorm) and module.training:
        return module(features)
    if torch.is_grad_enabled():
        for parameter in module.parameters():
            if parameter.requires_grad and parameter.numel():
                features = features + parameter.flatten()[0]
    return features
