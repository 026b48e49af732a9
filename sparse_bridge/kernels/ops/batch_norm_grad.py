"""The gradient of `batch_norm`, cut into rows and parts as there; its sums take the parts' place in
memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..maps.coord_key import live_rows
from ..runtime.launch import register
from .batch_norm import OPTIONS, affine, normal, saved, span, store_zeros, unread
from .norm_spec import PARTS, Gradients, NormSpec, cut_of


@triton.jit(
    do_not_specialize=["gain_ptr", "beta_ptr", "count_ptr", "n_rows", "counted", "has_gain", "has_beta", "relu"]
)
def _batch_norm_grad_partials(
    x_ptr,
    dy_ptr,
    gain_ptr,
    beta_ptr,
    count_ptr,
    memory_ptr,
    n_rows,
    n_channels,
    counted,
    has_gain,
    has_beta,
    relu,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Sums over a part: of dy behind the ReLU, and of its product with x normalised."""
    lane = tl.arange(0, ROWS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    ok_c = channel < n_channels
    live = live_rows(count_ptr, n_rows, counted)
    mean, invstd = saved(memory_ptr, channel, ok_c, n_channels)
    gain, beta = affine(gain_ptr, beta_ptr, channel, n_channels, has_gain, has_beta)
    begin, end = span(live, ROWS)
    shift = begin.to(tl.int64) * n_channels
    offs = lane[:, None] * n_channels + channel[None, :]
    total = tl.zeros((ROWS, CHANNELS), tl.float32)
    product = tl.zeros((ROWS, CHANNELS), tl.float32)
    for start in range(begin, end, ROWS):
        ok = (start + lane < end)[:, None] & ok_c[None, :]
        xhat, _, cut = normal(x_ptr + shift, offs, ok, mean, invstd, gain, beta, relu, ROWS, CHANNELS)
        dy = tl.load(dy_ptr + shift + offs, mask=ok, other=0.0).to(tl.float32)
        dy = tl.where(cut, 0.0, dy)
        total += dy
        product += dy * xhat
        shift += ROWS * n_channels
    out_ptr = memory_ptr + (2 + 2 * tl.program_id(0)) * n_channels + channel
    tl.store(out_ptr, tl.sum(total, 0), mask=ok_c)
    tl.store(out_ptr + n_channels, tl.sum(product, 0), mask=ok_c)


@triton.jit(
    do_not_specialize=[
        "gain_ptr",
        "beta_ptr",
        "dgain_ptr",
        "dbeta_ptr",
        "count_ptr",
        "n_rows",
        "n_parts",
        "counted",
        "has_gain",
        "has_beta",
        "relu",
    ]
)
def _batch_norm_dx(
    x_ptr,
    dy_ptr,
    dx_ptr,
    gain_ptr,
    beta_ptr,
    dgain_ptr,
    dbeta_ptr,
    count_ptr,
    memory_ptr,
    n_rows,
    n_channels,
    n_parts,
    counted,
    has_gain,
    has_beta,
    relu,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """dx, and once: the gradients of weight and bias. Rows that are not there become 0."""
    lane = tl.arange(0, ROWS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    ok_c = channel < n_channels
    live = live_rows(count_ptr, n_rows, counted)
    part = tl.arange(0, PARTS)
    sums_ptr = memory_ptr + (2 + 2 * part)[:, None] * n_channels + channel[None, :]
    ok_p = (part < n_parts)[:, None] & ok_c[None, :]
    total = tl.sum(tl.load(sums_ptr, mask=ok_p, other=0.0), 0)
    product = tl.sum(tl.load(sums_ptr + n_channels, mask=ok_p, other=0.0), 0)
    if tl.program_id(0) == 0:
        stored = channel < n_channels * has_gain
        tl.store(dgain_ptr + channel, product.to(dgain_ptr.dtype.element_ty), mask=stored)
        stored = channel < n_channels * has_beta
        tl.store(dbeta_ptr + channel, total.to(dbeta_ptr.dtype.element_ty), mask=stored)
    mean, invstd = saved(memory_ptr, channel, ok_c, n_channels)
    gain, beta = affine(gain_ptr, beta_ptr, channel, n_channels, has_gain, has_beta)
    rows = tl.maximum(live, 1).to(tl.float32)
    total, product, scale = total / rows, product / rows, gain * invstd
    begin, end = span(live, ROWS)
    shift = begin.to(tl.int64) * n_channels
    offs = lane[:, None] * n_channels + channel[None, :]
    for start in range(begin, end, ROWS):
        ok = (start + lane < end)[:, None] & ok_c[None, :]
        xhat, _, cut = normal(x_ptr + shift, offs, ok, mean, invstd, gain, beta, relu, ROWS, CHANNELS)
        dy = tl.load(dy_ptr + shift + offs, mask=ok, other=0.0).to(tl.float32)
        dy = tl.where(cut, 0.0, dy)
        dx = (dy - total[None, :] - xhat * product[None, :]) * scale[None, :]
        tl.store(dx_ptr + shift + offs, dx.to(dx_ptr.dtype.element_ty), mask=ok)
        shift += ROWS * n_channels
    store_zeros(dx_ptr, live, n_rows, n_channels, offs, ok_c, ROWS, CHANNELS)


grad_partials_kernel = register(_batch_norm_grad_partials)
dx_kernel = register(_batch_norm_dx)


def batch_norm_backward(
    spec: NormSpec,
    x: torch.Tensor,
    dy: torch.Tensor,
    gain: torch.Tensor | None,
    beta: torch.Tensor | None,
    count: torch.Tensor | None,
    memory: torch.Tensor,
    grads: Gradients,
    relu: bool,
) -> None:
    """Write `grads`: dx [N, C], and those of gain and beta [C], where there are such.

    x, dy, dx: contiguous, of one dtype: fp16, bf16 or fp32.  gain, beta: [C], in x's dtype or fp32, their gradients
    alike.  count: int32 [1], one less than the rows that there are; None: all are.  memory: fp32, from
    `batch_norm_forward`; its sums are overwritten.  relu: a ReLU followed the norm.
    """
    dx, dgain, dbeta = grads
    n_rows, n_channels = x.shape
    aligned = (x.data_ptr() % 16 == 0, dy.data_ptr() % 16 == 0)
    parts, programs, blocks, tile = cut_of(n_rows, n_channels, all(aligned), spec.units)
    parts = min(parts, memory.numel() // (2 * n_channels) - 1)  # x alone may have had larger steps
    counted, rows = (0, unread(spec.device)) if count is None else (1, count)
    w, b = memory if gain is None else gain, memory if beta is None else beta
    dw = (memory if dbeta is None else dbeta) if dgain is None else dgain
    db = dw if dbeta is None else dbeta  # unread, and of the same dtype
    flags = (counted, *spec.present[:2], int(relu))
    device, target, key = spec.device, spec.target, (spec.grads_key, tile, aligned)
    grad_partials_kernel.launch_plain(
        device,
        target,
        (parts, blocks, 1),
        (x, dy, w, b, rows, memory),
        (n_rows, n_channels, *flags),
        tile,
        OPTIONS,
        key,
    )
    dx_kernel.launch_plain(
        device,
        target,
        (programs, blocks, 1),
        (x, dy, dx, w, b, dw, db, rows, memory),
        (n_rows, n_channels, parts, *flags),
        (PARTS, *tile),
        OPTIONS,
        key,
    )
