"""Batch normalisation in training as operators of graphs: both passes without autograd, by kernels."""

from __future__ import annotations

import torch

from ...kernels.runtime.target import Target
from .batch_norm import compile_together, fits, gradients_like, passes, serves

MEMORY_ROWS = 2 + 2 * 128  # rows of the most memory that kernels need between both passes


def kernels_for(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float) -> Target | None:
    """Whose kernels normalise x [N, C], N > 1, fp16 / bf16 / fp32, with these vectors [C] (see `fits`); None: torch
    does."""
    target = serves(x) if x.shape[0] > 1 and eps > 0 else None
    return target if target is not None and fits(x, weight, bias, True) else None


def forward_pass(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float, relu: bool, target: Target
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`batch_norm` without gradients: (y, fp32 [2, C]: mean and unbiased variance, what
    `backward_pass` needs: fp32 [MEMORY_ROWS * C])."""
    from ...kernels.ops.norm_spec import spec_of

    x, n_channels = x.contiguous(), x.shape[1]
    # Zeros: results of operators have no undefined values.
    y, memory = torch.empty_like(x), x.new_zeros(MEMORY_ROWS * n_channels, dtype=torch.float32)
    statistics = x.new_zeros((2, n_channels), dtype=torch.float32)
    vectors = weight, bias, statistics[0], statistics[1], None
    spec = spec_of(x, vectors, target)
    compile_together(spec, x, vectors)
    passes()[0](spec, x, vectors, None, y, 1.0, eps, relu, memory)
    return y, statistics, memory


def backward_pass(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    memory: torch.Tensor,
    relu: bool,
    target: Target,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Gradients of x [N, C], weight and bias [C], each in its own dtype, from dy [N, C] in x's and the memory of
    `forward_pass`, which stays as it is. None for a vector that is not there."""
    from ...kernels.ops.norm_spec import spec_of

    x, memory = x.contiguous(), memory.clone()  # sums are written into it
    grads = gradients_like(x, weight, bias)
    spec = spec_of(x, (weight, bias, None, None, None), target)
    passes()[1](spec, x, dy.contiguous(), weight, bias, None, memory, grads, relu)
    return grads
