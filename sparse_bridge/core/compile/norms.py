"""Batch norms in training as operators. Compilers add up rows that they cannot count slowly."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..ops.batch_norm import batch_norm
from .library import define, differentiate, forget, recording

ops: Any = torch.ops.sparse_bridge
DEVICES = ("cuda",)  # where norms become operators


def _run(x, weight, bias, eps, relu):  # type: ignore[no-untyped-def]
    """The result, and the mean and unbiased variance of the batch."""
    mean, var = (x.new_zeros(x.shape[1], dtype=_statistics(x)) for _ in "mv")
    y = batch_norm(x, weight, bias, mean, var, momentum=1.0, eps=eps, relu=relu)
    return y, mean, var


def _statistics(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _forward(x, weight, bias, eps, relu):  # type: ignore[no-untyped-def]
    with torch.no_grad():
        y, mean, var = _run(x, weight, bias, eps, relu)
    return y.contiguous(), mean, var


def _fake(x, weight, bias, eps, relu):  # type: ignore[no-untyped-def]
    mean, var = (x.new_empty(x.shape[1], dtype=_statistics(x)) for _ in "mv")
    return x.new_empty(x.shape), mean, var


def _backward(dy, x, weight, bias, eps, relu):  # type: ignore[no-untyped-def]
    leaves = [t.detach().requires_grad_() for t in (x, weight, bias) if t is not None]
    kept = iter(leaves)
    x_leaf, *given = (None if t is None else next(kept) for t in (x, weight, bias))
    with recording():
        y = _run(x_leaf, given[0], given[1], eps, relu)[0]
        found = iter(torch.autograd.grad(y, leaves, dy.contiguous()))
    return tuple(
        x.new_empty(0) if t is None else next(found).contiguous() for t in (x, weight, bias)
    )


def _fake_backward(dy, x, weight, bias, eps, relu):  # type: ignore[no-untyped-def]
    grads = (x.new_empty(0) if t is None else t.new_empty(t.shape) for t in (x, weight, bias))
    return tuple(grads)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, eps, relu = inputs
    ctx.save_for_backward(*tensors)
    ctx.form = eps, relu
    ctx.mark_non_differentiable(*output[1:])


def _gradient(ctx: Any, dy: torch.Tensor, *ignored: Any) -> tuple[torch.Tensor | None, ...]:
    tensors = ctx.saved_tensors
    found = ops.batch_norm_backward(dy, *tensors, *ctx.form)
    grads = (None if t is None else grad for t, grad in zip(tensors, found, strict=True))
    return (*grads, None, None)


_GIVEN = "Tensor x, Tensor? weight, Tensor? bias, float eps, bool relu"
define("batch_norm", f"({_GIVEN}) -> (Tensor, Tensor, Tensor)", _forward, _fake)
define(
    "batch_norm_backward", f"(Tensor dy, {_GIVEN}) -> (Tensor, Tensor, Tensor)", _backward,
    _fake_backward,
)  # fmt: skip
differentiate("batch_norm", _setup, _gradient)
differentiate("batch_norm_backward", forget, None)


def served(norm: Any, x: torch.Tensor) -> bool:
    """Whether a traced BatchNorm1d becomes an operator: in training, with a momentum."""
    return (
        norm.training
        and x.dim() == 2
        and x.device.type in DEVICES
        and (norm.momentum is not None or not norm.track_running_stats)
    )


def normalised(norm: nn.BatchNorm1d, x: torch.Tensor, relu: bool) -> torch.Tensor:
    """What `norm` makes of x [N, C], and with `relu` a ReLU of that."""
    y, mean, var = ops.batch_norm(x, norm.weight, norm.bias, norm.eps, relu)
    if norm.track_running_stats and norm.running_mean is not None:
        momentum: Any = norm.momentum
        with torch.no_grad():
            for running, seen in ((norm.running_mean, mean), (norm.running_var, var)):
                assert running is not None
                running.mul_(1.0 - momentum).add_(seen.to(running.dtype), alpha=momentum)
            if norm.num_batches_tracked is not None:
                norm.num_batches_tracked.add_(1)
    result: torch.Tensor = y
    return result
