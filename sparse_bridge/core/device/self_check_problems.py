"""The tiny problems of the self-check: what kernels compute, compared with plain Python or torch on
the CPU. Each answers what is wrong, or None."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from ... import tolerances
from ...kernels.gemm.product import EpilogueForm
from ...kernels.runtime.target import Target
from ...kernels.tiles.epilogue_bits import AFFINE, NORM
from .precision import product_precision

if TYPE_CHECKING:
    from ...kernels.gemm.product import Product
    from ...kernels.gemm.vectors import Vectors
    from ...kernels.gemm.wgrad_gemm import WgradGemm
    from ...kernels.tiles.tile import TileConfig

ROWS, CHANNELS, OFFSETS = 150, 32, 27
COMMON_ROWS = 40_000  # of inputs whose default tiles are checked, and compiled before they are wanted
KEYS = {"int32 keys": (16, 16, 16), "int64 keys": (1 << 20, 1 << 15, 16)}
PRODUCTS: dict[str, tuple[torch.dtype, str]] = {
    "fp16": (torch.float16, "ieee"),
    "bf16": (torch.bfloat16, "ieee"),
    "fp32": (torch.float32, "ieee"),
    "tf32": (torch.float32, "tf32"),
}
NORMS = {f"{name} norms": name for name in ("fp16", "bf16", "fp32")}
_SUMS, NORMED = EpilogueForm(), EpilogueForm(NORM | AFFINE, None, 0.0, 1e-3)
NORM_ROWS = 1 << 12  # roundings of halves hide most differences
POOLS = {"max pools": "max", "avg pools": "avg", "sum pools": "sum"}
_FAR_BYTES = (1 << 31) + (1 << 20)  # of features that 32-bit offsets do not reach
_FAR_CHANNELS = 512
WGRAD_PAIRS = 100  # of every offset


def precision_of(target: Target, part: str, wgrad: bool = False) -> str:
    """How layers multiply what `part` names."""
    dtype, precision = PRODUCTS[part]
    return product_precision(target, dtype, precision, wgrad)


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


def check_keys(device: torch.device, target: Target, part: str) -> str | None:
    """Hash table and look-up, and with them the atomics on shared addresses."""
    from ...kernels.maps.coord_key import Reach
    from ...kernels.maps.hash_table import HashTable, hash_insert
    from ...kernels.maps.neighbor_lookup import neighbor_lookup
    from ..geometry.boxes import Box
    from ..geometry.offsets import Offsets, box_offsets

    ones, coords = (1, 1, 1), _crowd(part)
    offsets, box = box_offsets((3, 3, 3), ones, ones), Box.grid(2, KEYS[part])
    first: dict[tuple[int, ...], int] = {}
    for row, site in enumerate(coords.tolist()):
        first.setdefault(tuple(site), row)
    expected = [
        [first.get((b, x + dx, y + dy, z + dz), -1) for b, x, y, z in coords.tolist()] for dx, dy, dz in offsets.values
    ]
    device_coords = coords.to(device)
    table = HashTable.allocate(1 << 9, box.key64, device)
    slots = torch.empty((1, ROWS), dtype=torch.int32, device=device)
    origin = Offsets.of([(0, 0, 0)]).geometry(device, ones, ones, 1)
    bounds = box.layout(device).bounds
    hash_insert(table, Reach(device_coords, origin, bounds, False), slots, target)
    counted = table.counters()
    if counted != (len(first), ROWS, False):
        return f"the hash table counted {counted}; expected {(len(first), ROWS, False)}"
    near = Reach(device_coords, offsets.geometry(device, ones, ones, 1), bounds, False)
    nbr = neighbor_lookup(table, ROWS, near, target).nbr.cpu()
    wrong = int((nbr != torch.tensor(expected, dtype=torch.int32)).sum())
    return f"{wrong} of {nbr.numel()} neighbours are wrong" if wrong else None


def check_products(device: torch.device, target: Target, part: str) -> str | None:
    """The gather-GEMM over mask-ordered tiles, as forward and dgrad run it."""
    dtype, limit = PRODUCTS[part][0], tolerances.of("self_check", part).largest
    precision = precision_of(target, part)
    generator = torch.Generator().manual_seed(1)
    nbr = torch.randint(-ROWS, ROWS, (OFFSETS, ROWS), generator=generator, dtype=torch.int32)
    nbr.clamp_(min=-1)
    x = torch.randn(ROWS, CHANNELS, generator=generator).to(dtype)
    weight = torch.randn(OFFSETS, CHANNELS, CHANNELS, generator=generator).to(dtype)
    y = multiply(device, target, precision, nbr, x, weight).cpu().double()
    padded = torch.cat([x, x.new_zeros((1, CHANNELS))]).double()
    want = padded[nbr.t().long()].flatten(1) @ weight.double().flatten(0, 1)
    return _compare(y, want, limit)


def _compare(y: torch.Tensor, want: torch.Tensor, limit: float) -> str | None:
    """What is wrong with y, by its largest error relative to the RMS of `want`."""
    error = (y - want).abs() / want.square().mean().sqrt()
    worst = int(error.argmax()) if bool(torch.isfinite(error).all()) else -1
    if worst < 0:
        return f"{int((~torch.isfinite(y)).sum())} of {y.numel()} results are not finite"
    largest = error.flatten()[worst].item()
    if largest <= limit:
        return None
    row, channel = divmod(worst, y.shape[-1])
    return f"largest error {largest:.1e} of the typical value, at row {row}, channel {channel}; allowed {limit:.0e}"


def check_norms(device: torch.device, target: Target, part: str) -> str | None:
    """A norm behind a product, in its launch: the bits of torch's norm. On CPU tensors, where
    torch's norm rounds in another order, the same but for rounding. part: a key of NORMS."""
    dtype = PRODUCTS[NORMS[part]][0]
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(NORM_ROWS, CHANNELS, generator=generator).to(device, dtype)
    mean, var, gain, beta = torch.randn(4, CHANNELS, generator=generator).to(device)
    var, middle = var.square() + 0.1, OFFSETS // 2
    # The sums are the rows themselves, in every precision that products have.
    nbr = torch.full((OFFSETS, NORM_ROWS), -1, dtype=torch.int32)
    nbr[middle] = torch.arange(NORM_ROWS)
    weight = torch.zeros(OFFSETS, CHANNELS, CHANNELS, dtype=dtype)
    weight[middle].fill_diagonal_(1)
    vectors = None, mean, var, gain, beta, None
    y = multiply(device, target, "ieee", nbr, x, weight, NORMED, vectors)
    want = F.batch_norm(x, mean, var, gain, beta, eps=NORMED.eps)
    if device.type == "cpu":
        limit = tolerances.of("product", dtype).largest
        return _compare(y.double(), want.double(), limit)
    wrong = int((y != want).sum())
    return f"{wrong} of {y.numel()} results have other bits than torch's" if wrong else None


