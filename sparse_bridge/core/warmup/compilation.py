"""Warm-up: before the first use of a GPU, what a program is about to need is compiled side by side.

A first layer meets a dozen kernels that no cache has, each the condition of the next. Those that
build maps differ little between networks, and layers say beforehand what they will multiply, so
all of it is compiled in the background from the first question on. What was guessed wrong is
compiled when it is wanted, as without.
"""

from __future__ import annotations

import dataclasses
import math
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ... import log, settings
from ...kernels.gemm.product import EpilogueForm
from ...kernels.runtime.target import Target
from ..conv import registry
from ..conv.choice import serving_flow
from ..conv.column_sums import column_sums
from ..conv.dataflow import LayerProduct
from ..conv.epilogue import Epilogue
from ..conv.kernel_products import GatherProduct, KernelDataflow, WgradProduct
from ..device import serving
from ..device.precision import KERNEL_DTYPES
from ..device.self_check import NAMES
from ..device.self_check_problems import CHANNELS, KEYS, OFFSETS, PRODUCTS, WGRAD_PAIRS, wgrad_over
from ..device.self_check_problems import COMMON_ROWS as _ROWS
from ..geometry.boxes import Box
from ..geometry.offsets import Offsets, box_offsets
from ..geometry.weights import layout_of
from ..maps.expansion import Expansion, Source
from ..maps.rulebook import Rulebook
from ..ops.pointwise import HALVES
from ..tuning.problem import gather_problem, wgrad_problem
from ..tuning.tuner import tile_for
from . import preload

_FEW = 64  # rows of the tensors that stand for real ones
_SIZES = (_ROWS, 8 * _ROWS)  # of maps, on both sides of where the rule takes another dataflow


