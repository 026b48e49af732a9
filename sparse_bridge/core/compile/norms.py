"""Batch norms in training as operators. Compilers add up rows that they cannot count slowly."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..ops.batch_norm import batch_norm
from ..ops.norm_operators import MEMORY_ROWS, backward_pass, forward_pass, kernels_for
from .library import define, differentiate, forget, recording

ops: Any = torch.ops.sparse_bridge
DEVICES = ("cuda",)  # where norms become operators


def _statistics(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _forward(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float, relu: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The result, mean and unbiased variance [2, C], and what kernels keep for the gradient."""
    target = kernels_for(x, weight, bias, eps)
    if target is not None:
        return forward_pass(x, weight, bias, eps, relu, target)
    dtype, n_channels = _statistics(x), x.shape[1]
    with torch.no_grad():
        statistics = x.new_zeros((2, n_channels), dtype=dtype)
        y = batch_norm(x, (weight, bias, statistics[0], statistics[1], None), momentum=1.0, eps=eps, relu=relu)
    return y.contiguous(), statistics, x.new_zeros(MEMORY_ROWS * n_channels, dtype=dtype)


def _fake(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float, relu: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dtype, n_channels = _statistics(x), x.shape[1]
    statistics = x.new_empty((2, n_channels), dtype=dtype)
    return x.new_empty(x.shape), statistics, x.new_empty(MEMORY_ROWS * n_channels, dtype=dtype)


def _backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    memory: torch.Tensor,
    eps: float,
    relu: bool,
) -> tuple[torch.Tensor, ...]:
    target = kernels_for(x, weight, bias, eps)
    if target is not None:
        grads: tuple[torch.Tensor | None, ...] = backward_pass(dy, x, weight, bias, memory, relu, target)
    else:
        grads = _backward_in_torch(dy, x, weight, bias, eps, relu)
    return tuple(x.new_empty(0) if grad is None else grad for grad in grads)


def _backward_in_torch(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float, relu: bool
) -> tuple[torch.Tensor | None, ...]:
    inputs: Any = [None if t is None else t.detach().requires_grad_() for t in (x, weight, bias)]
    leaves = [t for t in inputs if t is not None]
    with recording():
        y = batch_norm(inputs[0], (inputs[1], inputs[2], None, None, None), momentum=0.0, eps=eps, relu=relu)
        grads = iter(torch.autograd.grad(y, leaves, dy.contiguous()))
    return tuple(None if t is None else next(grads).contiguous() for t in inputs)


def _fake_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    memory: torch.Tensor,
    eps: float,
    relu: bool,
) -> tuple[torch.Tensor, ...]:
    grads = (x.new_empty(0) if t is None else t.new_empty(t.shape) for t in (x, weight, bias))
    return tuple(grads)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, eps, relu = inputs
    ctx.save_for_backward(*tensors, output[2])
    ctx.form = eps, relu
    ctx.mark_non_differentiable(*output[1:])


def _gradient(ctx: Any, dy: torch.Tensor, *ignored: Any) -> tuple[torch.Tensor | None, ...]:
    tensors = ctx.saved_tensors
    results = ops.batch_norm_backward(dy, *tensors, *ctx.form)
    grads = (None if t is None else grad for t, grad in zip(tensors[:3], results, strict=True))
    return (*grads, None, None)


_INPUTS, _FORM = "Tensor x, Tensor? weight, Tensor? bias", "float eps, bool relu"
define("batch_norm", f"({_INPUTS}, {_FORM}) -> (Tensor, Tensor, Tensor)", _forward, _fake)
define(
    "batch_norm_backward",
    f"(Tensor dy, {_INPUTS}, Tensor memory, {_FORM}) -> (Tensor, Tensor, Tensor)",
    _backward,
    _fake_backward,
)
differentiate("batch_norm", _setup, _gradient)
differentiate("batch_norm_backward", forget, None)


def served(norm: Any, x: torch.Tensor) -> bool:
    """Whether a traced BatchNorm1d becomes an operator: in training, with a momentum, over x [N, C] of any float dtype
    on a GPU."""
    return (
        norm.training
        and x.dim() == 2
        and x.device.type in DEVICES
        and (norm.momentum is not None or not norm.track_running_stats)
    )


def move(running: torch.Tensor, now: torch.Tensor, momentum: float) -> None:
    """Move a running statistic [C] in place: (1 - momentum) of it stays, `momentum` of `now` [C] comes. Each is of a
    float dtype of its own."""
    running.mul_(1.0 - momentum).add_(now.to(running.dtype), alpha=momentum)


def normalised(norm: nn.BatchNorm1d, x: torch.Tensor, relu: bool) -> torch.Tensor:
    """What `norm` makes of x [N, C], and with `relu` a ReLU of that: [N, C] in x's dtype, fp16 / bf16 / fp32 / fp64.
    Running statistics move by torch's rule. Raises, when the graph runs, what `batch_norm` does."""
    y, statistics, _ = ops.batch_norm(x, norm.weight, norm.bias, norm.eps, relu)
    if norm.track_running_stats and norm.running_mean is not None:
        momentum: Any = norm.momentum
        with torch.no_grad():
            for running, now in zip((norm.running_mean, norm.running_var), statistics, strict=True):
                assert running is not None
                move(running, now, momentum)
            if norm.num_batches_tracked is not None:
                norm.num_batches_tracked.add_(1)
    result: torch.Tensor = y
    return result
