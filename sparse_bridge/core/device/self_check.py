"""At the first use of a GPU: do its kernels compute what a CPU computes?

Compilers and drivers have shipped that multiply wrongly on one GPU or in one dtype, without an
error. So before the first look-up with a width of keys, and before the first product in a dtype, a
tiny problem goes through the kernels that every layer uses, in variants that common layers use
too, and its result is compared with plain torch on the CPU. A verdict holds for the process.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable

import torch

from ... import settings, tolerances
from ...kernels.runtime.target import Target
from .precision import product_precision

ROWS, CHANNELS, OFFSETS = 150, 32, 27
COMMON_ROWS = (
    40_000  # of inputs whose default tiles are checked, and compiled before they are wanted
)
KEYS = {"int32 keys": (16, 16, 16), "int64 keys": (1 << 20, 1 << 15, 16)}
PRODUCTS: dict[str, tuple[torch.dtype, str]] = {
    "fp16": (torch.float16, "ieee"),
    "bf16": (torch.bfloat16, "ieee"),
    "fp32": (torch.float32, "ieee"),
    "tf32": (torch.float32, "tf32"),
}
NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}


@dataclasses.dataclass(frozen=True)
class Verdict:
    """device: as torch names it.  part: a key of KEYS or PRODUCTS.  problem: None when it
    passed.  milliseconds: what the check took, compiling included."""

    device: str
    part: str
    problem: str | None
    milliseconds: float


_verdicts: dict[tuple[torch.device, str, str], Verdict] = {}
generation = 0  # counts how often verdicts were dropped
_lock = threading.RLock()


def _applies(device: torch.device) -> bool:
    """GPUs are checked; on CPU tensors kernels run for tests only, and slowly."""
    return device.type == "cuda" and settings.get().self_check


def problem(device: torch.device, target: Target, part: str) -> str | None:
    """Why `part` cannot be trusted on `device`, or None; checked when it is first asked for.

    device: with an index.  part: a key of KEYS or PRODUCTS.
    """
    if not _applies(device):
        return None
    verdict = _verdicts.get((device, target.arch, _form(target, part)))
    return (verdict or run(device, target, part)).problem


def run(device: torch.device, target: Target, part: str) -> Verdict:
    """The verdict on `part`, reached now unless the process has one."""
    key = (device, target.arch, _form(target, part))
    with _lock:
        if key not in _verdicts:
            start = time.perf_counter()
            found = _find(device, target, part)
            took = 1e3 * (time.perf_counter() - start)
            _verdicts[key] = Verdict(str(device), part, found, took)
        return _verdicts[key]


def _form(target: Target, part: str) -> str:
    """What a verdict is about: fp32 may be computed in two ways, see `product_precision`."""
    split = part in PRODUCTS and _precision(target, part) == "tf32x3"
    return "tf32x3" if split else part


def _precision(target: Target, part: str) -> str:
    """How layers multiply what `part` names."""
    dtype, precision = PRODUCTS[part]
    return product_precision(target, dtype, precision)


def products_of(target: Target) -> list[str]:
    """The parts of PRODUCTS that kernels compute on a target."""
    missing = {"bf16": not target.has_bf16, "tf32": not target.has_tf32}
    return [part for part in PRODUCTS if not missing.get(part)]


def failures() -> tuple[Verdict, ...]:
    """What failed in this process so far."""
    return tuple(verdict for verdict in _verdicts.values() if verdict.problem is not None)


def reset() -> None:
    """Drop all verdicts: everything is checked again when it is next used."""
    global generation
    with _lock:
        _verdicts.clear()
        generation += 1
        settings.changed()


def _find(device: torch.device, target: Target, part: str) -> str | None:
    words, check = _CHECKS["keys" if part in KEYS else "products"]
    # Not the caller's modes: the answers are compared on the CPU, whatever its default device.
    with torch.no_grad(), torch.device("cpu"):
        try:
            wrong = check(device, target, part)
        except torch.cuda.OutOfMemoryError:
            raise  # says nothing about the kernels
        # The point of the check: a compiler or driver may fail in any way at all.
        except Exception as error:
            first = (str(error).strip() or "no message").splitlines()[0]
            wrong = f"{type(error).__name__}: {first}"
    return None if wrong is None else f"{words.format(part)} failed the self-check ({wrong})"


def _crowd(part: str) -> torch.Tensor:
    """int32 [ROWS, 4]: neighbours in one corner and, for 64-bit keys, far from it; every tenth row
    repeats an earlier one."""
    generator = torch.Generator().manual_seed(0)
    coords = torch.randint(0, 6, (ROWS, 4), generator=generator, dtype=torch.int32)
    coords[:, 0] %= 2
    far = torch.tensor(KEYS[part], dtype=torch.int32) - 6
    coords[::2, 1:] += far
    coords[9::10] = coords[:-9:10]
    return coords


def _check_keys(device: torch.device, target: Target, part: str) -> str | None:
    """Hash table and look-up, and with them the atomics on shared addresses."""
    from ...kernels.maps.hash_table import HashTable, hash_insert
    from ...kernels.maps.neighbor_table import neighbor_lookup
    from ..geometry.boxes import Box
    from ..geometry.offsets import Offsets, box_offsets

    one, coords = (1, 1, 1), _crowd(part)
    offsets, box = box_offsets((3, 3, 3), one, one), Box.grid(2, KEYS[part])
    first: dict[tuple[int, ...], int] = {}
    for row, site in enumerate(coords.tolist()):
        first.setdefault(tuple(site), row)
    wanted = [
        [first.get((b, x + dx, y + dy, z + dz), -1) for b, x, y, z in coords.tolist()]
        for dx, dy, dz in offsets.values
    ]
    there = coords.to(device)
    table = HashTable.allocate(1 << 9, box.key64, device)
    slots = torch.empty((1, ROWS), dtype=torch.int32, device=device)
    origin = Offsets.of([(0, 0, 0)]).geometry(device, one, one, 1)
    bounds = box.bounds(device)
    hash_insert(table, there, origin, bounds, None, slots, False, target)
    counted = table.counters()
    if counted != (len(first), ROWS, False):
        return f"the hash table counted {counted}; expected {(len(first), ROWS, False)}"
    found = neighbor_lookup(
        table, ROWS, there, offsets.geometry(device, one, one, 1), bounds, None, len(offsets), -1,
        False, target,
    ).nbr.cpu()  # fmt: skip
    wrong = int((found != torch.tensor(wanted, dtype=torch.int32)).sum())
    return f"{wrong} of {found.numel()} neighbours are wrong" if wrong else None


def _check_products(device: torch.device, target: Target, part: str) -> str | None:
    """The gather-GEMM over mask-ordered tiles, as forward and dgrad run it."""
    dtype, limit = PRODUCTS[part][0], tolerances.of("self_check", part).largest
    precision = _precision(target, part)
    generator = torch.Generator().manual_seed(1)
    nbr = torch.randint(-ROWS, ROWS, (OFFSETS, ROWS), generator=generator, dtype=torch.int32)
    nbr.clamp_(min=-1)
    x = torch.randn(ROWS, CHANNELS, generator=generator).to(dtype)
    weight = torch.randn(OFFSETS, CHANNELS, CHANNELS, generator=generator).to(dtype)
    y = _multiply(device, target, precision, nbr, x, weight).cpu().double()
    padded = torch.cat([x, x.new_zeros((1, CHANNELS))]).double()
    want = padded[nbr.t().long()].flatten(1) @ weight.double().flatten(0, 1)
    error = (y - want).abs() / want.square().mean().sqrt()
    worst = int(error.argmax()) if bool(torch.isfinite(error).all()) else -1
    if worst < 0:
        return f"{int((~torch.isfinite(y)).sum())} of {y.numel()} results are not finite"
    largest = error.flatten()[worst].item()
    if largest <= limit:
        return None
    row, channel = divmod(worst, CHANNELS)
    return (
        f"largest error {largest:.1e} of the typical value, at row {row}, channel {channel}; "
        f"allowed {limit:.0e}"
    )


def _multiply(
    device: torch.device, target: Target, precision: str, nbr: torch.Tensor, x: torch.Tensor,
    weight: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """y [ROWS, CHANNELS] on the device, by the tile of a common layer."""
    from ...kernels.gemm.gather_gemm import GatherGemm
    from ...kernels.gemm.gather_spec import GemmSpec
    from ...kernels.gemm.product import Product
    from ...kernels.maps.mask_order import mask_order, pack_tiles
    from ...kernels.maps.neighbor_table import NeighborTable
    from ...kernels.tiles.tile_config import gather_tile
    from ..geometry.weights import layout_of

    w = layout_of(weight, "vio")
    tile = gather_tile(target, x.dtype, COMMON_ROWS, w.c_in, w.c_out, OFFSETS, precision)
    table = NeighborTable(nbr.to(device))
    tiles = pack_tiles(table, mask_order(table, target), target)
    spec = GemmSpec(Product(target, device, x.dtype, precision, w), tile, packed=True)
    y = torch.full((ROWS, CHANNELS), float("nan"), dtype=x.dtype, device=device)
    return GatherGemm(spec, tiles, ROWS, ROWS)(x.to(device), weight.to(device), None, y)


_CHECKS: dict[str, tuple[str, Callable[[torch.device, Target, str], str | None]]] = {
    "keys": ("looking up coordinates by {}", _check_keys),
    "products": ("{} products", _check_products),
}
