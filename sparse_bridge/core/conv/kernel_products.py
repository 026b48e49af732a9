"""Products by Triton kernels: what of a layer's product does not depend on its map, and the tiles
chosen for maps like those it has met. A rulebook keeps the launches that were bound to it, so these
live exactly as long as the map."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ... import log
from ...errors import KernelError
from ...kernels.gemm.narrow import packs_offsets, tile_of
from ...kernels.gemm.product import Product
from ...kernels.runtime.target import Target
from ...kernels.tiles.epilogue_bits import BIAS
from ...native import calls as native_calls
from ...refusals import Refusal, Why
from ..device import self_check
from ..device.device_support import kernel_target, problem_of
from ..device.precision import KERNEL_DTYPES, product_precision, reads_rows
from ..maps.rulebook import Rulebook
from ..tuning.problem import Problem, gather_problem
from ..tuning.tuner import Trial, current, final, tile_for
from .dataflow import Case, Dataflow, Gather, LayerProduct, Wgrad, new_key, refusal, unit_channels
from .epilogue import Epilogue
from .torch_end import Finished, in_kernels

if TYPE_CHECKING:
    from ...kernels.gemm.gather_gemm import GatherGemm
    from ...kernels.gemm.grouped_gemm import GroupedGemm
    from ...kernels.gemm.narrow_gemm import NarrowGemm, NarrowSpec
    from ...kernels.gemm.vectors import Vectors
    from ...kernels.maps.tile_list import TileList
    from ...kernels.tiles.tile import TileConfig
    from ..maps.pair_groups import PairGroups

    Table = TileList | torch.Tensor | PairGroups
    Launch = GatherGemm | GroupedGemm
    Inputs = tuple[torch.Tensor, torch.Tensor, Vectors | None]

BY_PYTHON, OVER_TILES, OVER_TABLE = range(3)  # the compiled helper has them, too

# (product, the rulebook and side that it is bound to, x, weight, what its epilogue reads)
FirstBind = Callable[["GatherProduct", Rulebook, int, "Inputs"], None]
_listeners: list[FirstBind] = []


def on_first_fused(listener: FirstBind) -> None:
    """Have `listener` called when a product that ends in more than a bias meets its first map,
    before it is launched."""
    if listener not in _listeners:
        _listeners.append(listener)


def _of_device(case: Case) -> list[Refusal]:
    """Why no kernels multiply `case.dtype` on its device. Raises DeviceError where the settings
    force kernels that the device does not have."""
    target, device, dtype = kernel_target(case.device), case.device, case.dtype
    if target is None:
        asked = "layers on a CPU are computed in torch" if device.type == "cpu" else "plain torch was asked for"
        why = problem_of(device) or asked
        return [refusal(Why.FLOW_DEVICE, device, why)]
    if dtype == torch.bfloat16 and not target.has_bf16:
        return [refusal(Why.FLOW_DEVICE_DTYPE, target.arch, dtype)]
    problem = self_check.problem(device, target, self_check.NAMES[dtype])
    return [] if problem is None else [refusal(Why.FLOW_FAULT, target.arch, problem)]


class KernelDataflow(Dataflow):
    """The base of those that kernels compute.  packed: over mask-ordered tiles.  irregular: maps
    that tables cannot hold are served, too.  packing: narrow inputs take several offsets a step,
    see `narrow_gemm`."""

    packed: bool
    irregular = False
    packing = False

    def refusals(self, case: Case) -> list[Refusal]:
        reasons = [] if case.regular or self.irregular else [refusal(Why.FLOW_IRREGULAR)]
        if case.dtype not in KERNEL_DTYPES:
            reasons.append(refusal(Why.FLOW_DTYPE, case.dtype))
        return reasons or _of_device(case)

    def target(self, case: Case) -> Target | None:
        return kernel_target(case.device)

    def view(self, rulebook: Rulebook, side: int, target: Target) -> tuple[Table, bool]:
        """(what the kernel follows for the rows of `side`, whether its offsets run backwards)."""
        raise NotImplementedError

    def serving(self, rulebook: Rulebook, side: int, product: Product | LayerProduct) -> KernelDataflow:
        """The dataflow of one map: this one, where there is no rule."""
        return self

    def possible(self, rulebook: Rulebook, side: int, product: Product | LayerProduct) -> list[KernelDataflow]:
        """`serving`, and what may serve maps like this one otherwise."""
        return [self]

    def by_helper(self, product: Product) -> tuple[int, int, int, int]:
        """(how products go over maps that the compiled helper binds, and `unordered_rows` of those
        without tiles; -1 for any number). Elsewhere Python asks `serving`."""
        return BY_PYTHON, 0, 0, 0

    def work(self, table: Table, n_rows: int) -> int:
        """Rows that the kernel multiplies, for the choice of a tile."""
        return n_rows

    def likely_work(self, n_offsets: int, n_rows: int) -> int:
        """`work` of a map that is not there yet, into so many rows."""
        return n_rows

    def dry_table(self, n_offsets: int) -> Any:
        """What stands for the table of `view` where a launch only compiles (`precompile.dry_run`)."""
        if not self.packed:
            return torch.empty((n_offsets, 1), dtype=torch.int32)
        from ...kernels.maps.tile_list import TileList
        from ..device.self_check_problems import COMMON_ROWS

        memory = torch.empty(TileList.size(n_offsets, 1), dtype=torch.int32)
        return TileList(memory, n_offsets, 1, COMMON_ROWS)

    def packs(self, product: Product) -> bool:
        """Whether narrow_gemm serves a product."""
        return self.packing and packs_offsets(product.w, product.precision)

    def tile(self, product: Product, n_rows: int, n_in: int, trial: Trial | None = None) -> TileConfig:
        """The tile of a product of `n_in` rows into `n_rows`; narrow ones have one, which nobody
        tunes."""
        if self.packs(product):
            return tile_of(product)
        return tile_for(gather_problem(product, self.name, n_rows, n_in, self.tile_rule), trial)

    def tile_rule(self, problem: Problem) -> TileConfig:
        """The tile of a problem before tuning."""
        return problem.gather_tile()

    def spec(self, product: Product, tile: TileConfig) -> Any:
        """What the kernel needs to know but for the map."""
        if self.packs(product):
            return _narrow_gemm()[0](product, tile, self.packed)
        from ...kernels.gemm.gather_spec import GemmSpec

        return GemmSpec(product, tile, self.packed)

    def launch(self, spec: Any, table: Any, n_rows: int, n_in: int) -> Launch:
        """The kernel over one map."""
        launcher = _narrow_gemm()[1] if self.packs(spec.product) else _gather_gemm()
        return launcher(spec, table, n_rows, n_in)

    def gather(self, product: LayerProduct) -> Gather:
        inner = in_kernels(product)
        launched = GatherProduct(self, inner)
        return launched if inner is product else Finished(launched, product.epilogue)

    def wgrad(self, product: LayerProduct, dtype: torch.dtype) -> Wgrad:
        target, device = product.target, product.device
        assert target is not None
        problem = self_check.problem(device, target, f"wgrad {self_check.NAMES[product.dtype]}")
        if problem is None:
            from .dataflows.wgrad_product import WgradProduct

            return WgradProduct(product)
        log.once(
            ("fault", str(device), problem),
            f"On {device} {problem}. Gradients of weights are computed in torch. Please report "
            "this with the output of `python -m sparse_bridge doctor --json`.",
            level=30,
        )
        from .dataflows.per_offset import DATAFLOW

        return DATAFLOW.wgrad(product, dtype)


@functools.cache
def _gather_gemm() -> type[GatherGemm]:
    from ...kernels.gemm.gather_gemm import GatherGemm

    return GatherGemm


@functools.cache
def _narrow_gemm() -> tuple[type[NarrowSpec], type[NarrowGemm]]:
    from ...kernels.gemm.narrow_gemm import NarrowGemm, NarrowSpec

    return NarrowSpec, NarrowGemm


def octaves(target: Target, n_rows: int, n_in: int) -> tuple[int, int, int]:
    """What of a map's size the choice of a tile looks at: rows matter by tiles of 64 while those
    are few, and by octaves. Twin in C: `spec_key`."""
    units = target.compute_units
    much = 0 if n_in == n_rows else round(math.log2(n_in / n_rows))
    return min(-(-n_rows // 64), 4 * units), (n_rows // units).bit_length(), much


class GatherProduct:
    """y = act(norm(sum of x @ w[v] + bias) + residual)."""

    __slots__ = ("_backwards", "_columns", "_copied", "_key", "_specs", "flow", "native", "product")

    def __init__(self, flow: KernelDataflow, layer: LayerProduct) -> None:
        target, device, dtype, precision, w, epilogue = layer
        assert target is not None
        precision = product_precision(target, dtype, precision)
        # How the weight comes, where the kernel reads a copy of it.
        self._copied = w if reads_rows(target, precision, w) else None
        w = w if self._copied is None else w.in_rows()
        self.flow, self.product = flow, Product(target, device, dtype, precision, w, epilogue)
        self._backwards = self.product._replace(w=w.reversed())
        self._columns, self._key = w.columns_out, new_key()
        self._specs: dict[tuple[Any, ...], Any] = {}
        self.native: Any = None  # the same for the compiled helper, once it has been bound

    def for_helper(self) -> tuple[Any, ...]:
        """What the compiled helper asks of it: (the keys of its launches in rulebooks by side, the
        layers that tuned groups of its GPU decide about, the specs, compute units, how it goes over
        maps, see `KernelDataflow.by_helper`)."""
        target = self.product.target
        tiles = current().winners_of(self.product.device, target)
        tuned = None if tiles is None else tiles.groups.layers
        own = self._key, self._key + 1
        return own, tuned, self._specs, target.compute_units, self.flow.by_helper(self.product)

    @property
    def copies(self) -> bool:
        """Whether the kernel reads a copy of the weight."""
        return self._copied is not None

    @property
    def fused(self) -> bool:
        """Whether it ends in more than a bias."""
        parts, activation, _, _ = self.product.epilogue
        return parts > BIAS or activation is not None

    def __call__(
        self, rulebook: Rulebook, side: int, x: torch.Tensor, weight: torch.Tensor, epilogue: Epilogue
    ) -> torch.Tensor:
        """y [n_rows[side], C_out] in x's dtype from x [n_rows[1 - side], C_in], neither of them empty."""
        bias, _, _, norm, residual = epilogue
        vectors: Vectors | None = None
        if norm is not None:
            vectors = (bias, norm[0], norm[1], norm[2], norm[3], residual)
        elif bias is not None or residual is not None:
            vectors = (bias, None, None, None, None, residual)
        if x.stride()[1] != 1:
            x = unit_channels(x)
        return self.over(rulebook, side, x, weight, vectors)

    def over(
        self, rulebook: Rulebook, side: int, x: torch.Tensor, weight: torch.Tensor, vectors: Vectors | None
    ) -> torch.Tensor:
        """The same for x [n_rows[1 - side], C_in] whose channels lie side by side, and the vectors that the epilogue
        reads: see `Epilogue.vectors`; None for none. Result and weight are of x's dtype. Twin in C: `computed`."""
        if self._copied is not None:
            weight = self._copied.rows_of(weight)
        launch, rows = rulebook.cache.get(self._key + side), rulebook.rows[side]
        if launch is None:
            launch = self._bind(rulebook, side, (x, weight, vectors))
            rulebook.cache.put(self._key + side, launch)
        elif rulebook.order is not None and rulebook.order.number() not in rulebook.order.waited:
            rulebook.order.wait()
        if rows.device is None:
            y = x.new_empty(rows.capacity, self._columns)  # a tuple takes half as long again
        else:
            y = rows.empty(self._columns, x)
        result: torch.Tensor = launch(x, weight, vectors, y)
        if rows.padding_value is None:
            return result
        rulebook.rows[1 - side].look_for_nan(x)
        return rows.fill_padding(result)

    def _bind(self, rulebook: Rulebook, side: int, inputs: Inputs) -> Launch:
        """Twin in C: `spec_key`, `bound_over`."""
        n_rows, n_in = rulebook.n_rows[side], rulebook.n_rows[1 - side]
        self._check_far(inputs[0])
        flow = self.flow.serving(rulebook, side, self.product)
        table, reverse = flow.view(rulebook, side, self.product.target)
        # Most of a captured map's capacity may be empty, in deep levels.
        n_read = rulebook.rows[1 - side].estimate_or_capacity
        work = flow.work(table, rulebook.rows[side].estimate_or_capacity)
        key = (flow.name, reverse, octaves(self.product.target, work, n_read))
        spec = self._specs.get(key)
        if spec is None:
            if not self._specs and self.fused:
                for listener in _listeners:
                    listener(self, rulebook, side, inputs)
            product = self._backwards if reverse else self.product
            trial = Trial(
                lambda tile: flow.launch(flow.spec(product, tile), table, n_rows, n_in),
                inputs,
                lambda: inputs[0].new_empty((n_rows, self._columns)),
                table,
            )
            tile = flow.tile(product, work, n_read, trial)
            tile_key = (flow.name, reverse, tile)  # sizes that take the same tile share it
            spec = self._specs.get(tile_key)
            if spec is None:
                spec = self._specs[tile_key] = flow.spec(product, tile)
            if final():
                self._specs[key] = spec
        if self.native is None:
            self.native = native_calls.known_product(self, self._columns)
        launch = flow.launch(spec, table, n_rows, n_in)
        launch.blank = rulebook.rows[side].padding_value is not None
        if (count := rulebook.rows[side].device) is not None:
            launch.count_rows(count)
        return launch

    def _check_far(self, x: torch.Tensor) -> None:
        """Features of more than 2 GiB are addressed otherwise, which compilers have got wrong."""
        if x.untyped_storage().nbytes() < 1 << 31:
            return
        problem = self_check.problem(x.device, self.product.target, self_check.FAR)
        if problem is not None:
            raise KernelError(
                f"On {x.device} {problem}, and these features take "
                f"{x.untyped_storage().nbytes() / 2**30:.1f} GiB. Use smaller batches, or "
                "SPARSE_BRIDGE_DATAFLOW=per_offset."
            )
