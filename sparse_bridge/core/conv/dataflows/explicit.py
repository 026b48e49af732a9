"""Explicit GEMM: gather all neighbours of a slice of rows into one matrix and multiply once. The
slow truth."""

from __future__ import annotations

import torch

from ....refusals import Refusal, Why
from ...device import rocm
from ...maps.rulebook import Rulebook
from ..dataflow import Case, Dataflow, Gather, LayerProduct, Wgrad, refusal
from ..epilogue import Epilogue
from . import per_offset
from .per_offset import accumulator, columns

_BYTES = 64 << 20  # of a slice


class Explicit(Dataflow):
    """One matrix of all neighbours, [rows, V * C_in] of a slice of rows, and one product of it. For regular maps."""

    name = "explicit"

    def refusals(self, case: Case) -> list[Refusal]:
        return [] if case.regular else [refusal(Why.FLOW_IRREGULAR)]

    def gather(self, product: LayerProduct) -> Gather:
        w = product.w

        def gather(rulebook: Rulebook, side: int, x: torch.Tensor, weight: torch.Tensor, end: Epilogue) -> torch.Tensor:
            table, backwards = rulebook.table(side)
            nbr, work = table.nbr, accumulator(x)
            layout = w.reversed() if backwards else w
            n_offsets, n_out = nbr.shape
            padded = torch.cat([x, x.new_zeros((1, x.shape[1]))]).to(work)
            weights = [torch.stack(layout.matrices(weight, group)).flatten(0, 1).to(work) for group in range(w.groups)]
            y = padded.new_empty((n_out, w.columns_out))
            step = max(1, _BYTES // (n_offsets * x.shape[1] * padded.element_size()))
            for begin in range(0, n_out, step):
                rows = nbr[:, begin : begin + step].t().long()
                gathered = padded[rows]  # row -1 is the row of zeros
                for group in range(w.groups):
                    left = gathered[:, :, group * w.c_in : (group + 1) * w.c_in].flatten(1)
                    columns(y[begin : begin + step], group, w.c_out).copy_(rocm.linear(left, weights[group]))
            return end.finish(y, x.dtype)

        return gather

    def wgrad(self, product: LayerProduct, dtype: torch.dtype) -> Wgrad:
        return per_offset.DATAFLOW.wgrad(product, dtype)


DATAFLOW = Explicit()
