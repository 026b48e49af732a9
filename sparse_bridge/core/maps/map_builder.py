"""Building kernel maps from coordinate maps: submanifold, strided, generative, between given maps,
from pair lists."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch

from ... import memory, settings
from ...errors import (
    CoordinateError,
    DataTypeError,
    DeviceError,
    GeometryError,
    KernelError,
    OverflowLimitError,
    ShapeError,
)
from ...kernels.runtime.target import Target
from ..arguments import expect_tensors
from ..geometry.boxes import Box
from ..geometry.host_moves import MOST_CELLS, Rule
from ..geometry.offsets import Offsets
from . import host_index, wide_index
from .coordinate_map import CoordinateMap, capacity_for
from .expansion import Expansion, Source, look_up
from .kernel_map import KernelMap
from .pair_lists import PairLists
from .repeated import first_of_equal
from .rulebook import Rulebook

_TILED_OFFSETS = 27  # larger kernels are a first layer's, whose input may be narrow, see `flow_of`


def _check_dimension(cmap: CoordinateMap, offsets: Offsets, stride: Sequence[int]) -> None:
    cmap.rows.require_host_count("a kernel map that inputs before were not asked for")
    dimension = cmap.box.dimension
    if offsets.dimension != dimension or len(stride) != dimension:
        raise GeometryError(
            f"a {offsets.dimension}-dimensional kernel with stride {list(stride)} on "
            f"{cmap.box.dimension}-dimensional "
            "coordinates; all three must agree."
        )
    if min(stride) < 1:
        raise GeometryError(f"stride {list(stride)}; every stride must be at least 1.")
    if max(stride) >= 1 << 31:
        raise OverflowLimitError(
            f"stride {list(stride)}; coordinates of 32 bits take at most {(1 << 31) - 1}. Use a smaller stride."
        )


def search_of(box: Box, offsets: Offsets) -> ModuleType:
    """The torch code that looks up `offsets` in `box`: by keys of the widened box, if they fit."""
    widened = box.size[0]
    for axis in range(box.dimension):
        widened *= box.size[axis + 1] + 2 * offsets.reach(axis)
    return wide_index if box.oversized or widened >= 1 << 62 else host_index


def submanifold(cmap: CoordinateMap, offsets: Offsets) -> KernelMap:
    """Output rows = input rows, y[r] gathers the rows at coordinate + offset.

    The zero offset pairs every row with itself, dead ones too. Of equal coordinates, look-ups see the first row.
    Raises: GeometryError for a kernel of another dimension, Refusal where only the device knows how many rows there
        are.
    """
    _check_dimension(cmap, offsets, (1,) * offsets.dimension)
    target = None if cmap.checked else cmap.kernel_target()
    if target is not None:
        rulebook = _optimistic_rulebook(cmap, offsets, target)
        if rulebook is not None:
            return KernelMap(rulebook)
    elif not cmap.checked:
        cmap.host()  # whose order also tells whether rows are distinct
    if not cmap.unique:
        distinct = _submanifold_rulebook(cmap.distinct_map(), offsets, None)
        return first_of_equal(distinct, cmap.duplicates())
    return KernelMap(_submanifold_rulebook(cmap, offsets, cmap.alive))


def _optimistic_rulebook(cmap: CoordinateMap, offsets: Offsets, target: Target) -> Rulebook | None:
    """The map of distinct, live rows, queued before the device says whether they are; None when
    they are not. With tiles, which most layers ask for, where memory is not limited."""
    rulebook = _submanifold_rulebook(cmap, offsets, None)
    tiled = settings.get().dataflow in settings.TILED and memory.limit is None
    if tiled and len(offsets) <= _TILED_OFFSETS:
        rulebook.tiles(0, target)
    return rulebook if cmap.unique and cmap.alive is None else None


def _submanifold_rulebook(cmap: CoordinateMap, offsets: Offsets, alive: torch.Tensor | None) -> Rulebook:
    n, n_offsets, device = cmap.n_rows, len(offsets), cmap.device
    options = {"symmetric": offsets.symmetric, "center": offsets.center}
    target = cmap.kernel_target()
    if target is None:
        lists = search_of(cmap.box, offsets).submanifold(cmap.host(), offsets, n)
        return Rulebook(n, n, n_offsets, device, lists=lists, **options)  # type: ignore[arg-type]
    source = Source.of(cmap.coords, cmap.box, alive)
    ones, center = (1,) * offsets.dimension, offsets.center
    table = look_up(source, cmap.table(target), n, source.layout, offsets, ones, target, center)
    return Rulebook(n, n, n_offsets, device, views=(table, None), **options)  # type: ignore[arg-type]


def strided(
    cmap: CoordinateMap, offsets: Offsets, stride: tuple[int, ...], out_box: Box, order: str = "first_seen"
) -> tuple[CoordinateMap, KernelMap]:
    """y[u] gathers x[s * u + o]; the outputs are all u in `out_box` that reach a live input.

    order: of the output rows, see `MapRequest`. Equal input coordinates are summed. Returns the output coordinates,
    int32 [M, 1 + D], and the map. Waits for the device, to learn M.
    Raises: GeometryError for a dimension or stride that does not fit, KernelError where the hash table runs out of
        probes, Refusal where only the device knows how many rows there are.
    """
    ones = (1,) * offsets.dimension
    new, rulebook = _expand(cmap, offsets, Rule(ones, stride, -1), out_box, order)
    return new, KernelMap(rulebook, x_fold=None if cmap.unique else cmap.duplicates())


def generative(
    cmap: CoordinateMap, offsets: Offsets, stride: tuple[int, ...], out_box: Box, order: str = "first_seen"
) -> tuple[CoordinateMap, KernelMap]:
    """Transposed convolution onto new coordinates: y[s * u + o] gathers x[u], for all of these in `out_box`; order,
    what is returned and errors as in `strided`."""
    ones = (1,) * offsets.dimension
    new, rulebook = _expand(cmap, offsets, Rule(stride, ones, 1), out_box, order)
    return new, KernelMap(rulebook, x_fold=None if cmap.unique else cmap.duplicates())


def distinct(coords: torch.Tensor, box: Box) -> CoordinateMap:
    """The distinct ones of coordinates int32 [N, 1 + D] that lie in `box`, sorted, see `MapRequest`. Raises: what
    `CoordinateMap` does."""
    ones = (1,) * box.dimension
    origin = Offsets.of([(0,) * box.dimension])
    return _expand(CoordinateMap(coords, box), origin, Rule(ones, ones, 1), box, "sorted")[0]


def _expand(
    cmap: CoordinateMap, offsets: Offsets, rule: Rule, out_box: Box, order: str
) -> tuple[CoordinateMap, Rulebook]:
    for steps in rule[:2]:
        _check_dimension(cmap, offsets, steps)
    cmap = cmap.distinct_map()
    n, n_offsets, device = cmap.n_rows, len(offsets), cmap.device
    target = None
    if not out_box.oversized and order != "by_offset":
        target = cmap.kernel_target(out_box.key64, expands=True)
    if target is None:
        search = wide_index if out_box.volume >= MOST_CELLS or out_box.oversized else host_index
        coords, lists = search.expand(cmap.indexed(), offsets, rule, out_box, order)
        new = CoordinateMap(coords, out_box)
        new.adopt()
        return new, Rulebook(n, new.n_rows, n_offsets, device, lists=lists)
    source = Source.of(cmap.coords, cmap.box, cmap.alive)
    expansion = Expansion(source, offsets, *rule, out_box.layout(device), target)
    n_new = _insert_candidates(expansion, out_box)
    new = CoordinateMap(expansion.number(n_new, order, False), out_box)
    new.adopt(table=expansion.table)
    return new, Rulebook(n, n_new, n_offsets, device, views=expansion.link(n_new))


def _insert_candidates(expansion: Expansion, out_box: Box) -> int:
    """Hash every coordinate that a row reaches; how many there are. That is unknown beforehand, so
    a table sized for the usual case grows until it holds them at most two thirds full; one wait for
    the device per try."""
    from ...kernels.maps.hash_table import FLAGS, HashTable
    from ...kernels.maps.new_rows import owner_counters

    coords, geometry = expansion.reach[:2]
    n, key64 = coords.shape[0], out_box.key64
    most = min(geometry.n_row_offsets * n, out_box.volume)
    guess = most if most <= 1 << 16 else min(most, n)
    counters = owner_counters(n)
    while True:
        table = HashTable.allocate(capacity_for(guess), key64, coords.device, counters)
        expansion.insert(table)
        flags: list[int] = table.flags.tolist()[:FLAGS]
        _, _, overflow, last = flags
        if overflow <= 0 and (3 * (last + 1) <= 2 * table.capacity or guess == most):
            return last + 1
        if guess == most:
            raise KernelError(f"the hash table of {table.capacity} slots ran out of probes for {most} candidates.")
        guess = min(most, 4 * guess)


def between(x_map: CoordinateMap, y_map: CoordinateMap, offsets: Offsets, stride: tuple[int, ...]) -> KernelMap:
    """y[u] gathers x[s * u + o] between two given coordinate maps.

    Raises: GeometryError for a dimension or stride that does not fit, ShapeError for maps of two dimensions,
        DeviceError where they are on two devices, Refusal where only the device knows how many x rows there are.
    """
    _check_dimension(x_map, offsets, stride)
    if x_map.box.dimension != y_map.box.dimension:
        raise ShapeError(
            f"coordinates of {x_map.box.dimension} and of {y_map.box.dimension} dimensions; expected two maps of one "
            "number of dimensions."
        )
    if x_map.device != y_map.device:
        raise DeviceError(f"coordinates on {x_map.device} and {y_map.device}; move both to one device.")
    x_fold = None if x_map.unique else x_map.duplicates()
    y_fold = None if y_map.unique else y_map.duplicates()
    rulebook = _between_rulebook(x_map.distinct_map(), y_map.distinct_map(), offsets, stride)
    return KernelMap(rulebook, x_fold=x_fold, y_fold=y_fold)


def _between_rulebook(
    x_map: CoordinateMap, y_map: CoordinateMap, offsets: Offsets, stride: tuple[int, ...]
) -> Rulebook:
    n_x, n_y, n_offsets, device = x_map.n_rows, y_map.n_rows, len(offsets), x_map.device
    target = None if y_map.kernel_target() is None else x_map.kernel_target()
    if target is None:
        lists = search_of(x_map.box, offsets).lookup(x_map.host(), y_map.coords, y_map.alive, offsets, stride)
        return Rulebook(n_x, n_y, n_offsets, device, lists=lists)
    # The other side is made of this one, if it is asked for.
    source, layout = Source.of(y_map.coords, y_map.box, y_map.alive), x_map.box.layout(device)
    table = look_up(source, x_map.table(target), n_x, layout, offsets, stride, target)
    return Rulebook(n_x, n_y, n_offsets, device, views=(table, None))


def table_of_rows(
    x_map: CoordinateMap, y_map: CoordinateMap, offsets: Offsets, stride: tuple[int, ...], rows: slice
) -> torch.Tensor:
    """int32 [V, len(rows)], -1 where absent: columns of the table of y[u] that gathers x[s * u + o], those of some
    rows of y_map. All rows of both are distinct and live; kernels serve their device."""
    target, device = x_map.kernel_target(), x_map.device
    assert target is not None
    source = Source.of(y_map.coords[rows], y_map.box)
    layout = x_map.box.layout(device)
    return look_up(source, x_map.table(target), x_map.n_rows, layout, offsets, stride, target).nbr


def from_pairs(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], n_x: int, n_y: int, *, submanifold: bool = False
) -> KernelMap:
    """A map from explicit (x rows, y rows) lists, one pair of lists per offset: int32 or int64 [P], on one device, x
    rows below n_x and y rows below n_y. Waits for the device to see that.

    submanifold: x and y rows are the same rows and list V - 1 - v is list v swapped.
    Raises: GeometryError without an offset, ShapeError, DataTypeError, DeviceError, CoordinateError for a row that
        there is not.
    """
    if not pairs:
        raise GeometryError("a kernel map needs at least one offset; got an empty list of pair lists.")
    starts = [0]
    for x_rows, y_rows in pairs:
        expect_tensors("kernel_map", x_rows=x_rows, y_rows=y_rows)
        device = pairs[0][0].device
        if x_rows.shape != y_rows.shape or x_rows.ndim != 1:
            raise ShapeError(f"pair lists of shapes {list(x_rows.shape)} and {list(y_rows.shape)}; both must be [P].")
        for rows, n, side in ((x_rows, n_x, "input"), (y_rows, n_y, "output")):
            _check_rows(rows, n, side, device)
        starts.append(starts[-1] + x_rows.shape[0])
    x_all = torch.cat([pair[0] for pair in pairs]).long()
    y_all = torch.cat([pair[1] for pair in pairs]).long()
    lists = PairLists(x_all, y_all, starts, False)
    center = len(pairs) // 2 if submanifold else -1
    n_offsets = len(pairs)
    rulebook = Rulebook(n_x, n_y, n_offsets, device, center=center, lists=lists, regular=None)
    if submanifold and rulebook.regular:
        rulebook = Rulebook(n_x, n_y, n_offsets, device, symmetric=True, center=center, lists=lists)
    return KernelMap(rulebook)


def _check_rows(rows: torch.Tensor, n: int, side: str, device: torch.device) -> None:
    """A list of rows 0 .. n - 1; kernels follow it without looking."""
    if rows.dtype not in (torch.int32, torch.int64):
        raise DataTypeError(f"pair lists are {rows.dtype}; expected int32 or int64.")
    if rows.device != device:
        raise DeviceError(f"pair lists on {rows.device} and {device}; move all of them to one device.")
    if rows.numel():
        least, most = (int(bound) for bound in rows.aminmax())
        if least < 0 or most >= n:
            raise CoordinateError(
                f"a pair list names {side} row {least if least < 0 else most}; expected 0 <= row < {n}."
            )
