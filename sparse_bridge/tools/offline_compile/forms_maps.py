"""Forms of the kernels that build maps: hash table, neighbour tables, row order, keys."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping

from ...kernels.maps import (
    gray_rank,
    hash_kernels,
    hash_table,
    key_table,
    level_bounds,
    mask_kernels,
    mask_order,
    neighbor_lookup,
    neighbor_table,
    new_row_kernels,
    new_rows,
    pair_batch,
    row_bounds,
    row_ranks,
    tile_batch,
    tile_list,
    tile_packing,
)
from ...kernels.runtime.launch import Kernel, power_of_2
from ...kernels.runtime.target import Target
from .forms import ALIGNS, Form, Space, make
from .forms_gemm import OFFSET_BLOCKS

DIMENSIONS = (3, 1, 2, 4, 5, 6)
_FLAG = (False, True)
_DIVISION = (2, 1, 0)
_KEYS: Mapping[str, tuple] = {"alive": _FLAG, "dimension": DIMENSIONS, "key64": (True, False)}
_SILENT = ("align",)
# Division, whether a list tells the offsets of a row, and how many are looked at at once.
_DIVIDED = tuple(
    (division, classes, block_v)
    for block_v in (32, 8, 1)
    for division, classes in ((2, True), (1, True), (2, False), (1, False), (0, False))
)
_Divided = tuple[int, bool, int]
_LARGEST = {"i64": (1 << 63) - 1, "i32": (1 << 31) - 1, "i16": (1 << 15) - 1, "u8": 255}


def _insert(
    target: Target, kernel: Kernel, alive: bool, dimension: int, key64: bool, wide: bool, divided: _Divided, align: str
) -> Form:
    division, _, block_v = divided
    rows, warps = hash_table.insert_shape(block_v, target)
    shape = (dimension, key64, wide, *divided, rows)
    constants = (alive, block_v == 1 and division == 0, *shape)
    return make(kernel, constants, {"num_warps": warps}, align=align, keys=_key(key64))


def _key(key64: bool) -> str:
    return "i64" if key64 else "i32"


def _lookup(alive: bool, reversed: bool, dimension: int, key64: bool, wide: bool, division: int, align: str) -> Form:
    rows = neighbor_lookup._LOOKUP_ROWS
    constants = (alive, reversed, dimension, key64, wide, division, rows)
    kernel = neighbor_lookup.lookup_kernel
    return make(kernel, constants, {"num_warps": 1}, align=align, keys=_key(key64))


def _count(block_v: int, align: str) -> Form:
    constants = (hash_table.FLAGS, new_rows._CLUSTER, *new_rows._shape(block_v))
    return make(new_row_kernels.count_kernel, constants, neighbor_table.OPTIONS, align=align)


def _assign(dimension: int, block_v: int, one_block: bool, align: str) -> Form:
    shape = (hash_table.FLAGS, new_rows._CLUSTER, *new_rows._shape(block_v))
    constants = (dimension, *shape, one_block or block_v < 32)
    return make(new_row_kernels.assign_kernel, constants, neighbor_table.OPTIONS, align=align)


def _put_rows(dimension: int, wide: bool, divided: _Divided, align: str) -> Form:
    constants = (dimension, wide, *divided[:2], new_rows._PLACE_ROWS)
    return make(new_row_kernels.place_kernel, constants, neighbor_table.OPTIONS, align=align)


def _link(link: bool, dimension: int, wide: bool, divided: _Divided, align: str) -> Form:
    division, classes, block_v = divided
    shape = new_rows._shape(block_v if classes else 32)
    constants = (link, dimension, wide, division, classes, *shape)
    return make(new_row_kernels.link_kernel, constants, neighbor_table.OPTIONS, align=align)


def _sort_keys(dimension: int, key64: bool, align: str) -> Form:
    key = _key(key64)
    constants = (dimension, _LARGEST[key], row_ranks._BLOCK)
    return make(row_ranks.keys_kernel, constants, neighbor_table.OPTIONS, align=align, key=key)


def _rank(dimension: int, key64: bool, align: str) -> Form:
    key = _key(key64)
    constants = (dimension, _LARGEST[key], row_ranks._STEP, row_ranks._RANKED)
    return make(row_ranks.few_kernel, constants, neighbor_table.OPTIONS, align=align, key=key)


def _move(dimension: int, align: str) -> Form:
    constants = (dimension, row_ranks._BLOCK)
    return make(row_ranks.move_kernel, constants, neighbor_table.OPTIONS, align=align, order="i64")


def _bounds(dimension: int, align: str) -> Form:
    constants, options = (dimension, level_bounds.RULE), {"num_warps": 1}
    kernel = level_bounds.level_bounds_kernel
    return make(kernel, constants, options, align=align, record="i64")


def _row_bounds(dimension: int, align: str) -> Form:
    columns = dimension + 1
    constants = (columns, power_of_2(columns), row_bounds._ROWS)
    return make(row_bounds.row_bounds_kernel, constants, row_bounds.OPTIONS, align=align)


def _repeat(dimension: int, align: str) -> Form:
    constants = (dimension, new_rows._PLACE_ROWS)
    return make(new_row_kernels.repeat_kernel, constants, neighbor_table.OPTIONS, align=align)


def _fixed(kernel: Kernel, *constants: int, num_warps: int = 4, **types: str) -> tuple[Kernel, list[Space]]:
    """A kernel whose constexprs never change."""

    def build(align: str) -> Form:
        return make(kernel, constants, {"num_warps": num_warps}, align=align, **types)

    return kernel, [Space({"align": ALIGNS}, build, silent=_SILENT)]


def _order_key(v_block: int, key: str, align: str) -> Form:
    rank = (v_block, gray_rank.KEY_BITS, gray_rank.SAMPLE)
    constants = (*rank, mask_order._KEY_BLOCK, _LARGEST[key])
    return make(mask_order.key_kernel, constants, {"num_warps": 8}, align=align, key=key)


def _keys_each(v_block: int, shared: int, align: str) -> Form:
    rank = (v_block, gray_rank.KEY_BITS, gray_rank.SAMPLE, mask_order._KEY_BLOCK)
    last = _LARGEST["i64" if shared == 64 else "i32"]
    constants = (tile_batch.FIELDS, *rank, last, shared)
    kernel = tile_batch.keys_kernel
    return make(kernel, constants, {"num_warps": 8}, align=align, records="i64")


def _pack(order: str, align: str) -> Form:
    constants, options = (tile_list.TILE,), {"num_warps": 4}
    return make(tile_packing.pack_kernel, constants, options, align=align, order=order)


def _hash_rows(columns: int, first: int, shifted: bool, fold: bool, align: str) -> Form:
    constants = (columns, first, shifted, fold, key_table._BLOCK)
    kernel = key_table.hash_rows_kernel
    return make(kernel, constants, {"num_warps": 4}, align=align, key="i64")


def _find_keys(row: str, align: str) -> Form:
    types = {"query": "i64", "table": "i64", "row": row}
    constants, options = (key_table._BLOCK,), {"num_warps": 4}
    return make(key_table.find_keys_kernel, constants, options, align=align, **types)


def declare(target: Target) -> Iterator[tuple[Kernel, list[Space]]]:
    """The spaces of each kernel that builds maps."""
    aligns: dict[str, tuple] = {"align": ALIGNS}
    divided = {"wide": _FLAG, "divided": _DIVIDED}
    factors = {**_KEYS, **divided, **aligns}
    for kernel in (hash_kernels.hash_insert_kernel, hash_kernels.hash_claim_kernel):
        insert = functools.partial(_insert, target, kernel)
        yield kernel, [Space(factors, insert, silent=_SILENT)]
    factors = {**_KEYS, "reversed": (True, False), "wide": _FLAG, "division": _DIVISION, **aligns}
    yield neighbor_lookup.lookup_kernel, [Space(factors, _lookup, silent=_SILENT)]
    factors = {"dimension": DIMENSIONS, "wide": _FLAG, "divided": _DIVIDED[:5], **aligns}
    yield new_row_kernels.place_kernel, [Space(factors, _put_rows, silent=_SILENT)]
    factors = {"link": (True, False), "dimension": DIMENSIONS, **divided, **aligns}
    yield new_row_kernels.link_kernel, [Space(factors, _link, silent=_SILENT)]
    programs = {"block_v": (32, 8, 1)}
    factors = {"dimension": DIMENSIONS, **programs, "one_block": (True, False), **aligns}
    yield new_row_kernels.assign_kernel, [Space(factors, _assign, silent=_SILENT)]
    yield new_row_kernels.count_kernel, [Space({**programs, **aligns}, _count, silent=_SILENT)]
    factors = {"dimension": DIMENSIONS, **aligns}
    yield level_bounds.level_bounds_kernel, [Space(factors, _bounds, silent=_SILENT)]
    yield new_row_kernels.repeat_kernel, [Space(factors, _repeat, silent=_SILENT)]
    yield row_bounds.row_bounds_kernel, [Space(factors, _row_bounds, silent=_SILENT)]
    yield row_ranks.move_kernel, [Space(factors, _move, silent=_SILENT)]
    factors = {"dimension": DIMENSIONS, "key64": (True, False), **aligns}
    yield row_ranks.keys_kernel, [Space(factors, _sort_keys, silent=_SILENT)]
    yield row_ranks.few_kernel, [Space(factors, _rank, silent=_SILENT)]
    yield _fixed(row_ranks.rename_kernel, row_ranks._SLOTS)
    yield _fixed(mask_kernels.masks_kernel, neighbor_table.ROWS)
    sizes = tuple(block for block in OFFSET_BLOCKS if block >= gray_rank.LEAST_OFFSETS)
    blocks = {"v_block": sizes}
    factors = {**blocks, "key": ("i32", "i16", "u8", "i64"), **aligns}
    yield mask_order.key_kernel, [Space(factors, _order_key, silent=_SILENT)]
    part = mask_order._PART
    yield _fixed(mask_order.few_kernel, _LARGEST["i32"], part, part)
    orders = {"order": ("i64", "i32"), **aligns}
    yield tile_packing.pack_kernel, [Space(orders, _pack, silent=_SILENT)]
    yield _fixed(tile_packing.compact_kernel, tile_packing.PAIRS, 2 * tile_list.TILE, ends="i64")
    fields = tile_batch.FIELDS
    yield _fixed(tile_batch.masks_kernel, fields, neighbor_table.ROWS, records="i64")
    factors = {**blocks, "shared": (32, 0, 64), **aligns}
    yield tile_batch.keys_kernel, [Space(factors, _keys_each, silent=_SILENT)]
    yield _fixed(tile_batch.orders_kernel, fields, _LARGEST["i32"], part, part, records="i64")
    yield _fixed(tile_batch.tiles_kernel, fields, tile_list.TILE, records="i64")
    fields, rows_of_pair = pair_batch.FIELDS, 2 * tile_list.TILE
    yield _fixed(pair_batch.ends_kernel, fields, pair_batch.BLOCK, records="i64")
    yield _fixed(pair_batch.pairs_kernel, fields, tile_packing.PAIRS, rows_of_pair, records="i64")
    factors = {"columns": (4, 3, 5, 2, 6, 7), "first": (1, 0), "shifted": _FLAG, "fold": _FLAG}
    yield key_table.hash_rows_kernel, [Space({**factors, **aligns}, _hash_rows, silent=_SILENT)]
    lanes = 4 * target.warp_size
    yield _fixed(key_table.insert_keys_kernel, lanes, key="i64", table="i64")
    factors = {"row": ("i64", "i32"), **aligns}
    yield key_table.find_keys_kernel, [Space(factors, _find_keys, silent=_SILENT)]
