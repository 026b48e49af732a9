"""Forms of the kernels that do for programs without torch what torch does elsewhere: sorts, copies, sums and
dense grids."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from ...kernels.maps import radix_order
from ...kernels.ops import dense_rows, elementwise, item_pool, row_norm
from ...kernels.runtime.launch import Kernel
from ...kernels.runtime.target import Target
from .forms import ALIGNS, Form, Space, make

_SILENT = ("align",)
_FLAG = (False, True)
_AXES = (3, 2, 1, 4)
_CHANNELS = (64, 32, 16)  # of a program
_DIGITS = 1 << radix_order.BITS


def _dense(dtype: str, channels: int, axes: int, first: bool, align: str) -> Form:
    constants = (axes, first, dense_rows._ROWS, channels)
    return make(dense_rows.dense_rows_kernel, constants, dense_rows.OPTIONS, align=align, x=dtype, y=dtype)


def _elementwise(dtypes: tuple[str, str, str], operation: str, align: str) -> Form:
    """dtypes: of both operands and of the result."""
    a, b, y = dtypes
    constants = (operation, any("fp" in dtype or dtype == "bf16" for dtype in (a, y)), elementwise._BLOCK)
    types = {"a": a, "b": b, "c": b, "d": b, "y": y}
    return make(elementwise.elementwise_kernel, constants, elementwise.OPTIONS, align=align, **types)


def _digit(kernel: Kernel, key: str, first: bool, order: str, align: str) -> Form:
    types = {"key": key, **({"next": order} if kernel is radix_order.place_kernel else {})}
    constants = (first, _DIGITS, radix_order._BLOCK)
    return make(kernel, constants, radix_order.OPTIONS, align=align, **types)


def _alike(dtype: str, operation: str, align: str) -> Form:
    return _elementwise((dtype, dtype, dtype), operation, align)


def _row_norm(dtype: str, affine: bool, lanes: int, align: str) -> Form:
    constants = (affine, max(1, row_norm._ELEMENTS // lanes), lanes)
    types = {"x": dtype, "gain": "fp32" if affine else dtype, "beta": "fp32" if affine else dtype, "y": dtype}
    return make(row_norm.row_norm_kernel, constants, row_norm.OPTIONS, align=align, **types)


def _shares(dtype: str, largest: bool, channels: int, align: str) -> Form:
    constants = (largest, item_pool._ROWS, channels)
    types = {"x": dtype, "share": "fp32"}
    return make(item_pool.shares_kernel, constants, item_pool.OPTIONS, align=align, **types)


def _joined(dtype: str, mode: str, channels: int, align: str) -> Form:
    constants = (mode, channels, item_pool._SHARES)
    return make(item_pool.joined_kernel, constants, item_pool.OPTIONS, align=align, share="fp32", y=dtype)


def _scan(align: str) -> Form:
    return make(radix_order.scan_kernel, (_DIGITS, radix_order._SCAN), radix_order.OPTIONS, align=align)


def declare(target: Target) -> Iterator[tuple[Kernel, list[Space]]]:
    """The spaces of each of them."""
    floats = ("fp32", "fp16", *(("bf16",) if target.has_bf16 else ()))
    aligns = {"align": ALIGNS}
    grids = {"dtype": floats, "channels": _CHANNELS, "axes": _AXES, "first": _FLAG, **aligns}
    yield dense_rows.dense_rows_kernel, [Space(grids, _dense, silent=_SILENT)]
    same = [(dtype, dtype, dtype) for dtype in (*floats, "i32", "i64")]
    mixed = [(a, b, y) for a in floats for b in floats for y in floats if len({a, b, y}) > 1]
    integers = [(a, b, y) for a in ("i32", "i64") for b in ("i32", "i64") for y in ("i32", "i64") if len({a, b, y}) > 1]
    exact = ("copy", "relu", "add", "sub", "mul")
    spaces = {"dtypes": (*same, *mixed, *integers), "operation": exact, **aligns}
    others = tuple(name for name in elementwise.OPERATIONS if name not in exact)
    alike = {"dtype": floats, "operation": others, **aligns}
    both = [Space(spaces, _elementwise, silent=_SILENT), Space(alike, _alike, silent=_SILENT)]
    yield elementwise.elementwise_kernel, both
    keys = {"key": ("i64", "i32", "i16", "u8"), "first": _FLAG, "order": ("i32", "i64"), **aligns}
    for kernel in (radix_order.count_kernel, radix_order.place_kernel):
        yield kernel, [Space(keys, functools.partial(_digit, kernel), silent=_SILENT)]
    lanes = tuple(1 << bits for bits in range(row_norm.MOST_CHANNELS.bit_length()))
    rows = {"dtype": floats, "affine": _FLAG, "lanes": (64, *(n for n in lanes if n != 64)), **aligns}
    yield row_norm.row_norm_kernel, [Space(rows, _row_norm, silent=_SILENT)]
    channels = (64, 32, 16, 8, 4, 2, 1)
    shares = {"dtype": floats, "largest": _FLAG, "channels": channels, **aligns}
    yield item_pool.shares_kernel, [Space(shares, _shares, silent=_SILENT)]
    modes = {"dtype": floats, "mode": item_pool.MODES, "channels": channels, **aligns}
    yield item_pool.joined_kernel, [Space(modes, _joined, silent=_SILENT)]
    yield radix_order.scan_kernel, [Space(aligns, _scan, silent=_SILENT)]
