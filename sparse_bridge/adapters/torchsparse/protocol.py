"""torchsparse's tensors, as fusion, conversion and replay read them."""

from __future__ import annotations

from typing import Any

import torch

from ...core.geometry.sparse_data import SparseData
from ..protocol import TensorProtocol
from . import interchange
from .tensors import with_feats


class _Torchsparse(TensorProtocol):
    """Not replayed: the bounds of a grid are those of the data, so every scene has others."""

    def features_of(self, x: Any) -> torch.Tensor | None:
        """Of a `SparseTensor` or a `PointTensor`, which knows them as F alone."""
        found = getattr(x, "F", None)
        return found if isinstance(found, torch.Tensor) else None

    def coordinates_of(self, x: Any) -> torch.Tensor:
        coords: torch.Tensor = x.C
        return coords

    def with_features(self, x: Any, features: torch.Tensor) -> Any:
        return with_feats(x, features)

    def to_core(self, x: Any) -> SparseData:
        return interchange.to_core(x)

    def from_core(self, data: SparseData, like: Any = None) -> Any:
        return interchange.from_core(data, like)


PROTOCOL = _Torchsparse()
