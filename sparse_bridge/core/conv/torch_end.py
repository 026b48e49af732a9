"""What torch computes behind a product by kernels, since kernels would have other bits."""

from __future__ import annotations

from typing import Protocol

import torch

from ... import log
from ...kernels.gemm.product import EpilogueForm, Product
from ...kernels.tiles.activation_numbers import NUMBERS
from ...kernels.tiles.epilogue_bits import BIAS, NORM
from ..device import self_check
from ..maps.rulebook import Rulebook
from .dataflow import LayerProduct
from .epilogue import Epilogue


def in_kernels(layer: LayerProduct) -> LayerProduct:
    """The part of a product that kernels compute with the bits of separate operations: up to a
    norm where theirs differs from torch's on this device, and up to an activation without a number."""
    parts = layer.epilogue.parts
    if parts & NORM and not _norms(layer):
        return layer._replace(epilogue=EpilogueForm(parts & BIAS))
    return in_trusted_kernels(layer)


def in_trusted_kernels(layer: LayerProduct) -> LayerProduct:
    """The same where the device's norms have the bits of torch's."""
    parts, activation, alpha, eps = layer.epilogue
    if activation in NUMBERS:
        return layer
    return layer._replace(epilogue=EpilogueForm(parts, None, alpha, eps))


def _norms(layer: LayerProduct) -> bool:
    device, target = layer.device, layer.target
    assert target is not None
    problem = self_check.problem(device, target, f"{self_check.NAMES[layer.dtype]} norms")
    if problem is not None:
        log.once(
            ("norms", str(device), problem), f"On {device} {problem}: norms are computed apart from their convolutions."
        )
    return problem is None


class Launched(Protocol):
    """A product by kernels, see `kernel_products.GatherProduct`."""

    product: Product

    @property
    def copies(self) -> bool:
        """Whether the kernel reads a copy of the weight."""

    def __call__(
        self, rulebook: Rulebook, side: int, x: torch.Tensor, weight: torch.Tensor, epilogue: Epilogue
    ) -> torch.Tensor:
        """y [n_rows[side], C_out] from x [n_rows[1 - side], C_in], neither of them empty."""


class Finished:
    """A product by kernels and what torch does behind it.  form: all that follows the sums."""

    __slots__ = ("_launched", "_normed")

    def __init__(self, launched: Launched, form: EpilogueForm) -> None:
        self._launched = launched
        self._normed = not (form.parts & NORM) or launched.product.epilogue.parts == form.parts

    @property
    def copies(self) -> bool:
        """See `Launched`."""
        return self._launched.copies

    def __call__(
        self, rulebook: Rulebook, side: int, x: torch.Tensor, weight: torch.Tensor, epilogue: Epilogue
    ) -> torch.Tensor:
        """See `Launched`."""
        if self._normed:
            first, then = epilogue._replace(activation=None), Epilogue(None, epilogue.activation)
        else:
            first, then = Epilogue(epilogue.bias), epilogue._replace(bias=None)
        y = then.finish(self._launched(rulebook, side, x, weight, first), x.dtype)
        rows = rulebook.rows[side]
        return y if rows.padding_value is None else rows.fill_padding(y)
