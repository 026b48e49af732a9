"""Forms of the two GEMM kernels and of the sums behind them."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ...kernels.gemm import wgrad_gemm
from ...kernels.gemm.gather_kernels import gather_gemm_kernel, sum_partials_kernel
from ...kernels.gemm.wgrad_gemm import SUM_OPTIONS, sum_shares_kernel, wgrad_kernel
from ...kernels.maps.tile_list import shared_by
from ...kernels.runtime.launch import Kernel
from ...kernels.runtime.target import Target
from ...kernels.tiles.activation_numbers import NUMBERS
from ...kernels.tiles.candidates import candidates
from ...kernels.tiles.clamps import clamp_for_problem, clamp_for_splits
from ...kernels.tiles.epilogue_bits import AFFINE, BIAS, NORM
from ...kernels.tiles.tile import GemmSize, TileConfig
from ...kernels.tiles.tile_config import gather_tile, ways, wgrad_tile
from .forms import ALIGNS, POINTED, Form, Space, make

# One of each class that a tile choice can tell apart: powers of two, their neighbours, multiples of
# a smaller power, beyond the largest tile.
CHANNELS = (1, 16, 17, 32, 33, 48, 64, 65, 80, 96, 112, 128, 129, 160, 192, 256, 288, 320, 384, 512, 1024)
OFFSET_BLOCKS = (32, 16, 64, 128, 256, 512, 1024)  # powers of two that hold the kernel volume
PARTS = (2, 3, 4)  # of a row's sum, where mask splits are asked for
# Bits of what follows a sum, see `EpilogueForm`.
EPILOGUES = (7, 0, 1, 2, 3, 6, 15, 8, 9, 10, 11, 14)
VECTORS = ("fp32", "fp16", "bf16", "fp64")
_OFFSETS, _FEW_OFFSETS = 27, 8


@dataclasses.dataclass(frozen=True)
class Case:
    """A tile with what it multiplies."""

    tile: TileConfig
    dtype: torch.dtype
    precision: str

    @property
    def holds(self) -> str:
        return POINTED[self.dtype]


def products(target: Target) -> list[tuple[torch.dtype, str]]:
    """(dtype, precision) of the products that kernels of `target` compute."""
    cases = [(torch.float16, "ieee"), (torch.float32, "ieee")]
    if target.has_bf16:
        cases.append((torch.bfloat16, "ieee"))
    if target.has_tf32:
        cases.append((torch.float32, "tf32"))
    if target.splits_fp32:
        cases.append((torch.float32, "tf32x3"))
    return cases


_ROWS = (0, 2, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)  # per compute unit


@functools.lru_cache(maxsize=32)
def gather_tiles(target: Target) -> tuple[list[Case], list[Case]]:
    """(cases of the default tiles, of the tuner's other candidates) of the gather-GEMM."""
    default: dict[Case, None] = {}
    tuned: dict[Case, None] = {}
    rows = [max(1, power * target.compute_units) for power in _ROWS]
    for (dtype, precision), c_in, c_out in itertools.product(products(target), CHANNELS, CHANNELS):
        queued, roomy = ways(target, dtype, precision)  # else most of these choices are one
        orders = ("oi", "io") if roomy else ("oi",)
        offsets = (_OFFSETS, _FEW_OFFSETS) if roomy or queued else (_OFFSETS,)
        grown = (False, True) if queued else (False,)
        for n, order, v, grows in itertools.product(rows, orders, offsets, grown):
            tile = gather_tile(target, dtype, GemmSize(n, c_in, c_out, v, grows), precision, order)
            default[Case(tile, dtype, precision)] = None
        many = GemmSize(256 * target.compute_units, c_in, c_out, _OFFSETS)
        for tile in candidates(target, dtype, many, precision, "fwd"):
            tuned[Case(tile, dtype, precision)] = None
    return list(default), [case for case in tuned if case not in default]


@functools.lru_cache(maxsize=32)
def wgrad_tiles(target: Target) -> tuple[list[Case], list[Case]]:
    """(cases of the default tiles, of the tuner's other candidates) of wgrad."""
    default: dict[Case, None] = {}
    tuned: dict[Case, None] = {}
    for (dtype, precision), c_in, c_out in itertools.product(products(target), CHANNELS, CHANNELS):
        if precision == "tf32x3":
            continue  # see `product_precision`
        for pairs in (1, 1 << 20):
            tile = wgrad_tile(target, dtype, c_in, c_out, precision, pairs)
            default[Case(tile, dtype, precision)] = None
        for tile in candidates(target, dtype, GemmSize(1, c_in, c_out, _OFFSETS), precision, "wgrad"):
            tuned[Case(tile, dtype, precision)] = None
    return list(default), [case for case in tuned if case not in default]


# (EVEN_K, ONE_K, whether c_in is a multiple of 16, or 1)
DEPTHS = {
    "even": (True, False, 16),
    "ragged": (False, False, 3),
    "exact": (True, True, 16),
    "narrow": (False, True, 3),
    "point": (False, True, 1),
}
# Which stride of the weight is 1: that of output channels, of input channels (as dgrad reads it),
# or none, with nothing aligned.
LAYOUTS = ("rows", "swapped", "loose")


def strides(kernel: Kernel, layout: str, of_input: str, of_output: str) -> tuple[list, list]:
    """(arguments divisible by 16, arguments that are 1) by the layout of the weight."""
    ones = {"rows": [of_output], "swapped": [of_input], "loose": []}[layout]
    if layout == "loose":
        return [], ones
    names = kernel.fn.arg_names
    even = {of_input, of_output, "w_shift", "dw_shift"}
    even |= {name for name in names if name.endswith(("_ptr", "_wv", "_wg", "_dv", "_dg"))}
    return [name for name in names if name in even and name not in ones], ones


def product_form(
    kernel: Kernel,
    constants: tuple[Any, ...],
    options: Mapping[str, int],
    lies: tuple[str, int, int],
    operands: tuple[int, str, str],
    **types: str,
) -> Form:
    """A form of a gather-GEMM.  lies: the weight's layout, c_in and the columns of y by what of
    them Triton tells apart.  operands: bits of the epilogue, what its vectors hold, and what x, w and y
    do.  types: of other arguments."""
    (layout, c_in, columns), (bits, vector, dtype) = lies, operands
    divisible, ones = strides(kernel, layout, "stride_wi", "stride_wo")
    for names, channels in ((("c_in", "stride_xn"), c_in), (("c_out", "stride_yn"), columns)):
        divisible += names if channels == 16 else ()
        ones += names if channels == 1 else ()
    types = {"x": dtype, "w": dtype, "y": dtype, "alpha": "fp32", "eps": "fp32", **types}
    return make(kernel, constants, options, divisible, ones, **types, **vectors_of(bits, vector, dtype))


def _gather(
    target: Target,
    case: Case,
    layout: str,
    depth: str,
    columns: int,
    packed: bool,
    size: str,
    epilogue: tuple[int, int, bool],
    vector: str,
) -> Form:
    """epilogue: (bits, activation, whether the sum is over all offsets, not a range of them).
    vector: what bias and norm hold.  size: of offsets, "int32" or "wide"."""
    dtype, (bits, act, all_offsets) = case.holds, epilogue
    even, short, c_in = DEPTHS[depth]
    wide, whole = size != "int32", case.tile.block_k
    tile = case.tile if all_offsets else clamp_for_splits(case.tile)
    tile = tile if packed else tile.over_table()
    tile = clamp_for_problem(tile, target, case.dtype, case.precision, whole if even else whole + 1, wide, bits)
    constants = (
        packed,
        bits,
        act,
        case.precision,
        even,
        short,
        wide,
        shared_by(tile.block_m) if packed else 1,
        tile.block_m,
        tile.block_n,
        tile.block_k,
    )
    form = product_form(
        gather_gemm_kernel,
        constants,
        tile.options(target),
        (layout, c_in, columns),
        (bits, vector, dtype),
        y=dtype if all_offsets else "fp32",
    )
    return dataclasses.replace(form, large=wide)


def vectors_of(bits: int, vector: str, dtype: str) -> dict[str, str]:
    """What the vectors of an epilogue hold; y stands in for those it does not read. A residual is
    like y."""
    read = {"bias": BIAS, "mean": NORM, "var": NORM, "gain": AFFINE, "beta": AFFINE}
    return {"residual": dtype} | {n: vector if bits & bit else dtype for n, bit in read.items()}


def _sum_partials(dtype: str, vector: str, bits: int, act: int, parts: int, far: bool, align: str) -> Form:
    return make(
        sum_partials_kernel,
        (bits, act, parts, 1024),
        {"num_warps": 4},
        align=align,
        partial="fp32",
        y=dtype,
        alpha="fp32",
        eps="fp32",
        n_values="i64" if far else "i32",
        **vectors_of(bits, vector, dtype),
    )


def _wgrad(
    target: Target, case: Case, even: bool, mirrored: bool, v_block: int, size: str, out: tuple[str, str, bool]
) -> Form:
    """out: (what the result holds, its layout, whether it is written directly, not as partial
    sums)."""
    dtype, tile, (dw, layout, direct) = case.holds, case.tile, out
    divisible, ones = strides(wgrad_kernel, layout, "stride_di", "stride_do")
    if even:
        divisible += ["c_in", "c_out", "stride_xn", "stride_dyn"]
    constants = (
        mirrored,
        direct,
        case.precision,
        even,
        size != "int32",
        v_block,
        tile.block_m,
        tile.block_n,
        tile.block_k,
    )
    form = make(wgrad_kernel, constants, tile.options(target), divisible, ones, x=dtype, dy=dtype, dw=dw, starts="i64")
    return dataclasses.replace(form, large=size != "int32")


def _sum_shares(dtype: str, mirrored: bool, v_block: int, block: int, layout: str) -> Form:
    constants = (mirrored, v_block, wgrad_gemm.SUM_LOADS // block, block)
    marks = strides(sum_shares_kernel, layout, "stride_di", "stride_do")
    return make(sum_shares_kernel, constants, SUM_OPTIONS, *marks, partial="fp32", dw=dtype, starts="i64")


class GatherSpace(Space):
    """Forms of the gather-GEMM. Constants tell the flags on which `clamp_for_problem` decides, so
    that its tile is compared with tiles made under the same ones."""

    def holds(self, form: Form) -> bool:
        """As `Space.holds`."""
        named = form.named
        fixed: dict[str, Any] = {
            "depth": [
                name for name, (even, short, _) in DEPTHS.items() if (even, short) == (named["EVEN_K"], named["ONE_K"])
            ],
            "size": ("wide",) if named["WIDE"] else ("int32",),
        }
        if "PACKED" in named:
            fixed["packed"] = (named["PACKED"],)
        if "EPILOGUE" in named:
            fixed["epilogue"] = [(named["EPILOGUE"], named["ACT"], whole) for whole in (True, False)]
        sides = {
            name: [level for level in levels if level in fixed.get(name, levels)]
            for name, levels in self.factors.items()
        }
        return Space(sides, self.build, self.main, silent=self.silent).holds(form)


def in_half(target: Target, cases: list[Case]) -> list[Case]:
    """The cases of fp16, added up in fp16."""
    halves = [case for case in cases if case.dtype == torch.float16 and target.adds_in_fp16]
    return [dataclasses.replace(case, precision="half") for case in halves]


def declare(target: Target) -> Iterator[tuple[Kernel, list[Space]]]:
    """The spaces of each kernel of the two products."""
    names = sorted({POINTED[dtype] for dtype, _ in products(target)})
    acts = tuple(NUMBERS.values())
    epilogues = [(bits, act, True) for bits in EPILOGUES for act in acts]
    gather = functools.partial(
        GatherSpace, build=functools.partial(_gather, target), main="case", silent=("layout", "columns", "vector")
    )
    default, tuned = gather_tiles(target)
    flags: dict[str, Any] = {
        "layout": LAYOUTS,
        "depth": tuple(DEPTHS),
        "columns": (16, 3, 1),
        "packed": (True, False),
        "size": ("int32", "wide"),
        "epilogue": epilogues,
        "vector": VECTORS,
    }
    # Partial sums by ranges of the offsets (mask splits), which leave the epilogue to the kernel
    # that adds them up; in fp32 they are results like others.
    halves = [case for case in (*default, *tuned) if case.dtype != torch.float32]
    halves += in_half(target, default)
    ranges: dict[str, Any] = {"packed": (True,), "epilogue": [(0, 0, False)], "vector": ("fp32",)}
    yield (
        gather_gemm_kernel,
        [
            gather({"case": default, **flags}),
            gather({"case": tuned, **flags}, rows=1, lone=False),
            gather({"case": in_half(target, default), **flags}, rows=1, lone=False),
            gather({"case": halves, **flags, **ranges}, rows=1, lone=False),
        ],
    )
    flags = {"vector": VECTORS, "bits": EPILOGUES, "act": acts, "parts": PARTS}
    flags["far"] = (False, True)
    silent = ("align", "vector")
    flags = {"dtype": names, **flags, "align": ALIGNS}
    yield sum_partials_kernel, [Space(flags, _sum_partials, silent=silent)]
    wgrad = functools.partial(Space, build=functools.partial(_wgrad, target), main="case")
    default, tuned = wgrad_tiles(target)
    results = ("fp32", "fp16", "bf16")
    outs = [("fp32", "swapped", False), *((h, i, True) for h in results for i in LAYOUTS)]
    flags = {
        "even": (True, False),
        "mirrored": (True, False),
        "v_block": OFFSET_BLOCKS,
        "size": ("int32", "wide"),
        "out": outs,
    }
    yield (wgrad_kernel, [wgrad({"case": default, **flags}), wgrad({"case": tuned, **flags}, rows=1, lone=False)])
    flags = {"dtype": results, "mirrored": (True, False), "v_block": OFFSET_BLOCKS, "block": wgrad_gemm.SUM_BLOCKS}
    yield sum_shares_kernel, [Space({**flags, "layout": LAYOUTS}, _sum_shares, silent=("layout",))]
