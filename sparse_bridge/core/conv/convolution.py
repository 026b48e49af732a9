"""Sparse convolution with gradients, on plain tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

from ... import memory
from ...errors import UnsupportedError
from ..arguments import expect_tensors
from ..device import memory_use
from ..device.column_sums import column_sums
from ..device.no_double_backward import direct_apply, no_double_backward, refuse_transforms, tracing, wrapped
from ..device.torch_compat import eagerly
from ..geometry.weights import layout_of
from ..maps.kernel_map import KernelMap
from .checks import check, check_devices, check_operands, like_result
from .epilogue import Epilogue, Norm, check_activation
from .history import histories
from .plan import ConvForm, GradientRequest, backward, run

_transforms = torch._C._functorch.peek_interpreter_stack
_modes = torch._C._len_torch_dispatch_stack
Operator = Callable[[torch.Tensor, torch.Tensor, KernelMap, Epilogue, ConvForm], torch.Tensor]
as_operator: Operator | None = None  # once `sparse_bridge.compile` has registered operators
# What serves a layer of which it may be known what follows, once `layers` is imported.
convolve_deferred: Callable[..., Any] | None = None
# Values of a layer's result, on a CPU and on a GPU, from which on it pays to defer it. On a GPU it
# always does: a U-Net over 15k to 88k voxels takes an H200 3.3 ms instead of 3.8, and its host 0
# to 10 % less.
MIN_DEFERRED_ELEMENTS = [1 << 16, 0]
_any_autocast = torch._C._is_any_autocast_enabled
_form = functools.lru_cache(maxsize=256)(ConvForm)  # every call of `conv` names one


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype autocast asks for on `device` now, or None outside autocast."""
    device_type = device.type
    if torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return None


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if tensor.dtype in (dtype, torch.float64):
        return tensor
    if memory.limit is not None:
        copy = tensor.numel() * dtype.itemsize
        memory_use.need(tensor.device, copy, f"{list(tensor.shape)} in autocast's {dtype}", tensor)
    return tensor.to(dtype)


def autocast_operands(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [N, C_in] and the weight (any shape), both in the dtype that autocast asks for on x's device now, if it
    does; fp64 is left alone. Raises: MemoryLimitError where a copy does not fit under the limit in force."""
    dtype = autocast_dtype(x.device)
    return (x, weight) if dtype is None else (_cast(x, dtype), _cast(weight, dtype))


class _Conv(torch.autograd.Function):
    """y = conv(x, weight, bias). Casts happen inside, so that gradients reach the parameters in
    their own dtype."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        kmap: KernelMap,
        form: ConvForm,
        dtype: torch.dtype | None,
    ) -> torch.Tensor:
        x_cast, weight_cast = x, weight
        if dtype is not None:
            x_cast, weight_cast = _cast(x, dtype), _cast(weight, dtype)
        kmap.rulebook.trained = True
        y, plan = run(x_cast, weight_cast, kmap, Epilogue(bias), form)
        ctx.save_for_backward(x_cast, weight_cast)
        ctx.problem = kmap, plan, weight.dtype, None if bias is None else bias.dtype
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():  # the graph of this pass is wanted: it can be built, not used
            once: tuple[torch.Tensor | None, ...] = _backward_once(ctx, dy)
            return once
        return _backward(ctx, dy)


def _backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    kmap, plan, weight_dtype, bias_dtype = ctx.problem
    wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
    if dy.dtype != x.dtype:
        dy = dy.to(x.dtype)
    if not dy.is_contiguous():
        dy = dy.contiguous()
    dx = dw = db = None
    if wants_x or wants_weight:
        request = GradientRequest(wants_x, weight_dtype if wants_weight else None)
        dx, dw = backward(plan, kmap, x, weight, dy, request)
    if wants_bias:
        db = column_sums(dy, bias_dtype, plan.product.target, kmap.rulebook.rows[int(kmap.flipped)].device)
    return dx, dw, db, None, None, None


