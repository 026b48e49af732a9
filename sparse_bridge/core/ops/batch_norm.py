"""Batch normalisation of features in training, and a ReLU behind it, with gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from ... import settings, state
from ...errors import DataTypeError
from ...hooks import BATCH_NORM, TORCHS_BATCH_NORM, TORCHS_RELU
from ...kernels.runtime.target import Target
from ...refusals import Refusal, Why
from ..device.device_support import kernel_target
from ..device.no_double_backward import direct_apply, no_double_backward, refuse_transforms, wrapped
from ..device.precision import KERNEL_DTYPES
from ..device.torch_compat import TENSOR_GUARDS, guards
from ..maps.rows import in_scope, rows_of

if TYPE_CHECKING:
    from ...kernels.ops.norm_spec import Gradients, NormSpec, Vectors

_MOST_ROWS = (1 << 31) - (1 << 20)  # kernels count rows in 32 bits, and a few more than there are
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class _Call(NamedTuple):
    """What needs no gradient.  moved: running mean and variance, and the number of batches."""

    spec: NormSpec
    moved: Vectors
    counter: torch.Tensor | None
    momentum: float
    eps: float
    relu: bool


@functools.cache
def passes() -> tuple[Callable[..., torch.Tensor], Callable[..., None]]:
    """The functions that launch the forward and the backward pass over x [N, C], fp16 / bf16 / fp32. The first one
    returns what the second needs, fp32."""
    from ...kernels.ops.batch_norm import batch_norm_forward
    from ...kernels.ops.batch_norm_grad import batch_norm_backward

    return batch_norm_forward, batch_norm_backward


class _BatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, call: _Call
    ) -> torch.Tensor:
        spec, moved, counter, momentum, eps, relu = call
        x = x.contiguous()
        y, vectors = torch.empty_like(x), (weight, bias, *moved)
        compile_together(spec, x, vectors)
        memory = passes()[0](spec, x, vectors, counter, y, momentum, eps, relu)
        ctx.save_for_backward(x, weight, bias, memory)
        ctx.call = spec, counter, relu
        return y

    @staticmethod
    @no_double_backward
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, bias, memory = ctx.saved_tensors
        spec, counter, relu = ctx.call
        grads = gradients_like(x, weight, bias)
        passes()[1](spec, x, dy.contiguous(), weight, bias, counter, memory, grads, relu)
        return *grads, None


run_directly = direct_apply(_BatchNorm)


def gradients_like(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> Gradients:
    """Memory for the gradients of x [N, C], weight and bias [C], each of its dtype; None for what there is not."""
    dw = None if weight is None else torch.empty_like(weight)
    return torch.empty_like(x), dw, None if bias is None else torch.empty_like(bias)


class _Form(NamedTuple):
    """How norms over features of one kind are computed.

    same: whether their five vectors are of the kinds that were looked at.  generation: of the
    settings then.
    """

    spec: NormSpec
    same: Callable[..., bool]
    generation: int


_forms: dict[Any, _Form] = {}  # by dtype, device and channels
_compiled: set[NormSpec] = set()


@state.owns
def reset() -> None:
    """Forget the kinds of layers that were met."""
    _forms.clear()
    _compiled.clear()


def compile_together(spec: NormSpec, x: torch.Tensor, vectors: Vectors) -> None:
    """At the first norm of its kind: have the kernels of both passes compiled side by side. Nothing is written.

    x: [N, C], fp16 / bf16 / fp32.  vectors: weight, bias, running mean and variance [C], and the int64 number of
    batches; None for what there is not.
    """
    if spec in _compiled or not spec.target.raw:
        return
    _compiled.add(spec)
    if not settings.get().warmup:
        return
    from ...kernels.runtime.precompile import dry_run

    with dry_run():  # nothing is written
        _launch_all(spec, x, vectors)


def _launch_all(spec: NormSpec, x: torch.Tensor, vectors: Vectors) -> None:
    forward, backward = passes()
    memory = forward(spec, x, vectors, None, x, 0.1, 1e-5, False)
    weight, bias = vectors[:2]
    backward(spec, x, x, weight, bias, None, memory, (x, weight, bias), False)


def launch_both(x: torch.Tensor, vectors: Vectors, target: Target) -> None:
    """Launch what both passes over features like x [N, C], fp16 / bf16 / fp32, would; for `precompile.dry_run`.
    vectors: as in `compile_together`."""
    from ...kernels.ops.norm_spec import spec_of

    _launch_all(spec_of(x, vectors, target), x, vectors)


def _form_of(x: torch.Tensor, vectors: Vectors) -> _Form | None:
    """Found out anew; None where kernels do not serve. Kept where all vectors are there, as
    comparing them at once takes a tenth of the time."""
    target = serves(x)
    weight, bias, mean, var, batches = vectors
    if (
        target is None
        or not fits(x, weight, bias, True)
        or not fits(x, mean, var, False)
        or not (batches is None or _counts(x, batches))
    ):
        return None
    from ...kernels.ops.norm_spec import spec_of

    form = _Form(spec_of(x, vectors, target), _never, settings.generation)
    present = [vector for vector in vectors if vector is not None]
    if TENSOR_GUARDS is not None and target.raw and len(present) == len(vectors):
        form = _forms[x.dtype, x.device, x.shape[1]] = form._replace(same=guards(*present))
    return form


def _never(*vectors: torch.Tensor | None) -> bool:
    return False


def serves(x: torch.Tensor) -> Target | None:
    """The target whose kernels normalise features [N, C] like these, fp16 / bf16 / fp32, or None where torch does:
    other dtypes, no channels, more than 2^31 - 2^20 rows, bf16 on GPUs without it."""
    target = kernel_target(x.device)
    if target is None or x.dtype not in KERNEL_DTYPES or x.ndim != 2:
        return None
    if x.shape[0] > _MOST_ROWS or x.shape[1] == 0:
        return None
    return None if x.dtype is torch.bfloat16 and not target.has_bf16 else target


def fits(x: torch.Tensor, a: torch.Tensor | None, b: torch.Tensor | None, alone: bool) -> bool:
    """Whether kernels take this pair of vectors: [C] of x [N, C], both fp32 or both of x's dtype, contiguous, on x's
    device; or None.  alone: one may be there without the other."""
    if a is None or b is None:
        either = a if b is None else b
        return either is None or (alone and fits(x, either, either, True))
    return (
        type(a) in _PLAIN
        and type(b) in _PLAIN
        and (a.dtype is torch.float32 or a.dtype is x.dtype)
        and a.dtype is b.dtype
        and a.shape == b.shape == x.shape[1:]
        and a.device == b.device == x.device
        and a.is_contiguous()
        and b.is_contiguous()
    )


def _counts(x: torch.Tensor, batches: torch.Tensor) -> bool:
    """Whether kernels take this number of batches."""
    return (
        type(batches) is torch.Tensor
        and batches.dtype is torch.int64
        and batches.device == x.device
        and batches.numel() == 1
    )


def batch_norm(
    x: torch.Tensor,
    vectors: Vectors,
    *,
    momentum: float,
    eps: float,
    relu: bool = False,
    count: torch.Tensor | None = None,
) -> torch.Tensor:
    """Normalise every channel by its mean and variance over the rows: [N, C] in x's dtype.

    Args:
        x: [N, C], fp16 / bf16 / fp32 / fp64.
        vectors: weight, bias, running mean, running variance and number of batches, each or None.
            Weight and bias: [C], in x's dtype or fp32, and so are their gradients. Running mean and
            variance: [C]; moved by `momentum` towards the mean and the unbiased variance, in place.
            Number of batches: int64 scalar; counted up by one with them.
        momentum, eps: as torch's.
        relu: apply a ReLU to the result.
        count: int32 [1] on x's device, one less than the rows that there are, or None for as many as
            `rows_of` says: all of x, but in a padded input. Rows behind are not read; they are 0 in
            the result and in x's gradient. With fewer than two rows the running statistics stay as
            they are. Where kernels serve x, the host never waits for it.

    Raises: DataTypeError for a `count` of another kind; ValueError, as torch does, for a single row
        (without `count`) or an eps that is not positive; whatever torch raises for tensors that do
        not fit together; UnsupportedError, where kernels serve, in transforms of torch.func.
    """
    if count is None and in_scope():
        count = rows_of(x).device
    if count is not None and (count.dtype is not torch.int32 or count.device != x.device):
        raise DataTypeError(f"count is {count.dtype} on {count.device}; expected int32 on {x.device}, as maps have.")
    form, shape = None, x.shape
    if not (
        eps <= 0
        or (shape[0] < 2 and count is None)
        or (x.is_inference() and torch.is_grad_enabled())  # functions would save it, torch does not
    ):
        form = _forms.get((x.dtype, x.device, shape[-1] if len(shape) == 2 else None))
        if form is None or form.generation != settings.generation or shape[0] > _MOST_ROWS or not form.same(*vectors):
            form = _form_of(x, vectors)
    if form is None:
        return _in_torch(x, vectors, momentum, eps, relu, count)
    refuse_transforms()
    weight, bias, *_, batches = vectors
    if batches is not None:
        torch.autograd.graph.increment_version(batches)  # as its add_ would; the others' are kept
    call = _Call(form.spec, vectors[2:], count, momentum, eps, relu)
    apply = _BatchNorm.apply if wrapped(x) else run_directly
    result: torch.Tensor = apply(x, weight, bias, call)
    return result


def batch_norm_training(norm: nn.BatchNorm1d, x: torch.Tensor, relu: bool) -> torch.Tensor:
    """What a BatchNorm1d in training makes of x [N, C], fp16 / bf16 / fp32 / fp64, and with `relu` a ReLU of that:
    [N, C] in x's dtype. The norm's running statistics move, by torch's rule. Raises: what `batch_norm` does; Refusal in
    a capture, where they are averages over all batches."""
    parameters: dict[str, Any] = norm._parameters
    buffers: dict[str, Any] = norm._buffers
    mean = var = batches = None
    momentum = norm.momentum
    if norm.track_running_stats:
        mean, var = buffers["running_mean"], buffers["running_var"]
        batches = buffers["num_batches_tracked"]
        if momentum is None and batches is not None:  # the average over all batches
            if in_scope():
                raise Refusal(Why.GRAPH_MOMENTUM)
            batches.add_(1)
            momentum, batches = 1.0 / float(batches), None
    return batch_norm(
        x,
        (parameters["weight"], parameters["bias"], mean, var, batches),
        momentum=0.0 if momentum is None else momentum,
        eps=norm.eps,
        relu=relu,
    )


def _in_torch(
    x: torch.Tensor, vectors: Vectors, momentum: float, eps: float, relu: bool, count: torch.Tensor | None
) -> torch.Tensor:
    """`batch_norm` in plain torch."""
    weight, bias, running_mean, running_var, batches = vectors
    missing = 0
    if count is not None:
        n_rows = min(max(int(count) + 1, 0), x.shape[0])
        x, missing = x[:n_rows], x.shape[0] - n_rows
        if n_rows < 2:
            running_mean = running_var = batches = None
    if batches is not None:
        batches.add_(1)
    if count is None:
        y = BATCH_NORM(x, running_mean, running_var, weight, bias, True, momentum, eps)
    elif x.shape[0]:
        y = TORCHS_BATCH_NORM(  # which, other than F's, takes a single row
            x, weight, bias, running_mean, running_var, True, momentum, eps, False
        )
    else:
        y = x
    y = TORCHS_RELU(y) if relu else y
    return torch.cat([y, y.new_zeros((missing, *y.shape[1:]))]) if missing else y
