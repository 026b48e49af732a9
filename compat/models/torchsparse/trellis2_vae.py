"""TRELLIS.2's VAE on its torchsparse backend."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..flex_gemm import trellis2_vae as native
from ..flex_gemm.trellis2_vae import batch, outputs

__all__ = ["batch", "build", "outputs"]


def build(**options: Any) -> nn.Module:
    return native.build(backend="torchsparse", **options)
