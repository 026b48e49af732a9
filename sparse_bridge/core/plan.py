"""Plans: a GEMM problem resolved once per (map, direction, channels, dtype, epilogue) and then only
launched.

A plan is kept by the relation it belongs to, so it lives exactly as long as the map.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import torch

from .. import settings
from ..kernels.target import Target
from .device import TRITON_DATAFLOWS, kernel_target, trusts
from .kernel_map import KernelMap
from .problem import gather_problem, product_precision, reads_rows, wgrad_problem
from .tuner import Trial, final, tile_for
from .weights import WeightLayout

if TYPE_CHECKING:
    from ..kernels.gather_gemm import GatherGemm
    from ..kernels.gemm_spec import GemmSpec
    from ..kernels.mask_order import TileList
    from ..kernels.tile_config import TileConfig
    from .dataflows import Epilogue

__all__ = ["choose_dataflow", "spec_of", "triton_gather", "triton_wgrad"]

AUTOMATIC = "masked"  # what "auto" means where kernels run
KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


# What was decided under the settings in force, so that a layer asks once.
_decided: dict[Any, Any] = {}
_settings: settings.Settings | None = None


def _memory() -> dict[Any, Any]:
    """The decisions made under the present settings and tuner."""
    global _settings
    now = settings.get()
    if now is not _settings or len(_decided) > 1 << 16:
        _decided.clear()
        _settings = now
    return _decided


def choose_dataflow(
    device: torch.device, dtype: torch.dtype, kmap: KernelMap
) -> tuple[str, Target | None]:
    """(dataflow, target of its kernels or None). fp64 and irregular pair lists take the per-offset
    dataflow."""
    if not kmap.relation.regular:
        return "per_offset", None
    if device.type != "cuda":
        return _choose_dataflow(device, dtype)
    memory, key = _memory(), (device, dtype, AUTOMATIC)
    found = memory.get(key)
    if found is None:
        found = memory[key] = _choose_dataflow(device, dtype)
    return found


def _choose_dataflow(device: torch.device, dtype: torch.dtype) -> tuple[str, Target | None]:
    forced = settings.get().dataflow
    if forced in ("per_offset", "explicit"):
        return forced, None
    target = kernel_target(device)
    if target is None or dtype not in KERNEL_DTYPES:
        return "per_offset", None
    if dtype == torch.bfloat16 and not target.has_bf16:
        return "per_offset", None
    if not trusts(device, target, dtype):
        return "per_offset", None
    return (forced if forced in TRITON_DATAFLOWS else AUTOMATIC), target


def _unit_channels(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def triton_gather(dataflow, target, kmap, x, weight, w: WeightLayout, epilogue, precision):  # type: ignore[no-untyped-def]
    """`dataflows.gather_matmul` through the gather-GEMM kernel."""
    x, precision = _unit_channels(x), product_precision(target, x.dtype, precision)
    if reads_rows(target, precision, w):
        weight, w = w.rows_of(weight), w.in_rows()
    relation = kmap.relation
    eps = 0.0 if epilogue.norm is None else epilogue.norm.eps
    key = (
        dataflow, kmap.side, x.dtype, w, epilogue.tail, epilogue.activation, epilogue.alpha,
        eps, precision, target.arch
    )  # fmt: skip
    plan = relation.plans.get(key)
    if plan is None:
        plan = relation.plans[key] = _plan_gather(
            key, dataflow, target, kmap, x, weight, w, epilogue, precision
        )
    shape = (relation.n_rows[kmap.side], w.columns_out)
    y = x.new_empty(shape) if relation.scene is None else relation.scene.fresh(shape, x)
    return plan(x, weight, epilogue.vectors, y)


@functools.cache
def _gather_gemm() -> type[GatherGemm]:
    from ..kernels.gather_gemm import GatherGemm

    return GatherGemm


def _plan_gather(
    key: Any, dataflow: str, target: Target, kmap: KernelMap, x: torch.Tensor,
    weight: torch.Tensor, w: WeightLayout, epilogue: Epilogue, precision: str,
) -> GatherGemm:  # fmt: skip
    gemm, relation = _gather_gemm(), kmap.relation
    n_rows, n_in = relation.n_rows[kmap.side], relation.n_rows[1 - kmap.side]
    table: TileList | torch.Tensor
    if dataflow == "masked":
        table, reverse = relation.tiles(kmap.side, target)
    else:
        found, reverse = relation.table(kmap.side)
        table = found.nbr
    # Rows matter by tiles while those are few, and by octaves.
    few = min(-(-n_rows // 64), 4 * target.compute_units)
    memory, known = _memory(), (key, reverse, x.device, few, _octaves(target, n_rows, n_in))
    spec = memory.get(known)
    if spec is None:
        if reverse:
            w = w.reversed()
        problem = gather_problem(dataflow, target, x, n_rows, w, precision)
        inputs, shape = (x, weight, epilogue.vectors), (n_rows, w.columns_out)
        trial = Trial(
            lambda tile: gemm.of(
                spec_of(x, target, w, epilogue, precision, tile), table, n_rows, n_in
            ),
            inputs, lambda: x.new_empty(shape), table,
        )  # fmt: skip
        spec = spec_of(x, target, w, epilogue, precision, tile_for(problem, trial))
        if final():
            memory[known] = spec
    made = gemm.of(spec, table, n_rows, n_in)
    made.blank = relation.scene is not None and relation.scene.fill is not None
    return made


def _octaves(target: Target, n_rows: int, many: int) -> tuple[int, int]:
    """How many rows there are and how much there is for each, roughly."""
    return (n_rows // target.compute_units).bit_length(), round(math.log2(max(many, 1) / n_rows))


def spec_of(
    x: torch.Tensor, target: Target, w: WeightLayout, epilogue: Epilogue, precision: str,
    tile: TileConfig,
) -> GemmSpec:  # fmt: skip
    """The gather-GEMM of features like `x`, but for its map."""
    from ..kernels.gemm_spec import GemmSpec

    return GemmSpec(
        target, x.device, x.dtype, w.c_in, w.c_out, w.groups, w.strides, w.shift, epilogue.tail,
        epilogue.activation, epilogue.alpha, precision, tile,
        0.0 if epilogue.norm is None else epilogue.norm.eps,
    )  # fmt: skip


def triton_wgrad(target, kmap, x, dy, dw, w: WeightLayout, precision):  # type: ignore[no-untyped-def]
    """`dataflows.weight_gradient` through the wgrad kernel."""
    x, dy = _unit_channels(x), _unit_channels(dy)
    precision = product_precision(target, x.dtype, precision, wgrad=True)
    relation = kmap.relation
    key = ("wgrad", kmap.side, x.dtype, dw.dtype, w, precision, target.arch)
    plan = relation.plans.get(key)
    if plan is None:
        from ..kernels.wgrad_gemm import WgradGemm

        pairs = relation.device_pairs(target)
        lists = (pairs.in_rows, pairs.out_rows, pairs.starts)
        if kmap.flipped:
            lists = (lists[1], lists[0], lists[2])

        def build(tile: TileConfig) -> WgradGemm:
            return WgradGemm(
                target, x.device, x.dtype, lists, pairs.mirrored, relation.n_offsets, x.shape[0],
                dy.shape[0], w.c_in, w.c_out, w.groups, w.strides, w.shift, precision, tile,
                pairs.likely,
            )  # fmt: skip

        n_pairs = pairs.likely << pairs.mirrored
        memory = _memory()
        known = (key, x.device, _octaves(target, dy.shape[0], n_pairs), n_pairs.bit_length())
        tile = memory.get(known)
        if tile is None:
            problem = wgrad_problem(target, x, dy.shape[0], n_pairs, w, precision)
            tile = tile_for(problem, Trial(build, (x, dy), lambda: torch.empty_like(dw)))
            if final():
                memory[known] = tile
        plan = relation.plans[key] = build(tile)
    return plan(x, dy, dw)