_backward_once, _apply = no_double_backward(_backward), direct_apply(_Conv)


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
    fp16_accumulation: bool = False,
) -> torch.Tensor:
    """Convolve the rows of `x` along a kernel map.

    Args:
        x: [N_in, C_in], fp16 / bf16 / fp32 / fp64.
        weight: matrix v belongs to offset v of the map; layout "vio" [V, C_in / groups, C_out], any
            strides, never copied, or "ovi" [C_out, *kernel, C_in / groups].
        bias: [C_out] or None.
        kmap: from `map_builder`; its N_in must be x's rows.
        activation: None, "relu", "leaky_relu" (slope `alpha`) or "sigmoid"; only without gradients.
        norm: a normalisation by fixed statistics behind the bias; only without gradients.
        residual: [N_out, C_out] of the result's dtype (under autocast of any float dtype), added
            before the activation; only without gradients.
        allow_tf32: fp32 products may round their inputs to TF32 (IEEE otherwise).
        fp16_accumulation: sums of fp16 products may run in fp16, which consumer GPUs of NVIDIA do
            at twice the rate; less exact, and sums beyond 65504 become infinite. wgrad is left out.

    Returns: [N_out, C_out] in x's dtype; under autocast in the autocast dtype (fp64 is left alone).
    Raises: ShapeError, DataTypeError, DeviceError, UnsupportedError.
    """
    operands = isinstance(x, torch.Tensor) and isinstance(weight, torch.Tensor) and isinstance(kmap, KernelMap)
    if not operands or not (norm is None or isinstance(norm, Norm)):
        check_operands(kmap, norm, x=x, weight=weight)
    for name, value in (("bias", bias), ("residual", residual)):
        if value is not None and not isinstance(value, torch.Tensor):
            expect_tensors("conv", **{name: value})
    half = fp16_accumulation and torch.float16 in (x.dtype, autocast_dtype(x.device))
    form = _form(layout, groups, "half" if half else "tf32" if allow_tf32 else "ieee")
    return convolve(x, weight, kmap, Epilogue(bias, activation, alpha, norm, residual), form)


@eagerly
def convolve(
    x: torch.Tensor, weight: torch.Tensor, kmap: KernelMap, epilogue: Epilogue, form: ConvForm
) -> torch.Tensor:
    """`conv`, of value objects that a layer makes once: x [N_in, C_in] to [N_out, C_out].

    Dtypes are those of `conv`: fp16 / bf16 / fp32 / fp64, of the weight, too, unless autocast is on.
    Raises: what `conv` does. UnsupportedError is for transforms of torch.func, forward mode, `torch.jit.trace`, an
        activation that cannot be fused, and gradients through a fused activation, norm or residual.
    """
    bias, residual = epilogue.bias, epilogue.residual
    wants_grad = torch.is_grad_enabled() and (
        x.requires_grad
        or weight.requires_grad
        or (bias is not None and bias.requires_grad)
        or (residual is not None and residual.requires_grad)
    )
    if forward_ad._current_level >= 0 or _transforms() or tracing():
        refuse_transforms()
    if wants_grad or _any_autocast() or kmap.x_fold is not None or kmap.y_fold is not None:
        return _convolve(x, weight, kmap, epilogue, form, wants_grad)
    return run(x, weight, kmap, epilogue, form)[0]


def transformed() -> bool:
    """Whether forward-mode gradients or transforms of functions are at work."""
    return forward_ad._current_level >= 0 or bool(_transforms())


@eagerly
def convolve_layer(
    owner: Any, x: torch.Tensor, weight: torch.Tensor, kmap: KernelMap, epilogue: Epilogue, form: ConvForm
) -> Any:
    """`convolve`, or a `deferred.conv.DeferredConv`, for callers whose convolutions can be deferred; to be had from
    `layers`, which knows what followed.

    owner: the layer, or its weight, whose earlier results tell what follows.
    Returns a tensor [N_out, C_out] in the dtype of `convolve`, or what stands for it.
    Raises: what `conv` does, at the call or when the result is read.
    """
    if (
        convolve_deferred is None
        or torch.is_grad_enabled()
        or torch.is_inference_mode_enabled()  # where nobody counts changes
        or (
            epilogue[1] is None
            and (entry := histories.get(id(owner))) is not None
            and entry[1].disabled
            and entry[0]() is owner
        )
    ):
        return convolve(x, weight, kmap, epilogue, form)
    return convolve_deferred(owner, x, weight, kmap, epilogue, form)


