"""The kernels of a product that a layer will ask for, launched over stand-ins: for
`precompile.dry_run`.

A form follows from the layer, but for the tile and the dataflow: those follow from the rows. Who
knows them says so; others are guessed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ...kernels.gemm.product import EpilogueForm, Product
from ...kernels.runtime.target import Target
from ..conv.dataflow import LayerProduct
from ..conv.dataflows import masked, unmasked
from ..conv.dataflows.wgrad_product import WgradProduct
from ..conv.epilogue import Epilogue
from ..conv.kernel_products import GatherProduct, KernelDataflow
from ..conv.torch_end import in_trusted_kernels
from ..device.column_sums import column_sums
from ..device.precision import KERNEL_DTYPES, requested_precision
from ..device.self_check_problems import COMMON_ROWS
from ..geometry.weights import layout_of
from ..maps.pair_groups import likely_pairs
from ..maps.rulebook import Rulebook
from ..ops.pointwise import takes
from ..tuning.problem import wgrad_problem
from ..tuning.tuner import tile_for
from .map_kernels import Strided

if TYPE_CHECKING:
    from ...kernels.gemm.vectors import Vectors
    from ...kernels.tiles.tile import TileConfig

_DEEP = 256  # channels


class Sizes(NamedTuple):
    """Rows of a map."""

    n_in: int
    n_out: int


@dataclasses.dataclass(frozen=True)
class Expected:
    """A product that a layer will ask for.

    weight, layout, groups: see `conv`.  epilogue: what follows it.  symmetric: submanifold.
    trains: gradients will be asked for.  norm: weight, bias, running mean and variance and number
    of batches of a batch norm in training behind it.  layer: whose product it is; of several that
    speak for one layer the last is right.  pointwise: of kernel volume 1, see `ops.pointwise`.
    sizes: of its map, where they are known.  strided: the map that it asks for, if that has new
    coordinates in three dimensions.  expanding: it makes more rows than it is given, as transposed
    and inverse layers.  casts: it follows autocast.
    """

    layer: Any
    weight: torch.Tensor
    layout: str
    epilogue: Epilogue
    groups: int = 1
    symmetric: bool = False
    trains: bool = False
    precision: str = "ieee"
    norm: tuple[torch.Tensor | None, ...] | None = None
    pointwise: bool = False
    sizes: Sizes | None = None
    strided: Strided | None = None
    expanding: bool = False
    casts: bool = True

    @property
    def dtype(self) -> torch.dtype:
        """That of the product, by the autocast in force."""
        dtype = self.weight.dtype
        if self.casts and torch.is_autocast_enabled("cuda") and dtype != torch.float64:
            return torch.get_autocast_dtype("cuda")
        return dtype


def likely(expected: Expected) -> list[Sizes]:
    """The sizes of its map, or the first guess: the wider a layer, the fewer rows it meets."""
    if expected.sizes is not None:
        return [expected.sizes]
    if _width(expected) >= _DEEP:
        return [_rows(expected, 16)]
    return [_rows(expected, 8 if _coarse(expected) else 1)]


def less_likely(expected: Expected) -> list[Sizes]:
    """Further guesses, on the other side of where rules take other tiles and dataflows."""
    width = _width(expected)
    if expected.sizes is not None:
        return []
    times: list[float] = [4, 8, 16]
    if width >= _DEEP:
        times = [4, 32]
    elif expected.pointwise:
        times = [8, 16]
    elif width < 32 or _coarse(expected):
        times = [4]
    elif width >= 128:
        times = [4, 8, 16, 1 / 2]
    if 32 <= width < _DEEP and not (expected.pointwise or expected.symmetric or expected.trains):
        # In inference many rows of a map between coordinates are ordered, few are not.
        times.append(1 if _coarse(expected) else 1 / 4)
    return [_rows(expected, few) for few in times]


def _rows(expected: Expected, times_fewer: float) -> Sizes:
    """A map into so many rows."""
    rows = int(COMMON_ROWS / times_fewer)
    return Sizes(rows // 2 if expected.expanding else rows, rows)


def _coarse(expected: Expected) -> bool:
    """A wide layer between coordinates: deep in a network."""
    return not (expected.symmetric or expected.pointwise) and _width(expected) >= 128


def _width(expected: Expected) -> int:
    w = layout_of(expected.weight, expected.layout, expected.groups)
    return max(w.c_in, w.c_out)


def compile_product(
    device: torch.device,
    target: Target,
    expected: Expected,
    dtype: torch.dtype,
    maps: Iterable[Sizes],
    ordered: bool = False,
) -> None:
    """Launch what the product over maps of these sizes would, forward and backward.

    ordered: instead, what it would where larger scenes have had the rows ordered and the rule for
    these sizes would leave them.
    """
    if dtype not in KERNEL_DTYPES or (expected.pointwise and not takes(dtype, expected.weight)):
        return
    w = layout_of(expected.weight, expected.layout, expected.groups)
    product = LayerProduct(
        target, device, dtype, requested_precision(dtype, expected.precision), w, expected.epilogue.form
    )
    back = w.transposed().reversed() if expected.symmetric else w.transposed()
    gradient = product._replace(w=back, epilogue=EpilogueForm())
    launched = set[Any]()
    for sizes in maps:
        _gather(product, expected, 0, sizes, launched, ordered)
        if expected.trains and not ordered:
            _gather(gradient, expected, 1, sizes, launched)
            _wgrad(product, expected, sizes)


def compile_once(target: Target, expected: Expected, dtype: torch.dtype) -> None:
    """What follows the product whatever the map: sums of gradients, norms."""
    if dtype not in KERNEL_DTYPES or (expected.pointwise and not takes(dtype, expected.weight)):
        return
    columns, bias = layout_of(expected.weight, expected.layout, expected.groups).columns_out, expected.epilogue.bias
    if expected.trains and bias is not None:
        column_sums(torch.empty((1, columns), dtype=dtype), bias.dtype, target)
    if expected.norm is not None:
        from ..ops.batch_norm import launch_both

        features = torch.empty((1, columns), dtype=dtype).expand(COMMON_ROWS, -1)
        launch_both(features, expected.norm, target)


def _gather(
    layer: LayerProduct, expected: Expected, side: int, sizes: Sizes, launched: set[Any], ordered: bool = False
) -> None:
    """The product of one side, unless it was launched.  side: 0 forward."""
    n_rows, n_in = sizes[1 - side], sizes[side]
    flow, *others = flows_over(layer, expected, side, sizes)
    if ordered:
        if not others:
            return
        flow = others[0]
    product = GatherProduct(flow, in_trusted_kernels(layer)).product
    tile = flow.tile(product, flow.likely_work(layer.w.n_offsets, n_rows), n_in)
    if (side, flow.name, tile) in launched:
        return
    launched.add((side, flow.name, tile))
    vectors = (Epilogue() if side else expected.epilogue).vectors
    launch_over(flow, product, tile, (n_rows, n_in), vectors)


def launch_over(
    flow: KernelDataflow, product: Product, tile: TileConfig, rows: tuple[int, int], vectors: Vectors | None
) -> None:
    """Launch a product over stand-ins: x [1, columns] in the product's dtype.  rows: of the result, and of what is
    gathered.  vectors: [C_out], as of the epilogue, or None."""
    w = product.w
    x = torch.empty((1, w.groups * w.c_in), dtype=product.dtype)
    y = x.new_empty((1, w.groups * w.c_out))
    launch = flow.launch(flow.spec(product, tile), flow.dry_table(w.n_offsets), *rows)
    launch(x, x.new_empty(1), vectors, y)


def flows_over(layer: LayerProduct, expected: Expected, side: int, sizes: Sizes) -> list[KernelDataflow]:
    """The dataflows that may serve a map, the likeliest first."""
    if expected.pointwise:  # over the identity map
        return [unmasked.DATAFLOW]
    map_like = Rulebook(*sizes, layer.w.n_offsets, layer.device, symmetric=expected.symmetric)
    map_like.trained = expected.trains
    return masked.BY_RULE.possible(map_like, side, layer)


def _wgrad(layer: LayerProduct, expected: Expected, sizes: Sizes) -> None:
    from ...kernels.gemm.wgrad_gemm import WgradGemm

    product, w, mirrored = WgradProduct(layer), layer.w, expected.symmetric
    x, dy = (torch.empty((1, n), dtype=layer.dtype) for n in (w.columns_in, w.columns_out))
    rows = torch.empty(1, dtype=torch.int32)
    starts = torch.empty(w.n_offsets + 1, dtype=torch.int64)
    n_pairs = likely_pairs(w.n_offsets, sizes.n_out)
    tile = tile_for(wgrad_problem(product.product, sizes.n_out, sizes.n_in, n_pairs))
    launch = WgradGemm(product.spec(tile, mirrored), (rows, rows, starts), *sizes, n_pairs >> mirrored)
    launch(x, dy, torch.empty(1, dtype=expected.weight.dtype))
