"""Layers fused with what follows them."""

from spconv.pytorch.quantization.intrinsic.modules import (
    SpconvAddReLUNd,
    SpconvBnAddReLUNd,
    SpconvBnNd,
    SpconvBnReLUNd,
    SpconvReLUNd,
)

__all__ = ["SpconvAddReLUNd", "SpconvBnAddReLUNd", "SpconvBnNd", "SpconvBnReLUNd", "SpconvReLUNd"]
