"""MinkowskiEngine's tensors, as fusion, conversion and replay read them."""

from __future__ import annotations

from typing import Any

import torch

from ...core.geometry.sparse_data import SparseData
from ..protocol import TensorProtocol
from . import interchange


class _Minkowski(TensorProtocol):
    """Not replayed: coordinates are entered into a manager, which counts them on the host."""

    def features_of(self, x: Any) -> torch.Tensor | None:
        """Of a `SparseTensor` or a `TensorField`."""
        found = getattr(x, "F", None)
        return found if isinstance(found, torch.Tensor) else None

    def coordinates_of(self, x: Any) -> torch.Tensor:
        coords: torch.Tensor = x.C
        return coords

    def with_features(self, x: Any, features: torch.Tensor) -> Any:
        return x._with(features)

    def to_core(self, x: Any) -> SparseData:
        return interchange.to_core(x)

    def from_core(self, data: SparseData, like: Any = None) -> Any:
        return interchange.from_core(data, like)


PROTOCOL = _Minkowski()
