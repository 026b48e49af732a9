"""What a convolution does to its sums, in the same launch."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...errors import UnsupportedError
from ...hooks import TORCHS_ADD_, TORCHS_BATCH_NORM
from ...kernels.gemm.product import EpilogueForm
from ...kernels.tiles.epilogue_bits import AFFINE, BIAS, NORM, RESIDUAL
from .activations import ACTIVATIONS as ACTIVATIONS
from .activations import Activation as Activation
from .activations import activated as activated
from .activations import activated_ as activated_
from .activations import row_of as row_of

# What may follow a convolution, in this order: strings of letters, so that what came so far is a
# prefix of what is expected.
STEP_NORM, STEP_SUM, STEP_ACTIVATION = "n", "s", "a"
STEPS = STEP_NORM + STEP_SUM + STEP_ACTIVATION


def check_activation(activation: str | None) -> None:
    """Raise UnsupportedError for an activation that cannot be fused."""
    if activation is not None and activation not in ACTIVATIONS:
        raise UnsupportedError(f"activation {activation!r}; expected one of {(None, *ACTIVATIONS)}.")


class Norm(NamedTuple):
    """A normalisation by fixed statistics, vectors [C_out], weight and bias both or none: (x - mean) / sqrt(var +
    eps) * weight + bias. Vectors are of any float dtype."""

    mean: torch.Tensor
    var: torch.Tensor
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    eps: float

    def snapshot(self) -> Norm:
        """With copies of its statistics, which torch moves in training without counting that."""
        return self._replace(mean=self.mean.clone(), var=self.var.clone())


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
        """(bias, mean, var, weight, bias of the norm, residual), each in its own float dtype: [C_out], the residual
        [N_out, C_out]; None for what there is not."""
        if self.norm is None:
            return self.bias, None, None, None, None, self.residual
        return self.bias, *self.norm[:4], self.residual

    def fused(self) -> str | None:
        """What of it has no gradient, if anything does. (A method: while torch up to 2.8 traces,
        a property of a named tuple is never None.)"""
        if self.activation is not None:
            return self.activation
        return "norm" if self.norm is not None else None if self.residual is None else "residual"

    @property
    def form(self) -> EpilogueForm:
        """What of it kernels are compiled for, and the numbers."""
        parts = 0 if self.bias is None else BIAS
        parts |= 0 if self.residual is None else RESIDUAL
        eps = 0.0
        if self.norm is not None:
            parts |= NORM if self.norm.weight is None else NORM | AFFINE
            eps = self.norm.eps
        return EpilogueForm(parts, self.activation, self.alpha, eps)

    def contiguous(self) -> Epilogue:
        """With the values of every vector next to each other."""
        bias, norm = self.bias, self.norm
        if norm is not None:
            gain, beta = (v if v is None else v.contiguous() for v in (norm.weight, norm.bias))
            norm = Norm(norm.mean.contiguous(), norm.var.contiguous(), gain, beta, norm.eps)
        return self._replace(bias=None if bias is None else bias.contiguous(), norm=norm)

    def finish(self, y: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The result [N, C_out] in `dtype` from the sums y [N, C_out], fp32 or fp64, or of `dtype`, which may be
        overwritten: rounded wherever separate operations would round, so that it has their bits. Raises:
        UnsupportedError for an activation that is not of `ACTIVATIONS`."""
        if self.bias is not None:
            TORCHS_ADD_(y, self.bias.to(y.dtype))
        y = y.to(dtype)
        if self.norm is not None:
            *vectors, eps = self.norm
            dtypes = {vector.dtype for vector in vectors if vector is not None}
            # What torch's norm takes beside `dtype`: halves with statistics in fp32.
            if dtypes != {dtype} and not (dtypes == {torch.float32} and dtype.itemsize == 2):
                wide = torch.promote_types(dtype, torch.float32)
                vectors = [None if operand is None else operand.to(wide) for operand in vectors]
            mean, var, gain, beta = vectors
            y = TORCHS_BATCH_NORM(y, gain, beta, mean, var, False, 0.0, eps, torch.backends.cudnn.enabled)
        if self.residual is not None:
            TORCHS_ADD_(y, self.residual)
        check_activation(self.activation)
        return activated_(y, self.activation, self.alpha)
