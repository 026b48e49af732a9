"""spconv's tensors and layers, as fusion, conversion and replay read them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any

import torch

from ... import settings
from ...core.conv.deferred import materialize
from ...core.geometry.boxes import Box
from ...core.late_maps import LateMaps, LateSource, carried, late_facts, present
from ...core.maps import map_cache
from ...core.maps.coordinate_map import CoordinateMap
from ...refusals import Refusal, Why
from ..protocol import LayerFacts, Results, Root, TensorProtocol
from . import interchange, records
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
        if not hasattr(x, "indice_dict") or x.benchmark or (settings.get().shared_keys and present(x.indice_dict)):
            return None
        if isinstance(x.voxel_num, torch.Tensor):
            return None  # results would carry it on
        box, store = box_of(x), map_cache.find_store(x.indices)
        cmap = None if store is None else store.find(box)
        return Root(x.indices, box, distinct=cmap is not None and cmap.distinct)

    def is_fresh(self, x: Any) -> bool:
        return not _foreign_keys(x)

    def over(self, x: Any, features: torch.Tensor, root: CoordinateMap) -> Any:
        # Coordinates in an object of their own, which has no maps yet.
        over = _with_rows(x, features, root.coords.detach())
        if _has_maps(x):
            over.indice_dict[_CARRIED] = _Carried(over.indices)
            over.indice_dict.update(dict.fromkeys(_foreign_keys(x), _Elsewhere()))
        return over

    def apart(self, x: Any, features: torch.Tensor) -> Any:
        return _with_rows(x, features, x.indices)

    def label(self, x: Any) -> Hashable:
        own = _own_maps(x)  # of whichever layers ran: a replay has left the same as its layers would
        return x.voxel_num, x.force_algo, _has_maps(x), frozenset(own.items()), _foreign_keys(x, own)

    def result(self, x: Any, y: Any, features: torch.Tensor, coords: torch.Tensor | None, box: Box | None) -> Any:
        out = _with_rows(y, features, x.indices if coords is None else coords)
        if _CARRIED in y.indice_dict:
            out.indice_dict = carried(x.indice_dict)
        if box is not None:
            out.batch_size, out.spatial_shape = box.size[0], list(box.size[1:])
        return out

    def keep_for(self, y: Any, captured: Any, results: Results, cut: Callable[[torch.Tensor], torch.Tensor]) -> None:
        made = captured.indice_dict.items()
        maps = {key: one for key, one in made if not isinstance(one, (_Carried, _Elsewhere))}
        strided = frozenset([key for key, record in maps.items() if not getattr(record, "is_subm", False)])
        of_level = {key: records.facts(one) for key, one in maps.items() if records.is_over(one, captured.indices)}
        make = functools.cache(functools.partial(_made_again, maps, captured, results))
        y.indice_dict = LateMaps(y.indice_dict, LateSource(tuple(maps), strided, make, y.indices, of_level))

    def switches(self) -> Hashable:
        return allow_tf32()


def _made_again(maps: dict[Any, Any], captured: Any, results: Results, key: Hashable) -> Any:
    """The entry of `key` as its layer makes it over a result; else by all layers."""
    record = maps[key]
    x = results.at(record.indices, unwritten=True) if records.knows_its_layer(record) else None
    if x is None:
        return results.recover(captured).indice_dict[key]
    return records.made_again(record, x, results.at(record.out_indices))


class _Carried:
    """An entry in the place of the maps that the input of a replayed module has: tensors that have it as well carry
    these maps on."""

    is_subm = True

    def __init__(self, coords: torch.Tensor) -> None:
        self.indices = self.out_indices = coords

    @property
    def indice_pairs(self) -> torch.Tensor:
        """Asked for where rows get another order: the maps outside would need it, too."""
        raise Refusal(Why.GRAPH_HAS_MAPS)


class _Elsewhere:
    """An entry in the place of a map of another level, which no layer of a replayed module may look at."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python's own looks
            raise AttributeError(name)
        raise Refusal(Why.GRAPH_HAS_MAPS)


_CARRIED = object()  # the key of `_Carried`


def _has_maps(x: Any) -> bool:
    """Whether there are maps that results have to carry on."""
    return bool(dict.__len__(x.indice_dict) or _late_keys(x))


def _late_keys(x: Any) -> frozenset[Any]:
    return x.indice_dict.late_keys() if isinstance(x.indice_dict, LateMaps) else frozenset()


def _own_maps(x: Any) -> dict[Any, Hashable]:
    """What there is to know of the maps that submanifold layers over `x` would build now as they are, by key."""
    own = {key: records.facts(one) for key, one in present(x.indice_dict).items() if records.is_current(one, x)}
    return own | late_facts(x.indice_dict, x.indices)


def _foreign_keys(x: Any, known: dict[Any, Hashable] | None = None) -> frozenset[Any]:
    """The keys of all other maps that `x` has, or that are made late. known: its `_own_maps`, where the caller has
    them."""
    if settings.get().shared_keys:  # layers behind `x` have put theirs into its dictionary, which was empty
        return frozenset()
    return _late_keys(x).union(present(x.indice_dict)).difference(_own_maps(x) if known is None else known)


def _with_rows(x: Any, features: torch.Tensor, coords: torch.Tensor) -> Any:
    """Like `x`, without kernel maps."""
    out = x.replace_feature(features)
    out.indices, out.indice_dict = coords, {}
    return out


PROTOCOL = _Spconv(interchange)
