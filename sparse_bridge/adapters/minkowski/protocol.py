"""MinkowskiEngine's tensors, as fusion, conversion and replay read them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable
from typing import Any

import torch

from ...core.geometry.boxes import Box
from ...core.maps.coordinate_map import CoordinateMap
from ..protocol import LayerFacts, Results, Root, TensorProtocol
from . import interchange
from .batches import has_items_of_one
from .manager import enter_levels, join, over


class _Minkowski(TensorProtocol):
    feature_names = ("F",)

    def features_of(self, x: Any) -> torch.Tensor | None:
        """Of a `SparseTensor` or a `TensorField`."""
        features = getattr(x, "F", None)
        return features if isinstance(features, torch.Tensor) else None

    def coordinates_of(self, x: Any) -> torch.Tensor:
        coords: torch.Tensor = x._sites() if hasattr(x, "_sites") else x.C
        return coords

    def with_features(self, x: Any, features: torch.Tensor) -> Any:
        return x._with(features)

    def describe(self, layer: Any) -> LayerFacts | None:
        generator = getattr(layer, "kernel_generator", None)
        if generator is None:
            return None
        if not hasattr(layer, "kernel"):
            category = "pool"
        elif getattr(layer, "is_transpose", False):
            category = "generative" if generator.expand_coordinates else "transposed"
        else:
            category = ""
        return LayerFacts.of_sizes(category, generator.kernel_size, generator.kernel_stride)

    def capture_root(self, x: Any) -> Root | None:
        if not hasattr(x, "coordinate_map_key"):
            return None  # a field of points
        registry, key = x._manager._manager, x.coordinate_map_key.key
        if key not in registry.grids:
            return None
        view = registry.grids[key].own_view()
        return Root(view.coords, view.data_bounds or view.box, self.levels_of(x), view.distinct)

    def levels_of(self, x: Any) -> frozenset[Hashable]:
        """By their tensor strides: where there is one, layers give another one another name."""
        own = x.coordinate_map_key.key
        return frozenset([key[0] for key in x._manager._manager.grids if key != own])

    def is_fresh(self, x: Any) -> bool:
        return not (self.levels_of(x) or x._manager._manager.kernel_maps)

    def over(self, x: Any, features: torch.Tensor, root: CoordinateMap) -> Any:
        manager, key = copy.copy(x._manager), x.coordinate_map_key.key
        manager._manager = over(x._manager._manager, key, root)
        return x._of(features, key, manager)

    def on_rows_of(self, x: Any, y: Any) -> bool:
        same: bool = x.coordinate_map_key.key == y.coordinate_map_key.key
        return same

    def label(self, x: Any) -> Hashable:
        key = x.coordinate_map_key.key
        registry = x._manager._manager
        return key, registry.grid(key).unit, has_items_of_one(registry)

    def result(self, x: Any, y: Any, features: torch.Tensor, coords: torch.Tensor | None, box: Box | None) -> Any:
        if coords is None:
            return x._with(features)
        mine, theirs = x._manager._manager, y._manager._manager
        key = join(mine, x.coordinate_map_key.key, theirs, y.coordinate_map_key.key, coords)
        return x._of(features, key, x._manager)

    def keep_for(self, y: Any, captured: Any, results: Results, cut: Callable[[torch.Tensor], torch.Tensor]) -> None:
        # Kernel maps are built again, and other coordinates made where a layer finds none.
        mine, theirs = y._manager._manager, captured._manager._manager
        enter_levels(mine, theirs, captured.coordinate_map_key.key[0], cut)


PROTOCOL = _Minkowski(interchange)
