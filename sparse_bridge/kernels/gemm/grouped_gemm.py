"""Grouped gather-GEMM: all offsets of a list of pairs in one launch, forward and dgrad alike.

A tile holds pairs of one offset: it gathers their x rows, multiplies by that offset's matrix and
leaves fp32 products, pair by pair. A second kernel adds the products of each result row, always in
the same order, and applies the epilogue. No tile visits an offset that its rows lack, and a matrix
is read once per tile of its own pairs; what it costs are the products, written and read.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ...errors import KernelError
from ..runtime.launch import alignment, cdiv, number_of, register, specialise
from ..tiles.activation_numbers import NUMBERS
from ..tiles.clamps import clamp_for_grouped
from ..tiles.tile import TileConfig, power
from .epilogue import _finished
from .gather_spec import INT32_END
from .product import EpilogueForm, Product
from .vectors import Vectors, tensors_of

SUM_LANES = 4  # products of a row that a program loads at a time
SUM_ROWS = 8
LONGEST = 512  # products of a row of a regular map that one program adds up
# Longer rows of graphs are cut into such pieces: few are long, and all others wait for them.
_PIECE = 32


@triton.jit
def _grouped_gemm(
    x_ptr,
    w_ptr,
    out_ptr,
    source_ptr,
    tiles_ptr,
    c_in,
    c_out,
    w_shift,
    stride_xn,
    stride_pn,
    stride_wv,
    stride_wi,
    stride_wo,
    stride_wg,
    PRECISION: tl.constexpr,
    EVEN_K: tl.constexpr,
    ONE_K: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """grid: (tiles x column blocks, groups).

    out[p, :] = x[source[p], :] @ w[v] for the pairs p of each tile; tiles [T, 4]: v, the first
    pair, how many pairs (0: nothing to do), the same again. x [N_in, groups * c_in] with row stride
    stride_xn, out fp32 [P, groups * c_out]; w as in the gather-GEMM.
    """
    n_blocks = tl.cdiv(c_out, BLOCK_N)
    tile = tiles_ptr + (tl.program_id(0) // n_blocks) * 4
    offs_n = (tl.program_id(0) % n_blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    group = tl.program_id(1)
    v = tl.load(tile).to(tl.int64)
    count = tl.load(tile + 2)
    lane = tl.arange(0, BLOCK_M)
    offs_k = tl.arange(0, BLOCK_K)
    mask_m = lane < count
    mask_n = offs_n < c_out
    pair = tl.load(tile + 1) + lane
    source = tl.load(source_ptr + pair, mask=mask_m, other=0)
    if WIDE:
        source = source.to(tl.int64)
    x_rows = x_ptr + group * c_in + source[:, None] * stride_xn + offs_k[None, :]
    w_rows = (
        w_ptr + w_shift + v * stride_wv + group * stride_wg + offs_k[:, None] * stride_wi + offs_n[None, :] * stride_wo
    )
    k_blocks = 1 if ONE_K else tl.cdiv(c_in, BLOCK_K)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(tl.where(count > 0, k_blocks, 0)):
        k = step * BLOCK_K
        if EVEN_K:
            a = tl.load(x_rows + k, mask=mask_m[:, None], other=0.0)
            b = tl.load(w_rows + k * stride_wi, mask=mask_n[None, :], other=0.0)
        else:
            mask_k = offs_k < c_in - k
            a = tl.load(x_rows + k, mask=mask_m[:, None] & mask_k[None, :], other=0.0)
            b = tl.load(w_rows + k * stride_wi, mask=mask_k[:, None] & mask_n[None, :], other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    out = out_ptr + pair.to(tl.int64)[:, None] * stride_pn + (group * c_out + offs_n)[None, :]
    tl.store(out, acc, mask=mask_m[:, None] & mask_n[None, :])


@triton.jit(do_not_specialize=["n_rows", "alpha", "eps"])
def _sum_products(
    product_ptr,
    entry_ptr,
    starts_ptr,
    bias_ptr,
    mean_ptr,
    var_ptr,
    gain_ptr,
    beta_ptr,
    residual_ptr,
    y_ptr,
    n_rows,
    n_channels,
    alpha,
    eps,
    EPILOGUE: tl.constexpr,
    ACT: tl.constexpr,
    LISTED: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """y[r] = the sum of the products of row r, in order, and what follows it (`_finished`).

    product fp32 [P, n_channels]; those of row r are entry[starts[r] : starts[r + 1]], or these
    numbers themselves without LISTED. The rest as in the gather-GEMM.
    """
    lane = tl.arange(0, ROWS * LANES)
    row = tl.program_id(0) * ROWS + lane // LANES
    channel = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    ok_n = channel < n_channels
    begin = tl.load(starts_ptr + row, mask=row < n_rows, other=0)
    end = tl.load(starts_ptr + row + 1, mask=row < n_rows, other=0)
    acc = tl.zeros((ROWS * LANES, BLOCK_N), tl.float32)
    for step in range(0, tl.max(end - begin, 0), LANES):
        index = begin + step + lane % LANES
        inside = index < end
        entry = index
        if LISTED:
            entry = tl.load(entry_ptr + index, mask=inside, other=0)
        at = entry.to(tl.int64)[:, None] * n_channels + channel[None, :]
        acc += tl.load(product_ptr + at, mask=inside[:, None] & ok_n[None, :], other=0.0)
    acc = tl.sum(tl.reshape(acc, (ROWS, LANES, BLOCK_N)), 1)
    offs_m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    ok_n = ok_n[None, :]
    channel = channel[None, :]
    at = offs_m.to(tl.int64)[:, None] * n_channels + channel
    ok = (offs_m < n_rows)[:, None] & ok_n
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
        ok_n,
        at,
        ok,
        EPILOGUE,
        ACT,
        y_ptr.dtype.element_ty,
    )
    tl.store(y_ptr + at, acc.to(y_ptr.dtype.element_ty), mask=ok)


grouped_gemm_kernel = register(_grouped_gemm)
sum_products_kernel = register(_sum_products)


class Groups(NamedTuple):
    """Pairs by offset, as the two kernels follow them, int32 on the device.

    source: [P], x row of each pair, offset by offset.  entries: [P], the pairs by result row, in
    one order.  starts: [n_rows + 1], where each row's begin.  pieces: the entries of long rows are
    cut, see `pieces_of`; () where none is.
    """

    source: torch.Tensor
    entries: torch.Tensor
    starts: torch.Tensor
    pieces: tuple[torch.Tensor, ...] = ()


def pieces_of(starts: torch.Tensor, longest: int) -> tuple[torch.Tensor, ...]:
    """Cuts of rows with up to `longest` entries, (level 1, level 2, ...), each int32 [n + 1].

    starts: int32 [n_rows + 1], where each row's entries begin.  The starts of a level's pieces count
    what the level before left; the last level's are the rows'. () where no row is long.

    A row of up to two pieces (2 * 32 entries) stays whole, whatever others there are: how its sum is
    cut depends on its own length. Waits for the device once a level, to learn how many pieces there are.
    """
    if longest <= 2 * _PIECE:
        return ()
    lengths = starts.diff()
    per_row = torch.where(lengths > 2 * _PIECE, (lengths + _PIECE - 1) // _PIECE, lengths.clamp(max=1))
    ends = per_row.cumsum(0, dtype=torch.int32)
    total = int(ends[-1])
    row = torch.arange(len(lengths), device=starts.device).repeat_interleave(per_row, output_size=total)
    number = torch.arange(total, dtype=torch.int32, device=starts.device)
    first = starts[:-1][row] + (number - (ends - per_row)[row]) * _PIECE
    cut = torch.cat([first, starts[-1:]]).int()
    rows = torch.cat([ends.new_zeros(1), ends])
    return cut, *(pieces_of(rows, cdiv(longest, _PIECE)) or (rows,))


class GroupedSpec:
    """A product and its tile, but for the map: worked out once for many maps.

    constants, options, key: of the product's kernel.  numbers: c_in .. stride_wg of it.  sum_*: of
    the kernel that adds the products.
    """

    def __init__(self, product: Product, tile: TileConfig, wide: bool = False) -> None:
        self.product, self.wide, self._requested_tile = product, wide, tile
        self.target, self.device, self.dtype, precision, w, self.epilogue = product
        self.w = w
        c_in, c_out = w.c_in, w.c_out
        self.columns_in, self.columns = w.groups * c_in, w.groups * c_out
        tile = clamp_for_grouped(tile, self.target, self.dtype, precision, c_in, wide)
        self.tile = tile
        self.constants = (
            precision if self.dtype == torch.float32 else "ieee",
            c_in % tile.block_k == 0,
            c_in <= tile.block_k,
            wide,
            tile.block_m,
            tile.block_n,
            tile.block_k,
        )
        self.options = tile.options(self.target)
        self.leading, self.trailing = (c_in, c_out, w.shift), (self.columns, *w.strides)
        signature = specialise(*self.leading, *self.trailing)
        self.key = number_of(("grouped_gemm", self.dtype, self.constants, tile, signature))
        self.sum_block = power(self.columns, 16, 128)
        self._wider: GroupedSpec | None = None

    def fitting(self, n_in: int) -> GroupedSpec:
        """This one, or one with wide offsets, as `n_in` rows of x need it."""
        if self.wide or n_in * self.columns_in < INT32_END:
            return self
        if self._wider is None:
            self._wider = GroupedSpec(self.product, self._requested_tile, True)
        return self._wider


class GroupedGemm:
    """A product over the pairs of one map; `__call__` as in `GatherGemm`.

    tiles: [T, 4] int32 as the kernel reads them, for the spec's tile.  n_rows: rows of y; n_in: of
    x. Raises KernelError where a launch would need 2^31 programs or more.
    """

    __slots__ = ("blank", "groups", "n_rows", "spec", "tiles")

    def __init__(self, spec: GroupedSpec, groups: Groups, tiles: torch.Tensor, n_rows: int, n_in: int) -> None:
        self.spec, self.groups, self.tiles = spec.fitting(n_in), groups, tiles
        self.n_rows, self.blank = n_rows, False
        if len(tiles) * cdiv(self.spec.w.c_out, self.spec.tile.block_n) >= INT32_END:
            raise KernelError(
                f"a grouped product over {len(groups.source)} pairs needs more than 2^31 programs; "
                "a launch takes fewer."
            )

    def count_rows(self, count: torch.Tensor) -> None:
        """Its tiles tell of the rows in use."""

    @property
    def tile(self) -> TileConfig:
        """The tile that is launched."""
        return self.spec.tile

    def __call__(self, x: torch.Tensor, w: torch.Tensor, vectors: Vectors | None, y: torch.Tensor) -> torch.Tensor:
        """Write y [n_rows, groups * c_out], contiguous, and return it.

        x: [n_in, groups * c_in], unit channel stride.  w, vectors, y: as in `GatherGemm`. Takes an fp32
        workspace [P, groups * c_out] for the products of all pairs.
        """
        spec, groups = self.spec, self.groups
        device, target, n_pairs = spec.device, spec.target, len(groups.source)
        products = torch.empty((n_pairs, spec.columns), dtype=torch.float32, device=device)
        if len(self.tiles):
            blocks = len(self.tiles) * cdiv(spec.w.c_out, spec.tile.block_n)
            args = (x, w, products, groups.source, self.tiles, *spec.leading, x.stride()[0], *spec.trailing)
            key = (spec.key, w.dtype, alignment(*args[:5]), specialise(x.stride()[0]))
            grouped_gemm_kernel.launch(
                device, target, (blocks, spec.w.groups, 1), args, spec.constants, spec.options, key
            )
        entries: torch.Tensor | None = groups.entries
        starts = groups.pieces or (groups.starts,)
        for cut in starts[:-1]:
            products, entries = self._sum(products, entries, cut, None, None), None
        self._sum(products, entries, starts[-1], vectors, y)
        return y

    def _sum(
        self,
        products: torch.Tensor,
        entries: torch.Tensor | None,
        starts: torch.Tensor,
        vectors: Vectors | None,
        y: torch.Tensor | None,
    ) -> torch.Tensor:
        """Sums of the products by row, with the epilogue into `y`; without one, of pieces."""
        spec, n_rows = self.spec, len(starts) - 1
        end = EpilogueForm() if y is None else spec.epilogue
        if y is None:
            y = products.new_empty((n_rows, spec.columns))
        extra: tuple[torch.Tensor, ...] = (y,) * 6
        if vectors is not None and end.parts:
            extra = tuple(tensors_of(vectors, y))
        listed = entries is not None
        constants: tuple[Any, ...] = (end.parts, NUMBERS[end.activation], listed, SUM_ROWS, SUM_LANES, spec.sum_block)
        pointers = (products, starts if entries is None else entries, starts, *extra, y)
        args = (*pointers, n_rows, spec.columns, float(end.alpha), float(end.eps))
        dtypes = tuple([tensor.dtype for tensor in extra])
        key = (constants, y.dtype, dtypes, alignment(*pointers), specialise(spec.columns))
        grid = (cdiv(n_rows, SUM_ROWS), cdiv(spec.columns, spec.sum_block), 1)
        sum_products_kernel.launch(spec.device, spec.target, grid, args, constants, {"num_warps": 4}, key)
        return y
