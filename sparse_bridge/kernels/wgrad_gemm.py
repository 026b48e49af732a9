"""wgrad: dw[v] = sum over the pairs (i, j) of offset v of x[i]^T dy[j], without atomics.

Two ways to share the work. *Direct*: one program per offset and result block. *Balanced*: `shares`
programs per result block, each takes an equal run of the concatenated pair lists; where a run
crosses into another offset it starts a new fp32 partial result. Share p and offset v together
number that partial p + v (along the runs one of them always grows), so programs need no counters,
and a second kernel adds each offset's partials in order: bitwise repeatable. `wgrad_shares` chooses
by what the partials cost.

With mirrored lists (submanifold maps) only offsets 0..V/2 are stored; the pairs of V - 1 - v are
those of v swapped.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import alignment, cdiv, power_of_2, register, specialise
from .target import Target
from .tile_config import TileConfig, wgrad_shares


@triton.jit
def _list_of(v, n_offsets, MIRRORED: tl.constexpr):
    """Stored list that serves offset v."""
    if MIRRORED:
        return tl.minimum(v, n_offsets - 1 - v)
    else:
        return v


@triton.jit
def _run_starts(starts_ptr, n_offsets, MIRRORED: tl.constexpr, V_BLOCK: tl.constexpr):
    """(begin of each offset's run in the concatenation of all offsets, its length), vectors over
    V_BLOCK offsets."""
    u = tl.arange(0, V_BLOCK)
    index = _list_of(u, n_offsets, MIRRORED)
    length = tl.load(starts_ptr + index + 1, mask=u < n_offsets, other=0)
    length -= tl.load(starts_ptr + index, mask=u < n_offsets, other=0)
    return tl.cumsum(length, 0) - length, length


@triton.jit
def _share_size(total, shares):
    """Share p covers the pairs [p * size, (p + 1) * size) of the concatenation."""
    return tl.maximum((total + shares - 1) // shares, 1)


@triton.jit
def _pick(vector, index, V_BLOCK: tl.constexpr):
    return tl.sum(tl.where(tl.arange(0, V_BLOCK) == index, vector, 0), 0)


@triton.jit(do_not_specialize=["n_offsets"])
def _wgrad_gemm(
    x_ptr, dy_ptr, dw_ptr, in_ptr, out_ptr, starts_ptr, n_offsets, c_in, c_out, dw_shift,
    stride_xn, stride_dyn, stride_dv, stride_di, stride_do, stride_dg, MIRRORED: tl.constexpr,
    DIRECT: tl.constexpr, PRECISION: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr,
    V_BLOCK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """grid: (blocks of c_in x blocks of c_out, shares or V, groups).

    x [N_in, groups * c_in], dy [N_out, groups * c_out]; dw at dw_shift + v * stride_dv + i *
    stride_di + o * stride_do + group * stride_dg; without DIRECT dw is the workspace of partials
    [shares + V, groups * c_out, c_in].
    """
    n_blocks = tl.cdiv(c_out, BLOCK_N)
    offs_m = (tl.program_id(0) // n_blocks) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = (tl.program_id(0) % n_blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    group = tl.program_id(2)
    offs_p = tl.arange(0, BLOCK_K)
    mask_m = offs_m < c_in
    mask_n = offs_n < c_out
    x_base = x_ptr + group * c_in + offs_m[None, :]
    dy_base = dy_ptr + group * c_out + offs_n[None, :]
    dw_base = (
        dw_ptr
        + dw_shift
        + group * stride_dg
        + offs_m[:, None] * stride_di
        + offs_n[None, :] * stride_do
    )
    share = tl.program_id(1)
    begins, lengths = _run_starts(starts_ptr, n_offsets, MIRRORED, V_BLOCK)
    if DIRECT:
        v = share
        begin = _pick(begins, v, V_BLOCK)
        end = begin + _pick(lengths, v, V_BLOCK)
        last = v + 1
    else:
        total = tl.sum(lengths, 0)
        step = _share_size(total, tl.num_programs(1))
        begin = tl.minimum(total, share * step)
        end = tl.minimum(total, begin + step)
        # Offset whose run holds `begin`: the last one that starts at or before it and is not empty.
        v = tl.max(tl.where((begins <= begin) & (lengths > 0), tl.arange(0, V_BLOCK), 0), 0)
        last = n_offsets
    while (v < last) & ((begin < end) | DIRECT):
        run = _pick(begins, v, V_BLOCK)
        stop = tl.minimum(end, run + _pick(lengths, v, V_BLOCK))
        if (begin < stop) | DIRECT:
            index = _list_of(v, n_offsets, MIRRORED)
            shift = tl.load(starts_ptr + index) - run
            first_ptr = in_ptr
            second_ptr = out_ptr
            if MIRRORED:
                if v > index:
                    first_ptr = out_ptr
                    second_ptr = in_ptr
            acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for p in range(begin + shift, stop + shift, BLOCK_K):
                ok = offs_p < stop + shift - p
                i = tl.load(first_ptr + p + offs_p, mask=ok, other=0)
                j = tl.load(second_ptr + p + offs_p, mask=ok, other=0)
                if WIDE:
                    i = i.to(tl.int64)
                    j = j.to(tl.int64)
                if EVEN:
                    a = tl.load(x_base + i[:, None] * stride_xn, mask=ok[:, None], other=0.0)
                    b = tl.load(dy_base + j[:, None] * stride_dyn, mask=ok[:, None], other=0.0)
                else:
                    a = tl.load(
                        x_base + i[:, None] * stride_xn,
                        mask=ok[:, None] & mask_m[None, :],
                        other=0.0,
                    )
                    b = tl.load(
                        dy_base + j[:, None] * stride_dyn,
                        mask=ok[:, None] & mask_n[None, :],
                        other=0.0,
                    )
                acc = tl.dot(tl.trans(a), b, acc, input_precision=PRECISION)
            slot = v if DIRECT else share + v
            tl.store(
                dw_base + slot.to(tl.int64) * stride_dv, acc.to(dw_ptr.dtype.element_ty),
                mask=mask_m[:, None] & mask_n[None, :],
            )  # fmt: skip
        begin = tl.maximum(begin, stop)
        v += 1


@triton.jit(do_not_specialize=["n_offsets", "c_in", "c_out", "n_columns", "quads", "shares"])
def _sum_shares(
    partial_ptr, dw_ptr, starts_ptr, n_offsets, c_in, c_out, n_columns, quads, shares, dw_shift,
    stride_dv, stride_di, stride_do, stride_dg,
    MIRRORED: tl.constexpr, V_BLOCK: tl.constexpr, SHARES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dw[v] = sum of the partials p + v of the shares p that touch offset v. partial: [shares + V,
    4 * quads], of which n_columns * c_in are used."""
    v = tl.program_id(1)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    pitch = quads * 4  # so that loads take 16 bytes
    begins, lengths = _run_starts(starts_ptr, n_offsets, MIRRORED, V_BLOCK)
    begin = _pick(begins, v, V_BLOCK)
    end = begin + _pick(lengths, v, V_BLOCK)
    step = _share_size(tl.sum(lengths, 0), shares)
    acc = tl.zeros((SHARES, BLOCK), tl.float32)
    p0 = begin // step
    while (begin < end) & (p0 * step < end):
        p = p0 + tl.arange(0, SHARES)
        address = partial_ptr + (p + v).to(tl.int64)[:, None] * pitch + place[None, :]
        used = (p * step < end)[:, None] & (place < pitch)[None, :]
        acc += tl.load(address, mask=used, other=0.0)
        p0 += SHARES
    i = place % c_in
    o = place // c_in
    out = dw_ptr + dw_shift + v.to(tl.int64) * stride_dv + i * stride_di
    out += (o % c_out) * stride_do + (o // c_out) * stride_dg
    result = tl.sum(acc, 0).to(dw_ptr.dtype.element_ty)
    tl.store(out, result, mask=place < c_in * n_columns)


wgrad_kernel = register(_wgrad_gemm)
sum_shares_kernel = register(_sum_shares)
SUM_BLOCKS = (64, 128, 256, 512, 1024)  # results per program that adds partials
SUM_LOADS = 4096  # partial results that such a program loads at a time


def sum_shape(results: int, n_offsets: int, compute_units: int) -> tuple[int, int]:
    """(shares that a program adds at a time, results of it): few programs, since each first finds
    the shares of its offset, but enough to draw on the whole memory."""
    wanted = results * n_offsets // (16 * compute_units)
    block = next((block for block in SUM_BLOCKS if block >= wanted), SUM_BLOCKS[-1])
    return SUM_LOADS // block, block


class WgradGemm:
    """One wgrad problem, resolved.

    pairs: (in_rows [P], out_rows [P], starts int64 on the device); mirrored: lists of offsets
    0..V/2 only; likely: about how many pairs the lists hold where they have room for more.
    dw_strides: (offset, input channel, output channel, group) strides of the result;
    dw_shift: where offset 0 starts.
    """

    def __init__(
        self, target: Target, device: torch.device, dtype: torch.dtype,
        pairs: tuple[torch.Tensor, torch.Tensor, torch.Tensor], mirrored: bool, n_offsets: int,
        n_in: int, n_out: int, c_in: int, c_out: int, groups: int,
        dw_strides: tuple[int, int, int, int], dw_shift: int, precision: str, tile: TileConfig,
        likely: int | None = None,
    ) -> None:  # fmt: skip
        self.target, self.device = target, device
        self.pairs, self.n_offsets, self.c_in, self.columns = pairs, n_offsets, c_in, groups * c_out
        blocks = cdiv(c_in, tile.block_m) * cdiv(c_out, tile.block_n)
        n_pairs, longest = len(pairs[0]) if likely is None else likely, min(n_in, n_out)
        if mirrored:  # the centre meets every row, and its list is stored once
            n_pairs = max(n_pairs, 2 * n_pairs - longest)
        else:
            longest = min(longest, cdiv(2 * n_pairs, n_offsets))
        shares = wgrad_shares(
            target, tile, dtype, precision, (n_offsets, c_in, c_out), groups, n_pairs, longest
        )
        direct = shares == 0
        self.shares = n_offsets if direct else shares
        self.grid = (blocks, self.shares, groups)
        even = c_in % tile.block_m == 0 and c_out % tile.block_n == 0
        wide = max(n_in * groups * c_in, n_out * groups * c_out) >= 1 << 31
        v_block = max(16, power_of_2(n_offsets))
        self.direct, self.mirrored = direct, mirrored
        self.precision = precision if dtype == torch.float32 else "ieee"
        self.constants = (
            mirrored, direct, self.precision, even, wide, v_block, tile.block_m, tile.block_n,
            tile.block_k
        )  # fmt: skip
        self.dw_place = (dw_shift, *dw_strides)
        self.quads = cdiv(c_in * self.columns, 4)
        self.place = self.dw_place if direct else (0, 4 * self.quads, 1, c_in, c_in * c_out)
        self.options = tile.options(target)
        self.key = (dtype, self.constants, tile, specialise(c_in, c_out, *self.place))

    def __call__(self, x: torch.Tensor, dy: torch.Tensor, dw: torch.Tensor) -> torch.Tensor:
        """x [N_in, groups * c_in], dy [N_out, groups * c_out] (unit channel strides); dw written
        whole."""
        out = dw
        if not self.direct:
            rows = self.shares + self.n_offsets
            out = torch.empty((rows, 4 * self.quads), dtype=torch.float32, device=self.device)
        strides = (x.stride(0), dy.stride(0))
        aligned = alignment(x, dy, dw)
        c_out = self.columns // self.grid[2]
        numbers = (self.n_offsets, self.c_in, c_out, self.place[0], *strides, *self.place[1:])
        wgrad_kernel.launch(
            self.device, self.target, self.grid, (x, dy, out, *self.pairs, *numbers),
            self.constants, self.options, (self.key, aligned, out.dtype, specialise(*strides)),
        )  # fmt: skip
        if not self.direct:
            size = self.c_in * self.columns
            shape = sum_shape(size, self.n_offsets, self.target.compute_units)
            constants = (self.mirrored, self.constants[5], *shape)
            sum_shares_kernel.launch(
                self.device, self.target, (cdiv(size, shape[1]), self.n_offsets, 1),
                (out, dw, self.pairs[2], self.n_offsets, self.c_in, c_out, self.columns,
                self.quads, self.shares, *self.dw_place),
                constants, {"num_warps": 4},
                (constants, dw.dtype, specialise(*self.dw_place), alignment(dw)),
            )  # fmt: skip
        return dw
