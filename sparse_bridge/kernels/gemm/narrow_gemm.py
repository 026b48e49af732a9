"""Gather-GEMM for narrow inputs, of up to 8 channels, as the first layer of a network has them.

One offset fills no more than half of a step of the reduction there, and what a tile waits for is where its
rows are, offset after offset. So a step takes a window of offsets side by side: element k of it is channel
k % WIDTH of its offset k // WIDTH. The rest is the gather-GEMM's, launch and epilogue included.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..maps.tile_list import TileList
from ..runtime.launch import number_of, power_of_2, register, specialise
from ..tiles.narrow_tile import clamp_for_wide, width_of
from ..tiles.tile import TileConfig
from .epilogue import _finished
from .gather_gemm import GatherGemm
from .gather_kernels import rows_in_use
from .gather_spec import GemmSpec
from .product import Product
from .vectors import Vectors


@triton.jit
def _one(row_ptr, stride, ok, channel, c_in):
    mask_c = tl.full(ok.shape, channel, tl.int32) < c_in
    return tl.load(row_ptr + channel * stride, mask=ok & mask_c, other=0.0)


@triton.jit
def _pair(row_ptr, stride, ok, first, second, c_in):
    return tl.join(_one(row_ptr, stride, ok, first, c_in), _one(row_ptr, stride, ok, second, c_in))


@triton.jit
def _four(row_ptr, stride, ok, first, apart, c_in):
    """Channels first, first + apart, ... of each row; [..., 2, 2]."""
    even = _pair(row_ptr, stride, ok, first, first + 2 * apart, c_in)
    return tl.join(even, _pair(row_ptr, stride, ok, first + apart, first + 3 * apart, c_in))


@triton.jit
def _channels(row_ptr, stride, ok, c_in, WIDTH: tl.constexpr):
    """[..., WIDTH], or as many in several dimensions: channels of rows that start anywhere, loaded
    one after another, so that a thread keeps one address for all channels of a row."""
    if WIDTH == 1:
        value = _one(row_ptr, stride, ok, 0, c_in)
    elif WIDTH == 2:
        value = _pair(row_ptr, stride, ok, 0, 1, c_in)
    elif WIDTH == 4:
        value = _four(row_ptr, stride, ok, 0, 1, c_in)
    else:
        tl.static_assert(WIDTH == 8)
        value = tl.join(_four(row_ptr, stride, ok, 0, 2, c_in), _four(row_ptr, stride, ok, 1, 2, c_in))
    return value


@triton.jit
def _window(
    acc,
    x_ptr,
    w_ptr,
    nbr_ptr,
    v,
    valid,
    offs_m,
    row_ok,
    offs_n,
    mask_n,
    pitch,
    c_in,
    stride_xn,
    stride_wv,
    stride_wi,
    stride_wo,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
    EVEN_X: tl.constexpr,
    EVEN_W: tl.constexpr,
    WIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    OFFSETS: tl.constexpr,
):
    """acc and the products of the `valid` ones of the offsets v [OFFSETS]."""
    offs_c = tl.arange(0, WIDTH)
    v = tl.where(valid, v, 0)
    if WIDE:
        v = v.to(tl.int64)
    mask_w = valid[:, None] & mask_n[None, :]
    w_rows = w_ptr + (v[:, None] * stride_wv + offs_n[None, :] * stride_wo)
    if EVEN_W:
        b = tl.load(w_rows[:, :, None] + offs_c[None, None, :], mask=mask_w[:, :, None], other=0.0)
    else:
        b = _channels(w_rows, stride_wi, mask_w, c_in, WIDTH)
        b = tl.reshape(b, (OFFSETS, offs_n.shape[0], WIDTH))
    b = tl.permute(b, (0, 2, 1))
    mask_s = valid[None, :]
    if not PACKED:
        mask_s = mask_s & row_ok[:, None]
    source = tl.load(nbr_ptr + v[None, :] * pitch + offs_m[:, None], mask=mask_s, other=-1)
    present = source >= 0
    if WIDE:
        source = source.to(tl.int64)
    if EVEN_X:
        at = source[:, :, None] * stride_xn + offs_c[None, None, :]
        a = tl.load(x_ptr + at, mask=present[:, :, None], other=0.0)
    else:
        a = _channels(x_ptr + source * stride_xn, 1, present, c_in, WIDTH)
    a = tl.reshape(a, (offs_m.shape[0], OFFSETS * WIDTH))
    b = tl.reshape(b, (OFFSETS * WIDTH, offs_n.shape[0]))
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit(do_not_specialize=["n_live_ptr", "n_rows", "pitch", "n_offsets", "alpha", "eps"])
def _narrow_gemm(
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
    EVEN_X: tl.constexpr,
    EVEN_W: tl.constexpr,
    WIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """grid: (row tiles x column blocks, 1, 1).

    The arguments as of `_gather_gemm`; stride_wg is not read. EVEN_X: c_in is WIDTH, which divides
    stride_xn, too. EVEN_W: stride_wi is 1, and WIDTH divides c_in and the weight's other strides
    and shift. So channels of a row are loaded at once. LANES, where PACKED: n_offsets, rounded up
    to a power of two.

    Which offsets a step takes side by side is fixed: a window of them that no row of the tile has
    is skipped, and an absent one in it adds zeros. So a row's bits do not depend on its tile.
    """
    OFFSETS: tl.constexpr = BLOCK_K // WIDTH
    n_blocks = tl.cdiv(c_out, BLOCK_N)
    n_tiles = tl.num_programs(0) // n_blocks
    tile = n_tiles - 1 - tl.program_id(0) // n_blocks  # the longest first, see `_gather_gemm`
    offs_m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = (tl.program_id(0) % n_blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < c_out
    if PACKED:
        row = tl.load(rows_ptr + offs_m)
        row_ok = row >= 0
        steps = tl.load(n_live_ptr + tile)
        lanes = tl.arange(0, LANES)
        live = live_ptr + tile.to(tl.int64) * n_offsets + lanes
        lives = tl.load(live, mask=lanes < steps, other=1 << 30)
    else:
        row = offs_m
        n_used = rows_in_use(n_live_ptr, n_rows)
        row_ok = row < n_used
        steps = tl.where(tile * BLOCK_M < n_used, n_offsets, 0)  # see `_gather_gemm`
    if WIDE:
        row = row.to(tl.int64)
        pitch = pitch.to(tl.int64)
    if EVEN_X:  # said so that the compiler sees it
        stride_xn = stride_xn // WIDTH * WIDTH
    if EVEN_W:
        w_shift = w_shift // WIDTH * WIDTH
        stride_wv = stride_wv // WIDTH * WIDTH
        stride_wo = stride_wo // WIDTH * WIDTH
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if PACKED:
        for word in range(tl.cdiv(n_offsets, 32)):
            bits = tl.sum(tl.where(lives // 32 == word, 1 << (lives % 32), 0), 0)
            for window in range(0, 32, OFFSETS):
                lane = window + tl.arange(0, OFFSETS)
                if (bits >> window) & ((1 << OFFSETS) - 1) != 0:
                    acc = _window(
                        acc,
                        x_ptr,
                        w_ptr + w_shift,
                        nbr_ptr,
                        word * 32 + lane,
                        ((bits >> lane) & 1) != 0,
                        offs_m,
                        row_ok,
                        offs_n,
                        mask_n,
                        pitch,
                        c_in,
                        stride_xn,
                        stride_wv,
                        stride_wi,
                        stride_wo,
                        PACKED,
                        PRECISION,
                        EVEN_X,
                        EVEN_W,
                        WIDE,
                        WIDTH,
                        OFFSETS,
                    )
    else:
        for first in range(0, steps, OFFSETS):
            v = first + tl.arange(0, OFFSETS)
            acc = _window(
                acc,
                x_ptr,
                w_ptr + w_shift,
                nbr_ptr,
                v,
                v < n_offsets,
                offs_m,
                row_ok,
                offs_n,
                mask_n,
                pitch,
                c_in,
                stride_xn,
                stride_wv,
                stride_wi,
                stride_wo,
                PACKED,
                PRECISION,
                EVEN_X,
                EVEN_W,
                WIDE,
                WIDTH,
                OFFSETS,
            )
    channel = offs_n[None, :]
    at = row[:, None] * stride_yn + channel
    ok = row_ok[:, None] & mask_n[None, :]
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
        channel,
        mask_n[None, :],
        at,
        ok,
        EPILOGUE,
        ACT,
        y_ptr.dtype.element_ty,
    )
    tl.store(y_ptr + at, acc.to(y_ptr.dtype.element_ty), mask=ok)


narrow_gemm_kernel = register(_narrow_gemm)


class NarrowSpec(GemmSpec):
    """A narrow product and its tile, see `GemmSpec`.  loose: rows of x start anywhere."""

    def __init__(
        self, product: Product, tile: TileConfig, packed: bool, wide: bool = False, splits: int = 1, loose: bool = False
    ) -> None:
        super().__init__(product, tile, packed, wide)
        precision, w, (parts, *_) = product.precision, product.w, product.epilogue
        tile, width = clamp_for_wide(tile, wide), width_of(w.c_in)
        over, inner, outer, _ = w.strides
        full_width = w.c_in == width
        self.even = full_width and not loose
        lined = full_width and inner == 1 and not (over % width or outer % width or w.shift % width)
        self.width, self.tile = width, tile
        self._loose: NarrowSpec | None = None
        self.constants = (
            packed,
            parts,
            self.activation,
            precision if self.dtype == torch.float32 else "ieee",
            self.even,
            lined,
            wide,
            width,
            power_of_2(w.n_offsets) if packed else 1,
            tile.block_m,
            tile.block_n,
            tile.block_k,
        )
        self.options = tile.options(self.target)
        signature = specialise(w.c_in, w.c_out, w.shift, *w.strides, self.columns)
        self._key_parts = ("narrow_gemm", self.dtype, self.constants, tile, signature, False)
        self.key = number_of(self._key_parts)

    def loose(self) -> NarrowSpec:
        """The same for x whose rows start anywhere."""
        if self._loose is None:
            self._loose = NarrowSpec(self.product, self._requested_tile, self.packed, self.wide, loose=True)
        return self._loose


class NarrowGemm(GatherGemm):
    """A narrow product over one map; all as in `GatherGemm`.

    table: a `TileList`, or nbr int32 [V, n_rows].  n_rows: rows of y; n_in: of x. Raises KernelError
    where a launch would need 2^31 programs or more.
    """

    __slots__ = ("_sizes", "_strided")

    kernel = narrow_gemm_kernel
    spec: NarrowSpec

    def __init__(self, spec: NarrowSpec, table: TileList | torch.Tensor, n_rows: int, n_in: int) -> None:
        super().__init__(spec, table, n_rows, n_in)
        self._sizes = n_rows, n_in
        self._strided: NarrowGemm | None = None

    def __call__(self, x: torch.Tensor, w: torch.Tensor, vectors: Vectors | None, y: torch.Tensor) -> torch.Tensor:
        """Write y [n_rows, groups * c_out] and return it; operands as of `GatherGemm`. x whose rows do not
        start at whole vectors of `width` channels takes a kernel of its own."""
        if self.spec.even and x.stride()[0] % self.spec.width:
            if self._strided is None:
                self._strided = NarrowGemm(self.spec.loose(), self.table, *self._sizes)
                if self._lists is not None:
                    self._strided.count_rows(self._lists[3])
            return self._strided(x, w, vectors, y)
        return super().__call__(x, w, vectors, y)
