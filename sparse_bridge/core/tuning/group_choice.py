"""What tuning has found for the layers of a map, asked when a layer meets a new one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import tuner
from .groups import Groups, layer_of, map_class_of

if TYPE_CHECKING:
    from ...kernels.gemm.product import Product
    from ..conv.dataflow import LayerProduct
    from ..maps.rulebook import Rulebook


def flow_for(rulebook: Rulebook, side: int, product: Product | LayerProduct) -> str | None:
    """The dataflow of a layer over a map as its group was tuned; None where the rules decide, as
    they do for maps whose rows only the device knows."""
    assert product.target is not None
    known = tuner.current().known_of(product.device, product.target)
    if known is None or not known.groups or rulebook.rows[side].device is not None:
        return None
    return known.groups.flow(map_class_of(rulebook, product), layer_of(side, product))


def used_groups() -> Groups:
    """Winners of groups that have decided about layers of this process."""
    found: Groups = {}
    for known in list(tuner.current().known.values()):
        found.update(known.groups.used)
    return found
