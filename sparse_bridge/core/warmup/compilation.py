"""Warm-up: before the first use of a GPU, what a program is about to need is compiled side by side.

A first layer meets a dozen kernels that no cache has, each the condition of the next. Those that
build maps differ little between networks, and layers say beforehand what they will multiply, so
all of it is compiled in the background from the first question on. What was guessed wrong is
compiled when it is wanted, as without.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from ... import log, settings
from ...kernels.runtime.target import Target
from ..conv import kernel_products
from ..conv.dataflows import masked
from ..conv.epilogue import Epilogue
from ..conv.kernel_products import GatherProduct
from ..device import device_support
from ..device.self_check import NAMES
from ..device.self_check_problems import (
    CHANNELS,
    COMMON_ROWS,
    NORM_ROWS,
    NORMED,
    OFFSETS,
    PRODUCTS,
    WGRAD_PAIRS,
    common_product,
    wgrad_over,
)
from ..maps.rulebook import Rulebook
from . import preload
from .fused_forms import compile_others, followed, waits
from .map_kernels import CHECKED, MapKernels
from .product_kernels import Expected, Sizes, compile_once, compile_product, launch_over, less_likely, likely

if TYPE_CHECKING:
    from ..conv.kernel_products import Inputs

Describe = Callable[[Any], Iterable[Expected]]
_described: weakref.WeakKeyDictionary[Any, Describe] = weakref.WeakKeyDictionary()
_devices: set[torch.device] = set()  # whose layers have been asked
_lock = threading.Lock()


def expect(module: Any, describe: Describe) -> None:
    """Remember a module, whose products `describe` tells when they are about to be asked for."""
    preload.begin()
    _described[module] = describe


def begin(expected: Expected) -> bool:
    """Have what a product needs compiled in the background from now on; False where its device has
    not been used yet: it is to be expected then."""
    device = expected.weight.device
    with _lock:
        if device not in _devices:
            return False
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return True  # other threads may not load kernels now
    target = device_support.kernel_target(device)
    if target is not None and _warms(target):
        products = [(product, product.dtype) for product in (expected, _checked(expected.dtype))]
        _guarded(_compile_products, device, target, products)
    return True


def reset() -> None:
    """Forget the modules that were described, and that devices are warm."""
    with _lock:
        _described.clear()
        _devices.clear()


def _warms(target: Target) -> bool:
    return target.raw and settings.get().warmup


def _guarded(work: Callable[..., None], *args: Any) -> None:
    try:
        work(*args)
    # Guesses about layers of any kind, and memory for them: the layers themselves will complain.
    except Exception as error:
        log.logger.debug("the warm-up stops: %s", error)


def compile_first(device: torch.device, target: Target, key64: bool) -> None:
    """Have what maps with keys of this width need compiled in the background; with the first map on
    a device also what the known layers there will need. Listens to `device_support.on_first_use`.

    device: with an index.
    """
    if _warms(target):
        _guarded(_compile, device, target, key64)


def compile_fused(product: GatherProduct, rulebook: Rulebook, side: int, inputs: Inputs) -> None:
    """Have a product whose epilogue was found out compiled for other scenes. Listens to
    `kernel_products.on_first_fused`."""
    device, target = product.product.device, product.product.target
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return
    if _warms(target):
        _guarded(_compile_fused, product, rulebook, side, inputs)


def _compile_fused(product: GatherProduct, rulebook: Rulebook, side: int, inputs: Inputs) -> None:
    from ...kernels.runtime.precompile import dry_run

    with torch.no_grad(), torch.device(product.product.device), dry_run(later=True):
        compile_others(product, rulebook, side, inputs)


def _compile(device: torch.device, target: Target, key64: bool) -> None:
    """First what is waited for first, last what may not be wanted."""
    from ...kernels.runtime.precompile import dry_run

    with _lock:
        first = device not in _devices
        _devices.add(device)
    preload.finish()
    products = _products(device) if first else []
    fuses = waits()
    # Not the caller's modes: tensors here only stand for others.
    with torch.no_grad(), torch.device(device), dry_run():
        maps = MapKernels(device, target, key64)
        maps.looked_up()
        for expected, dtype in sorted(products, key=lambda pair: pair[0].layer is None):
            if expected.sizes is not None:  # no guess, and long to compile
                compile_product(device, target, expected, dtype, likely(expected))
        maps.ordered({_volume(expected) for expected, _ in products if expected.symmetric})
        _compile_products(device, target, products)
        ends = [(end, dtype) for expected, dtype in products for end in followed(expected)] if fuses else []
        _compile_checks(device, target, ends)
        strided = {expected.strided for expected, _ in products if expected.strided is not None}
        maps.expanded([*strided, *({CHECKED} - strided)])
        maps.together({_volume(expected) for expected, _ in products if expected.layer is not None})
        for expected, dtype in ends:
            compile_product(device, target, expected, dtype, likely(expected))
        for expected, dtype in products:
            compile_product(device, target, expected, dtype, less_likely(expected))
        maps.less_common(strided)
        maps.paired()
        with dry_run(later=True):  # guesses about guesses
            for expected, dtype in ends:
                compile_product(device, target, expected, dtype, less_likely(expected))
            for expected, dtype in (*products, *ends):
                maps_of = [*likely(expected), *less_likely(expected)]
                compile_product(device, target, expected, dtype, maps_of, ordered=True)


def _volume(expected: Expected) -> int:
    """Kernel volume."""
    sizes = expected.weight.shape
    return math.prod(sizes[1:-1]) if expected.layout == "ovi" else sizes[0]


def _compile_products(device: torch.device, target: Target, products: list[tuple[Expected, torch.dtype]]) -> None:
    from ...kernels.runtime.precompile import dry_run

    with torch.no_grad(), torch.device(device), dry_run():
        for expected, dtype in products:
            compile_product(device, target, expected, dtype, likely(expected))
            compile_once(target, expected, dtype)
        _compile_checks(device, target, products)


def _compile_checks(device: torch.device, target: Target, products: list[tuple[Expected, torch.dtype]]) -> None:
    """What the self-check runs for them, beside their own kind of product."""
    if settings.get().self_check:
        for name in {_name(expected, dtype) for expected, dtype in products if expected.trains}:
            _checked_wgrad(device, target, name)
        for dtype in {dtype for expected, dtype in products if expected.epilogue.norm is not None}:
            _checked_norms(device, target, dtype)


def _products(device: torch.device) -> list[tuple[Expected, torch.dtype]]:
    """What the known layers on a device will ask for, and in which dtype, each form once; the
    self-check's first."""
    by_layer: dict[int, Expected] = {}
    for module, describe in list(_described.items()):
        for expected in describe(module):
            if expected.weight.device == device:
                by_layer[id(expected.layer)] = expected
    dtypes = {expected.dtype for expected in by_layer.values()} or {torch.float32}
    forms: dict[Any, tuple[Expected, torch.dtype]] = {}
    for product in (*map(_checked, dtypes), *by_layer.values()):
        shape, end = (tuple(product.weight.shape), product.weight.stride()), product.epilogue
        normed = None if product.norm is None else [v is None or v.dtype for v in product.norm]
        maps = product.symmetric, product.pointwise, product.sizes, product.strided, product.expanding
        about = (product.layout, product.groups, product.trains, *maps, product.precision, str(normed))
        forms.setdefault((shape, product.dtype, *end.form[:2], about), (product, product.dtype))
    return list(forms.values())


