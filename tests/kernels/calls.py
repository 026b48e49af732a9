"""Direct calls of the kernel launchers on small problems."""

from __future__ import annotations

import torch

from sparse_bridge.core.geometry.offsets import Offsets
from sparse_bridge.kernels.maps.coord_key import Reach
from sparse_bridge.kernels.maps.hash_table import HashTable, hash_insert
from sparse_bridge.kernels.maps.neighbor_lookup import neighbor_lookup
from sparse_bridge.kernels.maps.new_rows import owner_counters
from sparse_bridge.kernels.runtime import target as targets


def schedules(lane):
    """Three runs; on an emulated GPU the waves take turns in a different order each time."""
    for seed in (None, 1, 2):
        if lane.arch:
            import amd_emulator

            amd_emulator.cfg.seed = seed
        try:
            yield seed
        finally:
            if lane.arch:
                amd_emulator.cfg.seed = None


def target_of(lane):
    return targets.of(torch.device(lane.device))


def geometry(offsets, device, stride=None, divisor=None, sign=1):
    one = (1,) * offsets.dimension
    return offsets.geometry(torch.device(device), stride or one, divisor or one, sign)


def zero(dimension):
    return Offsets.of([(0,) * dimension])


def reach(lane, coords, box, kernel_geometry, alive=None, wide=False):
    """What `coords` reach in `box`, on the lane's device."""
    coords, alive = coords.to(lane.device), None if alive is None else alive.to(lane.device)
    return Reach(coords, kernel_geometry, box.layout(coords.device).bounds, wide, alive)


def insert(lane, coords, box, capacity, offsets=None, alive=None, wide=False, sign=1, divisor=None):
    """(table, slots [n_row_offsets, N]) after inserting what `coords` reach by `offsets` (the zero
    offset)."""
    offsets = zero(box.dimension) if offsets is None else offsets
    kernel_geometry = geometry(offsets, lane.device, divisor=divisor, sign=sign)
    rows = reach(lane, coords, box, kernel_geometry, alive, wide)
    counters = owner_counters(len(coords))  # for tests that number new coordinates
    table = HashTable.allocate(capacity, box.key64, rows.coords.device, counters)
    slots = torch.empty((kernel_geometry.n_row_offsets, len(coords)), dtype=torch.int32, device=rows.coords.device)
    hash_insert(table, rows, slots, target_of(lane))
    return table, slots


def find(lane, table, n_values, coords, box, offsets=None, center=-1, alive=None, wide=False):
    """Neighbour table of what `coords` reach in `table`."""
    offsets = zero(box.dimension) if offsets is None else offsets
    rows = reach(lane, coords, box, geometry(offsets, lane.device), alive, wide)
    return neighbor_lookup(table, n_values, rows, target_of(lane), center)
