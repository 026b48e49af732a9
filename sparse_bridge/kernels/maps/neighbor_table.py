"""Neighbour tables: for every offset and output row the input row, or -1.

`nbr` is int32 `[V, N]`, offset-major. Beside it builders leave what the row order needs: `mask`
int32 `[W, N]`, bit v % 32 of word v // 32 = offset v present, W = ceil(V / 32).

In the kernels nbr_ptr and mask_ptr are these two. `store_mask` and `store_table_masks` write words
of the masks; `part_masks` gives the pointer to those of a part.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ..runtime.launch import cdiv, register
from ..runtime.parts import Operand, Slab, allocate_part, memory_of, viewed
from ..runtime.symbolic import allocated
from ..runtime.target import Target
from .coord_key import Reach, live_rows, locate
from .hash_kernels import hash_find, value_at
from .hash_table import MAX_PROBES, HashTable

OFFSETS = 32  # offsets per program: one mask word
ROWS = 128  # of a table of which a program makes the masks


@triton.jit
def store_mask(value, mask_ptr, n_rows, ROWS: tl.constexpr):
    """The mask words of ROWS rows from a [32, ROWS] block of table entries."""
    bit = tl.arange(0, 32)[:, None]
    word = tl.sum((value >= 0).to(tl.int32) << bit, 0)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tl.store(mask_ptr + tl.program_id(1).to(tl.int64) * n_rows + row, word, mask=row < n_rows)


@triton.jit(
    do_not_specialize=[
        "count_ptr",
        "values_ptr",
        "step",
        "n_rows",
        "counted",
        "n_values",
        "n_offsets",
        "capacity",
        "max_probes",
        "center",
    ]
)
def _neighbor_lookup(
    coords_ptr,
    geometry_ptr,
    bounds_ptr,
    alive_ptr,
    count_ptr,
    keys_ptr,
    values_ptr,
    nbr_ptr,
    mask_ptr,
    step,
    n_rows,
    counted,
    n_values,
    n_offsets,
    capacity,
    max_probes,
    center,
    HAS_ALIVE: tl.constexpr,
    REVERSED: tl.constexpr,
    D: tl.constexpr,
    KEY64: tl.constexpr,
    WIDE: tl.constexpr,
    DIVISION: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Look up what ROWS rows reach by 32 offsets. Offset `center` (-1: none) is every row itself,
    found or not."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[None, :]
    v = tl.program_id(1) * 32 + tl.arange(0, 32)[:, None]
    inside = (row < live_rows(count_ptr, n_rows, counted)) & (v < n_offsets)
    ok = inside
    if HAS_ALIVE:
        ok = ok & (tl.load(alive_ptr + row, mask=row < n_rows, other=-1) >= 0)
    key, ok = locate(
        coords_ptr, geometry_ptr, bounds_ptr, row, tl.minimum(v, n_offsets - 1), ok, D, KEY64, WIDE, DIVISION
    )
    slot = hash_find(keys_ptr, key, ok, capacity, max_probes, KEY64)
    value = tl.load(value_at(values_ptr, slot, step), mask=slot >= 0, other=-1)
    if REVERSED:
        value = tl.where(slot >= 0, n_values - 1 - value, -1)
    else:
        value = -2 - value
    value = tl.where(inside & (v == center), row, value)
    # Columns behind the rows in use become -1, too: products need not know how many there are.
    tl.store(nbr_ptr + v.to(tl.int64) * n_rows + row, value, mask=(row < n_rows) & (v < n_offsets))
    store_mask(value, mask_ptr, n_rows, ROWS)


@triton.jit
def part_start(part, n_offsets, parts):
    """The first offset of a part, where they are cut into `parts` ranges."""
    return part * n_offsets // parts


@triton.jit
def part_masks(mask_ptr, part, parts, n_rows, n_offsets):
    """Where the masks of a part begin."""
    most = tl.cdiv(n_offsets, parts)
    return mask_ptr + (part * tl.cdiv(most, 32)) * n_rows.to(tl.int64)


@triton.jit
def store_table_masks(nbr_ptr, mask_ptr, n_rows, start, end, ROWS: tl.constexpr):
    """Masks of ROWS rows of an existing table by a word of the offsets from `start` to `end`."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[None, :]
    v = start + tl.program_id(1) * 32 + tl.arange(0, 32)[:, None]
    inside = (row < n_rows) & (v < end)
    value = tl.load(nbr_ptr + v.to(tl.int64) * n_rows + row, mask=inside, other=-1)
    store_mask(value, mask_ptr, n_rows, ROWS)


@triton.jit(do_not_specialize=["n_rows", "n_offsets"])
def _table_masks(nbr_ptr, mask_ptr, n_rows, n_offsets, ROWS: tl.constexpr):
    """Masks of an existing table, in parts: grid axis 2."""
    part, parts = tl.program_id(2), tl.num_programs(2)
    start, end = part_start(part, n_offsets, parts), part_start(part + 1, n_offsets, parts)
    mask_ptr += (part * tl.num_programs(1)) * n_rows.to(tl.int64)
    store_table_masks(nbr_ptr, mask_ptr, n_rows, start, end, ROWS)


lookup_kernel = register(_neighbor_lookup)
masks_kernel = register(_table_masks)

OPTIONS = {"num_warps": 4}
_LOOKUP_ROWS = 4


