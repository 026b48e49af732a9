"""spconv's tensors and layers, as fusion, conversion and replay read them."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import nn

from ...core.geometry.boxes import Box
from ...core.geometry.sparse_data import SparseData
from ..protocol import TensorProtocol
from . import interchange
from .conv import allow_tf32
from .tensors import box_of


class _Spconv(TensorProtocol):
    def features_of(self, x: Any) -> torch.Tensor | None:
        found = getattr(x, "features", None)
        return found if isinstance(found, torch.Tensor) else None

    def coordinates_of(self, x: Any) -> torch.Tensor:
        coords: torch.Tensor = x.indices
        return coords

    def with_features(self, x: Any, features: torch.Tensor) -> Any:
        return x.replace_feature(features)

    def to_core(self, x: Any) -> SparseData:
        return interchange.to_core(x)

    def from_core(self, data: SparseData, like: Any = None) -> Any:
        return interchange.from_core(data, like)

    def fused_inside(self, container: nn.Module) -> Iterator[nn.Module]:
        """`SparseSequential` folds a BatchNorm1d and an activation into the convolution before."""
        if any(kind.__name__ == "SparseSequential" for kind in type(container).__mro__):
            for child, after in itertools.pairwise(container.children()):
                if type(after) is nn.BatchNorm1d:
                    yield child

    def capture_box(self, x: Any) -> Box | None:
        if not hasattr(x, "indice_dict") or x.indice_dict or x.benchmark:
            return None
        return box_of(x)

    def with_rows(self, x: Any, features: torch.Tensor, coords: torch.Tensor) -> Any:
        out = x.replace_feature(features)
        out.indices, out.indice_dict = coords, {}
        return out

    def switches(self) -> Hashable:
        return allow_tf32()


PROTOCOL = _Spconv()
