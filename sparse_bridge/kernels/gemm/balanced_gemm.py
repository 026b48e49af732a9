"""Gather-GEMM over packed tiles, where long ones are shared: split-K by a tile's length with a
fix-up, as in Stream-K (Osama et al., PPoPP 2023), forward and dgrad alike.

In a sparse scene most tiles visit a few offsets and some visit all of them, one after another, and
a launch lasts as long as the longest. Here a program walks a limited number of a tile's offsets;
helpers walk the rest. Each leaves its fp32 sums in memory, and the last one to come adds the tile's
sums up, always in the order of the offsets, and writes the result. So the same map gives the same
bits whoever comes last. How many offsets make a tile long, programs work out from the lengths of
all tiles: none is shared where all are long and there are enough of them.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl

from ...errors import KernelError
from ..maps.tile_list import TileList
from ..runtime.launch import alignment_at, cdiv, number_of, register, specialise
from ..runtime.scratch import Scratch, scratch
from ..runtime.target import Target
from ..tiles.tile_config import TileConfig
from .gather_gemm import GatherGemm, _activate, _added, _read, _tail
from .gather_spec import GemmSpec
from .product import Product
from .vectors import NO_VECTORS, Vectors, tensors_of

MOST_TILES = 2048  # whose lengths a program looks at
# Offsets of a tile that are not worth sharing: steps of a reduction, an offset taking one or more.
_LEAST_STEPS = 6
_REGISTERS = 64 << 10  # of a compute unit
_OTHER = 56  # registers of a thread beside its results, about
_MOST_PROGRAMS = 12  # that a compute unit holds


@triton.jit
def _piece(n_live_ptr, place, n_tiles, helpers, least, TILES: tl.constexpr):
    """(tile, the part of it that program `place` walks, how many parts it has, number of its second
    part, how many offsets it visits).

    The first `helpers` programs walk further parts, numbered from the last tile on; program helpers
    + t the first part of tile n_tiles - 1 - t. Without one to walk a helper gets no offsets.
    """
    helps = place < helpers
    tile = n_tiles - 1 - (place - helpers)
    part = 0
    parts = 1
    second = 0
    length = 0
    if not helps:
        length = tl.load(n_live_ptr + tile)
    if helps | (length > least):
        back = tl.arange(0, TILES)
        lengths = tl.load(n_live_ptr + n_tiles - 1 - back, mask=back < n_tiles, other=0)
        # With so many offsets each, helpers suffice for all that is behind.
        limit = tl.maximum(least, tl.cdiv(tl.sum(lengths, 0), helpers))
        further = tl.maximum(tl.cdiv(lengths, limit), 1) - 1
        before = tl.cumsum(further, 0) - further
        own = back == place - helpers
        mine = tl.where(helps, (before <= place) & (place < before + further), own)
        second = tl.sum(tl.where(mine, before, 0), 0)
        length = tl.sum(tl.where(mine, lengths, 0), 0)
        if helps:
            tile = n_tiles - 1 - tl.sum(tl.where(mine, back, 0), 0)
            part = place - second + 1
        parts = tl.maximum(tl.cdiv(length, limit), 1)
    return tile, part, parts, second, length


@triton.jit
def _added_up(
    acc, sums_ptr, counts_ptr, at, part, parts, second, helpers, n_blocks,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """(the sum of all parts of a tile, 1) for the program that comes last; the others get 0.

    at: the column block among all `n_blocks`, of all groups. Sums of second and further parts lie
    in the first `helpers` places, of first parts behind those.
    """
    inside = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    size = BLOCK_M * BLOCK_N
    first_ptr = sums_ptr + ((helpers + second).to(tl.int64) * n_blocks + at) * size
    further_ptr = sums_ptr + (second.to(tl.int64) * n_blocks + at) * size
    step = n_blocks.to(tl.int64) * size
    own_ptr = first_ptr
    if part > 0:
        own_ptr = further_ptr + (part - 1) * step
    tl.store(own_ptr + inside, acc)
    tl.debug_barrier()  # what all threads have stored comes before the count of one
    count = counts_ptr + second * n_blocks + at
    last = (tl.atomic_add(count, 1, sem="acq_rel") == parts - 1).to(tl.int32)
    if last > 0:
        acc = tl.load(first_ptr + inside, cache_modifier=".cg")
        for other in range(parts - 1):
            acc += tl.load(further_ptr + other * step + inside, cache_modifier=".cg")
        tl.store(count, 0)  # as the next launch expects it
    return acc, last


@triton.jit(do_not_specialize=["pitch", "n_offsets", "alpha", "eps", "helpers", "least"])
def _balanced_gemm(
    x_ptr, w_ptr, bias_ptr, mean_ptr, var_ptr, gain_ptr, beta_ptr, residual_ptr, y_ptr, nbr_ptr,
    rows_ptr, live_ptr, n_live_ptr, sums_ptr, counts_ptr, pitch, n_offsets, c_in, c_out, w_shift,
    alpha, eps, stride_xn, stride_yn, stride_wv, stride_wi, stride_wo, stride_wg, helpers, least,
    TAIL: tl.constexpr, ACT: tl.constexpr, PRECISION: tl.constexpr, EVEN_K: tl.constexpr,
    ONE_K: tl.constexpr, WIDE: tl.constexpr, TILES: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """grid: ((helpers + row tiles) x column blocks, groups).

    The packed gather-GEMM, see there; tiles of more than `least` offsets may be shared. sums: fp32
    [2 * helpers, column blocks of all groups, BLOCK_M, BLOCK_N]; counts: zeros [helpers, the same].
    """
    n_blocks = tl.cdiv(c_out, BLOCK_N)
    place = tl.program_id(0) // n_blocks
    block = tl.program_id(0) % n_blocks
    group = tl.program_id(1)
    tile, part, parts, second, length = _piece(
        n_live_ptr, place, pitch // BLOCK_M, helpers, least, TILES
    )
    lane = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    mask_n = offs_n < c_out
    row = tl.load(rows_ptr + lane)
    writes = tl.where(place < helpers, length, 1)  # a helper that found nothing does not
    live = live_ptr + tile.to(tl.int64) * n_offsets
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
    share = tl.cdiv(length, parts)
    first = part * share
    end = tl.minimum(length, first + share) * k_blocks
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float16 if PRECISION == "half" else tl.float32)
    for step in range(first * k_blocks, end):
        if ONE_K:
            index = step
            k = 0
        else:
            index = step // k_blocks
            k = (step - index * k_blocks) * BLOCK_K
        v = tl.load(live + index)
        source = tl.load(nbr_ptr + v * pitch + lane)
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
    if parts > 1:
        acc, writes = _added_up(
            acc,
            sums_ptr,
            counts_ptr,
            group * n_blocks + block,
            part,
            parts,
            second,
            helpers,
            n_blocks * tl.num_programs(1),
            BLOCK_M,
            BLOCK_N,
        )
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
    row_ok = tl.where(writes > 0, row, -1) >= 0
    ok = row_ok[:, None] & mask_n[None, :]
    if TAIL & 8:
        acc = _added(acc, residual_ptr, at, ok, y_ptr.dtype.element_ty)
    acc = _activate(acc, alpha, ACT)
    tl.store(y_ptr + at, acc.to(y_ptr.dtype.element_ty), mask=ok)


balanced_gemm_kernel = register(_balanced_gemm)


def room_for(target: Target, tile: TileConfig, element_size: int) -> int:
    """Programs that a GPU holds at a time, estimated from the tile alone."""
    threads = tile.num_warps * target.warp_size
    registers = tile.block_m * tile.block_n // threads + _OTHER
    shared = (tile.block_m + tile.block_n) * tile.block_k * element_size * tile.num_stages
    held = min(_REGISTERS // (registers * threads), target.shared_memory // shared)
    return max(1, min(held, _MOST_PROGRAMS)) * target.compute_units


def clamp_for_balanced(
    tile: TileConfig, target: Target, wide: bool, epilogue: int
) -> TileConfig:  # fmt: skip
    """The tile of a balanced product, spread over more warps or made narrower until it stays in
    registers; wide, epilogue: see `clamp_for_problem`."""
    most = target.generation.shared_results
    if wide and epilogue & 8:
        most //= 2
    n, warps = tile.block_n, tile.num_warps
    while tile.block_m * n > most * warps * target.warp_size and n > 16:
        n, warps = (n, 2 * warps) if warps < 8 else (n // 2, warps)
    return dataclasses.replace(tile, block_n=n, num_warps=warps, split_k=1)


class BalancedSpec(GemmSpec):
    """A product and its tile, as `GemmSpec` has them; nothing is split beforehand."""

    def __init__(
        self, product: Product, tile: TileConfig, packed: bool = True, wide: bool = False,
        splits: int = 1,
    ) -> None:  # fmt: skip
        tile = clamp_for_balanced(tile, product.target, wide, product.epilogue.parts)
        super().__init__(product, tile, packed, wide, splits)
        _, parts, activation, precision, even, one, far, _, *blocks = self.constants
        self.constants = (parts, activation, precision, even, one, far, MOST_TILES, *blocks)
        kinds = specialise(*self.following[:3], *self.following[5:])
        self.key = number_of(("balanced_gemm", self.dtype, self.constants, self.tile, kinds))


class BalancedGemm(GatherGemm):
    """A product over one map's tiles, at most MOST_TILES of them; `__call__` as in `GatherGemm`."""

    __slots__ = ("_counts", "_helpers", "_least", "_sums")

    def __init__(self, spec: BalancedSpec, table: TileList, n_rows: int, n_in: int) -> None:
        super().__init__(spec, table, n_rows, n_in)
        tile, target = self.spec.tile, self.spec.target
        tiles, blocks = table.pitch // tile.block_m, cdiv(self.spec.c_out, tile.block_n)
        if tiles > MOST_TILES:
            raise KernelError(
                f"a balanced product over {tiles} tiles; its programs look at {MOST_TILES} at most."
            )
        self._least = max(2, cdiv(_LEAST_STEPS, cdiv(self.spec.product.w.c_in, tile.block_k)))
        columns = blocks * self.spec.groups
        most = tiles * (cdiv(table.n_offsets, self._least) - 1)
        held = room_for(target, tile, self.spec.dtype.itemsize) // columns
        self._helpers = max(1, min(held, most))
        self.grid = ((self._helpers + tiles) * blocks, self.spec.groups, 1)
        self._counts = self._helpers * columns
        self._sums = 2 * self._counts * tile.block_m * tile.block_n
        # The gather-GEMM's, but for the rows of y and the distance of partial sums.
        numbers = self._numbers
        lists, rest = (numbers[:4], numbers[4:]) if self._addressed else ((), numbers)
        self._numbers = (*lists, *rest[1:-1], self._helpers, self._least)

    def _memory(self) -> Scratch:
        return scratch(self.spec.device, self._sums, self._counts)

    def __call__(
        self, x: torch.Tensor, w: torch.Tensor, vectors: Vectors | None, y: torch.Tensor
    ) -> torch.Tensor:
        """See `GatherGemm`."""
        spec, memory = self.spec, self._memory()
        x_at, w_at, y_at = x.data_ptr(), w.data_ptr(), y.data_ptr()
        aligned: object = True
        if (x_at | w_at | y_at) & 15:
            aligned = alignment_at(x_at, w_at, y_at)
        extra_at: tuple[int, ...] = (y_at,) * 6
        kinds: tuple[object, ...] = ()
        if vectors is None or not spec.epilogue.parts:
            vectors = NO_VECTORS
        else:
            extra_at, kinds = _read(vectors, y_at)
        lists: tuple[int, ...] = ()
        row, row_kind, numbers = x.stride()[0], spec.row_kind, self._numbers
        if self._addressed:
            lists, numbers = numbers[:4], numbers[4:]
        if row != spec.columns_in:
            row_kind = specialise(row)
            numbers = (*numbers[:7], row, *numbers[8:])
        key = (spec.key, aligned, w.dtype, kinds, row_kind)
        kernel, at = balanced_gemm_kernel, (memory.sums.data_ptr(), memory.counts.data_ptr())
        values = (x_at, w_at, *extra_at, y_at, *lists, *at, *numbers)
        if not (lists and kernel.start(spec.device, key, self.grid, values, spec.constants)):
            args = (x, w, *tensors_of(vectors, y), y, *self._views(), *memory, *numbers)
            kernel.launch(
                spec.device, spec.target, self.grid, args, spec.constants, spec.options, key
            )
        return y
