"""Sparse convolution with gradients, on plain tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ...errors import DeviceError, ShapeError, UnsupportedError
from ..geometry.weights import WeightLayout, layout_of
from ..maps.kernel_map import KernelMap
from .column_sums import column_sums
from .dataflows import ACTIVATIONS, Epilogue, Norm, gather_matmul, weight_gradient
from .deferred import Deferred
from .fused_call import collecting, produced, take
from .per_offset import gradients
from .resolved import Resolved, check, known, like_result, resolve

__all__ = ["autocast_dtype", "conv"]

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype autocast asks for on `device` now, or None outside autocast."""
    kind = device.type
    if torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return None


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor if tensor.dtype in (dtype, torch.float64) else tensor.to(dtype)


def _gradient_like(weight: torch.Tensor, dtype: torch.dtype, dense: bool) -> torch.Tensor:
    """Uninitialised memory for a gradient: laid out as the weight, unless that overlaps itself.
    dense: new memory like the weight's is so anyway."""
    if dense and type(weight) in _PLAIN:
        return torch.empty_like(weight, dtype=dtype)
    shape, strides = weight.shape, weight.stride()
    if any(step == 0 and size > 1 for size, step in zip(shape, strides, strict=True)):
        return torch.empty(shape, dtype=dtype, device=weight.device)
    return torch.empty_strided(shape, strides, dtype=dtype, device=weight.device)


class _Conv(torch.autograd.Function):
    """y = conv(x, weight, bias). Casts happen inside, so that gradients reach the parameters in
    their own dtype."""

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx: Any, x, weight, bias, kmap, found, layout, groups, precision, dtype
    ):
        """found: the convolution; None to find it for what the tensors are cast to, or to check
        them first."""
        x_cast, weight_cast = x, weight
        if dtype is not None:
            x_cast, weight_cast = _cast(x, dtype), _cast(weight, dtype)
        if found is None:
            found = resolve(x_cast, weight_cast, Epilogue(bias), layout, groups, precision, kmap)
        y = found.forward(kmap, x_cast, weight_cast, bias)
        ctx.save_for_backward(x_cast, weight_cast)
        ctx.problem = kmap, found, weight.dtype, None if bias is None else bias.dtype
        return y

    @staticmethod
    def backward(ctx: Any, dy):  # type: ignore[no-untyped-def]
        if torch.is_grad_enabled():  # the graph of this pass is wanted: it can be built, not used
            return _backward_once(ctx, dy)
        return _backward(ctx, dy)


def _backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    found: Resolved
    kmap, found, weight_dtype, bias_dtype = ctx.problem
    needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
    if dy.dtype != x.dtype:
        dy = dy.to(x.dtype)
    if not dy.is_contiguous():
        dy = dy.contiguous()
    dx = dw = db = None
    like_weight = True
    if needs_weight:
        dense = found.dense(weight)
        dw = _gradient_like(weight, weight_dtype, dense)
        like_weight = dense or dw.stride() == weight.stride()
    rulebook = kmap.rulebook
    if (
        like_weight
        and found.gather is not None
        and rulebook.regular
        and rulebook.n_rows[0]
        and rulebook.n_rows[1]
    ):
        back, wgrad = found.backward(needs_x, None if dw is None else weight_dtype)
        if back is not None:
            dx = back(rulebook, int(not kmap.flipped), dy, weight, None)
        if wgrad is not None and dw is not None:
            wgrad(rulebook, kmap.flipped, x, dy, dw)
    else:
        w_dw = found.w if dw is None or like_weight else layout_of(dw, *found.layout)
        dx = _gradients(found, kmap, x, weight, dy, dw, w_dw, needs_x)
    if needs_bias:
        db = column_sums(dy, bias_dtype, found.target)
    return dx, dw, db, None, None, None, None, None, None


_backward_once = once_differentiable(_backward)