class NeighborTable:
    """nbr int32 [V, N] and mask int32 [W, N] as described above (None until somebody asks for it).

    count: int32 [1] on the device, one less than the rows in use. None if all are.  blank: the columns
    behind them are -1; otherwise they mean nothing.

    own: (nbr, mask, count) for launches.
    """

    tiled = False  # unlike a `TileList`

    def __init__(
        self, nbr: Operand, mask: Operand | None = None, count: Operand | None = None, blank: bool = False
    ) -> None:
        self.own, self.blank = (nbr, mask, count), blank
        self.n_offsets, self.n_rows = nbr.shape
        self._parted: dict[int, torch.Tensor] = {}

    def __reduce__(self) -> Any:
        return NeighborTable, (*self.own, self.blank)

    @property
    def nbr(self) -> torch.Tensor:
        """int32 [V, N]: the row that is met, -1 where there is none."""
        return viewed(self.own[0])  # type: ignore[no-any-return]

    @property
    def mask(self) -> torch.Tensor | None:
        """int32 [W, N]; None where nobody has asked for masks, see `masks`."""
        return viewed(self.own[1])  # type: ignore[no-any-return]

    @property
    def count(self) -> torch.Tensor | None:
        """int32 [1] on the device: rows in use, less one. None if all are."""
        return viewed(self.own[2])  # type: ignore[no-any-return]

    @property
    def device(self) -> torch.device:
        """Where the table is."""
        return memory_of(self.own[0]).device

    @property
    def parts(self) -> tuple[torch.Tensor, ...]:
        """What holds the table: nbr int32 [V, N], and `count` int32 [1] if it has one. Masks can be made
        again."""
        return (self.nbr,) if self.count is None else (self.nbr, self.count)

    @property
    def nbytes(self) -> int:
        """Bytes of the table and of all masks that were made."""
        tensors = [*map(viewed, self.own[:2]), *map(viewed, self._parted.values())]
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def masks(self, target: Target, parts: int = 1) -> torch.Tensor:
        """The offset masks, int32 [parts * W, N], made and kept if nobody left them.

        parts: of so many ranges of the offsets, each with as many words, W, as the longest of them.
        """
        nbr, mask, count = self.own
        masks = mask if parts == 1 else self._parted.get(parts)
        if masks is not None:
            return viewed(masks)  # type: ignore[no-any-return]
        n_offsets, n_rows = nbr.shape
        blocks, words, _ = grid_of(n_rows, cdiv(n_offsets, parts))
        masks = allocated((parts * words, n_rows), torch.int32, self.device)
        masks_kernel.launch(
            self.device,
            target,
            (blocks, words, parts),
            (nbr, masks, n_rows, n_offsets),
            (ROWS,),
            OPTIONS,
            nbr.data_ptr() % 16,
        )
        if parts == 1:
            self.own = nbr, masks, count
        else:
            self._parted[parts] = masks
        return masks

    def used(self, n_rows: int) -> NeighborTable:
        """The table of its first `n_rows` rows, those in use."""
        if n_rows == self.n_rows and self.blank:
            return NeighborTable(*self.own[:2])
        nbr, mask, count = self.nbr, self.mask, self.count
        if n_rows == self.n_rows:
            if count is not None:
                nbr.masked_fill_(torch.arange(n_rows, device=nbr.device) > count, -1)
            return NeighborTable(nbr, mask)
        mask = None if mask is None else mask[:, :n_rows].contiguous()
        return NeighborTable(nbr[:, :n_rows].contiguous(), mask)


def table_elements(n_rows: int, n_offsets: int) -> int:
    """Elements of a `Slab` that a table with masks takes."""
    return Slab.rounded(n_offsets * n_rows) + Slab.rounded(cdiv(n_offsets, OFFSETS) * n_rows)


def grid_of(n_rows: int, n_offsets: int) -> tuple[int, int, int]:
    """The launch grid of a kernel whose programs take `ROWS` rows and `OFFSETS` offsets."""
    return cdiv(n_rows, ROWS), cdiv(n_offsets, OFFSETS), 1


def neighbor_lookup(
    table: HashTable, n_values: int, reach: Reach, target: Target, center: int = -1, slab: Slab | None = None
) -> NeighborTable:
    """Table int32 [V, N] of what rows reach among the keys of `table`, with masks; columns behind the rows in use
    become -1.

    n_values: rows that were inserted in `table`.  center: the offset that is every row itself, or -1.  slab: for the
    table and its masks; None: they get memory of their own.
    """
    coords, geometry, bounds, wide, alive, count = reach
    (n_rows, columns), n_offsets = coords.shape, geometry.n_offsets
    # A single warp waits only for its own slowest look-up.
    grid = (cdiv(n_rows, _LOOKUP_ROWS), cdiv(n_offsets, OFFSETS), 1)
    device, (keys, values, _) = table.device, table.own
    nbr, mask = allocate_part(slab, device, n_offsets, n_rows), allocate_part(slab, device, grid[1], n_rows)
    constants = (alive is not None, table.reversed, columns - 1, table.key64, wide, geometry.division, _LOOKUP_ROWS)
    args = (
        coords,
        geometry.table,
        bounds,
        bounds if alive is None else alive,
        bounds if count is None else count,
        keys,
        values,
        nbr,
        mask,
        table.step,
        n_rows,
        int(count is not None),
        n_values,
        n_offsets,
        table.capacity,
        min(MAX_PROBES, table.capacity),
        center,
    )
    lookup_kernel.launch(device, target, grid, args, constants, {"num_warps": 1}, (constants, coords.data_ptr() % 16))
    return NeighborTable(nbr, mask, count, blank=True)
