"""New coordinates of strided layers: counted, numbered and written, after `hash_insert`.

Every candidate belongs to the smallest input row that reaches it (the table's value says which);
numbers follow by that row, then by offset, so that they are the same on every run and device.
"""

from __future__ import annotations

import torch

from ..runtime.launch import cdiv
from ..runtime.parts import Operand, Part, Slab, allocate_part
from ..runtime.target import Target
from .coord_key import Reach
from .hash_table import FLAGS, HashTable, offsets_per_program
from .neighbor_table import OPTIONS, NeighborTable
from .new_row_kernels import assign_kernel, count_kernel, link_kernel, place_kernel, repeat_kernel

_BLOCK = 1024  # places times rows of a program that numbers new coordinates
_CLUSTER = 256  # such programs per intermediate sum
_PLACE_ROWS = 256  # rows per program that writes new coordinates


def _shape(n_row_offsets: int) -> tuple[int, int]:
    """(places, rows) of a program."""
    block_v = offsets_per_program(n_row_offsets)
    return block_v, _BLOCK // block_v


def count_owners(
    table: HashTable, slots: Operand, target: Target, count: Operand | None = None, slab: Slab | None = None
) -> Part:
    """int32 [blocks]: new coordinates discovered by each block of rows, after `hash_insert`; their sum is
    added to the table's counters.

    slots: int32 [n_row_offsets, N].  count: of the rows in use, see `NeighborTable`.  slab: for what is
    returned, `owner_blocks` elements.
    """
    n_row_offsets, n_rows = slots.shape
    block_v, rows = _shape(n_row_offsets)
    blocks, (_, values, flags) = cdiv(n_rows, rows), table.own
    owned = allocate_part(slab, table.device, blocks)
    constants = (FLAGS, _CLUSTER, block_v, rows)
    count_kernel.launch(
        table.device,
        target,
        (blocks, 1, 1),
        (
            slots,
            values,
            slots if count is None else count,
            owned,
            flags,
            table.step,
            n_rows,
            int(count is not None),
            n_row_offsets,
        ),
        constants,
        OPTIONS,
        constants,
    )
    return owned


def owner_blocks(n_rows: int, n_row_offsets: int) -> int:
    """Elements of what `count_owners` returns."""
    return cdiv(n_rows, _shape(n_row_offsets)[1])


def owner_counters(n_rows: int) -> int:
    """Counters that `count_owners` needs at most in the table's memory beyond its own."""
    return cdiv(n_rows, _shape(32)[1] * _CLUSTER)


def number_new_rows(
    table: HashTable, slots: Operand, owned: Operand, n_new: int, reach: Reach, target: Target
) -> torch.Tensor:
    """Give the distinct keys that `hash_insert` left in `table` their rows: the new coordinates
    int32 [n_new, 1 + D].

    Order: by the smallest input row that reaches a key, then by offset; the same on every run and
    device. slots: int32 [n_row_offsets, N] from `hash_insert`, for the same `reach`; owned: int32, from
    `count_owners`.  n_new: how many keys there are, or at most; what exceeds it is not written.  `table` then
    maps keys to the new rows.
    """
    coords, geometry, _, wide, _, count = reach
    n_row_offsets, n_rows = slots.shape
    block_v, block = _shape(n_row_offsets)
    shape, (_, values, flags) = (n_new, coords.shape[1]), table.own
    new = coords.new_empty(shape)
    dimension = coords.shape[1] - 1
    constants = (dimension, FLAGS, _CLUSTER, block_v, block, n_row_offsets <= block_v)
    args = (
        slots,
        values,
        slots if count is None else count,
        owned,
        flags,
        new,
        table.step,
        n_rows,
        int(count is not None),
        n_row_offsets,
        n_new,
    )
    assign_kernel.launch(table.device, target, (cdiv(n_rows, block), 1, 1), args, constants, OPTIONS, constants)
    form = (dimension, wide, geometry.division, geometry.class_offsets is not None, _PLACE_ROWS)
    if n_new:
        place_kernel.launch(
            table.device,
            target,
            (cdiv(n_new, _PLACE_ROWS), 1, 1),
            (coords, geometry.table, geometry.classes, flags, new, n_new, n_row_offsets),
            form,
            OPTIONS,
            (form, coords.data_ptr() % 16),
        )
    table.reversed = False
    return new


def repeat_first(coords: torch.Tensor, last: Operand, target: Target) -> None:
    """Write the first row of coords int32 [N, 1 + D] behind the rows in use, where it changes no bounds; zeros where
    none is in use.

    last: int32 [1] on the device, the number of the last row in use.
    """
    n_rows, columns = coords.shape
    constants = (columns - 1, _PLACE_ROWS)
    repeat_kernel.launch(
        coords.device,
        target,
        (cdiv(n_rows, _PLACE_ROWS), 1, 1),
        (coords, last, n_rows),
        constants,
        OPTIONS,
        (constants, coords.data_ptr() % 16),
    )


def link_new_rows(
    table: HashTable,
    slots: Operand,
    n_new: int,
    reach: Reach,
    target: Target,
    count_new: Operand | None = None,
    link: bool = True,
    slabs: tuple[Slab | None, Slab | None] = (None, None),
) -> tuple[NeighborTable | None, NeighborTable]:
    """(table input row -> new row int32 [V, N], its transpose int32 [V, n_new] without masks), after
    `number_new_rows`, in whose terms the arguments are. `slots` may be overwritten: it becomes the former
    where there are no classes of offsets.

    link: whether the former is wanted; None otherwise.  count_new: int32 [1], the new rows in use less
    one.  slabs: for the latter and the former, of -1.
    """
    coords, geometry, _, wide, _, count = reach
    (n_row_offsets, n_rows), n_offsets = slots.shape, geometry.n_offsets
    classes, device = geometry.class_offsets is not None, table.device
    transposed = allocate_part(slabs[0], device, n_offsets, n_new, fill=-1)
    linked, mask = slots, None
    if link and classes:
        linked = allocate_part(slabs[1], device, n_offsets, n_rows, fill=-1)
    elif link:
        mask = allocate_part(None, device, cdiv(n_row_offsets, 32), n_rows)
    # A mask word is made of all its offsets at once.
    block_v, rows = _shape(n_row_offsets) if classes else _shape(32)
    form = (link, coords.shape[1] - 1, wide, geometry.division, classes, block_v, rows)
    args = (
        coords,
        geometry.table,
        geometry.classes,
        slots,
        table.own[1],
        slots if count is None else count,
        linked,
        transposed,
        slots if mask is None else mask,
        table.step,
        n_rows,
        int(count is not None),
        n_row_offsets,
        n_new,
    )
    link_kernel.launch(
        device,
        target,
        (cdiv(n_rows, rows), cdiv(n_row_offsets, block_v), 1),
        args,
        form,
        OPTIONS,
        (form, coords.data_ptr() % 16),
    )
    old_rows = NeighborTable(linked, mask, count, classes) if link else None
    return old_rows, NeighborTable(transposed, None, count_new, blank=True)
