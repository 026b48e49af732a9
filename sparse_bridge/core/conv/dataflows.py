"""The two products of sparse convolution on every dataflow.

`gather_matmul`: y[r] = act(sum_v x[in(v, r)] @ w[v] + bias); forward, and dgrad through the
transposed map and weight. `weight_gradient`: dw[v] = sum over the pairs (i, j) of v of x[i]^T
dy[j]. All take folded (distinct-coordinate) rows; channels are contiguous, accumulation is fp32
(fp64 for fp64).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from ...errors import UnsupportedError
from ...kernels.runtime.target import Target
from ..device import rocm
from ..geometry.weights import WeightLayout
from ..maps.kernel_map import KernelMap
from . import per_offset, plan
from .per_offset import accumulator, columns

__all__ = ["ACTIVATIONS", "Epilogue", "Norm", "gather_matmul", "weight_gradient"]

ACTIVATIONS = (None, "relu", "leaky_relu", "sigmoid")
_EXPLICIT_BYTES = 64 << 20


class Norm(NamedTuple):
    """A normalisation by fixed statistics, vectors [C_out]: (x - mean) / sqrt(var + eps) * weight +
    bias."""

    mean: torch.Tensor
    var: torch.Tensor
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    eps: float


class Epilogue(NamedTuple):
    """What follows the sum: bias [C_out] or none, a norm or none, a residual [N_out, C_out] of the
    result's dtype or none, then an activation (alpha: slope of leaky_relu)."""

    bias: torch.Tensor | None = None
    activation: str | None = None
    alpha: float = 0.0
    norm: Norm | None = None
    residual: torch.Tensor | None = None

    @property
    def vectors(self) -> tuple[torch.Tensor | None, ...]:
        """(bias, mean, var, weight, bias of the norm, residual)."""
        if self.norm is None:
            return self.bias, None, None, None, None, self.residual
        return self.bias, *self.norm[:4], self.residual

    @property
    def tail(self) -> int:
        """Which of them there are: 1 for a bias, plus 2 for a norm, plus 4 for its weight and bias,
        plus 8 for a residual."""
        tail = int(self.bias is not None) + 8 * (self.residual is not None)
        if self.norm is not None:
            tail += 2 if self.norm.weight is None else 6
        return tail

    def finish(self, y: torch.Tensor) -> torch.Tensor:
        """Apply to `y`, in place."""
        if self.bias is not None:
            y += self.bias.to(y.dtype)
        if self.norm is not None:
            mean, var, weight, bias = (
                None if vector is None else vector.to(y.dtype) for vector in self.norm[:4]
            )
            y = F.batch_norm(y, mean, var, weight, bias, eps=self.norm.eps)
        if self.residual is not None:
            y += self.residual
        if self.activation == "relu":
            y.relu_()
        elif self.activation == "leaky_relu":
            F.leaky_relu(y, self.alpha, inplace=True)
        elif self.activation == "sigmoid":
            y.sigmoid_()
        elif self.activation is not None:
            raise UnsupportedError(
                f"activation {self.activation!r}; expected one of {ACTIVATIONS}."
            )
        return y


def gather_matmul(
    dataflow: str, target: Target | None, kmap: KernelMap, x: torch.Tensor, weight: torch.Tensor,
    w: WeightLayout, epilogue: Epilogue, precision: str,
) -> torch.Tensor:  # fmt: skip
    """x [n_in, groups * c_in] -> y [n_out, groups * c_out] in x's dtype."""
    n_out = kmap.rulebook.n_rows[kmap.side]
    if n_out == 0 or x.shape[0] == 0:
        y = x.new_zeros((n_out, w.columns_out))
        return epilogue.finish(y)
    if target is not None and dataflow in ("masked", "unmasked"):
        return plan.triton_gather(dataflow, target, kmap, x, weight, w, epilogue, precision)
    if dataflow == "explicit":
        return _explicit(kmap, x, weight, w, epilogue)
    return epilogue.finish(per_offset.gather_matmul(kmap, x, weight, w)).to(x.dtype)


def weight_gradient(
    dataflow: str, target: Target | None, kmap: KernelMap, x: torch.Tensor, dy: torch.Tensor,
    dw: torch.Tensor, w: WeightLayout, precision: str,
) -> None:  # fmt: skip
    """Write dw (any float dtype) from x [n_in, ...] and dy [n_out, ...]."""
    if x.shape[0] == 0 or dy.shape[0] == 0:
        dw.zero_()
    elif target is not None and dataflow in ("masked", "unmasked"):
        plan.triton_wgrad(target, kmap, x, dy, dw, w, precision)
    else:
        per_offset.weight_gradient(kmap, x, dy, dw, w)


def _explicit(
    kmap: KernelMap, x: torch.Tensor, weight: torch.Tensor, w: WeightLayout, epilogue: Epilogue
) -> torch.Tensor:
    """Gather all neighbours of a slice of rows into one matrix and multiply once: the slow
    truth."""
    table, reverse = kmap.rulebook.table(kmap.side)
    if reverse:
        w = w.reversed()
    nbr, dtype, work = table.nbr, x.dtype, accumulator(x)
    n_offsets, n_out = nbr.shape
    padded = torch.cat([x, x.new_zeros((1, x.shape[1]))]).to(work)
    weights = [
        torch.stack(w.matrices(weight, group)).flatten(0, 1).to(work) for group in range(w.groups)
    ]
    y = padded.new_empty((n_out, w.columns_out))
    step = max(1, _EXPLICIT_BYTES // (n_offsets * x.shape[1] * padded.element_size()))
    for begin in range(0, n_out, step):
        rows = nbr[:, begin : begin + step].t().long()
        gathered = padded[rows]  # row -1 is the row of zeros
        for group in range(w.groups):
            left = gathered[:, :, group * w.c_in : (group + 1) * w.c_in].flatten(1)
            columns(y[begin : begin + step], group, w.c_out).copy_(
                rocm.linear(left, weights[group])
            )
    return epilogue.finish(y).to(dtype)
