"""The convolution as operators: one for the output, one for the gradients."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from ... import memory
from ...errors import UnsupportedError
from ..conv import convolution, override
from ..conv.convolution import autocast_dtype, convolve
from ..conv.epilogue import Epilogue, Norm
from ..conv.plan import ConvForm, GradientRequest, backward, find, run
from ..device import memory_use, rocm
from ..device.column_sums import column_sums
from ..geometry.weights import gradient_like
from ..maps.kernel_map import KernelMap
from ..ops import pointwise
from . import handles, inductor
from .library import define, differentiate, forget, recording

ops: Any = torch.ops.sparse_bridge
_FORM = "Tensor kmap, str layout, int groups, str precision, str dataflow, bool transposed"


def map_of(handle: torch.Tensor, transposed: bool) -> KernelMap:
    """The kernel map behind a handle, int64 [1], or its reverse. Raises LifecycleError where it is gone."""
    kmap = handles.value_of(handle, KernelMap)
    return kmap.transposed() if transposed else kmap


_form = functools.lru_cache(maxsize=256)(ConvForm)  # every call names one


def _conv(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, rows: int, kmap: torch.Tensor, *form: Any
) -> torch.Tensor:
    *read, transposed = form
    return _product(x, weight, map_of(kmap, transposed), Epilogue(bias), _form(*read))


def _product(
    x: torch.Tensor, weight: torch.Tensor, kmap: KernelMap, epilogue: Epilogue, form: ConvForm
) -> torch.Tensor:
    if kmap.x_fold is None and kmap.y_fold is None:  # autocast has done its part while tracing
        return run(x, weight, kmap, epilogue, form)[0].contiguous()
    with torch.no_grad():
        return convolve(x, weight, kmap, epilogue, form).contiguous()


def _fake_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    rows: int,
    kmap: torch.Tensor,
    layout: str,
    *form: Any,
) -> torch.Tensor:
    return x.new_empty((rows, weight.shape[0] if layout == "ovi" else weight.shape[-1]))


def _conv_backward(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, kmap: torch.Tensor, *form: Any
) -> tuple[torch.Tensor, ...]:
    if memory.limit is not None:
        memory_use.refuse_gradients()
    *read, transposed, needs_grad = form
    form, pairs = _form(*read), map_of(kmap, transposed)
    dx = dw = db = None
    if pairs.x_fold is not None or pairs.y_fold is not None:
        return _folded_backward(dy, x, weight, bias, pairs, form, needs_grad)
    with torch.no_grad():
        dy = dy.contiguous()
        plan = find(x, weight, pairs, Epilogue(), form)
        if needs_grad[0] or needs_grad[1]:
            request = GradientRequest(needs_grad[0], weight.dtype if needs_grad[1] else None)
            dx, dw = backward(plan, pairs, x, weight, dy, request)
        if needs_grad[2]:
            assert bias is not None
            db = column_sums(dy, bias.dtype, plan.product.target)
    return tuple(x.new_empty(0) if grad is None else grad for grad in (dx, dw, db))


def _folded_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    kmap: KernelMap,
    form: ConvForm,
    needs_grad: Sequence[bool],
) -> tuple[torch.Tensor, ...]:
    """Equal coordinates: gradients follow by composition."""
    inputs: Any = [
        tensor.detach().requires_grad_(wants) if tensor is not None else None
        for tensor, wants in zip((x, weight, bias), needs_grad, strict=True)
    ]
    with recording():
        y = convolve(inputs[0], inputs[1], kmap, Epilogue(inputs[2]), form)
    leaves = [tensor for tensor, wants in zip(inputs, needs_grad, strict=True) if wants]
    grads = iter(torch.autograd.grad(y, leaves, dy))
    return tuple(next(grads).contiguous() if wants else x.new_empty(0) for wants in needs_grad)


def _fake_conv_backward(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, kmap: torch.Tensor, *form: Any
) -> tuple[torch.Tensor, ...]:
    needs_grad = form[-1]
    dx = x.new_empty(x.shape) if needs_grad[0] else x.new_empty(0)
    dw = gradient_like(weight, weight.dtype) if needs_grad[1] else x.new_empty(0)
    db = bias.new_empty(bias.shape) if needs_grad[2] and bias is not None else x.new_empty(0)
    return dx, dw, db


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, bias, _, kmap, *form = inputs
    ctx.save_for_backward(x, weight, bias, kmap)
    ctx.form = form


def _gradient(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    x, weight, bias, kmap = ctx.saved_tensors
    needs_grad = [bool(wants) for wants in ctx.needs_input_grad[:3]]
    results = ops.conv_backward(dy.to(x.dtype), x, weight, bias, kmap, *ctx.form, needs_grad)
    grads = [grad if wants else None for grad, wants in zip(results, needs_grad, strict=True)]
    return (*grads, *(None,) * (2 + len(ctx.form)))


define("conv", f"(Tensor x, Tensor weight, Tensor? bias, SymInt rows, {_FORM}) -> Tensor", _conv, _fake_conv)
define(
    "conv_backward",
    f"(Tensor dy, Tensor x, Tensor weight, Tensor? bias, {_FORM}, bool[] wanted) -> (Tensor, Tensor, Tensor)",
    _conv_backward,
    _fake_conv_backward,
)
differentiate("conv", _setup, _gradient)
differentiate("conv_backward", forget, None)


def _conv_fused(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, rows: int, kmap: torch.Tensor, *form_and_end: Any
) -> torch.Tensor:
    *read, transposed, mean, var, gain, beta, residual, eps, activation, alpha = form_and_end
    norm = None if mean is None else Norm(mean, var, gain, beta, eps)
    epilogue = Epilogue(bias, activation, alpha, norm, residual)
    return _product(x, weight, map_of(kmap, transposed), epilogue, _form(*read))


def _fused_gradient(ctx: Any, dy: torch.Tensor) -> None:
    raise UnsupportedError(
        "this graph was made for inference, with norms fused into convolutions; gradients need one "
        "that is made with gradients enabled."
    )


define(
    "conv_fused",
    f"(Tensor x, Tensor weight, Tensor? bias, SymInt rows, {_FORM}, Tensor? mean, Tensor? var, "
    "Tensor? gain, Tensor? beta, Tensor? residual, float eps, str? activation, float alpha) "
    "-> Tensor",
    _conv_fused,
    lambda *inputs: _fake_conv(*inputs[:10]),
)
differentiate("conv_fused", forget, _fused_gradient)


def _watched(
    x: torch.Tensor, weight: torch.Tensor, kmap: KernelMap, epilogue: Epilogue, form: ConvForm
) -> torch.Tensor:
    """`convolve` of an eager layer as an operator."""
    return conv(x, weight, epilogue, handles.make(kmap), kmap.n_out, form)


def _same_rows(x: torch.Tensor, listed: bool) -> torch.Tensor:
    n_rows, device = x.shape[0], x.device
    kmap = pointwise.identity(n_rows, device, listed)
    return handles.make(kmap or pointwise.build_identity(n_rows, device, listed))


define("same_rows", "(Tensor x, bool listed) -> Tensor", _same_rows, lambda *_: handles.like())


_launched = torch.compiler.assume_constant_result(pointwise.launched)


def _linear(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`pointwise.linear` in a graph: the rule for any number of rows."""
    dtype = pointwise.dtype_of(x, w, bias)
    if (
        x.device.type not in pointwise.DEVICES
        or dtype is None
        or not pointwise.takes(dtype, w)
        or override.traced()
        or not _launched(x.device, dtype)
    ):
        return rocm.linear(x, w, bias)
    kmap = ops.same_rows(x.detach(), torch.is_grad_enabled())
    epilogue = Epilogue(None if bias is None else bias.flatten())
    return conv(x, w[None], epilogue, kmap, x.shape[0], pointwise.form_of(x))


