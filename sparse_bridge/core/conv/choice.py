"""Which of the kernels' dataflows serves one map of a layer, where nobody forces one.

By what the host knows without waiting: rows, kernel volume, channels, whether gradients have been
recorded over the map, and what prefetch has made of it. So a program takes the same way every time
that it sees the same scenes.
"""

from __future__ import annotations

import math

import torch

from ...kernels.gemm.narrow import packs_offsets
from ...kernels.gemm.product import Product
from ...kernels.tiles.tile_config import INTENSITY, MOVED
from ..device.precision import product_precision
from ..maps.rulebook import Rulebook
from ..tuning import tuner
from ..tuning.groups import Groups, Layer, MapClass
from .dataflow import LayerProduct

_FEW_OFFSETS = 27  # of strided maps, which a network uses once in each direction
# Microseconds of ordering a table and packing its tiles (H200): of few rows; of many, in all and
# per row.
_FEW, _ORDER, _ORDER_ROW = 45.0, 20.0, 1e-4
_FEW_ROWS = 32 << 10
_NO_BOUND = 1 << 62
_WIDE_ORDER = 100.0  # the same of 125 offsets, at 18k to 94k rows
_UNEVEN = 2.0  # how much longer products over a table take than their multiply-adds


def serving_flow(rulebook: Rulebook, side: int, product: Product | LayerProduct) -> str:
    """The dataflow of the rows of `side`: as tuned for the map's layers, else by rule."""
    return flow_for(rulebook, side, product) or flow_of(rulebook, side, product)


def flow_of(rulebook: Rulebook, side: int, product: Product | LayerProduct) -> str:
    """The dataflow of the rows of `side`: "masked" unless *unmasked* is clearly cheaper, which
    gives every row the same bits. Others add up in an order of their own: they are on request.

    *unmasked* where ordering the rows takes longer than it saves, and no gradients, for whose pair
    lists rows are ordered anyway: maps between other rows, narrow channels or few rows, and rows
    that are not ordered already, as prefetch does it where larger scenes wanted it; first layers
    with large kernels, whatever else is made of the map.
    Twin in C: `flow_over`.
    """
    n_rows = rulebook.rows[side].estimate_or_capacity
    if rulebook.trained:
        return "masked"
    if not is_stem(product) and (rulebook.symmetric or rulebook.tiled(side)):
        return "masked"
    few, *below = unordered_rows(product)
    return "unmasked" if n_rows < below[n_rows > few] else "masked"


def unordered_rows(product: Product | LayerProduct) -> tuple[int, int, int]:
    """(how many rows are few, below how many of those maps stay in their order, and of more),
    where nothing else has them ordered."""
    target, w = product.target, product.w
    assert target is not None
    half = product.dtype != torch.float32
    product_type = "half" if half else product_precision(target, product.dtype, product.precision)
    rate = INTENSITY[product_type] * MOVED * target.compute_units
    # Microseconds that a row over a table takes longer than over tiles.
    longer = _UNEVEN * 2.0 * w.n_offsets * w.c_in * w.c_out * w.groups / rate
    if is_stem(product):
        most = math.ceil(_WIDE_ORDER / longer)
        return 0, most, most
    if w.n_offsets > _FEW_OFFSETS:
        return 0, 0, 0
    many = _NO_BOUND if longer <= _ORDER_ROW else math.ceil(_ORDER / (longer - _ORDER_ROW))
    return _FEW_ROWS, math.ceil(_FEW / longer), many


def is_stem(product: Product | LayerProduct) -> bool:
    """Whether a layer takes few channels through a kernel of 5x5x5, say: the first of a network,
    and the only one over its map."""
    w = product.w
    return w.n_offsets > _FEW_OFFSETS and packs_offsets(w, product.precision)


def map_class_of(rulebook: Rulebook, product: Product | LayerProduct) -> MapClass:
    """Of a map as it is now, by what the host knows, and a product over it."""
    target = product.target
    assert target is not None
    rows = tuple((n // target.compute_units).bit_length() for n in rulebook.n_rows)
    return MapClass(
        "submanifold" if rulebook.symmetric else "other",
        rulebook.n_offsets,
        str(product.dtype).removeprefix("torch."),
        product_precision(target, product.dtype, product.precision),
        rulebook.trained,
        (rows[0], rows[1]),
    )


def layer_of(side: int, product: Product | LayerProduct) -> Layer:
    """A product as groups know it."""
    w = product.w
    return Layer("dgrad" if w.exchanged else "fwd", side, w.c_in, w.c_out, w.groups)


def flow_for(rulebook: Rulebook, side: int, product: Product | LayerProduct) -> str | None:
    """The dataflow of a layer over a map as its group was tuned; None where the rules decide, as
    they do for maps whose rows only the device knows."""
    assert product.target is not None
    tiles = tuner.current().winners_of(product.device, product.target)
    if tiles is None or not tiles.groups or rulebook.rows[side].device is not None:
        return None
    return tiles.groups.flow(map_class_of(rulebook, product), layer_of(side, product))


def used_groups() -> Groups:
    """Winners of groups that have decided about layers of this process."""
    groups: Groups = {}
    for tiles in list(tuner.current().by_device.values()):
        groups.update(tiles.groups.used)
    return groups
