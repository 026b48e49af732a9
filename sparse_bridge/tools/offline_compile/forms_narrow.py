"""Forms of the gather-GEMM for narrow inputs."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

from ...kernels.gemm.narrow_gemm import narrow_gemm_kernel
from ...kernels.runtime.launch import Kernel
from ...kernels.runtime.target import Target
from ...kernels.tiles.activation_numbers import NUMBERS
from ...kernels.tiles.narrow_tile import SMALL, WIDEST, clamp_for_wide, narrow_tile, width_of
from .forms import Form, Space
from .forms_gemm import CHANNELS, EPILOGUES, VECTORS, Case, product_form, products

# (EVEN_X, EVEN_W, how the weight lies, see `forms_gemm.LAYOUTS`)
LINES = {
    "both": (True, True, "swapped"),
    "rows": (True, False, "rows"),
    "none": (False, False, "loose"),
    "weight": (False, True, "swapped"),
    "loose weight": (True, False, "loose"),
    "odd": (False, False, "swapped"),
    "odd rows": (False, False, "rows"),
}


# Powers of two that hold the kernel volume, of packed tiles; 1 for tables.
LANES = (32, 1, 2, 4, 8, 16, 64, 128, 256, 512, 1024)


@dataclasses.dataclass(frozen=True)
class Narrow(Case):
    """A tile with what it multiplies, and how many channels a step keeps for an offset."""

    width: int


@functools.lru_cache(maxsize=16)
def narrow_tiles(target: Target) -> list[Narrow]:
    """Every tile."""
    tiles = {
        Narrow(narrow_tile(target, dtype, precision, c_in, c_out, n_offsets), dtype, precision, width_of(c_in)): None
        for (dtype, precision), c_in in itertools.product(products(target), range(WIDEST, 0, -1))
        for c_out, n_offsets in itertools.product(CHANNELS, (SMALL + 1, SMALL))
    }
    return list(tiles)


def _narrow(
    target: Target,
    case: Narrow,
    lines: str,
    columns: int,
    lanes: int,
    size: str,
    epilogue: tuple[int, int],
    vector: str,
) -> Form:
    dtype, (bits, act), (even_x, even_w, layout) = case.holds, epilogue, LINES[lines]
    wide = size != "int32"
    tile = clamp_for_wide(case.tile, wide)
    constants = (
        lanes > 1,
        bits,
        act,
        case.precision,
        even_x,
        even_w,
        wide,
        case.width,
        lanes,
        tile.block_m,
        tile.block_n,
        tile.block_k,
    )
    point = 1 if case.width == 1 else 3  # channels that Triton tells apart from others
    form = product_form(
        narrow_gemm_kernel, constants, tile.options(target), (layout, point, columns), (bits, vector, dtype), y=dtype
    )
    divisible, ones = form.divisible, form.ones
    if layout == "swapped":  # offsets lie c_in elements apart
        divisible -= {"stride_wv"}
        ones |= {"stride_wv"} if case.width == 1 else set()
    return dataclasses.replace(form, divisible=divisible, ones=ones, large=wide)


class NarrowSpace(Space):
    """Constants tell the width, which a tile alone does not."""

    def holds(self, form: Form) -> bool:
        """As `Space.holds`."""
        named = form.named
        fixed: dict[str, Any] = {
            "case": [c for c in self.factors["case"] if c.width == named["WIDTH"]],
            "lines": [name for name, (x, w, _) in LINES.items() if (x, w) == (named["EVEN_X"], named["EVEN_W"])],
            "lanes": [n for n in LANES if n == named["LANES"]],
            "size": ("wide" if named["WIDE"] else "int32",),
            "epilogue": [(named["EPILOGUE"], named["ACT"])],
        }
        sides = {**self.factors, **fixed}
        return Space(sides, self.build, self.main, silent=self.silent).holds(form)


def declare(target: Target) -> Iterator[tuple[Kernel, list[Space]]]:
    """The space of the kernel."""
    flags: dict[str, Any] = {
        "lines": tuple(LINES),
        "columns": (16, 3, 1),
        "lanes": LANES,
        "size": ("int32", "wide"),
        "epilogue": list(itertools.product(EPILOGUES, NUMBERS.values())),
        "vector": VECTORS,
    }
    space = NarrowSpace(
        {"case": narrow_tiles(target), **flags},
        functools.partial(_narrow, target),
        "case",
        silent=("columns", "vector"),
    )
    yield narrow_gemm_kernel, [space]
