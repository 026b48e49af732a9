"""What a dataflow is: a way to compute the three products of a convolution.

Forward and dgrad are one product, y[r] = epilogue(sum over v of x[in(v, r)] @ w[v]), dgrad over the
transposed map and weight; wgrad is dw[v] = sum over the pairs (i, j) of v of x[i]^T dy[j]. Rows are
distinct coordinates', channels are contiguous, accumulation is fp32 (fp64 for fp64).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch

from ... import memory, settings
from ...kernels.gemm.product import EpilogueForm
from ...kernels.runtime.target import Target
from ...refusals import Refusal
from ..device import memory_use
from ..geometry.weights import WeightLayout
from ..maps.kernel_map import KernelMap
from ..maps.rulebook import Rulebook
from .epilogue import Epilogue

# (rulebook, side, x, weight, epilogue) -> y; and (rulebook, side, x, dy, dw), which writes dw.
Gather = Callable[[Rulebook, int, torch.Tensor, torch.Tensor, Epilogue], torch.Tensor]
Wgrad = Callable[[Rulebook, int, torch.Tensor, torch.Tensor, torch.Tensor], None]

_keys = itertools.count(0, 2)


def new_key() -> int:
    """A product's key in rulebooks; the next number is that of the other side."""
    return next(_keys)


def unit_channels(x: torch.Tensor) -> torch.Tensor:
    """x [N, C] of any dtype with its channels side by side; a copy where they are not."""
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def of_copy(gather: Gather) -> Gather:
    """The product by a contiguous copy of the weight, made at every call. It raises MemoryLimitError, too."""

    def copying(rulebook: Rulebook, side: int, x: torch.Tensor, weight: torch.Tensor, end: Epilogue) -> torch.Tensor:
        if memory.limit is not None:
            memory_use.need(x.device, weight.nbytes, "a contiguous copy of a weight", x, weight)
        return gather(rulebook, side, x, weight.contiguous(), end)

    return copying


class Case(NamedTuple):
    """What a dataflow is asked to serve.  regular: an offset of the map meets each row at most
    once."""

    device: torch.device
    dtype: torch.dtype
    regular: bool = True


# Cases are looked at again and again: the same refusal for the same case, made once.
refusal = functools.lru_cache(maxsize=128)(Refusal)


class LayerProduct(NamedTuple):
    """A product but for its map: see `kernels.gemm.product.Product`.  precision: that the layer
    asked for, "ieee" or "tf32".  target: whose kernels compute; None for plain torch."""

    target: Target | None
    device: torch.device
    dtype: torch.dtype
    precision: str
    w: WeightLayout
    epilogue: EpilogueForm = EpilogueForm()


class Dataflow:
    """The base of all: plain torch, for every case.  name: as settings spell it.  joint: it has
    `gradients`.  same_sums: kernels add up a row in the usual order, offset by offset, so that it
    has the bits that others of these give it, and tuning may put one in another's place."""

    name: str
    joint = False
    same_sums = False

    @property
    def kernels(self) -> bool:
        """Whether Triton kernels compute it."""
        return settings.DATAFLOWS[self.name].kernels

    def by_rule(self) -> Dataflow:
        """What "auto" takes in its place: itself, or one that looks at each map."""
        return self

    def refusals(self, case: Case) -> list[Refusal]:
        """Why it cannot serve; empty where it can."""
        return []

    def target(self, case: Case) -> Target | None:
        """The target whose kernels compute a case that it serves."""
        return None

    def serves(self, rulebook: Rulebook, side: int, product: LayerProduct) -> str:
        """The name of what computes the rows of `side`: its own, or what a rule puts there."""
        return self.name

    def gather(self, product: LayerProduct) -> Gather:
        """Forward or dgrad, for maps with rows on both sides."""
        raise NotImplementedError

    def wgrad(self, product: LayerProduct, dtype: torch.dtype) -> Wgrad:
        """The gradient of a weight that lies as `product.w` says, in `dtype`."""
        raise NotImplementedError

    def gradients(
        self,
        product: LayerProduct,
        kmap: KernelMap,
        x: torch.Tensor,
        weight: torch.Tensor,
        dy: torch.Tensor,
        dw: torch.Tensor,
    ) -> torch.Tensor:
        """dx [N_in, C_in] in x's dtype, with dw written: both together, where that is cheaper than one by one.

        x: [N_in, C_in].  dy: [N_out, C_out], contiguous, of x's dtype, as the weight is.  dw: of the weight's shape,
        laid out like it, of any float dtype.
        Raises: NotImplementedError where `joint` is False.
        """
        raise NotImplementedError