@dataclasses.dataclass(frozen=True)
class Expected:
    """A product that a layer will ask for.

    weight, layout, groups: see `conv`.  epilogue: what follows it.  symmetric: submanifold.
    trains: gradients will be asked for.  norm: weight, bias, running mean and variance and number
    of batches of a batch norm in training behind it.  layer: whose product it is; of several that
    speak for one layer the last is right.  pointwise: of kernel volume 1, see `ops.pointwise`.
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


Describe = Callable[[Any], Iterable[Expected]]
_described: weakref.WeakKeyDictionary[Any, Describe] = weakref.WeakKeyDictionary()
_devices: set[torch.device] = set()  # whose layers have been asked
_lock = threading.Lock()


def expect(module: Any, describe: Describe) -> None:
    """Remember a module, whose products `describe` tells when they are about to be asked for."""
    preload.begin()
    _described[module] = describe


def reset() -> None:
    """Forget the modules that were described, and that devices are warm."""
    with _lock:
        _described.clear()
        _devices.clear()


def compile_ahead(device: torch.device, target: Target, key64: bool) -> None:
    """Have what maps with keys of this width need compiled in the background; with the first map on
    a device also what the known layers there will need. Listens to `serving.on_first_use`.

    device: with an index.
    """
    if not target.raw or not settings.get().warmup:
        return
    try:
        _compile(device, target, key64)
    # Guesses about layers of any kind, and memory for them: the layers themselves will complain.
    except Exception as error:
        log.logger.debug("the warm-up stops: %s", error)


def _compile(device: torch.device, target: Target, key64: bool) -> None:
    from ...kernels.runtime.precompile import dry_run

    with _lock:
        first = device not in _devices
        _devices.add(device)
    preload.finish()
    products = _products(device) if first else []
    # Not the caller's modes: tensors here only stand for others.
    with torch.no_grad(), torch.device(device), dry_run():
        later = _map_kernels(device, target, key64)
        for expected, dtype in products:
            _product_kernels(device, target, expected, dtype)
        for name in {_name(one, dtype) for one, dtype in products if one.trains}:
            _checked_wgrad(device, target, name)
        later()


def _map_kernels(device: torch.device, target: Target, key64: bool) -> Callable[[], None]:
    """Everything between coordinates and tiles, for kernels of 3x3x3, in the order of a first
    submanifold layer; what that does not need, the result compiles."""
    from ...kernels.maps.hash_table import HashTable, hash_insert
    from ...kernels.maps.mask_order import SORTED_APART, mask_order, pack_tiles, write_pairs
    from ...kernels.maps.neighbor_table import NeighborTable, neighbor_lookup

    one = (1, 1, 1)
    offsets = box_offsets((3, 3, 3), one, one)
    nbr = torch.empty((len(offsets), _FEW), dtype=torch.int32)
    order = mask_order(NeighborTable(nbr, nbr), target)
    coords, slots = nbr.new_empty((_FEW, 4)), nbr.new_empty((1, _FEW))
    box = Box.grid(1, KEYS["int64 keys" if key64 else "int32 keys"])
    bounds, table = box.layout(device).bounds, HashTable.allocate(1 << 9, key64, device)
    origin = Offsets.of([(0, 0, 0)]).geometry(device, one, one, 1)
    hash_insert(table, coords, origin, bounds, None, slots, False, target)
    near = offsets.geometry(device, one, one, 1)
    wide = box.wide(offsets, one)

    def look_up() -> NeighborTable:
        return neighbor_lookup(
            table, _FEW, coords, near, bounds, None, len(offsets), offsets.center, wide, target
        )

    look_up()
    tiles = pack_tiles(NeighborTable(nbr, nbr), order, target)
    NeighborTable(nbr).masks(target)

    def later() -> None:
        _expansion_kernels(coords, box, offsets, target)
        table.reversed = False
        look_up()
        large = NeighborTable(nbr[:, :1].expand(-1, SORTED_APART + 1), nbr)
        pack_tiles(NeighborTable(nbr, nbr), mask_order(large, target)[:_FEW], target)
        write_pairs(tiles, order.long(), tiles.counts, order, order, len(offsets), target)

    return later


def _expansion_kernels(coords: torch.Tensor, box: Box, offsets: Offsets, target: Target) -> None:
    """New coordinates, stride 2, and bounds that are found on the device."""
    from ...kernels.maps.hash_table import HashTable
    from ...kernels.maps.level_bounds import level_bounds
    from ...kernels.maps.new_rows import owner_counters

    table = HashTable.allocate(1 << 9, box.key64, coords.device, owner_counters(_FEW))
    source, layout = Source.of(coords, box), box.layout(coords.device)
    expansion = Expansion(source, offsets, (1, 1, 1), (2, 2, 2), -1, layout, target)
    expansion.insert(table)
    expansion.number(_FEW, "first_seen", False)
    slots = expansion.slots
    for link in (False, True):
        expansion.slots = slots
        expansion.link(_FEW, link=link)
    level_bounds(coords[:2], coords, coords.new_empty(2 * _FEW, dtype=torch.int64), target)


def _products(device: torch.device) -> list[tuple[Expected, torch.dtype]]:
    """What the known layers on a device will ask for, and in which dtype, each form once; the
    self-check's first."""
    weight = torch.empty((27, CHANNELS, CHANNELS), device="meta")
    found: dict[int, Expected] = {}
    for module, describe in list(_described.items()):
        for expected in describe(module):
            if expected.weight.device == device:
                found[id(expected.layer)] = expected
    dtypes = {_dtype(expected) for expected in found.values()} or {torch.float32}
    # As of submanifold layers, which are masked: the self-check is.
    checks = [
        Expected(None, weight.to(dtype), "vio", Epilogue(), symmetric=True) for dtype in dtypes
    ]
    forms: dict[Any, tuple[Expected, torch.dtype]] = {}
    for one in (*checks, *found.values()):
        shape, end = (tuple(one.weight.shape), one.weight.stride()), one.epilogue
        normed = None if one.norm is None else [v is None or v.dtype for v in one.norm]
        kinds = one.groups, one.symmetric, one.trains, one.pointwise
        about = (one.layout, *kinds, one.precision, str(normed))
        dtype = _dtype(one)
        forms.setdefault((shape, dtype, *end.form[:2], about), (one, dtype))
    return list(forms.values())


def _dtype(expected: Expected) -> torch.dtype:
    """The dtype of the product, by the autocast in force."""
    dtype = expected.weight.dtype
    if expected.layer is not None and torch.is_autocast_enabled("cuda"):
        return dtype if dtype == torch.float64 else torch.get_autocast_dtype("cuda")
    return dtype