def _gradients(
    found: Resolved, kmap: KernelMap, x: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor,
    dw: torch.Tensor | None, w_dw: WeightLayout, needs_x: bool,
) -> torch.Tensor | None:  # fmt: skip
    """dx if it is needed, and dw written where it is given, on any dataflow."""
    w, precision, (dataflow, target) = found.w, found.precision, found.chosen(kmap)
    if dw is not None and needs_x and dataflow == "per_offset" and w_dw is w:
        return gradients(kmap, x, weight, dy, dw, w)
    dx = None
    if needs_x:
        back, end = kmap.transposed(), Epilogue()
        dx = gather_matmul(dataflow, target, back, dy, weight, w.transposed(), end, precision)
    if dw is not None:
        weight_gradient(dataflow, target, kmap, x, dy, dw, w_dw, precision)
    return dx


def conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    kmap: KernelMap,
    *,
    layout: str = "vio",
    groups: int = 1,
    activation: str | None = None,
    alpha: float = 0.0,
    norm: Norm | None = None,
    residual: torch.Tensor | None = None,
    allow_tf32: bool = False,
) -> torch.Tensor:
    """Convolve the rows of `x` along a kernel map.

    Args:
        x: [N_in, C_in], fp16 / bf16 / fp32 / fp64.
        weight: tap v belongs to offset v of the map; layout "vio" [V, C_in / groups, C_out], any
            strides, never copied, or "ovi" [C_out, *kernel, C_in / groups].
        bias: [C_out] or None.
        kmap: from `map_builder`; its N_in must be x's rows.
        activation: None, "relu", "leaky_relu" (slope `alpha`) or "sigmoid"; only without gradients.
        norm: a normalisation by fixed statistics behind the bias; only without gradients.
        residual: [N_out, C_out] of the result's dtype (under autocast of any float dtype), added
            before the activation; only without gradients.
        allow_tf32: fp32 products may round their inputs to TF32 (IEEE otherwise).

    Returns: [N_out, C_out] in x's dtype; under autocast in the autocast dtype (fp64 is left alone).
    Raises: ShapeError, DataTypeError, DeviceError, UnsupportedError.
    """
    wants_grad = torch.is_grad_enabled() and (
        x.requires_grad
        or weight.requires_grad
        or (bias is not None and bias.requires_grad)
        or (residual is not None and residual.requires_grad)
    )
    precision = "tf32" if allow_tf32 else "ieee"
    ends = activation is not None or norm is not None or residual is not None
    offered = None if wants_grad or ends else take()
    folds = kmap.x_fold is not None or kmap.y_fold is not None
    if offered is not None:
        norm, activation, alpha, summed = offered[0]
        if summed is not None:
            if not folds:
                y = _deferred(x, weight, bias, kmap, layout, groups, precision, offered[0])
                offered[1].append(y)
                return y
            activation = None  # belongs behind the sum
    if not (folds or collecting() or torch._C._is_any_autocast_enabled()):
        found = known(
            x, weight, bias, activation, alpha, norm, residual is not None, layout, groups,
            precision, kmap,
        )  # fmt: skip
        if found is not None:
            if not wants_grad:
                y = found.forward(kmap, x, weight, bias, activation, alpha, norm, residual)
                if offered is not None:
                    offered[1].append(y)
                return y
            if not found.ends:
                return _Conv.apply(x, weight, bias, kmap, found, layout, groups, precision, None)
    if x.ndim != 2:
        raise ShapeError(f"features have shape {list(x.shape)}; expected [N, C].")
    _check_devices(x, weight, bias, kmap)
    dtype = autocast_dtype(x.device)
    check_activation(activation)
    if wants_grad and ends:
        what = activation or ("norm" if norm is not None else "residual")
        raise UnsupportedError(
            f"a fused {what} has no gradient; apply it after the convolution, or run under "
            "torch.no_grad()."
        )
    if residual is not None and dtype is not None:
        residual = _cast(residual, dtype)
    epilogue = Epilogue(bias, activation, alpha, norm, residual)
    if folds:
        y = _folded(x, weight, epilogue, kmap, layout, groups, precision, dtype)
    else:
        y = _apply(x, weight, epilogue, kmap, layout, groups, precision, dtype, wants_grad)
    if offered is not None:
        offered[1].append(y)
    return produced(y)


