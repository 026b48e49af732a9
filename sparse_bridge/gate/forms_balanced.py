"""Forms of the balanced gather-GEMM: the packed ones of the gather-GEMM, none split beforehand."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

from ..kernels.gemm.balanced_gemm import MOST_TILES, balanced_gemm_kernel, clamp_for_balanced
from ..kernels.gemm.gather_spec import ACTIVATIONS
from ..kernels.runtime.launch import Kernel
from ..kernels.runtime.target import Target
from ..kernels.tiles.tile_config import clamp_for_problem
from .forms import Form, Space
from .forms_gemm import (
    DEPTHS,
    EPILOGUES,
    LAYOUTS,
    VECTORS,
    Case,
    GatherSpace,
    gather_tiles,
    in_half,
    product_form,
)


def _balanced(
    target: Target, case: Case, layout: str, depth: str, columns: int, size: str,
    epilogue: tuple[int, int, int], vector: str,
) -> Form:  # fmt: skip
    bits, act, _ = epilogue
    even, one, c_in = DEPTHS[depth]
    wide, whole = size != "int32", case.tile.block_k
    tile = clamp_for_balanced(case.tile, target, wide, bits)
    tile = clamp_for_problem(
        tile, target, case.dtype, case.precision, whole if even else whole + 1, wide, bits
    )
    constants = (
        bits, act, case.precision, even, one, wide, MOST_TILES, tile.block_m, tile.block_n,
        tile.block_k,
    )  # fmt: skip
    return dataclasses.replace(
        product_form(
            balanced_gemm_kernel, constants, tile.options(target), (layout, c_in, columns),
            (bits, vector, case.holds), sums="fp32",
        ),
        large=wide,
    )  # fmt: skip


def declare(target: Target) -> Iterator[tuple[Kernel, list[Space]]]:
    """The spaces of the kernel."""
    space = functools.partial(
        GatherSpace, build=functools.partial(_balanced, target), main="case", rows=1,
        silent=("layout", "columns", "vector"),
    )  # fmt: skip
    default, tuned = gather_tiles(target)
    flags: dict[str, Any] = {
        "layout": LAYOUTS, "depth": tuple(DEPTHS), "columns": (16, 3, 1),
        "size": ("int32", "wide"),
        "epilogue": [(bits, act, 1) for bits in EPILOGUES for act in ACTIVATIONS.values()],
        "vector": VECTORS,
    }  # fmt: skip
    yield balanced_gemm_kernel, [
        space({"case": default, **flags}),
        space({"case": tuned, **flags}, lone=False),
        space({"case": in_half(target, default), **flags}, lone=False),
    ]  # fmt: skip
