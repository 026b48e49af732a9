"""The first products of their shapes and dtypes, announced to the warm-up before their maps are built.

FlexGEMM has no layers that could say beforehand what they will multiply. A call knows the very
product instead: weight, dtype, rows, and whether gradients will be asked for, whose kernels are
compiled while the forward pass runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ... import state
from ...core.conv.epilogue import Epilogue
from ...core.warmup import preload
from ..warmup_registry import Expected, Sizes, begin, expect
from .options import allow_tf32

preload.begin()

_announced: set[tuple[Any, ...]] = set()


class FirstProduct:
    """A product, for as long as this object lives."""

    def __init__(self, product: Expected) -> None:
        self.product = product

    def products(self) -> Iterator[Expected]:
        yield self.product


def tell(
    feats: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, n_out: int | None
) -> FirstProduct | None:
    """Have the kernels of this product compiled, when it is the first of its shapes and dtypes; None
    at later calls. Where the device has not been used yet they are compiled with those that build
    the map, until when the result must live.

    feats: [N, C_in].  weight: [C_out, k1, k2, k3, C_in].  n_out: rows of the output coordinates;
    None: submanifold.
    """
    learns = torch.is_grad_enabled() and (feats.requires_grad or weight.requires_grad)
    key = (weight.device, weight.shape, feats.dtype, bias is None, n_out is None, learns)
    if key in _announced or 0 in feats.shape or n_out == 0:
        return None
    _announced.add(key)
    if weight.dtype != feats.dtype:
        weight = weight.detach().to(feats.dtype)
    sizes = Sizes(len(feats), len(feats) if n_out is None else n_out)
    product = Expected(
        weight,
        weight,
        "ovi",
        Epilogue(bias),
        1,
        n_out is None,
        learns,
        "tf32" if allow_tf32() else "ieee",
        sizes=sizes,
        casts=False,
    )
    if begin(product):
        return None
    first = FirstProduct(product)
    expect(first, FirstProduct.products)
    return first


@state.owns
def reset() -> None:
    """Forget which products were announced."""
    _announced.clear()
