"""torchsparse's tensors, as fusion, conversion and replay read them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable
from typing import Any

import torch

from ...core.device import selection
from ...core.geometry.boxes import Box
from ...core.late_maps import LateMaps, LateSource, late_facts, present
from ...core.maps import map_cache
from ...core.maps.coordinate_map import CoordinateMap
from ...core.maps.map_cache import MapStore
from ..protocol import LayerFacts, Results, Root, TensorProtocol
from . import interchange, options
from . import profile as profiles
from .conv import allow_tf32
from .geometry import box_bounds
from .levels import Level
from .maps import as_tensor, coordinate_map, exact_bounds, give_range, known_to_lie_in
from .records import entry_of, record_of
from .tensors import alone, caches_of, output_of, range_of, with_feats


class _Torchsparse(TensorProtocol):
    feature_names = ("feats", "F")  # points know them as F alone

    def features_of(self, x: Any) -> torch.Tensor | None:
        """Of a `SparseTensor` or a `PointTensor`, which knows them as F alone."""
        features = getattr(x, "F", None)
        return features if isinstance(features, torch.Tensor) else None

    def coordinates_of(self, x: Any) -> torch.Tensor:
        coords: torch.Tensor = x.C
        return coords

    def with_features(self, x: Any, features: torch.Tensor) -> Any:
        return with_feats(x, features)

    def describe(self, layer: Any) -> LayerFacts | None:
        if not hasattr(layer, "kernel_size"):
            return None
        category = "transposed" if getattr(layer, "transposed", False) else ""
        category = "generative" if getattr(layer, "generative", False) else category
        axes = [size if isinstance(size, tuple) else (size,) * 3 for size in (layer.kernel_size, layer.stride)]
        return LayerFacts.of_sizes(category, *axes)

    def capture_root(self, x: Any) -> Root | None:
        caches = caches_of(x)
        kmaps, cmaps = getattr(caches, "kmaps", None), getattr(caches, "cmaps", None)
        if kmaps is None or cmaps is None or not _is_first(x, cmaps):
            return None  # a PointTensor, or other coordinates than layers find
        if x.coords.dtype != torch.int32 or x.coords.ndim != 2 or x.coords.shape[1] != 4:
            return None
        store, within = map_cache.store_of(x.coords), range_of(x)
        cmap = coordinate_map(store, x.coords, _profile(), within)
        if within is not None and not known_to_lie_in(cmap, within):
            return None  # strided layers look which rows they drop
        # Without a range the extremes of the data decide which rows a strided layer makes.
        bounds = exact_bounds(store, x.coords, _profile()) if within is None else cmap.data_bounds or cmap.box
        return Root(cmap.coords, bounds, self.levels_of(x), cmap.distinct, None if cmap.unbounded else cmap.box)

    def levels_of(self, x: Any) -> frozenset[Hashable]:
        """By their tensor strides."""
        return frozenset(caches_of(x).cmaps.keys() - {x.stride})

    def is_fresh(self, x: Any) -> bool:
        return not (self.levels_of(x) or dict.__len__(caches_of(x).kmaps))

    def over(self, x: Any, features: torch.Tensor, root: CoordinateMap) -> Any:
        store = MapStore(root)
        if range_of(x) is None:  # the box is that of the coordinates
            store.put("bounds", box_bounds(root.box))
        return alone(x, features, as_tensor(Level(root, store), _profile()))

    def apart(self, x: Any, features: torch.Tensor) -> Any:
        return alone(x, features, x.coords)

    def label(self, x: Any) -> Hashable:
        return x.stride, range_of(x), frozenset(_ranges(x).items())

    def result(self, x: Any, y: Any, features: torch.Tensor, coords: torch.Tensor | None, box: Box | None) -> Any:
        rows = x.coords if coords is None else coords
        give_range(rows, range_of(x), range_of(y), coords is not None)
        level = caches_of(y).cmaps.get(y.stride)
        if isinstance(level, tuple) and level[0] is y.coords:  # with the range of the layer that made it
            caches_of(x).cmaps.setdefault(y.stride, (rows, level[1]))
        return output_of(x, _profile(), features, rows, y.stride, range_of(y))

    def keep_for(self, y: Any, captured: Any, results: Results, cut: Callable[[torch.Tensor], torch.Tensor]) -> None:
        caches = caches_of(y)  # those of the input and of other results, too
        if not isinstance(caches.kmaps, LateMaps):
            caches.kmaps = LateMaps(caches.kmaps)
        late, made = caches.kmaps, caches_of(captured).kmaps
        there = late.late_keys().union(present(late))  # of another output, or a comparison
        keys = tuple([key for key in made if key not in there and _kept(key, made[key], results)])
        if keys:
            make = functools.cache(functools.partial(_made_again, made, captured, results))
            ranges = {key: value for key, value in _ranges(captured).items() if key in keys}
            late.add(LateSource(keys, frozenset(keys), make, y.coords, ranges))

    def allows_tf32(self) -> bool:
        with selection.standing_in("a GPU"):
            return allow_tf32(_profile(), torch.device("cpu"))

    def switches(self) -> Hashable:
        profile = _profile()
        tf32 = torch.cuda.is_available() and allow_tf32(profile, torch.device("cuda"))
        return profile, options.resolve(profile, None), tf32


def _kept(key: Any, entry: Any, results: Results) -> bool:
    """Whether layers behind a model look for what one inside has made: a map to go back by, or a map that comes with
    the range of the first layer that has made it."""
    if any(step != 1 for step in key[2]):
        return True
    record = record_of(entry)
    if record is None or record.in_range is None:
        return False
    return record.out_range != record.in_range[:4] or results.at(record.in_coords) is not None


def _ranges(x: Any) -> dict[Hashable, Hashable]:
    """Of the maps over `x` that there are, by key: layers of `x` take them, whatever its own range is."""
    kmaps = caches_of(x).kmaps
    records = [(key, record_of(entry)) for key, entry in present(kmaps).items()]
    found: dict[Hashable, Hashable] = {
        key: (one.in_range, one.out_range)
        for key, one in records
        if one is not None and one.in_range is not None and one.in_coords is x.coords
    }
    return found | late_facts(kmaps, x.coords)


def _made_again(maps: Any, captured: Any, results: Results, key: Any) -> Any:
    """The entry of `key` as its layer makes it over a result; else by all layers."""
    record = record_of(maps[key])
    x = None if record is None or record.again is None else results.at(record.in_coords, unwritten=True)
    if x is None:
        return caches_of(results.recover(captured)).kmaps[key]
    assert record is not None and record.again is not None
    made, y = record.again(x.coords, record.in_range), results.at(record.out_coords)
    return entry_of(made if y is None else dataclasses.replace(made, out_coords=y.coords), _profile())


def _is_first(x: Any, cmaps: dict[Any, Any]) -> bool:
    """Whether layers over `x` find its own coordinates at its stride."""
    kept = cmaps.get(x.stride)
    return kept is None or (kept[0] if isinstance(kept, tuple) else kept) is x.coords


def _profile() -> profiles.Profile:
    return profiles.current()


PROTOCOL = _Torchsparse(interchange)
