"""Rows that share a coordinate. torchsparse looks rows up: a neighbour is the first of equal ones,
never their sum."""

from __future__ import annotations

from ...core.maps.kernel_map import KernelMap
from ...core.maps.repeated import first_of_equal
from .geometry import Layer


def among_themselves(kmap: KernelMap, layer: Layer) -> KernelMap:
    """The map of a layer whose outputs are its inputs.

    Every output looks up all offsets, the zero one too, where `layer` is not halved.
    """
    back = kmap.rulebook.backward
    if back is None:
        return kmap
    if layer.halved:
        # Not with the map of distinct rows, which it refers to: a cycle would last until the garbage collector runs.
        cache = kmap.rulebook.cache
        halved: KernelMap | None = cache.get("halved")
        if halved is None:
            halved = first_of_equal(back.distinct, back.fold, halved=True)
            cache.put("halved", halved)
        return halved
    return KernelMap(back.distinct, x_fold=back.fold.firsts, y_fold=back.fold)
