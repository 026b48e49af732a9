"""What layers refuse: transforms of torch.func, derivatives of other orders, and traces."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

from ...errors import UnsupportedError

NO_SECOND_ORDER = (
    "the gradient of a sparse layer has no gradient of its own; do without create_graph=True, or "
    "compute the second order by finite differences."
)

_transforms = torch._C._functorch.peek_interpreter_stack
tracing = torch._C._get_tracing_state
wrapped = torch._C._functorch.is_functorch_wrapped_tensor


def refuse_transforms() -> None:
    """UnsupportedError under a transform of torch.func, in forward mode, or in `torch.jit.trace`."""
    refuse_trace()
    if forward_ad._current_level >= 0 or _transforms():
        raise UnsupportedError(
            "sparse layers have no forward-mode derivative and run under no transform of "
            "torch.func (vmap, jvp, grad); use backward() or torch.autograd.grad, and put samples "
            "into one tensor by batch index."
        )


def refuse_trace() -> None:
    """UnsupportedError while `torch.jit.trace` records: it would keep this input's kernel map for all."""
    if tracing():
        raise UnsupportedError(
            "torch.jit.trace recorded a sparse layer; a trace would hold the coordinates of this "
            "one input. Use torch.export or torch.compile (docs/compile.md), or "
            "sparse_bridge.export.export_onnx (docs/export.md)."
        )


def refuse_wrapped(coords: torch.Tensor) -> None:
    """`refuse_transforms` for coordinates (any shape and dtype) that a transform of torch.func wraps. Raises:
    UnsupportedError."""
    if wrapped(coords):
        refuse_transforms()


def direct_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`function.apply`, without what it does in Python at every call, a third of its time, for
    transforms of torch.func. For callers who have refused those, of tensors that none of them has
    left behind (`wrapped`)."""
    of_base = vars(torch._C._FunctionBase).get("apply")
    direct: Callable[..., Any]
    direct = function.apply if of_base is None else of_base.__get__(None, function)
    return direct


class _Refusal(torch.autograd.Function):
    """Gradients as they are, whose own gradient is an UnsupportedError."""

    @staticmethod
    def forward(ctx: Any, dy: torch.Tensor, *grads: Any) -> Any:
        return tuple(grad.view_as(grad) for grad in grads)

    @staticmethod
    def backward(ctx: Any, *ignored: Any) -> Any:
        raise UnsupportedError(NO_SECOND_ORDER)


def no_double_backward(backward: Callable[..., Any]) -> Callable[..., Any]:
    """`once_differentiable` with a typed error, for layers whose first result alone has a
    gradient."""

    @functools.wraps(backward)
    def run(ctx: Any, dy: torch.Tensor, *more: Any) -> Any:
        if not torch.is_grad_enabled():
            return backward(ctx, dy, *more)
        with torch.no_grad():
            result = backward(ctx, dy, *more)
        saved = [tensor for tensor in ctx.saved_tensors if tensor is not None]
        if not any(tensor.requires_grad for tensor in (dy, *saved)):
            return result
        several = isinstance(result, tuple)
        grads = list(result) if several else [result]
        indices = [i for i, grad in enumerate(grads) if grad is not None]
        marked = dy if dy.requires_grad else dy.detach().requires_grad_()
        for i, grad in zip(indices, _Refusal.apply(marked, *(grads[i] for i in indices)), strict=True):
            grads[i] = grad
        return tuple(grads) if several else grads[0]

    return run
