"""spconv's tensors and layers, as fusion, conversion and replay read them."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

from ...core.conv.waiting import materialize
from ...core.geometry.boxes import Box
from ...core.maps.coordinate_map import CoordinateMap
from ..protocol import LateMaps, LayerFacts, Root, TensorProtocol
from . import interchange
from .rules.switches import allow_tf32
from .tensors import box_of


class _Spconv(TensorProtocol):
    def features_of(self, x: Any) -> torch.Tensor | None:
        features = materialize(getattr(x, "features", None))
        return features if isinstance(features, torch.Tensor) else None

    def coordinates_of(self, x: Any) -> torch.Tensor:
        coords: torch.Tensor = x.indices
        return coords

    def with_features(self, x: Any, features: torch.Tensor) -> Any:
        return x.replace_feature(features)

    def describe(self, layer: Any) -> LayerFacts | None:
        if not hasattr(layer, "kernel_size"):
            return None
        if not hasattr(layer, "in_channels"):
            category = "pool"
        elif layer.inverse:
            category = "inverse"
        elif layer.transposed:
            category = "transposed"
        elif layer.subm or layer.conv1x1 or any(step != 1 for step in layer.stride):
            category = ""
        else:
            category = "convolution"  # at stride 1 onto every site that the kernel reaches
        return LayerFacts.of_sizes(category, layer.kernel_size, layer.stride)

    def capture_root(self, x: Any) -> Root | None:
        if not hasattr(x, "indice_dict") or x.indice_dict or x.benchmark:
            return None
        if isinstance(x.voxel_num, torch.Tensor):
            return None  # results would carry it on
        return Root(x.indices, box_of(x))

    def over(self, x: Any, features: torch.Tensor, root: CoordinateMap) -> Any:
        # Coordinates in an object of their own, which has no maps yet.
        return _with_rows(x, features, root.coords.detach())

    def label(self, x: Any) -> Hashable:
        return x.voxel_num, x.force_algo

    def result(self, x: Any, y: Any, features: torch.Tensor, coords: torch.Tensor | None, box: Box | None) -> Any:
        out = _with_rows(y, features, x.indices if coords is None else coords)
        if box is not None:
            out.batch_size, out.spatial_shape = box.size[0], list(box.size[1:])
        return out

    def keep_for(self, y: Any, captured: Any, recover: Callable[[], Any]) -> None:
        maps = captured.indice_dict
        late_keys = [key for key, record in maps.items() if not getattr(record, "is_subm", False)]
        if late_keys:
            y.indice_dict = LateMaps(late_keys, lambda: recover().indice_dict)

    def switches(self) -> Hashable:
        return allow_tf32()


def _with_rows(x: Any, features: torch.Tensor, coords: torch.Tensor) -> Any:
    """Like `x`, without kernel maps."""
    out = x.replace_feature(features)
    out.indices, out.indice_dict = coords, {}
    return out


PROTOCOL = _Spconv(interchange)
