"""Forms of the grouped gather-GEMM and of the sums of its products."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import torch

from ...kernels.gemm.grouped_gemm import SUM_LANES, SUM_ROWS, grouped_gemm_kernel, sum_products_kernel
from ...kernels.runtime.launch import Kernel
from ...kernels.runtime.target import Target
from ...kernels.tiles.activation_numbers import NUMBERS
from ...kernels.tiles.clamps import clamp_for_grouped
from ...kernels.tiles.tile import GemmSize
from ...kernels.tiles.tile_config import grouped_tile
from .forms import ALIGNS, POINTED, Form, Space, make
from .forms_gemm import (
    DEPTHS,
    EPILOGUES,
    LAYOUTS,
    VECTORS,
    Case,
    GatherSpace,
    gather_tiles,
    products,
    strides,
    vectors_of,
)


def _grouped(target: Target, case: Case, layout: str, depth: str, columns: int, size: str) -> Form:
    dtype, (even, short, c_in) = case.holds, DEPTHS[depth]
    wide, whole = size != "int32", case.tile.block_k
    channels = whole if even else whole + 1
    tile = clamp_for_grouped(case.tile, target, case.dtype, case.precision, channels, wide)
    divisible, ones = strides(grouped_gemm_kernel, layout, "stride_wi", "stride_wo")
    for names, n in ((("c_in", "stride_xn"), c_in), (("c_out", "stride_pn"), columns)):
        divisible += names if n == 16 else ()
        ones += names if n == 1 else ()
    constants = (case.precision, even, short, wide, tile.block_m, tile.block_n, tile.block_k)
    form = make(grouped_gemm_kernel, constants, tile.options(target), divisible, ones, x=dtype, w=dtype, out="fp32")
    return dataclasses.replace(form, large=wide)


def _sum_products(dtype: str, vector: str, bits: int, act: int, listed: bool, block: int, align: str) -> Form:
    return make(
        sum_products_kernel,
        (bits, act, listed, SUM_ROWS, SUM_LANES, block),
        {"num_warps": 4},
        align=align,
        product="fp32",
        y=dtype,
        alpha="fp32",
        eps="fp32",
        **vectors_of(bits, vector, dtype),
    )


def declare(target: Target) -> Iterator[tuple[Kernel, list[Space]]]:
    """The spaces of both kernels."""
    names = sorted({POINTED[dtype] for dtype, _ in products(target)})
    acts = tuple(NUMBERS.values())
    grouped = functools.partial(
        GatherSpace, build=functools.partial(_grouped, target), main="case", rows=1, silent=("layout", "columns")
    )
    flags: dict[str, Any] = {
        "layout": LAYOUTS,
        "depth": tuple(DEPTHS),
        "columns": (16, 3, 1),
        "size": ("int32", "wide"),
    }
    default, tuned = gather_tiles(target)
    size = GemmSize(1 << 20, 1024, 1024, 27)
    wide = [
        dataclasses.replace(c, tile=grouped_tile(target, c.dtype, size)) for c in default if c.dtype != torch.float32
    ]
    default = list(dict.fromkeys([*default, *wide]))
    tuned = [case for case in tuned if case not in default]
    spaces: list[Space] = [grouped({"case": default, **flags}), grouped({"case": tuned, **flags}, lone=False)]
    yield grouped_gemm_kernel, spaces
    flags = {
        "dtype": names,
        "vector": VECTORS,
        "bits": EPILOGUES,
        "act": acts,
        "listed": (True, False),
        "block": (128, 64, 32, 16),
        "align": ALIGNS,
    }
    yield sum_products_kernel, [Space(flags, _sum_products, silent=("align", "vector"))]
