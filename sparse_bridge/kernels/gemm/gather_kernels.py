"""Gather-GEMM: y[r] = act(norm(sum_v x[nbr[v, r]] @ w[v] + bias) + residual[r]), both ways.

dgrad is that product over the transposed table, with the weight read through swapped strides.
Two forms of one kernel: *packed* walks the live offsets of mask-ordered tiles, *plain* walks every
offset of the table in row order. Under mask splits a packed launch makes S partial sums of each
row, one after another in memory: to the kernel those are S times as many rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..maps.coord_key import live_rows
from ..runtime.launch import register
from ..tiles import activations, epilogue_bits

# On the left of what they are combined with, since in the interpreter that is a plain number.
BIAS = tl.constexpr(epilogue_bits.BIAS)
NORM = tl.constexpr(epilogue_bits.NORM)
AFFINE = tl.constexpr(epilogue_bits.AFFINE)
RESIDUAL = tl.constexpr(epilogue_bits.RESIDUAL)
RELU = tl.constexpr(activations.RELU)
LEAKY_RELU = tl.constexpr(activations.LEAKY_RELU)


@triton.jit
def rows_in_use(count_ptr, n_rows):
    """Rows of a plain table: `n_rows`, or where that is negative as many of its columns as a counter
    says, which started at -1."""
    return live_rows(count_ptr, tl.abs(n_rows), (n_rows < 0).to(tl.int32))


@triton.jit
def _rounded(value, DTYPE: tl.constexpr):
    """fp32 values as a result of `DTYPE` holds them."""
    return value.to(DTYPE).to(tl.float32)


@triton.jit
def _normed(value, mean_ptr, var_ptr, gain_ptr, beta_ptr, eps, channel, ok, AFFINE: tl.constexpr):
    """A normalisation by fixed statistics, in the operations and the order of torch's own kernel:
    fma(gain * (x - mean), rsqrt(var + eps), beta). channel, ok: of every value."""
    mean = tl.load(mean_ptr + channel, mask=ok, other=0.0).to(tl.float32)
    var = tl.load(var_ptr + channel, mask=ok, other=1.0).to(tl.float32)
    value = value - mean
    scale = tl.rsqrt(var + eps)
    if AFFINE:
        gain = tl.load(gain_ptr + channel, mask=ok, other=0.0).to(tl.float32)
        beta = tl.load(beta_ptr + channel, mask=ok, other=0.0).to(tl.float32)
        scale, beta = tl.broadcast_to(scale, value.shape), tl.broadcast_to(beta, value.shape)
        value = tl.fma(gain * value, scale, beta)
    else:
        value = value * scale
    return value


@triton.jit
def _activated(value, alpha, ACT: tl.constexpr, DTYPE: tl.constexpr):
    """Behind an activation, in fp32. ACT: a number of `tiles/activations.py`, or 0."""
    if RELU == ACT:
        value = tl.where(value <= 0, 0.0, value)  # a NaN stays
    if LEAKY_RELU == ACT:
        value = _rounded(value, DTYPE)
        value = tl.where(value > 0, value, value * alpha)
    return value


@triton.jit
def _finished(
    acc,
    bias_ptr,
    mean_ptr,
    var_ptr,
    gain_ptr,
    beta_ptr,
    residual_ptr,
    alpha,
    eps,
    channel,
    ok_c,
    at,
    ok,
    EPILOGUE: tl.constexpr,
    ACT: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """What follows the sums, in fp32; rounded to `DTYPE` wherever separate operations would round,
    so that the result has their bits.

    EPILOGUE: bits, see `EpilogueForm`. ACT: see `_activated`.
    channel, ok_c: the channels, of a shape that broadcasts to that of acc. at, ok: places of the
    results, which are those of the residual.
    """
    if BIAS & EPILOGUE:
        acc += tl.load(bias_ptr + channel, mask=ok_c, other=0.0).to(tl.float32)
    elif (NORM | RESIDUAL) & EPILOGUE == NORM | RESIDUAL:
        # Sums are never -0, so this changes nothing. Where accumulators go straight to a rounding
        # and, past a norm, to another layout, ptxas runs all of wgmma in turns (C7514, Triton 3.6
        # and 3.9): a residual U-Net took a sixth longer.
        acc += 0.0
    if NORM & EPILOGUE:
        acc = _normed(
            _rounded(acc, DTYPE), mean_ptr, var_ptr, gain_ptr, beta_ptr, eps, channel, ok_c, (AFFINE & EPILOGUE) != 0
        )
    if RESIDUAL & EPILOGUE:
        acc = _rounded(acc, DTYPE)
        residual = tl.load(residual_ptr + at, mask=ok, other=0.0)
        acc = acc + residual.to(tl.float32)
    return _activated(acc, alpha, ACT, DTYPE)


@triton.jit(do_not_specialize=["n_live_ptr", "n_rows", "pitch", "n_offsets", "alpha", "eps"])
def _gather_gemm(
    x_ptr,
    w_ptr,
    bias_ptr,
    mean_ptr,
    var_ptr,
    gain_ptr,
    beta_ptr,
    residual_ptr,
    y_ptr,
    nbr_ptr,
    rows_ptr,
    live_ptr,
    n_live_ptr,
    n_rows,
    pitch,
    n_offsets,
    c_in,
    c_out,
    w_shift,
    alpha,
    eps,
    stride_xn,
    stride_yn,
    stride_wv,
    stride_wi,
    stride_wo,
    stride_wg,
    PACKED: tl.constexpr,
    EPILOGUE: tl.constexpr,
    ACT: tl.constexpr,
    PRECISION: tl.constexpr,
    EVEN_K: tl.constexpr,
    ONE_K: tl.constexpr,
    WIDE: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """grid: (row tiles x column blocks, groups).

    x [N_in, groups * c_in] with row stride stride_xn and unit channel stride; w read at w_shift + v
    * stride_wv + i * stride_wi + o * stride_wo + group * stride_wg; y [n_rows, groups * c_out].
    nbr: [V, pitch]; packed: rows, live [T, V], n_live [T] as in `TileList`, each list for SHARED
    programs of BLOCK_M rows; plain: n_rows is negative where n_live_ptr counts the rows in use, see
    `rows_in_use`. Nothing is stored for others. bias, mean, var, gain, beta [groups * c_out] as EPILOGUE says,
    residual like y.

    A row's sum runs over its offsets in their order, each one's channels in theirs; an absent
    offset adds exactly nothing. So its bits do not depend on the tile it is in.
    """
    n_blocks = tl.cdiv(c_out, BLOCK_N)
    # The last tiles of the mask order hold the rows with rare offsets and take longest: start with
    # them.
    n_tiles = tl.num_programs(0) // n_blocks
    tile = n_tiles - 1 - tl.program_id(0) // n_blocks
    column = (tl.program_id(0) % n_blocks) * BLOCK_N
    group = tl.program_id(1)
    offs_m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = column + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    mask_n = offs_n < c_out
    if PACKED:
        row = tl.load(rows_ptr + offs_m)
        row_ok = row >= 0
        steps = tl.load(n_live_ptr + tile // SHARED)
        live = live_ptr + (tile // SHARED).to(tl.int64) * n_offsets
    else:
        row = offs_m
        n_used = rows_in_use(n_live_ptr, n_rows)
        row_ok = row < n_used
        # Tiles of no rows make no steps, and store nothing. (Leaving here takes registers: 48 became 64.)
        steps = tl.where(tile * BLOCK_M < n_used, n_offsets, 0)
    if WIDE:  # what is multiplied by a stride: a stride of 1 is a constexpr, which has no type
        row = row.to(tl.int64)
        pitch = pitch.to(tl.int64)
    x_base = x_ptr + group * c_in + offs_k[None, :]
    w_base = w_ptr + w_shift + group * stride_wg + offs_k[:, None] * stride_wi + offs_n[None, :] * stride_wo
    k_blocks = 1 if ONE_K else tl.cdiv(c_in, BLOCK_K)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float16 if PRECISION == "half" else tl.float32)
    for step in range(steps * k_blocks):
        if ONE_K:
            index = step
            k = 0
        else:
            index = step // k_blocks
            k = (step - index * k_blocks) * BLOCK_K
        if PACKED:
            v = tl.load(live + index)
            source = tl.load(nbr_ptr + v * pitch + offs_m)
        else:
            v = index
            source = tl.load(nbr_ptr + v * pitch + offs_m, mask=row_ok, other=-1)
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
            b = tl.load(w_base + v * stride_wv + k * stride_wi, mask=mask_k[:, None] & mask_n[None, :], other=0.0)
        if PRECISION == "half":
            acc = tl.dot(a, b, acc, out_dtype=tl.float16)
        else:
            acc = tl.dot(a, b, acc, input_precision=PRECISION)
    channel = (group * c_out + offs_n)[None, :]
    at = row[:, None] * stride_yn + channel
    ok = row_ok[:, None] & mask_n[None, :]
    acc = _finished(
        acc.to(tl.float32),
        bias_ptr,
        mean_ptr,
        var_ptr,
        gain_ptr,
        beta_ptr,
        residual_ptr,
        alpha,
        eps,
        channel,
        mask_n[None, :],
        at,
        ok,
        EPILOGUE,
        ACT,
        y_ptr.dtype.element_ty,
    )
    tl.store(y_ptr + at, acc.to(y_ptr.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["n_values", "n_channels", "alpha", "eps"])
def _sum_partials(
    partial_ptr,
    bias_ptr,
    mean_ptr,
    var_ptr,
    gain_ptr,
    beta_ptr,
    residual_ptr,
    y_ptr,
    n_values,
    n_channels,
    alpha,
    eps,
    EPILOGUE: tl.constexpr,
    ACT: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """y = the sum of PARTS partial results, in order, and what follows it (`_finished`)."""
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ok = offs < n_values
    acc = tl.load(partial_ptr + offs, mask=ok, other=0.0)
    for part in range(1, PARTS):
        acc += tl.load(partial_ptr + part * n_values.to(tl.int64) + offs, mask=ok, other=0.0)
    acc = _finished(
        acc,
        bias_ptr,
        mean_ptr,
        var_ptr,
        gain_ptr,
        beta_ptr,
        residual_ptr,
        alpha,
        eps,
        offs % n_channels,
        ok,
        offs,
        ok,
        EPILOGUE,
        ACT,
        y_ptr.dtype.element_ty,
    )
    tl.store(y_ptr + offs, acc.to(y_ptr.dtype.element_ty), mask=ok)


gather_gemm_kernel = register(_gather_gemm)
sum_partials_kernel = register(_sum_partials)
