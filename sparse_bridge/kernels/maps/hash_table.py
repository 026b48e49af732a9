"""A hash table on the GPU: ordered linear probing (Amble and Knuth, 1974), filled with atomic
maxima.

Along every probe sequence a larger key goes before a smaller one. An insert therefore swaps its key
for a smaller one that it meets and carries that one on, and a search ends at the first smaller key:
short probes for the absent neighbours that most look-ups of a sparse scene ask for. Keys are never
negative and free slots hold -1, so one atomic maximum per step does it all, and the finished table
is the same whatever the order of execution.

Memory of a table with `capacity` slots (a power of two), one int32 tensor filled with -1: `FLAGS`
counters, then keys and values (int32), side by side where keys are int32 as well, so that a search
that ends well finds the value in the sector it has just read. A value stores `n_rows - 1 - row`
under an atomic maximum, so the smallest row of equal keys wins; later, once rows are numbered
anew, `-2 - number`; -1 means none. The counters start at -1: keys inserted, live rows (both only
where COUNT asks for them), and whether a key ran out of probes. The kernels are in `hash_kernels`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..runtime.fetched import Fetched
from ..runtime.launch import cdiv
from ..runtime.parts import Operand, Part, viewed
from ..runtime.target import Target
from .coord_key import Reach
from .hash_kernels import hash_claim_kernel, hash_insert_kernel

FLAGS = 4
MAX_PROBES = 512


class HashTable:
    """Slots in device memory. `values` decode to rows by `n_rows - 1 - value` when `reversed`, else
    by `-2 - value`.

    keys: int32 or int64 [capacity].  values: int32 [capacity].  flags: int32 [FLAGS + more counters].
    own: these three, for launches.  total: the counter of new rows, int32 [1], see
    `new_rows.count_owners`.
    """

    def __init__(self, keys: Operand, values: Operand, flags: Part, capacity: int, reversed: bool = True) -> None:
        self.own, self.capacity, self.reversed = (keys, values, flags), capacity, reversed
        self.total = Part(flags.memory, flags.start + FLAGS - 1, (1,))
        self.key64, self.device = keys.dtype == torch.int64, flags.memory.device
        # From one value to the next.
        self.step = values.step if isinstance(values, Part) else values.stride(0)
        self._fetched: Fetched | None = None

    @staticmethod
    def allocate(capacity: int, key64: bool, device: torch.device, counters: int = 0) -> HashTable:
        """An empty table; `capacity` must be a power of two of at least 64. counters: further ones
        that later kernels want."""
        return HashTable.allocate_all([(capacity, key64, counters)], device)[0]

    @staticmethod
    def allocate_all(requests: Sequence[tuple[int, bool, int]], device: torch.device) -> list[HashTable]:
        """Empty tables of (capacity, key64, counters). They share memory, in which the flags and
        counters of all of them come first, one after another."""
        heads = [4 * cdiv(FLAGS + counters, 4) for _, _, counters in requests]
        sizes = [(3 if key64 else 2) * capacity for capacity, key64, _ in requests]
        head, at = 0, sum(heads)
        memory = torch.full((at + sum(sizes),), -1, dtype=torch.int32, device=device)
        tables = []
        for (capacity, key64, _), length, size in zip(requests, heads, sizes, strict=True):
            shape = (capacity,)
            if key64:
                keys = Part(memory, at, shape, torch.int64)
                values = Part(memory, at + 2 * capacity, shape)
            else:
                keys, values = Part(memory, at, shape, step=2), Part(memory, at + 1, shape, step=2)
            tables.append(HashTable(keys, values, Part(memory, head, (length,)), capacity))
            head, at = head + length, at + size
        return tables

    @property
    def keys(self) -> torch.Tensor:
        """int32 or int64 [capacity], -1 where a slot is free."""
        return viewed(self.own[0])  # type: ignore[no-any-return]

    @property
    def values(self) -> torch.Tensor:
        """int32 [capacity], -1 where there is none."""
        return viewed(self.own[1])  # type: ignore[no-any-return]

    @property
    def flags(self) -> torch.Tensor:
        """int32 [FLAGS + further counters, rounded up to a multiple of four], -1 at first: what kernels count, as
        described above; `counters` are their copy on the host."""
        return self.own[2].view()

    def fetch(self) -> None:
        """Start copying the counters to the host, so that `counters` waits for no later work."""
        if self._fetched is None:
            self._fetched = Fetched([self.flags])

    def counters(self) -> tuple[int, int, bool]:
        """(keys inserted, live rows, overflow); waits for the device."""
        flags = self.flags.tolist() if self._fetched is None else self._fetched.read()[0]
        self._fetched = None
        return live_flags(flags)


def live_flags(flags: Sequence[int]) -> tuple[int, int, bool]:
    """(keys inserted, live rows, overflow) from a table's counters."""
    return flags[0] + 1, flags[1] + 1, flags[2] > 0


def offsets_per_program(n_row_offsets: int) -> int:
    """Places of offsets that one program looks at: few sizes, since each is a form of its own."""
    return 1 if n_row_offsets == 1 else 8 if n_row_offsets <= 8 else 32


def insert_shape(block_v: int, target: Target) -> tuple[int, int]:
    """(rows, warps) of a program that looks at `block_v` offsets. A single warp waits only for its
    own slowest search."""
    return (4 * target.warp_size, 4) if block_v == 1 else (256 // block_v, 1)


def hash_insert(table: HashTable, reach: Reach, slots: Operand, target: Target) -> None:
    """Insert the coordinates that rows reach into an empty table.

    With a single offset, undivided, the table's counters count; else only the overflow flag means
    something.

    slots: int32 [reach.geometry.n_row_offsets, N], written, -1 where an offset leads nowhere; columns behind the rows
    in use are left as they were.

    The table's keys, counters and values are updated; the caller reads them. A full table raises
    nothing: it sets the overflow flag.
    """
    coords, geometry, bounds, wide, alive, count = reach
    n_rows, columns = coords.shape
    n_row_offsets = geometry.n_row_offsets
    block_v = offsets_per_program(n_row_offsets)
    rows, warps = insert_shape(block_v, target)
    max_probes = min(MAX_PROBES, table.capacity)
    unused = bounds  # stands for a pointer that is not followed
    keys, values, flags = table.own
    pointers = (
        coords,
        geometry.table,
        geometry.classes,
        bounds,
        unused if alive is None else alive,
        unused if count is None else count,
        keys,
    )
    sizes = (n_rows, int(count is not None), n_row_offsets, table.capacity, max_probes)
    alone = n_row_offsets == 1 and geometry.division == 0
    classes = geometry.class_offsets is not None
    shape = (columns - 1, table.key64, wide, geometry.division, classes, block_v, rows)
    constants = (alive is not None, alone, *shape)
    grid = (cdiv(n_rows, rows), cdiv(n_row_offsets, block_v), 1)
    key = (constants, coords.data_ptr() % 16)
    options = {"num_warps": warps}
    hash_insert_kernel.launch(coords.device, target, grid, (*pointers, flags, *sizes), constants, options, key)
    hash_claim_kernel.launch(
        coords.device, target, grid, (*pointers, values, slots, table.step, *sizes), constants, options, key
    )