def _product_kernels(
    device: torch.device, target: Target, expected: Expected, dtype: torch.dtype
) -> None:
    if dtype not in KERNEL_DTYPES or (expected.pointwise and dtype not in HALVES):
        return
    w = layout_of(expected.weight, expected.layout, expected.groups)
    form, bias = expected.epilogue.form, expected.epilogue.bias
    product = LayerProduct(target, device, dtype, expected.precision, w, form)
    back = w.transposed().reversed() if expected.symmetric else w.transposed()
    for flow in _flows(product, expected):
        _gather_kernel(product, expected.epilogue, flow)
        if expected.trains:
            _gather_kernel(product._replace(w=back, epilogue=EpilogueForm()), Epilogue(), flow)
    if expected.trains:
        _wgrad_kernel(product, expected.symmetric, expected.weight.dtype)
        if bias is not None:
            column_sums(torch.empty((1, w.columns_out), dtype=dtype), bias.dtype, target)
    if expected.norm is not None:
        from ..ops.batch_norm import launch_both

        features = torch.empty((1, w.columns_out), dtype=dtype).expand(_ROWS, -1)
        launch_both(features, expected.norm, target)


def _flows(product: LayerProduct, expected: Expected) -> list[str]:
    """The dataflows that serve maps of any size."""
    if expected.pointwise:
        return ["unmasked"]  # over the identity map
    flows = []
    for rows in _SIZES:
        offsets = product.w.n_offsets
        map_like = Rulebook(rows, rows, offsets, product.device, symmetric=expected.symmetric)
        map_like.trained = expected.trains
        flows.append(serving_flow(map_like, 0, product))
    return list(dict.fromkeys(flows))


def _gather_kernel(layer: LayerProduct, epilogue: Epilogue, name: str) -> None:
    """name: of the dataflow."""
    from ...kernels.gemm.gather_gemm import GatherGemm
    from ...kernels.maps.tile_list import TileList

    if name == "grouped":
        return  # its launches follow pairs, which nobody knows yet
    flow = registry.entry(name)
    assert isinstance(flow, KernelDataflow)
    product, w = GatherProduct(flow, layer), layer.w
    x, y = (torch.empty((1, n), dtype=layer.dtype) for n in (w.columns_in, w.columns_out))
    table: TileList | torch.Tensor = torch.empty((w.n_offsets, 1), dtype=torch.int32)
    if flow.packed:
        memory = torch.empty(TileList.size(w.n_offsets, 1), dtype=torch.int32)
        table = TileList(memory, w.n_offsets, 1, _ROWS)
    tile = tile_for(gather_problem(product.product, flow.name, _ROWS, _ROWS))
    launch = GatherGemm(flow.spec(product.product, tile), table, _ROWS, _ROWS)
    launch(x, x.new_empty(1), epilogue.vectors, y)


def _name(expected: Expected, dtype: torch.dtype) -> str | None:
    """What the self-check calls this product."""
    tf32 = dtype == torch.float32 and expected.precision == "tf32"
    return "tf32" if tf32 else NAMES.get(dtype)


def _checked_wgrad(device: torch.device, target: Target, name: str | None) -> None:
    """The kernel that the self-check runs before a first gradient of a weight."""
    if name is None or not settings.get().self_check:
        return
    dtype = PRODUCTS[name][0]
    rows = torch.empty(OFFSETS * WGRAD_PAIRS, dtype=torch.int32)
    starts = torch.empty(OFFSETS + 1, dtype=torch.int64)
    x = torch.empty((1, CHANNELS), dtype=dtype)
    dw = torch.empty((OFFSETS, CHANNELS, CHANNELS), dtype=dtype)
    wgrad_over((rows, rows, starts), target, name, dw)(x, x, dw)


def _wgrad_kernel(layer: LayerProduct, mirrored: bool, dtype: torch.dtype) -> None:
    from ...kernels.gemm.wgrad_gemm import WgradGemm

    product, w = WgradProduct(layer), layer.w
    x, dy = (torch.empty((1, n), dtype=layer.dtype) for n in (w.columns_in, w.columns_out))
    rows = torch.empty(1, dtype=torch.int32)
    starts = torch.empty(w.n_offsets + 1, dtype=torch.int64)
    n_pairs = _ROWS * math.ceil(w.n_offsets / 3)  # of a pointwise layer all
    tile = tile_for(wgrad_problem(product.product, _ROWS, _ROWS, n_pairs))
    spec = product.spec(tile, mirrored)
    launch = WgradGemm(spec, (rows, rows, starts), _ROWS, _ROWS, n_pairs >> mirrored)
    launch(x, dy, torch.empty(1, dtype=dtype))


serving.on_first_use(compile_ahead)