def _checked(dtype: torch.dtype) -> Expected:
    """The product that the self-check multiplies: masked, as those of submanifold layers."""
    weight = torch.empty((OFFSETS, CHANNELS, CHANNELS), device="meta", dtype=dtype)
    common = Sizes(COMMON_ROWS, COMMON_ROWS)
    return Expected(None, weight, "vio", Epilogue(), symmetric=True, sizes=common, casts=False)


def _name(expected: Expected, dtype: torch.dtype) -> str | None:
    """What the self-check calls this product."""
    tf32 = dtype == torch.float32 and expected.precision == "tf32"
    return "tf32" if tf32 else NAMES.get(dtype)


def _checked_wgrad(device: torch.device, target: Target, name: str | None) -> None:
    """The kernel that the self-check runs before a first gradient of a weight."""
    if name is None:
        return
    dtype = PRODUCTS[name][0]
    rows = torch.empty(OFFSETS * WGRAD_PAIRS, dtype=torch.int32)
    starts = torch.empty(OFFSETS + 1, dtype=torch.int64)
    x = torch.empty((1, CHANNELS), dtype=dtype)
    dw = torch.empty((OFFSETS, CHANNELS, CHANNELS), dtype=dtype)
    wgrad_over((rows, rows, starts), target, name, dw)(x, x, dw)


def _checked_norms(device: torch.device, target: Target, dtype: torch.dtype) -> None:
    """The kernel that the self-check runs before a first norm in a product's launch."""
    if dtype in NAMES:
        vector, weight = torch.empty(CHANNELS), _checked(dtype).weight
        product, tile = common_product(device, target, "ieee", weight, NORMED)
        vectors = None, vector, vector, vector, vector, None
        launch_over(masked.DATAFLOW, product, tile, (NORM_ROWS, NORM_ROWS), vectors)


device_support.on_first_use(compile_first)
kernel_products.on_first_fused(compile_fused)
