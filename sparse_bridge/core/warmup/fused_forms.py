"""Kernels of products that end in a norm, a sum or an activation which no layer told beforehand.

Modules apart from the layer, as in residual blocks, follow it without its knowledge: before the
first call that is a guess, at the first launch with them it is known. Then the same product over
maps of other usual sizes is compiled as well, before the next scene asks for it.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from ... import settings
from ..conv.epilogue import Epilogue, Norm
from ..conv.kernel_products import GatherProduct
from ..geometry.weights import layout_of
from ..maps.rulebook import Rulebook
from .product_kernels import Expected, Sizes, launch_over

if TYPE_CHECKING:
    from ..conv.kernel_products import Inputs

# How many times the rows of the first map, the likeliest first: tiles differ by octaves.
_TIMES = (2.0, 0.5, 4.0, 0.25, 8.0)
_MOST_ROWS = 1 << 21  # more need other forms, and are rare


def followed(expected: Expected) -> list[Expected]:
    """What may come of a layer's product in inference, where its container tells no more: without
    bias a norm and an activation, behind a single offset the norm alone, as in a projected skip;
    between as many channels a sum behind the norm, as at the end of a residual block."""
    if expected.layer is None or expected.trains or expected.sizes is not None:
        return []
    w = layout_of(expected.weight, expected.layout, expected.groups)
    bias, activation, _, norm, _ = expected.epilogue
    ends: list[Epilogue] = []
    if norm is None and bias is None and activation is None:
        vector = torch.empty(w.columns_out, dtype=expected.weight.dtype)
        norm = Norm(vector, vector, vector, vector, 0.0)
        ends = [Epilogue(None, "relu", 0.0, norm)]
        if expected.pointwise:
            ends.insert(0, Epilogue(norm=norm))
    if norm is not None and activation is None and expected.symmetric and w.columns_in == w.columns_out:
        ends.append(Epilogue(bias, "relu", 0.0, norm, torch.empty(1, dtype=expected.dtype)))
    return [dataclasses.replace(expected, epilogue=end) for end in ends]


def waits() -> bool:
    """Whether layers that are called now go together with what follows them."""
    return not (torch.is_grad_enabled() or torch.is_inference_mode_enabled() or settings.get().optimize == "off")


def compile_others(product: GatherProduct, rulebook: Rulebook, side: int, inputs: Inputs) -> None:
    """Launch what a product over this map would over smaller and larger ones, each form once."""
    if side and rulebook.symmetric:
        return
    case, met = product.product, rulebook.rows
    vectors = inputs[2] and tuple(
        [None if vector is None else torch.empty(1, dtype=vector.dtype) for vector in inputs[2]]
    )
    launched = set()
    for times in (1.0, *_TIMES):
        n_rows, n_in = (int(met[i].estimate_or_capacity * times) or 1 for i in (side, 1 - side))
        if max(n_rows, n_in) > _MOST_ROWS:
            continue
        sizes = Sizes(n_rows, n_in) if side else Sizes(n_in, n_rows)
        like = Rulebook(*sizes, rulebook.n_offsets, case.device, symmetric=rulebook.symmetric)
        like.trained = rulebook.trained
        for flow in product.flow.possible(like, side, case):
            tile = flow.tile(case, flow.likely_work(case.w.n_offsets, n_rows), n_in)
            if (flow.name, tile) not in launched and times != 1.0:  # its own one is launched next
                launch_over(flow, case, tile, (n_rows, n_in), vectors)
            launched.add((flow.name, tile))
