"""The first product of a process on a device, told to the warm-up before its map is asked for.

FlexGEMM has no layers that could say beforehand what they will multiply.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ...core.conv.epilogue import Epilogue
from ...core.warmup import preload
from ..expected import Expected, expect, trains
from .options import allow_tf32

preload.begin()

_told: set[torch.device] = set()


class FirstProduct:
    """A product, for as long as this object lives.

    weight: [C_out, k1, k2, k3, C_in].  symmetric: submanifold.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, symmetric: bool) -> None:
        self.weight, self.bias, self.symmetric = weight, bias, symmetric

    def products(self) -> Iterator[Expected]:
        yield Expected(
            self, self.weight, "ovi", Epilogue(self.bias), 1, self.symmetric,
            trains(self.weight), "tf32" if allow_tf32() else "ieee",
        )  # fmt: skip


def tell(weight: torch.Tensor, bias: torch.Tensor | None, symmetric: bool) -> FirstProduct | None:
    """Have the kernels of this product compiled with those that build its map, at the first call on
    a device; the result must live until the map is there. None at later calls."""
    if weight.device in _told:
        return None
    _told.add(weight.device)
    found = FirstProduct(weight, bias, symmetric)
    expect(found, FirstProduct.products)
    return found


def reset() -> None:
    """Forget which devices were told."""
    _told.clear()