def _apply(x, weight, epilogue, kmap, layout, groups, precision, dtype, wants_grad):  # type: ignore[no-untyped-def]
    if wants_grad:
        return _Conv.apply(x, weight, epilogue.bias, kmap, None, layout, groups, precision, dtype)
    if dtype is not None:
        x, weight = _cast(x, dtype), _cast(weight, dtype)
    found = resolve(x, weight, epilogue, layout, groups, precision, kmap)
    return found.forward(kmap, x, weight, *epilogue)


def _folded(x, weight, epilogue, kmap, layout, groups, precision, dtype):  # type: ignore[no-untyped-def]
    """Equal coordinates: fold x rows, convolve the distinct ones, unfold y rows. Gradients follow
    by composition."""
    from ..maps.fold import copy_rows, first_rows, self_product, sum_rows

    if kmap.n_in != x.shape[0]:
        check(x, weight, epilogue, kmap, layout, groups)
    plain = KernelMap(kmap.rulebook, kmap.flipped)
    folded = x
    if kmap.x_fold is not None:
        folded = first_rows(x, kmap.x_fold) if kmap.self_offset >= 0 else sum_rows(x, kmap.x_fold)
    grad = torch.is_grad_enabled() and (folded.requires_grad or weight.requires_grad)
    y = _apply(folded, weight, Epilogue(), plain, layout, groups, precision, dtype, grad)
    if kmap.y_fold is not None:
        y = copy_rows(y, kmap.y_fold)
    if kmap.self_offset >= 0:
        y = y + self_product(x.to(y.dtype), weight.to(y.dtype), layout, groups, kmap.self_offset)
    if epilogue.residual is not None:
        like_result(epilogue.residual, tuple(y.shape), y.dtype, y.device)
    return epilogue.finish(y.clone())


def _deferred(x, weight, bias, kmap, layout, groups, precision, pending):  # type: ignore[no-untyped-def]
    """The result to which somebody is about to add features."""
    if x.ndim != 2:
        raise ShapeError(f"features have shape {list(x.shape)}; expected [N, C].")
    _check_devices(x, weight, bias, kmap)
    dtype = autocast_dtype(x.device)
    if dtype is not None:
        x, weight = _cast(x, dtype), _cast(weight, dtype)
    norm, activation, alpha, summed = pending
    plain = Epilogue(bias, None, 0.0, norm)
    found = resolve(x, weight, plain, layout, groups, precision, kmap)

    def launch(residual: torch.Tensor | None) -> torch.Tensor:
        if residual is None:
            return found.forward(kmap, x, weight, *plain)
        end = Epilogue(bias, activation, alpha, norm, residual)
        return found.ending(x, weight, end, kmap).forward(kmap, x, weight, *end)

    shape = (kmap.rulebook.n_rows[kmap.side], found.columns_out)
    return Deferred(shape, x, launch, summed)


def _check_devices(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, kmap: KernelMap
) -> None:
    device = kmap.device
    if (
        x.device != device
        or weight.device != device
        or (bias is not None and bias.device != device)
    ):
        there = "" if bias is None else f", the bias on {bias.device}"
        raise DeviceError(
            f"features are on {x.device}, the weight on {weight.device}{there}, the coordinates on "
            f"{device}; move them all to one device."
        )


def check_activation(activation: str | None) -> None:
    """Raise UnsupportedError for an activation that cannot be fused."""
    if activation not in ACTIVATIONS:
        raise UnsupportedError(f"activation {activation!r}; expected one of {ACTIVATIONS}.")