def multiply(
    device: torch.device,
    target: Target,
    precision: str,
    nbr: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    end: EpilogueForm = _SUMS,
    vectors: Vectors | None = None,
) -> torch.Tensor:
    """y [N, CHANNELS] in x's dtype on the device. nbr: int32 [V, N], -1 where absent.  x: [N_in, C_in].  weight: [V,
    C_in, CHANNELS] of x's dtype.  vectors: what `end` reads, see `Epilogue.vectors`."""
    from ...kernels.gemm.gather_gemm import GatherGemm
    from ...kernels.gemm.gather_spec import GemmSpec
    from ...kernels.maps.mask_order import mask_order
    from ...kernels.maps.neighbor_table import NeighborTable
    from ...kernels.maps.tile_packing import pack_tiles

    table, n_rows = NeighborTable(nbr.to(device)), nbr.shape[1]
    tiles = pack_tiles(table, mask_order(table, target), target)
    spec = GemmSpec(*common_product(device, target, precision, weight, end), packed=True)
    y = torch.full((n_rows, CHANNELS), float("nan"), dtype=x.dtype, device=device)
    return GatherGemm(spec, tiles, n_rows, len(x))(x.to(device), weight.to(device), vectors, y)


def common_product(
    device: torch.device, target: Target, precision: str, weight: torch.Tensor, end: EpilogueForm = _SUMS
) -> tuple[Product, TileConfig]:
    """The product by a weight [OFFSETS, c_in, c_out] of any device, whose dtype is multiplied, and the tile that
    common layers take for it."""
    from ...kernels.gemm.product import Product
    from ...kernels.tiles.tile import GemmSize
    from ...kernels.tiles.tile_config import gather_tile
    from ..geometry.weights import layout_of

    w = layout_of(weight, "vio")
    tile = gather_tile(target, weight.dtype, GemmSize(COMMON_ROWS, w.c_in, w.c_out, OFFSETS), precision)
    return Product(target, device, weight.dtype, precision, w, end), tile