convolution.as_operator = _watched
pointwise.as_operator = _linear
inductor.install()


def conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    epilogue: Epilogue,
    kmap: torch.Tensor,
    rows: int,
    form: ConvForm,
    transposed: bool = False,
) -> torch.Tensor:
    """`convolve` while a program is traced: [rows, C_out] in x's dtype, or autocast's.

    x: [N_in, C_in], fp16 / bf16 / fp32 / fp64.  weight: laid out as `form.layout` says.  kmap: a handle, int64 [1];
    transposed: of a map that is read backwards.  rows: of its output.  epilogue: anything but the bias has no
    gradient; to ask for one raises UnsupportedError.
    """
    dtype = autocast_dtype(x.device)
    if dtype is not None:
        x = x if x.dtype == torch.float64 else x.to(dtype)
        weight = weight if weight.dtype == torch.float64 else weight.to(dtype)
    end: tuple[Any, ...] = ()
    if epilogue.fused() is not None:
        norm = epilogue.norm or Norm(None, None, None, None, 0.0)  # type: ignore[arg-type]
        *vectors, eps = norm
        end = (*vectors, epilogue.residual, eps, epilogue.activation, epilogue.alpha)
    function = ops.conv_fused if end else ops.conv
    dataflow = form.dataflow or override.traced()
    read = form.layout, form.groups, form.precision, dataflow, transposed
    y: torch.Tensor = function(x, weight, epilogue.bias, rows, kmap, *read, *end)
    return y
