"""Plans: a GEMM problem resolved once per (map, direction, channels, dtype, epilogue) and then only
launched.

A plan is kept by the rulebook it belongs to, so it lives exactly as long as the map.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import TYPE_CHECKING, Any

import torch

from ... import log, settings
from ...kernels.runtime.target import Target
from ..device import self_check
from ..device.precision import KERNEL_DTYPES, product_precision, reads_rows
from ..device.selection import forces_kernels, refusal
from ..device.serving import kernel_target
from ..geometry.weights import WeightLayout
from ..maps.kernel_map import KernelMap
from ..maps.rulebook import Rulebook
from ..tuning.problem import gather_problem, wgrad_problem
from ..tuning.tuner import Trial, final, tile_for

if TYPE_CHECKING:
    from ...kernels.gemm.gather_gemm import GatherGemm
    from ...kernels.gemm.gather_spec import GemmSpec
    from ...kernels.gemm.wgrad_gemm import WgradGemm
    from ...kernels.gemm.wgrad_spec import WgradSpec
    from ...kernels.maps.mask_order import TileList
    from ...kernels.tiles.tile_config import TileConfig
    from .dataflows import Epilogue

__all__ = ["choose_dataflow", "spec_of", "triton_gather", "triton_wgrad"]

AUTOMATIC = "masked"  # what "auto" means where kernels run


# What was decided under the settings in force, so that a layer asks once.
_decided: dict[Any, Any] = {}
_under: tuple[Any, ...] = (None,)  # what the decisions stand on
epoch = 0  # counts how often they were dropped
_MOST = 1 << 16


def memory() -> dict[Any, Any]:
    """The decisions made under the present settings, verdicts and tuner."""
    global _decided, _under, epoch
    now, under = settings.get(), _under
    if (
        under[0] is not now
        or under[1] != self_check.generation
        or under[2] is not AUTOMATIC
        or len(_decided) > _MOST
    ):
        # A new one: who decided under others keeps it in the old one.
        _decided, _under = {}, (now, self_check.generation, AUTOMATIC)
        epoch += 1
    return _decided


_numbers: dict[Any, int] = {}
_next = itertools.count(0, 2)


def _number(key: Any) -> int:
    """A small even number for what plans of one rulebook have in common, never used for anything
    else: with a side added, the key under which the rulebook keeps such a plan."""
    if len(_numbers) > _MOST:
        _numbers.clear()
    return _numbers.setdefault(key, next(_next))


def choose_dataflow(
    device: torch.device, dtype: torch.dtype, kmap: KernelMap
) -> tuple[str, Target | None]:
    """(dataflow, target of its kernels or None). fp64 and irregular pair lists take the per-offset
    dataflow."""
    if not kmap.rulebook.regular:
        return "per_offset", None
    if device.type != "cuda":
        return _choose_dataflow(device, dtype)
    known, key = memory(), (device, dtype)
    found = known.get(key)
    if found is None:
        found = known[key] = _choose_dataflow(device, dtype)
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
    if not _trusted(device, target, dtype):
        return "per_offset", None
    return (forced if forces_kernels() else AUTOMATIC), target


def _trusted(device: torch.device, target: Target, dtype: torch.dtype) -> bool:
    """Whether kernels multiply rightly in `dtype`, by the self-check."""
    problem = self_check.problem(device, target, self_check.NAMES[dtype])
    if problem is None:
        return True
    if forces_kernels():
        raise refusal(f"{dtype} products on {device}", problem)
    log.once(
        ("self-check", str(device), problem),
        f"On {device} ({target.arch}) {problem}. Layers in {dtype} use the per-offset dataflow in "
        "torch. Please report this with the output of `python -m sparse_bridge doctor --json`.",
        level=30,
    )
    return False


def _unit_channels(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def triton_gather(dataflow, target, kmap, x, weight, w: WeightLayout, epilogue, precision):  # type: ignore[no-untyped-def]
    """`dataflows.gather_matmul` through the gather-GEMM kernel."""
    product = GatherProduct.of(dataflow, target, x.device, x.dtype, w, epilogue, precision)
    return product(kmap.rulebook, kmap.side, x, weight, epilogue.vectors)


@functools.cache
def _gather_gemm() -> type[GatherGemm]:
    from ...kernels.gemm.gather_gemm import GatherGemm

    return GatherGemm


class GatherProduct:
    """y = act(norm(sum of x @ w[v] + bias) + residual), but for the map: what its plans for many
    scenes have in common.

    given, w: the weight as it comes, and as the kernel reads it.  precision: of the products.
    """

    __slots__ = (
        "_columns", "_copies", "_end", "_few", "_gemm", "_number", "_units", "dataflow", "device",
        "dtype", "given", "precision", "target", "w",
    )  # fmt: skip

    def __init__(
        self, dataflow: str, target: Target, device: torch.device, dtype: torch.dtype,
        w: WeightLayout, end: tuple[int, str | None, float, float], precision: str,
    ) -> None:  # fmt: skip
        self.dataflow, self.target, self.device, self.dtype = dataflow, target, device, dtype
        self.precision = precision = product_precision(target, dtype, precision)
        self._copies = reads_rows(target, precision, w)
        self.given, self.w = w, w.in_rows() if self._copies else w
        self._end, self._columns, self._gemm = end, w.columns_out, _gather_gemm()
        self._units, self._few = target.compute_units, 4 * target.compute_units
        self._number = _number((dataflow, dtype, self.w, end, precision, target.arch))

    @classmethod
    def of(
        cls, dataflow: str, target: Target, device: torch.device, dtype: torch.dtype,
        w: WeightLayout, epilogue: Epilogue, precision: str,
    ) -> GatherProduct:  # fmt: skip
        """The product under the present settings."""
        end = _end_of(epilogue)
        known, key = memory(), ("gather", dataflow, target, device, dtype, w, end, precision)
        found = known.get(key)
        if found is None:
            found = known[key] = cls(dataflow, target, device, dtype, w, end, precision)
        return found

    def __call__(
        self, rulebook: Rulebook, side: int, x: torch.Tensor, weight: torch.Tensor,
        vectors: tuple[torch.Tensor | None, ...] | None,
    ) -> torch.Tensor:  # fmt: skip
        """y [n_rows[side], C_out] from x [n_rows[1 - side], C_in], neither of them empty.

        vectors: as `Epilogue.vectors`, or None where there are none.
        """
        if x.stride()[1] != 1:
            x = _unit_channels(x)
        if self._copies:
            weight = self.given.rows_of(weight)
        plan = rulebook.cache.get(self._number + side)
        if plan is None:
            plan = self._plan(rulebook, side, x, weight, vectors)
            rulebook.cache.put(self._number + side, plan)
        return plan(x, weight, vectors, rulebook.rows[side].empty(self._columns, x))

    def _plan(
        self, rulebook: Rulebook, side: int, x: torch.Tensor, weight: torch.Tensor,
        vectors: tuple[torch.Tensor | None, ...] | None,
    ) -> GatherGemm:  # fmt: skip
        n_rows, n_in = rulebook.n_rows[side], rulebook.n_rows[1 - side]
        table: TileList | torch.Tensor
        if self.dataflow == "masked":
            table, reverse = rulebook.tiles(side, self.target)
        else:
            found, reverse = rulebook.table(side)
            table = found.nbr
        # Rows matter by tiles while those are few, and by octaves.
        few, units = -(-n_rows // 64), self._units
        if few > self._few:
            few = self._few
        much = 0 if n_in == n_rows else round(math.log2(n_in / n_rows))
        known = memory()
        key = (self._number, reverse, self.device, few, (n_rows // units).bit_length(), much)
        spec = known.get(key)
        if spec is None:
            spec = self._spec(table, reverse, n_rows, x, weight, vectors)
            if final():
                known[key] = spec
        made = self._gemm.of(spec, table, n_rows, n_in)
        made.blank = rulebook.rows[side].fill is not None
        return made

    def _spec(
        self, table: TileList | torch.Tensor, reverse: bool, n_rows: int, x: torch.Tensor,
        weight: torch.Tensor, vectors: tuple[torch.Tensor | None, ...] | None,
    ) -> GemmSpec:  # fmt: skip
        """With the tile for maps like this one."""
        target, precision = self.target, self.precision
        w = self.w.reversed() if reverse else self.w
        problem = gather_problem(self.dataflow, target, x, n_rows, w, precision)
        shape, n_in, end = (n_rows, w.columns_out), x.shape[0], self._end

        def build(tile: TileConfig) -> GatherGemm:
            spec = _spec_of(self.device, self.dtype, target, w, end, precision, tile)
            return self._gemm.of(spec, table, n_rows, n_in)

        trial = Trial(build, (x, weight, vectors), lambda: x.new_empty(shape), table)
        tile = tile_for(problem, trial)
        return _spec_of(self.device, self.dtype, target, w, end, precision, tile)


def _end_of(epilogue: Epilogue) -> tuple[int, str | None, float, float]:
    """(tail, activation, alpha, eps)."""
    eps = 0.0 if epilogue.norm is None else epilogue.norm.eps
    return epilogue.tail, epilogue.activation, epilogue.alpha, eps


def _octaves(target: Target, n_rows: int, many: int) -> tuple[int, int]:
    """How many rows there are and how much there is for each, roughly."""
    return (n_rows // target.compute_units).bit_length(), round(math.log2(max(many, 1) / n_rows))


def spec_of(
    x: torch.Tensor, target: Target, w: WeightLayout, epilogue: Epilogue, precision: str,
    tile: TileConfig,
) -> GemmSpec:  # fmt: skip
    """The gather-GEMM of features like `x`, but for its map."""
    return _spec_of(x.device, x.dtype, target, w, _end_of(epilogue), precision, tile)


def _spec_of(
    device: torch.device, dtype: torch.dtype, target: Target, w: WeightLayout,
    end: tuple[int, str | None, float, float], precision: str, tile: TileConfig,
) -> GemmSpec:  # fmt: skip
    from ...kernels.gemm.gather_spec import GemmSpec

    tail, activation, alpha, eps = end
    return GemmSpec(
        target, device, dtype, w.c_in, w.c_out, w.groups, w.strides, w.shift, tail, activation,
        alpha, precision, tile, eps,
    )  # fmt: skip


def triton_wgrad(target, kmap, x, dy, dw, w: WeightLayout, precision):  # type: ignore[no-untyped-def]
    """`dataflows.weight_gradient` through the wgrad kernel."""
    product = WgradProduct.of(target, x.device, x.dtype, dw.dtype, w, precision)
    product(kmap.rulebook, kmap.flipped, x, dy, dw)


class WgradProduct:
    """dw[v] = sum of x[i]^T dy[j], but for the map.  result: dtype of dw, laid out as `w`."""

    __slots__ = ("_number", "device", "dtype", "precision", "target", "w")

    def __init__(
        self, target: Target, device: torch.device, dtype: torch.dtype, result: torch.dtype,
        w: WeightLayout, precision: str,
    ) -> None:  # fmt: skip
        self.target, self.device, self.dtype, self.w = target, device, dtype, w
        self.precision = product_precision(target, dtype, precision, wgrad=True)
        self._number = _number((dtype, result, w, self.precision, target.arch))

    @classmethod
    def of(
        cls, target: Target, device: torch.device, dtype: torch.dtype, result: torch.dtype,
        w: WeightLayout, precision: str,
    ) -> WgradProduct:  # fmt: skip
        """The product under the present settings."""
        known, key = memory(), ("wgrad", target, device, dtype, result, w, precision)
        found = known.get(key)
        if found is None:
            found = known[key] = cls(target, device, dtype, result, w, precision)
        return found

    def __call__(
        self, rulebook: Rulebook, flipped: bool, x: torch.Tensor, dy: torch.Tensor,
        dw: torch.Tensor,
    ) -> None:  # fmt: skip
        """x [N_in, C_in], dy [N_out, C_out], neither empty; dw is written whole."""
        if x.stride()[1] != 1 or dy.stride()[1] != 1:
            x, dy = _unit_channels(x), _unit_channels(dy)
        plan = rulebook.cache.get(self._number + flipped)
        if plan is None:
            plan = self._plan(rulebook, flipped, x, dy, dw)
            rulebook.cache.put(self._number + flipped, plan)
        plan(x, dy, dw)

    def _plan(
        self, rulebook: Rulebook, flipped: bool, x: torch.Tensor, dy: torch.Tensor,
        dw: torch.Tensor,
    ) -> WgradGemm:  # fmt: skip
        from ...kernels.gemm.wgrad_gemm import WgradGemm

        target, n_in, n_out = self.target, x.shape[0], dy.shape[0]
        pairs = rulebook.device_pairs(target)
        lists = (pairs.in_rows, pairs.out_rows, pairs.starts)
        if flipped:
            lists = (lists[1], lists[0], lists[2])
        rest = (lists, pairs.mirrored, n_in, n_out, pairs.likely)
        n_pairs, known = pairs.likely << pairs.mirrored, memory()
        octaves = _octaves(target, n_out, n_pairs)
        key = (self._number, flipped, self.device, octaves, n_pairs.bit_length())
        spec = known.get(key)
        if spec is None:
            problem = wgrad_problem(target, x, n_out, n_pairs, self.w, self.precision)
            trial = Trial(
                lambda tile: WgradGemm.of(self._spec(tile), *rest), (x, dy),
                lambda: torch.empty_like(dw),
            )  # fmt: skip
            spec = self._spec(tile_for(problem, trial))
            if final():
                known[key] = spec
        return WgradGemm.of(spec, *rest)

    def _spec(self, tile: TileConfig) -> WgradSpec:
        from ...kernels.gemm.wgrad_spec import WgradSpec

        w = self.w
        return WgradSpec(
            self.target, self.device, self.dtype, w.n_offsets, w.c_in, w.c_out, w.groups, w.strides,
            w.shift, self.precision, tile,
        )  # fmt: skip