def check_new_coordinates(device: torch.device, target: Target, part: str) -> str | None:
    """The launches of a strided layer: candidates, their owners, their order, and the table; then
    sorted rows."""
    from ...kernels.maps.coord_key import Reach
    from ...kernels.maps.hash_table import HashTable, hash_insert
    from ...kernels.maps.new_rows import count_owners, link_new_rows, number_new_rows, owner_counters
    from ...kernels.maps.row_ranks import sort_rows
    from ..geometry.boxes import Box
    from ..geometry.offsets import box_offsets

    ones, coords = (1, 1, 1), torch.unique(_crowd("int32 keys"), dim=0)
    offsets, box = box_offsets((3, 3, 3), ones, ones), Box.grid(2, KEYS["int32 keys"])
    sites: dict[tuple[int, ...], int] = {}
    pairs = set()
    for row, (b, *site) in enumerate(coords.tolist()):
        for at, offset in enumerate(offsets.values):
            steps = [c - o for c, o in zip(site, offset, strict=True)]
            u = (b, *(c // 2 for c in steps))
            if not any(c % 2 for c in steps) and min(steps) >= 0:
                pairs.add((at, row, sites.setdefault(u, len(sites))))
    device_coords, n_new = coords.to(device), len(sites)
    geometry = offsets.geometry(device, ones, (2, 2, 2), -1)
    wide = box.wide(offsets, ones) or box.wide(offsets, (2, 2, 2))
    reach = Reach(device_coords, geometry, box.layout(device).bounds, wide)
    table = HashTable.allocate(1 << 11, box.key64, device, owner_counters(len(coords)))
    slots = torch.empty((geometry.n_row_offsets, len(coords)), dtype=torch.int32, device=device)
    hash_insert(table, reach, slots, target)
    owned = count_owners(table, slots, target)
    if (counted := int(table.total.view()) + 1) != n_new:
        return f"{counted} new coordinates were counted; expected {n_new}"
    new = number_new_rows(table, slots, owned, n_new, reach, target)
    if new.tolist() != [list(site) for site in sites]:
        return "the new coordinates are others, or in another order"
    scattered = link_new_rows(table, slots, n_new, reach, target)[1].nbr.cpu()
    v, out = torch.nonzero(scattered >= 0, as_tuple=True)
    linked = set(zip(v.tolist(), scattered[v, out].tolist(), out.tolist(), strict=True))
    if linked != pairs:
        return f"{len(linked ^ pairs)} of {len(pairs)} pairs are wrong"
    numbers = -2 - table.values.cpu()
    moved = sort_rows(table, new, reach.bounds, target).cpu()
    renamed = -2 - table.values.cpu()
    named = numbers >= 0
    if moved.tolist() != sorted(new.tolist(), key=lambda site: (site[0], *site[:0:-1])):
        return "the new coordinates are not sorted"
    followed = torch.equal(moved[renamed[named].long()], new.cpu()[numbers[named].long()])
    return None if followed else "the table does not know where sorted rows are"


def wgrad_over(
    pairs: tuple[torch.Tensor, torch.Tensor, torch.Tensor], target: Target, name: str, dw: torch.Tensor
) -> WgradGemm:
    """The wgrad that is checked.  pairs: (x rows, y rows) int32 [P] and where each offset's begin, int64 [OFFSETS +
    1]. name: a key of PRODUCTS.  dw: what it writes, [OFFSETS, CHANNELS, CHANNELS]."""
    from ...kernels.gemm.product import Product
    from ...kernels.gemm.wgrad_gemm import WgradGemm
    from ...kernels.gemm.wgrad_spec import WgradSpec
    from ...kernels.tiles.tile_config import wgrad_tile
    from ..geometry.weights import layout_of

    dtype, precision = PRODUCTS[name][0], precision_of(target, name, wgrad=True)
    tile = wgrad_tile(target, dtype, CHANNELS, CHANNELS, precision)
    product = Product(target, dw.device, dtype, precision, layout_of(dw, "vio"))
    return WgradGemm(WgradSpec(product, tile, False), pairs, ROWS, ROWS)


def check_wgrad(device: torch.device, target: Target, part: str) -> str | None:
    """Gradients of weights over pair lists. part: "wgrad fp16", ..."""
    name = part.removeprefix("wgrad ")
    dtype = PRODUCTS[name][0]
    generator = torch.Generator().manual_seed(2)
    rows = [torch.randperm(ROWS, generator=generator)[:WGRAD_PAIRS] for _ in range(2 * OFFSETS)]
    x, dy = (torch.randn(ROWS, CHANNELS, generator=generator).to(dtype) for _ in "ab")
    lists = (torch.cat(rows[::2]).int(), torch.cat(rows[1::2]).int())
    starts = torch.arange(OFFSETS + 1) * WGRAD_PAIRS
    dw = torch.full((OFFSETS, CHANNELS, CHANNELS), float("nan"), dtype=dtype, device=device)
    device_lists = (lists[0].to(device), lists[1].to(device), starts.to(device))
    wgrad_over(device_lists, target, name, dw)(x.to(device), dy.to(device), dw)
    want = torch.stack([x[i].double().t() @ dy[j].double() for i, j in zip(rows[::2], rows[1::2], strict=True)])
    limit = tolerances.of("self_check", name).largest
    return _compare(dw.cpu().double().flatten(0, 1), want.flatten(0, 1), limit)


def check_pools(device: torch.device, target: Target, part: str) -> str | None:
    """A pool and its gradient. part: a key of POOLS."""
    from ...kernels.ops.pooling import pool_backward, pool_forward

    mode, generator = POOLS[part], torch.Generator().manual_seed(3)
    nbr = torch.full((OFFSETS, ROWS), -1, dtype=torch.int32)
    back = nbr.clone()
    for v in range(OFFSETS):
        i, j = (torch.randperm(ROWS, generator=generator)[:60] for _ in "ab")
        nbr[v, j], back[v, i] = i.int(), j.int()
    x, dy = (torch.randn(ROWS, CHANNELS, generator=generator) for _ in "ab")
    device_x, device_nbr = (tensor.to(device) for tensor in (x, nbr))
    y, count = torch.full_like(device_x, float("nan")), device_nbr.new_empty(ROWS)
    dx = torch.full_like(device_x, float("nan"))
    pool_forward(device_x, device_nbr, y, count, mode, float("-inf"), target)
    pool_backward(device_x, y, dy.to(device), back.to(device), count, dx, mode, target)
    x, dy, inside = x.double(), dy.double(), nbr >= 0
    values = torch.where(inside.unsqueeze(2), x[nbr.clamp(min=0).long()], float("-inf"))
    total = torch.where(inside.unsqueeze(2), values, 0.0).sum(0)
    counts = inside.sum(0).unsqueeze(1)
    want = {"max": values.amax(0), "sum": total, "avg": total / counts}[mode]
    gradient = torch.zeros_like(x)
    for v in range(OFFSETS):
        out = torch.nonzero(inside[v]).flatten()
        rows, share = nbr[v, out].long(), dy[out] / (counts[out] if mode == "avg" else 1)
        gradient[rows] += share * (x[rows] == want[out]) if mode == "max" else share
    limit = tolerances.of("self_check", "fp32").largest
    return _compare(y.cpu().double(), want, limit) or _compare(dx.cpu().double(), gradient, limit)


def check_far(device: torch.device, target: Target, part: str) -> str | None:
    """Features beyond 2 GiB: a product that reads the rows behind it."""
    n_in = _FAR_BYTES // (2 * _FAR_CHANNELS)
    generator = torch.Generator().manual_seed(4)
    rows = torch.cat([torch.arange(n_in - ROWS // 2, n_in), torch.arange(ROWS - ROWS // 2)])
    values = torch.randn(ROWS, _FAR_CHANNELS, generator=generator).half()
    weight = torch.randn(OFFSETS, _FAR_CHANNELS, CHANNELS, generator=generator).half()
    pick = torch.randint(-ROWS, ROWS, (OFFSETS, ROWS), generator=generator).clamp(min=-1)
    nbr = torch.where(pick >= 0, rows[pick.clamp(min=0)], -1).int()
    x = torch.empty((n_in, _FAR_CHANNELS), dtype=torch.float16, device=device)
    x[rows.to(device)] = values.to(device)
    y = multiply(device, target, "ieee", nbr, x, weight).cpu().double()
    padded = torch.cat([values, values.new_zeros((1, _FAR_CHANNELS))]).double()
    want = padded[pick.t()].flatten(1) @ weight.double().flatten(0, 1)
    return _compare(y, want, tolerances.of("self_check", "fp16").largest)
