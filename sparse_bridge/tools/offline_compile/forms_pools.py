"""Forms of the kernels that pool, average, interpolate and convolve channel by channel."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from ...kernels.gemm import depthwise
from ...kernels.ops import pooling, segment_sum, serialize, voxel_ops, window_max
from ...kernels.runtime.launch import Kernel
from ...kernels.runtime.target import Target
from .forms import ALIGNS, Form, Space, make

_BLOCKS = (128, 64, 32, 16)  # channels of a program
_SHARES = (1, 2, 4, 8, 16, 32, 64)
_OPTIONS = {"num_warps": 4}
_SILENT = ("align",)
_FLAG = (False, True)
_SUMS = (segment_sum._SEGMENTS, segment_sum._LANES, segment_sum.CHUNK)
_SUM_BLOCKS = (32, 16)  # channels of a program that adds up segments
_INDEX = ("i64", "i32")
_PER_ROW = (8, 1, 2, 4)  # corners of a cell, or points by their voxel


def _rows_of(channels: int) -> tuple[int, int]:
    return (pooling._ROWS, channels)


def _pool_forward(dtype: str, mode: int, channels: int, align: str) -> Form:
    constants, types = (mode, *_rows_of(channels)), {"x": dtype, "y": dtype, "floor": "fp32"}
    return make(pooling.pool_forward_kernel, constants, _OPTIONS, align=align, **types)


def _pool_backward(dtype: str, mode: int, channels: int, align: str) -> Form:
    types = dict.fromkeys(("x", "y", "dy", "dx"), dtype)
    constants = (mode, *_rows_of(channels))
    return make(pooling.pool_backward_kernel, constants, _OPTIONS, align=align, **types)


def _first_largest(dtype: str, shares: int, channels: int, align: str) -> Form:
    types = {"x": dtype, "order": "i64", "starts": "i64", "index": "i64"}
    constants = (shares, *_rows_of(channels))
    return make(pooling.first_largest_kernel, constants, _OPTIONS, align=align, **types)


def _by_channel(kernel: Kernel, dtype: str, channels: int, align: str) -> Form:
    """Kernels of rows x channels; those that write a gradient of weights write fp32."""
    names = [name.removesuffix("_ptr") for name in kernel.fn.arg_names]
    types = {name: dtype for name in ("x", "w", "y", "dy", "dx") if name in names}
    types |= {"part": "fp32"} if "part" in names else {}
    return make(kernel, (depthwise._ROWS, channels), _OPTIONS, align=align, **types)


def _segment_sum(
    rows: tuple[str, int], per_row: int, weight: str | None, count: str | None, cut: bool, index: str, align: str
) -> Form:
    """rows: what they hold, and channels of a program."""
    dtype, channels = rows
    wide = "fp64" if dtype == "fp64" else "fp32"
    types = {"x": dtype, "order": index, "starts": index, "y": wide if cut else dtype}
    count = None if cut else count
    types |= {"weight": weight or dtype, "count": count or index}
    constants = (per_row, weight is not None, count is not None, dtype == "fp64", cut, *_SUMS, channels)
    return make(segment_sum.segment_sum_kernel, constants, segment_sum.OPTIONS, align=align, **types)


def _chunk_sum(rows: tuple[str, int], count: str | None, index: str, align: str) -> Form:
    """rows: as for `_segment_sum`."""
    dtype, channels = rows
    wide = "fp64" if dtype == "fp64" else "fp32"
    types = {"part": wide, "starts": index, "count": count or index, "y": dtype}
    constants = (count is not None, *_SUMS, channels)
    return make(segment_sum.chunk_sum_kernel, constants, segment_sum.OPTIONS, align=align, **types)


def _gather_sum(
    rows: tuple[str, int], per_row: int, weight: str | None, count: str | None, index: str, align: str
) -> Form:
    """rows: as for `_segment_sum`."""
    dtype, channels = rows
    types = {"x": dtype, "index": index, "weight": weight or dtype, "count": count or index}
    types["y"] = dtype
    constants = (per_row, weight is not None, count is not None, dtype == "fp64", voxel_ops._ROWS, channels)
    return make(voxel_ops.gather_sum_kernel, constants, _OPTIONS, align=align, **types)


def _trilinear(dtype: str, index: str, align: str) -> Form:
    types = {"coords": dtype, "index": index, "weight": dtype, "scale": "fp32"}
    constants = (dtype == "fp64", voxel_ops._POINTS)
    return make(voxel_ops.trilinear_kernel, constants, _OPTIONS, align=align, **types)


def _count(index: str, align: str) -> Form:
    return make(voxel_ops.count_kernel, (1024,), _OPTIONS, align=align, index=index)


def _encode(code: str, hilbert: bool, align: str) -> Form:
    constants = (hilbert, serialize._POINTS)
    types = {"coords": "i32", "code": code}
    return make(serialize.encode_kernel, constants, _OPTIONS, align=align, **types)


def _decode(code: str, hilbert: bool, align: str) -> Form:
    constants = (hilbert, code == "i64", serialize._POINTS)
    types = {"coords": "i32", "code": code}
    return make(serialize.decode_kernel, constants, _OPTIONS, align=align, **types)


def declare(target: Target) -> Iterator[tuple[Kernel, list[Space]]]:
    """The spaces of each kernel that works row by row."""
    floats = ("fp32", "fp16", *(("bf16",) if target.has_bf16 else ()))
    aligns = {"align": ALIGNS}
    rows: dict[str, tuple] = {"dtype": floats, "channels": _BLOCKS, **aligns}
    modes = {"mode": tuple(pooling.MODES.values())}
    pools = {**rows, **modes}
    yield pooling.pool_forward_kernel, [Space(pools, _pool_forward, silent=_SILENT)]
    yield pooling.pool_backward_kernel, [Space(pools, _pool_backward, silent=_SILENT)]
    segments = {**rows, "shares": _SHARES}
    yield pooling.first_largest_kernel, [Space(segments, _first_largest, silent=_SILENT)]
    for kernel in (
        depthwise.gather_kernel,
        depthwise.wgrad_kernel,
        window_max.forward_kernel,
        window_max.backward_kernel,
    ):
        build = functools.partial(_by_channel, kernel)
        yield kernel, [Space(rows, build, silent=_SILENT)]
    voxels = {
        **aligns,
        # fp64 has narrower programs.
        "rows": [(dtype, c) for dtype in ("fp64", *floats) for c in _BLOCKS[dtype == "fp64" :]],
        "per_row": _PER_ROW,
        "weight": ("fp32", None, "fp16", "bf16", "fp64"),
        "count": ("i32", None, "i64", "fp32"),
        "index": _INDEX,
    }
    summed = [(dtype, c) for dtype in ("fp64", *floats) for c in _SUM_BLOCKS[dtype == "fp64" :]]
    sums = {**voxels, "rows": summed, "cut": (False, True)}
    yield segment_sum.segment_sum_kernel, [Space(sums, _segment_sum, silent=_SILENT)]
    chunks = {name: levels for name, levels in sums.items() if name not in ("per_row", "weight", "cut")}
    yield segment_sum.chunk_sum_kernel, [Space(chunks, _chunk_sum, silent=_SILENT)]
    yield voxel_ops.gather_sum_kernel, [Space(voxels, _gather_sum, silent=_SILENT)]
    points = {"dtype": ("fp64", *floats), "index": _INDEX, **aligns}
    yield voxel_ops.trilinear_kernel, [Space(points, _trilinear, silent=_SILENT)]
    yield voxel_ops.count_kernel, [Space({"index": _INDEX, **aligns}, _count, silent=_SILENT)]
    codes = {"code": _INDEX, "hilbert": _FLAG, **aligns}
    yield serialize.encode_kernel, [Space(codes, _encode, silent=_SILENT)]
    yield serialize.decode_kernel, [Space(codes, _decode, silent=_SILENT)]
