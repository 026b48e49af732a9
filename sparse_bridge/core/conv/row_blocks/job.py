"""A convolution under a memory limit: the bytes that it takes, whole or in blocks, and its computation."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...maps.rulebook import Rulebook
from ..dataflow import Gather, LayerProduct
from ..epilogue import Epilogue

SLACK = 1 << 16  # bytes by which allocators round a block's tensors up, all together


class Call(NamedTuple):
    """The operands of a `Gather`: x [N_in, C_in], the weight in x's dtype, and what follows."""

    rulebook: Rulebook
    side: int
    x: torch.Tensor
    weight: torch.Tensor
    end: Epilogue

    @property
    def n_rows(self) -> int:
        """Rows of the result."""
        return self.rulebook.n_rows[self.side]

    @property
    def operands(self) -> tuple[torch.Tensor | None, ...]:
        """x [N_in, C_in], the weight and the residual [N_out, C_out], each in its float dtype; None without a
        residual."""
        return self.x, self.weight, self.end.residual

    def end_of(self, begin: int, end: int) -> Epilogue:
        """What follows the sums of some rows."""
        residual = self.end.residual
        return self.end if residual is None else self.end._replace(residual=residual[begin:end])


class Job:
    """A convolution in one piece only. Sizes are bytes beside the operands and the result."""

    divisible = False

    def __init__(self, product: LayerProduct, inner: Gather, call: Call) -> None:
        self.product, self.inner, self.call = product, inner, call
        self.columns, self.size = product.w.columns_out, call.x.element_size()

    def one_piece(self) -> int:
        """Bytes of the convolution in one piece, with the views of the map that have to be made."""
        n_in, n_out = self.call.x.shape[0], self.call.n_rows
        sums = 8 if self.call.x.dtype == torch.float64 else 4
        return sums * (n_in * self.product.w.columns_in + n_out * self.columns)

    def views(self) -> int:
        """Bytes of making the view that blocks are cut from; 0 where the map has it."""
        return 0

    def growth(self) -> int:
        """Bytes by which the map grows, or shrinks, when it keeps that view alone."""
        return 0

    def prepare(self) -> None:
        """Make that view, and drop all others."""

    def block(self, height: int) -> int:
        """Bytes of a block of so many rows."""
        raise NotImplementedError

    def fill(self, y: torch.Tensor, height: int) -> None:
        """Write the result y [N_out, C_out], x's dtype, in blocks of `height` rows. Raises: NotImplementedError
        where it is not divisible."""
        raise NotImplementedError

    def end_bytes(self, n_rows: int, normed: bool) -> int:
        """Bytes of what torch makes of the sums of so many rows.  normed: it has the norm to compute."""
        return n_rows * self.columns * self.size if normed else 0
