"""Gather-GEMM: y[r] = act(norm(sum_v x[nbr[v, r]] @ w[v] + bias) + residual[r]), both ways.

dgrad is that product over the transposed table, with the weight read through swapped strides.
Two forms of one kernel: *packed* walks the live offsets of mask-ordered tiles, *plain* walks every
offset of the table in row order. Under mask splits a packed launch makes S partial sums of each
row, one after another in memory: to the kernel those are S times as many rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..runtime.launch import register


@triton.jit
def _activate(value, alpha, ACT: tl.constexpr):
    if ACT == 1:
        value = tl.maximum(value, 0.0)
    if ACT == 2:
        value = tl.where(value >= 0, value, value * alpha)
    if ACT == 3:
        value = 1.0 / (1.0 + tl.exp(-value))
    return value


@triton.jit
def _added(value, residual_ptr, at, ok, held: tl.constexpr):
    """value + residual, rounded in between as results are held: so two operations would do it, and
    the sum takes place where results are written, in no more registers than those (measured: the
    order of these lines matters)."""
    rounded = value.to(held).to(tl.float32)
    residual = tl.load(residual_ptr + at, mask=ok, other=0.0)
    return rounded + residual.to(tl.float32)


@triton.jit
def _tail(
    bias_ptr, mean_ptr, var_ptr, gain_ptr, beta_ptr, eps, channel, ok, TAIL: tl.constexpr
):  # fmt: skip
    """(scale, shift) fp32 of the channels. TAIL adds 1: a bias, 2: a norm, 4: gain and beta of it,
    8: a residual, which is not a vector."""
    scale = tl.full(channel.shape, 1.0, tl.float32)
    shift = tl.zeros(channel.shape, tl.float32)
    if TAIL & 1:
        shift += tl.load(bias_ptr + channel, mask=ok, other=0.0).to(tl.float32)
    if TAIL & 2:
        var = tl.load(var_ptr + channel, mask=ok, other=1.0).to(tl.float32)
        scale = 1.0 / tl.sqrt(var + eps)
        if TAIL & 4:
            scale *= tl.load(gain_ptr + channel, mask=ok, other=0.0).to(tl.float32)
        shift -= tl.load(mean_ptr + channel, mask=ok, other=0.0).to(tl.float32)
        shift *= scale
        if TAIL & 4:
            shift += tl.load(beta_ptr + channel, mask=ok, other=0.0).to(tl.float32)
    return scale, shift


@triton.jit(do_not_specialize=["n_rows", "pitch", "n_offsets", "alpha", "eps"])
def _gather_gemm(
    x_ptr, w_ptr, bias_ptr, mean_ptr, var_ptr, gain_ptr, beta_ptr, residual_ptr, y_ptr, nbr_ptr,
    rows_ptr, live_ptr, n_live_ptr, n_rows, pitch, n_offsets, c_in, c_out, w_shift, alpha, eps,
    stride_xn, stride_yn, stride_wv, stride_wi, stride_wo, stride_wg, stride_ys,
    PACKED: tl.constexpr, TAIL: tl.constexpr, ACT: tl.constexpr, PRECISION: tl.constexpr,
    EVEN_K: tl.constexpr, ONE_K: tl.constexpr, WIDE: tl.constexpr, SPLIT_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """grid: (row tiles x column blocks, groups, SPLIT_K).

    x [N_in, groups * c_in] with row stride stride_xn and unit channel stride; w read at w_shift + v
    * stride_wv + i * stride_wi + o * stride_wo + group * stride_wg; y [n_rows, groups * c_out], or
    with SPLIT_K > 1 fp32 partial sums, stride_ys apart. nbr: [V, pitch]; packed: rows, live [T, V],
    n_live [T] as in `TileList`. bias, mean, var, gain, beta [groups * c_out] as TAIL says, residual
    like y.
    """
    n_blocks = tl.cdiv(c_out, BLOCK_N)
    # The last tiles of the mask order hold the rows with rare offsets and take longest: start with
    # them.
    n_tiles = tl.num_programs(0) // n_blocks
    tile = n_tiles - 1 - tl.program_id(0) // n_blocks
    column = (tl.program_id(0) % n_blocks) * BLOCK_N
    group = tl.program_id(1)
    place = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = column + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    mask_n = offs_n < c_out
    if PACKED:
        row = tl.load(rows_ptr + place)
        row_ok = row >= 0
        steps = tl.load(n_live_ptr + tile)
        live = live_ptr + tile.to(tl.int64) * n_offsets
    else:
        row = place
        row_ok = row < n_rows
        steps = n_offsets
    if WIDE:  # what is multiplied by a stride: a stride of 1 is a constexpr, which has no type
        row = row.to(tl.int64)
        pitch = pitch.to(tl.int64)
    x_base = x_ptr + group * c_in + offs_k[None, :]
    w_base = (
        w_ptr
        + w_shift
        + group * stride_wg
        + offs_k[:, None] * stride_wi
        + offs_n[None, :] * stride_wo
    )
    k_blocks = 1 if ONE_K else tl.cdiv(c_in, BLOCK_K)
    first = 0
    end = steps * k_blocks
    if SPLIT_K > 1:
        share = tl.cdiv(end, SPLIT_K)
        first = tl.program_id(2) * share
        end = tl.minimum(end, first + share)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float16 if PRECISION == "half" else tl.float32)
    for step in range(first, end):
        if ONE_K:
            index = step
            k = 0
        else:
            index = step // k_blocks
            k = (step - index * k_blocks) * BLOCK_K
        if PACKED:
            v = tl.load(live + index)
            source = tl.load(nbr_ptr + v * pitch + place)
        else:
            v = index
            source = tl.load(nbr_ptr + v * pitch + place, mask=row_ok, other=-1)
        if WIDE:
            v = v.to(tl.int64)
            offset = source.to(tl.int64)[:, None] * stride_xn + k
        else:
            offset = source[:, None] * stride_xn + k
        if EVEN_K:
            a = tl.load(x_base + offset, mask=(source >= 0)[:, None], other=0.0)
            b = tl.load(w_base + v * stride_wv + k * stride_wi, mask=mask_n[None, :], other=0.0)
        else:
            mask_k = offs_k < c_in - k
            a = tl.load(x_base + offset, mask=(source >= 0)[:, None] & mask_k[None, :], other=0.0)
            b = tl.load(
                w_base + v * stride_wv + k * stride_wi,
                mask=mask_k[:, None] & mask_n[None, :],
                other=0.0,
            )
        if PRECISION == "half":
            acc = tl.dot(a, b, acc, out_dtype=tl.float16)
        else:
            acc = tl.dot(a, b, acc, input_precision=PRECISION)
    acc = acc.to(tl.float32)
    if TAIL & 7:
        scale, shift = _tail(
            bias_ptr,
            mean_ptr,
            var_ptr,
            gain_ptr,
            beta_ptr,
            eps,
            group * c_out + offs_n,
            mask_n,
            TAIL,
        )
        acc = acc * scale[None, :] + shift[None, :]
    at = row[:, None] * stride_yn + (group * c_out + offs_n)[None, :]
    ok = row_ok[:, None] & mask_n[None, :]
    if TAIL & 8:
        acc = _added(acc, residual_ptr, at, ok, y_ptr.dtype.element_ty)
    acc = _activate(acc, alpha, ACT)
    out = y_ptr + at
    if SPLIT_K > 1:
        out += tl.program_id(2).to(tl.int64) * stride_ys
    tl.store(out, acc.to(y_ptr.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["n_values", "n_channels", "alpha", "eps"])
def _sum_partials(
    partial_ptr, bias_ptr, mean_ptr, var_ptr, gain_ptr, beta_ptr, residual_ptr, y_ptr, n_values,
    n_channels, alpha, eps,
    TAIL: tl.constexpr, ACT: tl.constexpr, SPLIT_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y = act(scale * (sum of SPLIT_K partial results, in order) + shift + residual)."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ok = place < n_values
    acc = tl.load(partial_ptr + place, mask=ok, other=0.0)
    for part in range(1, SPLIT_K):
        acc += tl.load(partial_ptr + part * n_values.to(tl.int64) + place, mask=ok, other=0.0)
    if TAIL & 7:
        scale, shift = _tail(
            bias_ptr, mean_ptr, var_ptr, gain_ptr, beta_ptr, eps, place % n_channels, ok, TAIL
        )
        acc = acc * scale + shift
    if TAIL & 8:
        acc = _added(acc, residual_ptr, place, ok, y_ptr.dtype.element_ty)
    tl.store(y_ptr + place, _activate(acc, alpha, ACT).to(y_ptr.dtype.element_ty), mask=ok)


gather_gemm_kernel = register(_gather_gemm)
sum_partials_kernel = register(_sum_partials)
