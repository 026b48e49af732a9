"""Gather-GEMM: y[r] = act(norm(sum_v x[nbr[v, r]] @ w[v] + bias) + residual[r]), both ways.

dgrad is that product over the transposed table, with the weight read through swapped strides.
Two forms of one kernel: *packed* walks the live offsets of mask-ordered tiles, *plain* walks every
offset of the table in row order. Under mask splits a packed launch makes S partial sums of each
row, one after another in memory: to the kernel those are S times as many rows.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ...errors import KernelError
from ..maps.tile_list import TileList
from ..runtime.launch import Entry, alignment_at, begin, register, specialise
from ..tiles.tile import TileConfig
from .gather_spec import GemmSpec
from .vectors import NO_VECTORS, Vectors, tensors_of


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


def _read(vectors: Vectors, y_at: int) -> tuple[tuple[int, ...], tuple[object, ...]]:
    """(addresses of `tensors_of`, what of them the kernel is compiled for)."""
    bias, mean, var, gain, beta, residual = vectors
    bias_kind = mean_kind = var_kind = gain_kind = beta_kind = residual_kind = None
    p = q = r = s = t = u = y_at
    if bias is not None:
        p, bias_kind = bias.data_ptr(), bias.dtype
    if mean is not None and var is not None:
        q, r, mean_kind, var_kind = mean.data_ptr(), var.data_ptr(), mean.dtype, var.dtype
    if gain is not None and beta is not None:
        s, t, gain_kind, beta_kind = gain.data_ptr(), beta.data_ptr(), gain.dtype, beta.dtype
    if residual is not None:
        u, residual_kind = residual.data_ptr(), residual.dtype
    at = (p, q, r, s, t, u)
    aligned = alignment_at(*at) if (p | q | r | s | t | u) & 15 else True
    kinds = (aligned, bias_kind, mean_kind, var_kind, gain_kind, beta_kind, residual_kind)
    return at, kinds


class GatherGemm:
    """A product over one map: everything but the tensors' addresses is fixed, so `__call__` only
    launches.

    table: `TileList` (packed) or nbr [V, N] int32 (plain), rows side by side.  n_rows: rows of y;
    n_in: of x.  blank: rows that no tile names are to be what an empty sum makes them.
    """

    # _numbers: what follows the tensors in a launch; where _addressed, the table's parts first.
    __slots__ = (
        "_addressed", "_key", "_lists", "_n_values", "_numbers", "_sum_grid", "blank", "grid",
        "spec", "table",
    )  # fmt: skip

    kernel = gather_gemm_kernel

    def __init__(
        self, spec: GemmSpec, table: TileList | torch.Tensor, n_rows: int, n_in: int
    ) -> None:
        if isinstance(table, TileList):
            n_offsets, pitch = table.n_offsets, table.pitch
        else:
            n_offsets, pitch = table.shape[0], table.stride(0)
        self.spec = spec = spec.fitting(n_offsets, pitch, n_rows, n_in)
        self.table, self.blank, tile = table, False, spec.tile
        split_stride = n_rows * spec.columns if tile.split_k > 1 else 0
        self._key = spec.key_of(split_stride) if split_stride else spec.key
        tiles = -(-n_rows // tile.block_m)
        if spec.splits > 1:
            tiles = spec.splits * pitch // tile.block_m
        programs = tiles * -(-spec.c_out // tile.block_n)
        if programs >= 1 << 31:
            raise KernelError(
                f"gather-GEMM over {n_rows} rows needs {programs} programs; a launch takes fewer "
                "than 2^31."
            )
        self.grid = (programs, spec.groups, tile.split_k)
        self._lists: tuple[torch.Tensor, ...] | None = None
        self._numbers: tuple[Any, ...] = (n_rows, pitch, n_offsets, *spec.following, split_stride)
        self._n_values = n_rows * spec.columns
        self._sum_grid = (-(-self._n_values // 1024), 1, 1)
        # Addresses serve a compiled kernel as well as views do, and cost nothing.
        self._addressed = spec.packed and spec.target.takes_addresses
        if self._addressed and isinstance(table, TileList):
            base = table.memory.data_ptr()
            nbr, rows, live, n_live = table.places(tile.block_m)
            lists = (base + 4 * nbr, base + 4 * rows, base + 4 * live, base + 4 * n_live)
            self._numbers = (*lists, *self._numbers)

    @property
    def tile(self) -> TileConfig:
        return self.spec.tile

    @property
    def constants(self) -> tuple[Any, ...]:
        """The kernel's constexprs."""
        return self.spec.constants

    def _views(self) -> tuple[torch.Tensor, ...]:
        """(nbr, rows, live, n_live)."""
        if not isinstance(self.table, TileList):
            return (self.table,) * 4
        if self._lists is None:
            lists = self.table.lists(self.tile.block_m)
            self._lists = (self.table.packed, self.table.rows, *lists)
        return self._lists

    def __call__(
        self, x: torch.Tensor, w: torch.Tensor, vectors: Vectors | None, y: torch.Tensor
    ) -> torch.Tensor:
        """x [N_in, groups * c_in] (unit channel stride), w any layout, vectors (bias, mean, var,
        gain, beta) [groups * c_out] and the residual, like y, those that the epilogue does not name
        None, or None for no epilogue, y written whole [n_rows, groups * c_out], contiguous."""
        if vectors is None or not self.spec.epilogue.parts:
            vectors = NO_VECTORS
        if not (self._addressed and self._started(x, w, vectors, y)):
            self._launch(x, w, vectors, y)
        return y

    def _started(
        self, x: torch.Tensor, w: torch.Tensor, vectors: Vectors, y: torch.Tensor
    ) -> bool:  # fmt: skip
        """Run kernels that have run before for tensors like these, all at multiples of 16 bytes and
        rows of x side by side. False where that is not so, and nothing ran."""
        spec, read = self.spec, None
        x_at, w_at, y_at = x.data_ptr(), w.data_ptr(), y.data_ptr()
        p = q = r = s = t = u = y_at
        if vectors is not NO_VECTORS:
            (p, q, r, s, t, u), read = _read(vectors, y_at)
        found = spec.ready.get((self._key, w.dtype, read))
        if (
            found is None
            or (x_at | w_at | y_at) & 15
            or x.stride()[0] != spec.columns_in
            or (self.blank and spec.partials > 1)
        ):
            return False
        entry, sums = found
        index, numbers = spec.device.index, self._numbers
        if sums is None:
            values = (x_at, w_at, p, q, r, s, t, u, y_at, *numbers)
            return begin(entry, index, self.grid, values, spec.constants)
        partial = y.new_empty(spec.partials * self._n_values, dtype=torch.float32)
        at = partial.data_ptr()
        values = (x_at, w_at, y_at, y_at, y_at, y_at, y_at, y_at, at, *numbers)
        if not begin(entry, index, self.grid, values, spec.constants):
            return False
        values = (at, p, q, r, s, t, u, y_at, self._n_values, spec.columns, *spec.floats)
        if not begin(sums, index, self._sum_grid, values, spec.sum_constants):
            self._sum(partial, vectors, y)
        return True

    def _launch(
        self, x: torch.Tensor, w: torch.Tensor, vectors: Vectors, y: torch.Tensor
    ) -> None:  # fmt: skip
        """Run kernels that may have to be compiled."""
        spec, split, out, read = self.spec, self.spec.partials, y, vectors
        if split > 1:
            fresh, read = torch.zeros if self.blank else torch.empty, NO_VECTORS
            out = fresh(split * self._n_values, dtype=torch.float32, device=spec.device)
        x_at, w_at, y_at, out_at = x.data_ptr(), w.data_ptr(), y.data_ptr(), out.data_ptr()
        aligned: object = True
        if (x_at | w_at | y_at | out_at) & 15:
            aligned = alignment_at(x_at, w_at, y_at, out_at)
        end_at, kinds = _read(read, y_at)
        stride_xn, numbers = x.stride()[0], self._numbers
        row_kind = spec.row_kind
        if stride_xn != spec.columns_in:
            row_kind = specialise(stride_xn)
            numbers = (*numbers[:-7], stride_xn, *numbers[-6:])  # the first of seven strides
        key = (self._key, aligned, w.dtype, kinds, row_kind)
        index, values = spec.device.index, (x_at, w_at, *end_at, out_at, *numbers)
        if not (
            self._addressed and self.kernel.start(index, key, self.grid, values, spec.constants)
        ):
            numbers = numbers[4:] if self._addressed else numbers
            args = (x, w, *tensors_of(read, y), out, *self._views(), *numbers)
            self.kernel.launch(
                spec.device, spec.target, self.grid, args, spec.constants, spec.options, key
            )
        sums = self._sum(out, vectors, y) if split > 1 else None
        entry = self.kernel.compiled(index, key) if self._addressed else None
        if entry is None or aligned is not True or row_kind is not spec.row_kind:
            return
        if split == 1 or (sums is not None and not spec.wide):
            ends = None if vectors is NO_VECTORS else _read(vectors, y_at)[1]
            spec.ready[self._key, w.dtype, ends] = entry, sums

    def _sum(self, partial: torch.Tensor, vectors: Vectors, y: torch.Tensor) -> Entry | None:
        """Add the partial sums up and apply the epilogue; the compiled kernel that does."""
        spec, n_values = self.spec, self._n_values
        out_at, y_at = partial.data_ptr(), y.data_ptr()
        end_at, kinds = _read(vectors, y_at)
        aligned = alignment_at(out_at, y_at)
        key = (spec.sum_constants, y.dtype, kinds, aligned, n_values >= 1 << 31)
        numbers = (n_values, spec.columns, *spec.floats)
        index, values = spec.device.index, (out_at, *end_at, y_at, *numbers)
        if not (
            self._addressed
            and sum_partials_kernel.start(index, key, self._sum_grid, values, spec.sum_constants)
        ):
            args = (partial, *tensors_of(vectors, y), y, *numbers)
            sum_partials_kernel.launch(
                spec.device, spec.target, self._sum_grid, args, spec.sum_constants,
                {"num_warps": 4}, key,
            )  # fmt: skip
        return sum_partials_kernel.compiled(index, key) if self._addressed else None
