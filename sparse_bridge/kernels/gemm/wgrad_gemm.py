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

from ..runtime.launch import alignment_at, cdiv, register, specialise
from ..tiles.tile_config import wgrad_shares
from .gather_spec import INT32_END
from .wgrad_spec import SUM_BLOCKS, SUM_LOADS, WgradSpec, sum_shape

__all__ = ["SUM_BLOCKS", "SUM_LOADS", "WgradGemm", "WgradSpec", "sum_shape", "sum_shares_kernel", "wgrad_kernel"]


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
    x_ptr,
    dy_ptr,
    dw_ptr,
    in_ptr,
    out_ptr,
    starts_ptr,
    n_offsets,
    c_in,
    c_out,
    dw_shift,
    stride_xn,
    stride_dyn,
    stride_dv,
    stride_di,
    stride_do,
    stride_dg,
    MIRRORED: tl.constexpr,
    DIRECT: tl.constexpr,
    PRECISION: tl.constexpr,
    EVEN: tl.constexpr,
    WIDE: tl.constexpr,
    V_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
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
    dw_base = dw_ptr + dw_shift + group * stride_dg + offs_m[:, None] * stride_di + offs_n[None, :] * stride_do
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
            first_ptr += begin + shift
            second_ptr += begin + shift
            # Triton 3.8 and 3.9 for AMD fold comparisons of integers that a loop between 64-bit
            # bounds carries, such as the stage of shared memory that the pipeliner adds.
            n_pairs = (stop - begin).to(tl.int32)
            acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for p in range(0, n_pairs, BLOCK_K):
                ok = offs_p < n_pairs - p
                i = tl.load(first_ptr + p + offs_p, mask=ok, other=0)
                j = tl.load(second_ptr + p + offs_p, mask=ok, other=0)
                if WIDE:
                    i = i.to(tl.int64)
                    j = j.to(tl.int64)
                if EVEN:
                    a = tl.load(x_base + i[:, None] * stride_xn, mask=ok[:, None], other=0.0)
                    b = tl.load(dy_base + j[:, None] * stride_dyn, mask=ok[:, None], other=0.0)
                else:
                    a = tl.load(x_base + i[:, None] * stride_xn, mask=ok[:, None] & mask_m[None, :], other=0.0)
                    b = tl.load(dy_base + j[:, None] * stride_dyn, mask=ok[:, None] & mask_n[None, :], other=0.0)
                acc = tl.dot(tl.trans(a), b, acc, input_precision=PRECISION)
            slot = v if DIRECT else share + v
            tl.store(
                dw_base + slot.to(tl.int64) * stride_dv,
                acc.to(dw_ptr.dtype.element_ty),
                mask=mask_m[:, None] & mask_n[None, :],
            )
        begin = tl.maximum(begin, stop)
        v += 1


