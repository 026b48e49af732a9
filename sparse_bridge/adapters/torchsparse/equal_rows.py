"""Rows that share a coordinate. torchsparse looks rows up: a neighbour is the first of equal ones,
never their sum."""

from __future__ import annotations

import dataclasses

from ...core.maps.kernel_map import KernelMap, unfolded
from ...core.maps.map_cache import MapStore
from ...core.maps.request import MapRequest, build
from .geometry import Layer


def among_themselves(kmap: KernelMap, layer: Layer, store: MapStore) -> KernelMap:
    """The map of a layer whose outputs are its inputs, the coordinates of `store`.

    Every output looks up all offsets, the zero one too, where `layer` is not halved.
    """
    fold = kmap.x_fold
    if fold is None:
        return kmap
    if layer.halved:
        return unfolded(kmap, halved=True)
    asked = MapRequest("submanifold", layer.offsets)
    distinct: KernelMap = store.get(("distinct", asked), lambda: build(fold.map, asked).kmap)
    return dataclasses.replace(distinct, x_fold=fold.firsts, y_fold=fold)
