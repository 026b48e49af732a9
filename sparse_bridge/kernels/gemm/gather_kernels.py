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
from .epilogue import _finished


@triton.jit
def rows_in_use(count_ptr, n_rows):
    """Rows of a plain table: `n_rows`, or where that is negative as many of its columns as a counter
    says, which started at -1."""
    return live_rows(count_ptr, tl.abs(n_rows), (n_rows < 0).to(tl.int32))


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
