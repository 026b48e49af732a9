"""In which order the rows of new coordinates come: one rule for all layers and functions."""

from __future__ import annotations

import sys
from typing import Any

from ....core.device.selection import ordered_as_on_gpu
from .switches import uses_direct_table

__all__ = ["ORDERS", "is_original", "order_of_layer", "row_order"]

ORDERS = ("first_seen", "ascending", "by_offset")  # of `MapRequest`


def row_order(algo: Any, direct_table: bool, device_type: str, original: bool = False) -> str:
    """The order of the output rows of a strided or transposed convolution or a pool.

    spconv sorts them on a GPU for the algorithm Native, and for the others where its direct table
    is off; with the table their order changes from run to run, so that any will do. Its CPU code
    numbers them offset by offset, whatever is asked for. The stand-in keeps one order on all
    devices.

    algo: a `ConvAlgo` or its number; kernels of more than 32 offsets, and pools of more than 128,
        have Native where nothing else was said.
    direct_table: `SPCONV_USE_DIRECT_TABLE`.  original: of classes of spconv itself, which are
        patched.
    """
    if original and device_type == "cpu":
        return "by_offset"
    native = getattr(algo, "value", algo) == 0
    return "ascending" if native or not direct_table else "first_seen"


def order_of_layer(layer: Any, x: Any) -> str:
    """`row_order` of a convolution or pool on a tensor."""
    switches = getattr(x, "_switches", None)  # tensors of the stand-in know theirs
    table, device = uses_direct_table(switches), x.indices.device
    kind = "gpu" if ordered_as_on_gpu(device) else device.type
    return row_order(layer.algo, table, kind, switches is None)


def is_original() -> bool:
    """Whether the spconv that is imported is itself, patched or not."""
    core = sys.modules.get("spconv.pytorch.core")
    return core is not None and not hasattr(core.SparseConvTensor, "_switches")
