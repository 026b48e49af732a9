"""FlexGEMM's plain tensors, as conversion reads them.

It has no modules and no tensor class, so there is nothing to fuse or to capture; its functions
offer their products to whoever fuses, like all convolutions.
"""

from __future__ import annotations

from typing import Any

import torch

from ..protocol import LayerFacts, TensorProtocol
from . import interchange


class _FlexGemm(TensorProtocol):
    feature_names = ("feats",)

    def features_of(self, x: Any) -> torch.Tensor | None:
        return x.feats if isinstance(x, interchange.Voxels) else None

    def coordinates_of(self, x: Any) -> torch.Tensor:
        coords: torch.Tensor = x.coords
        return coords

    def with_features(self, x: Any, features: torch.Tensor) -> Any:
        return interchange.Voxels(features, x.coords, interchange.with_channels(x.shape, features.shape[1]))

    def describe(self, layer: Any) -> LayerFacts | None:
        """Of 2.0's layers; 1.x has functions alone."""
        kernel = getattr(layer, "kernel_size", None)
        if kernel is None:
            return None
        stride = getattr(layer, "stride", (1,) * len(kernel))
        if not hasattr(layer, "weight"):
            category = "pool"
        elif "Transpose" in type(layer).__name__:
            category = "transposed"
        else:  # at stride 1 onto every site that the kernel reaches, but for submanifold layers
            category = "convolution" if hasattr(layer, "stride") and set(stride) == {1} else ""
        return LayerFacts.of_sizes(category, kernel, stride)


PROTOCOL = _FlexGemm(interchange)