@triton.jit(do_not_specialize=["n_offsets", "c_in", "c_out", "n_columns", "quads", "shares"])
def _sum_shares(
    partial_ptr,
    dw_ptr,
    starts_ptr,
    n_offsets,
    c_in,
    c_out,
    n_columns,
    quads,
    shares,
    dw_shift,
    stride_dv,
    stride_di,
    stride_do,
    stride_dg,
    MIRRORED: tl.constexpr,
    V_BLOCK: tl.constexpr,
    SHARES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """dw[v] = sum of the partials p + v of the shares p that touch offset v. partial: [shares + V,
    4 * quads], of which n_columns * c_in are used."""
    v = tl.program_id(1)
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    pitch = quads * 4  # so that loads take 16 bytes
    begins, lengths = _run_starts(starts_ptr, n_offsets, MIRRORED, V_BLOCK)
    begin = _pick(begins, v, V_BLOCK)
    end = begin + _pick(lengths, v, V_BLOCK)
    step = _share_size(tl.sum(lengths, 0), shares)
    acc = tl.zeros((SHARES, BLOCK), tl.float32)
    p0 = begin // step
    while (begin < end) & (p0 * step < end):
        p = p0 + tl.arange(0, SHARES)
        address = partial_ptr + (p + v).to(tl.int64)[:, None] * pitch + offs[None, :]
        used = (p * step < end)[:, None] & (offs < pitch)[None, :]
        acc += tl.load(address, mask=used, other=0.0)
        p0 += SHARES
    i = offs % c_in
    o = offs // c_in
    out = dw_ptr + dw_shift + v.to(tl.int64) * stride_dv + i * stride_di
    out += (o % c_out) * stride_do + (o // c_out) * stride_dg
    result = tl.sum(acc, 0).to(dw_ptr.dtype.element_ty)
    tl.store(out, result, mask=offs < c_in * n_columns)


wgrad_kernel = register(_wgrad_gemm)
sum_shares_kernel = register(_sum_shares)
SUM_OPTIONS = {"num_warps": 2}


class WgradGemm:
    """A wgrad over one map.

    pairs: (in_rows int32 [P], out_rows int32 [P], starts int64) on the device; likely: about how many
    pairs the lists hold where they have room for more; most: pairs of the longest, where that is known.
    n_in: rows of x; n_out: of dy.
    """

    def __init__(
        self,
        spec: WgradSpec,
        pairs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        n_in: int,
        n_out: int,
        likely: int | None = None,
        most: int | None = None,
    ) -> None:
        n_offsets, groups = spec.n_offsets, spec.groups
        n_pairs, longest = len(pairs[0]) if likely is None else likely, min(n_in, n_out)
        if spec.mirrored:  # the centre meets every row, and its list is stored once
            n_pairs = max(n_pairs, 2 * n_pairs - longest)
        else:
            longest = min(longest, cdiv(2 * n_pairs, n_offsets)) if most is None else most
        shares = wgrad_shares(spec.target, spec.tile, spec.dtype, spec.precision, spec.sizes, groups, n_pairs, longest)
        wide = n_in * spec.columns_in >= INT32_END or n_out * spec.columns >= INT32_END
        self.pairs, self.direct, self.shares = pairs, shares == 0, shares or n_offsets
        self.spec = spec.fitting(self.direct, wide)
        self.grid = (spec.blocks, self.shares, groups)
        self._pairs_at: tuple[int, ...] = ()  # where a launch takes addresses
        if spec.target.takes_addresses:
            self._pairs_at = (pairs[0].data_ptr(), pairs[1].data_ptr(), pairs[2].data_ptr())

    def __call__(self, x: torch.Tensor, dy: torch.Tensor, dw: torch.Tensor) -> torch.Tensor:
        """x [N_in, groups * c_in], dy [N_out, groups * c_out] (unit channel strides); dw written
        whole. Twin in C: `launched_wgrad`."""
        spec, out = self.spec, dw
        device, target = spec.device, spec.target
        if not self.direct:
            rows = self.shares + spec.n_offsets
            out = torch.empty((rows, 4 * spec.quads), dtype=torch.float32, device=device)
            if spec.padding:  # sums read it with the last values, and drop it
                out[:, -spec.padding :] = 0.0
        x_at, dy_at, dw_at = x.data_ptr(), dy.data_ptr(), dw.data_ptr()
        aligned: object = True
        if (x_at | dy_at | dw_at) & 15:
            aligned = alignment_at(x_at, dy_at, dw_at)
        strides, row_kinds = (x.stride()[0], dy.stride()[0]), spec.row_kinds
        if strides != spec.rows:
            row_kinds = specialise(*strides)
        numbers = (*spec.leading, *strides, *spec.trailing)
        key = (spec.key, aligned, out.dtype, row_kinds)
        values = (x_at, dy_at, out.data_ptr(), *self._pairs_at, *numbers)
        if not (self._pairs_at and wgrad_kernel.start(device.index, key, self.grid, values, spec.constants)):
            wgrad_kernel.launch(
                device, target, self.grid, (x, dy, out, *self.pairs, *numbers), spec.constants, spec.options, key
            )
        if not self.direct:
            self._sum(out, dw, dw_at)
        return dw

    def _sum(self, partial: torch.Tensor, dw: torch.Tensor, dw_at: int) -> None:
        """Add up what programs that share a result have found."""
        spec, key = self.spec, (self.spec.sum_key, dw.dtype, dw_at % 16 == 0)
        numbers = (*spec.sum_sizes, self.shares, *spec.layout)
        values = (partial.data_ptr(), dw_at, *self._pairs_at[2:], *numbers)
        if not (
            self._pairs_at
            and sum_shares_kernel.start(spec.device.index, key, spec.sum_grid, values, spec.sum_constants)
        ):
            sum_shares_kernel.launch(
                spec.device,
                spec.target,
                spec.sum_grid,
                (partial, dw, self.pairs[2], *numbers),
                spec.sum_constants,
                SUM_OPTIONS,
                key,
            )