def _convolve(
    x: torch.Tensor, weight: torch.Tensor, kmap: KernelMap, epilogue: Epilogue, form: ConvForm, wants_grad: bool
) -> torch.Tensor:
    dtype = autocast_dtype(x.device) if _any_autocast() else None
    if wants_grad:
        _check_gradients(x, weight, kmap, epilogue)
        if kmap.x_fold is None and kmap.y_fold is None:
            if _modes() and as_operator is not None and _selects():
                return as_operator(x, weight, kmap, epilogue, form)
            apply = _Conv.apply if wrapped(x) or wrapped(weight) else _apply
            y: torch.Tensor = apply(x, weight, epilogue.bias, kmap, form, dtype)
            return y
    if dtype is not None and epilogue.residual is not None:
        epilogue = epilogue._replace(residual=_cast(epilogue.residual, dtype))
    if kmap.x_fold is not None or kmap.y_fold is not None:
        return _folded(x, weight, kmap, epilogue, form, dtype)
    return _inference(x, weight, kmap, epilogue, form, dtype)


def _selects() -> bool:
    """Whether a selective checkpoint keeps results by the operators that made them."""
    modes = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    return any(type(mode).__module__ == "torch.utils.checkpoint" for mode in modes)


def _inference(
    x: torch.Tensor,
    weight: torch.Tensor,
    kmap: KernelMap,
    epilogue: Epilogue,
    form: ConvForm,
    dtype: torch.dtype | None,
) -> torch.Tensor:
    if dtype is not None:
        x, weight = _cast(x, dtype), _cast(weight, dtype)
    return run(x, weight, kmap, epilogue, form)[0]


def _check_gradients(x: torch.Tensor, weight: torch.Tensor, kmap: KernelMap, epilogue: Epilogue) -> None:
    """UnsupportedError for an epilogue that has none, and under a limit on memory."""
    if memory.limit is not None:
        memory_use.refuse_gradients()
    fused = epilogue.activation or epilogue.norm or epilogue.residual
    if fused is None:
        return
    check_devices(x, weight, epilogue.bias, kmap)
    check_activation(epilogue.activation)
    raise UnsupportedError(
        f"a fused {epilogue.fused()} has no gradient; apply it after the convolution, or run under torch.no_grad()."
    )


def _folded(
    x: torch.Tensor,
    weight: torch.Tensor,
    kmap: KernelMap,
    epilogue: Epilogue,
    form: ConvForm,
    dtype: torch.dtype | None,
) -> torch.Tensor:
    """Equal coordinates: sum x rows, convolve the distinct ones, copy y rows. Gradients follow by
    composition."""
    from ..maps.fold import copy_rows, sum_rows

    check_devices(x, weight, epilogue.bias, kmap)
    check_activation(epilogue.activation)
    if kmap.n_in != x.shape[0]:
        check(x, weight, epilogue, kmap, layout_of(weight, form.layout, form.groups))
    plain, folded = KernelMap(kmap.rulebook, kmap.flipped), x
    if kmap.x_fold is not None:
        folded = sum_rows(x, kmap.x_fold)
    if torch.is_grad_enabled() and (folded.requires_grad or weight.requires_grad):
        y: torch.Tensor = _Conv.apply(folded, weight, None, plain, form, dtype)
    else:
        y = _inference(folded, weight, plain, Epilogue(), form, dtype)
    if kmap.y_fold is not None:
        y = copy_rows(y, kmap.y_fold)
    if epilogue.residual is not None:
        like_result(epilogue.residual, (y.shape[0], y.shape[1]), y.dtype, y.device)
    return epilogue.finish(y.clone(), y.dtype)
