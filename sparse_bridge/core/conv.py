"""Sparse convolution with gradients, on plain tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ..errors import DataTypeError, DeviceError, ShapeError, UnsupportedError
from . import trace
from .dataflows import ACTIVATIONS, Epilogue, Norm, gather_matmul, weight_gradient
from .fused_call import produced, take
from .kernel_map import KernelMap
from .per_offset import gradients
from .plan import choose_dataflow
from .weights import WeightLayout, layout_of

__all__ = ["autocast_dtype", "conv"]

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype autocast asks for on `device` now, or None outside autocast."""
    kind = device.type
    if torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return None


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor if tensor.dtype in (dtype, torch.float64) else tensor.to(dtype)


def _gradient_like(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Uninitialised memory for a gradient: laid out as the weight, unless that overlaps itself."""
    shape, strides = weight.shape, weight.stride()
    if any(step == 0 and size > 1 for size, step in zip(shape, strides, strict=True)):
        return torch.empty(shape, dtype=dtype, device=weight.device)
    return torch.empty_strided(shape, strides, dtype=dtype, device=weight.device)


class _Conv(torch.autograd.Function):
    """y = conv(x, weight, bias). Casts happen inside, so that gradients reach the parameters in
    their own dtype."""

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx: Any, x, weight, bias, kmap, layout, groups, precision, dtype
    ):
        if dtype is not None:
            x_cast, weight_cast = _cast(x, dtype), _cast(weight, dtype)
        else:
            x_cast, weight_cast = x, weight
        epilogue = Epilogue(bias)
        w = _check(x_cast, weight_cast, epilogue, kmap, layout, groups)
        dataflow, target = choose_dataflow(x.device, x_cast.dtype, kmap)
        y = gather_matmul(dataflow, target, kmap, x_cast, weight_cast, w, epilogue, precision)
        trace.emit("conv", dataflow, kmap, w.columns_in, w.columns_out)
        ctx.save_for_backward(x_cast, weight_cast)
        ctx.problem = (
            kmap, w, (layout, groups), precision, dataflow, target, weight.dtype,
            None if bias is None else bias.dtype,
        )  # fmt: skip
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy):  # type: ignore[no-untyped-def]
        x, weight = ctx.saved_tensors
        kmap, w, layout, precision, dataflow, target, weight_dtype, bias_dtype = ctx.problem
        dy = dy.to(x.dtype).contiguous()
        dx = dw = db = None
        if ctx.needs_input_grad[1]:
            dw = _gradient_like(weight, weight_dtype)
        w_dw = w if dw is None or dw.stride() == weight.stride() else layout_of(dw, *layout)
        both = dw is not None and ctx.needs_input_grad[0]
        if dw is not None and both and dataflow == "per_offset" and w_dw is w:
            dx = gradients(kmap, x, weight, dy, dw, w)
        else:
            if ctx.needs_input_grad[0]:
                back, end = kmap.transposed(), Epilogue()
                dx = gather_matmul(
                    dataflow, target, back, dy, weight, w.transposed(), end, precision
                )
            if dw is not None:
                weight_gradient(dataflow, target, kmap, x, dy, dw, w_dw, precision)
        if ctx.needs_input_grad[2]:
            db = dy.sum(0, dtype=torch.float32 if dy.dtype != torch.float64 else None).to(
                bias_dtype
            )
        return dx, dw, db, None, None, None, None, None


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
        norm: a normalisation by fixed statistics between bias and activation; only without
            gradients.
        allow_tf32: fp32 products may round their inputs to TF32 (IEEE otherwise).

    Returns: [N_out, C_out] in x's dtype; under autocast in the autocast dtype (fp64 is left alone).
    Raises: ShapeError, DataTypeError, DeviceError, UnsupportedError.
    """
    if x.ndim != 2:
        raise ShapeError(f"features have shape {list(x.shape)}; expected [N, C].")
    _check_devices(x, weight, bias, kmap)
    dtype = autocast_dtype(x.device)
    precision = "tf32" if allow_tf32 else "ieee"
    wants_grad = torch.is_grad_enabled() and (
        x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    )
    check_activation(activation)
    offered = None if wants_grad or activation is not None or norm is not None else take()
    if offered is not None:
        norm, activation, alpha = offered[0]
    if wants_grad and (activation is not None or norm is not None):
        raise UnsupportedError(
            f"a fused {activation or 'norm'} has no gradient; apply it after the convolution, or "
            "run under torch.no_grad()."
        )
    epilogue = Epilogue(bias, activation, alpha, norm)
    if kmap.x_fold is not None or kmap.y_fold is not None:
        y = _folded(x, weight, epilogue, kmap, layout, groups, precision, dtype)
    else:
        y = _apply(x, weight, epilogue, kmap, layout, groups, precision, dtype, wants_grad)
    if offered is not None:
        offered[1].append(y)
    return produced(y)


def _apply(x, weight, epilogue, kmap, layout, groups, precision, dtype, wants_grad):  # type: ignore[no-untyped-def]
    if wants_grad:
        return _Conv.apply(x, weight, epilogue.bias, kmap, layout, groups, precision, dtype)
    if dtype is not None:
        x, weight = _cast(x, dtype), _cast(weight, dtype)
    w = _check(x, weight, epilogue, kmap, layout, groups)
    dataflow, target = choose_dataflow(x.device, x.dtype, kmap)
    y = gather_matmul(dataflow, target, kmap, x, weight, w, epilogue, precision)
    trace.emit("conv", dataflow, kmap, w.columns_in, w.columns_out)
    return y


def _folded(x, weight, epilogue, kmap, layout, groups, precision, dtype):  # type: ignore[no-untyped-def]
    """Equal coordinates: fold x rows, convolve the distinct ones, unfold y rows. Gradients follow
    by composition."""
    from .fold import copy_rows, first_rows, self_product, sum_rows

    if kmap.n_in != x.shape[0]:
        _check(x, weight, epilogue, kmap, layout, groups)
    plain = KernelMap(kmap.relation, kmap.flipped)
    folded = x
    if kmap.x_fold is not None:
        folded = first_rows(x, kmap.x_fold) if kmap.self_offset >= 0 else sum_rows(x, kmap.x_fold)
    grad = torch.is_grad_enabled() and (folded.requires_grad or weight.requires_grad)
    y = _apply(folded, weight, Epilogue(), plain, layout, groups, precision, dtype, grad)
    if kmap.y_fold is not None:
        y = copy_rows(y, kmap.y_fold)
    if kmap.self_offset >= 0:
        y = y + self_product(x.to(y.dtype), weight.to(y.dtype), layout, groups, kmap.self_offset)
    return epilogue.finish(y.clone())


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


def _check(
    x: torch.Tensor,
    weight: torch.Tensor,
    epilogue: Epilogue,
    kmap: KernelMap,
    layout: str,
    groups: int,
) -> WeightLayout:
    w = layout_of(weight, layout, groups)
    n_in = kmap.relation.n_rows[1 - kmap.side] if kmap.x_fold is None else kmap.n_in
    if x.shape[0] != n_in:
        raise ShapeError(
            f"features have {x.shape[0]} rows, but the kernel map was built for {n_in}; "
            "features and coordinates must be row-aligned."
        )
    if x.shape[1] != w.columns_in:
        raise ShapeError(
            f"features have {x.shape[1]} channels, the weight expects {w.columns_in} "
            f"({w.groups} group(s) of {w.c_in})."
        )
    if w.n_offsets != kmap.n_offsets:
        raise ShapeError(
            f"the weight has {w.n_offsets} taps, the kernel map {kmap.n_offsets} offsets."
        )
    if x.dtype not in _FLOATS:
        raise DataTypeError(
            f"features are {x.dtype}; expected one of fp16, bf16, fp32, fp64 (use .float())."
        )
    if x.dtype != weight.dtype:
        raise DataTypeError(
            f"features are {x.dtype} and the weight is {weight.dtype}; convert one, or use "
            "torch.autocast."
        )
    bias, norm = epilogue.bias, epilogue.norm
    if bias is not None and bias.shape != (w.columns_out,):
        raise ShapeError(f"bias has shape {list(bias.shape)}; expected [{w.columns_out}].")
    if bias is not None and bias.dtype not in _FLOATS:
        raise DataTypeError(f"bias is {bias.dtype}; expected one of fp16, bf16, fp32, fp64.")
    if norm is not None:
        _check_norm(norm, w, x.device)
    return w


def _check_norm(norm: Norm, w: WeightLayout, device: torch.device) -> None:
    for vector in norm[:4]:
        if vector is not None and (vector.shape != (w.columns_out,) or vector.device != device):
            raise ShapeError(
                f"a vector of the norm is {list(vector.shape)} on {vector.device}; expected "
                f"[{w.columns_out}] on {device}."
            )
    if (norm.weight is None) != (norm.bias is None):
        raise ShapeError("the norm has only one of weight and bias; give both or none.")


def check_activation(activation: str | None) -> None:
    """Raise UnsupportedError for an activation that cannot be fused."""
    if activation not in ACTIVATIONS:
        raise UnsupportedError(f"activation {activation!r}; expected one of {ACTIVATIONS}.")
