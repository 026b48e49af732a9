"""Kernels that do without torch what torch does elsewhere: sorts, copies, sums and dense grids."""

from __future__ import annotations

import math

import pytest
import torch

from sparse_bridge.errors import KernelError
from sparse_bridge.kernels.maps import radix_order as radix
from sparse_bridge.kernels.maps.radix_order import radix_order
from sparse_bridge.kernels.maps.row_bounds import row_bounds
from sparse_bridge.kernels.ops import item_pool as item_pools
from sparse_bridge.kernels.ops.dense_rows import dense_rows
from sparse_bridge.kernels.ops.elementwise import elementwise, merged
from sparse_bridge.kernels.ops.row_norm import row_norm
from sparse_bridge.kernels.runtime import target as targets

pytestmark = [pytest.mark.interpreted, pytest.mark.emulated]
HALVES = (torch.float32, torch.float16)


@pytest.fixture
def target(kernel_lane):
    return targets.of(torch.empty(0, device=kernel_lane.device).device)


@pytest.mark.parametrize("rows", [1, 511, 512, 513, 1300])
@pytest.mark.parametrize("scanned", [2, None])  # blocks at once
@pytest.mark.parametrize(("dtype", "bits"), [(torch.int32, 31), (torch.int64, 37), (torch.uint8, 8), (torch.int16, 15)])
def test_an_order_is_torchs(kernel_lane, target, rules, rows, scanned, dtype, bits):
    if scanned is not None:
        rules.set(radix, _SCAN=scanned)
    generator = torch.Generator().manual_seed(rows)
    most = 2**bits if rows % 2 else 40  # keys that differ, and many that are equal
    keys = torch.randint(0, most, (rows,), generator=generator).to(dtype).to(kernel_lane.device)
    keys[rows // 2] = 2**bits - 1
    for kind in (torch.int32, torch.int64):
        order = torch.full((rows,), -7, dtype=kind, device=keys.device)
        radix_order(keys, order, bits, target)
        assert torch.equal(order.long(), torch.sort(keys, stable=True).indices)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("rows", [1, 63, 300])
def test_sums_products_and_copies(kernel_lane, target, rows, dtype):
    generator, device = torch.Generator().manual_seed(rows), kernel_lane.device
    a = torch.randn(rows, 17, generator=generator).to(dtype).to(device)
    wide = torch.randn(rows, 40, generator=generator).to(dtype).to(device)
    b, vector = wide[:, 5:22], wide[0, :17]
    for name, operands, wanted in [
        ("copy", [b], b),
        ("add", [a, b], a + b),
        ("sub", [a, vector], a - vector),
        ("mul", [a, torch.tensor(1.7, device=device)], a * 1.7),
        ("relu", [a], a.relu()),
        ("div", [a, vector], a / vector),
        ("maximum", [a, b], torch.maximum(a, b)),
        ("minimum", [a, vector], torch.minimum(a, vector)),
        ("leaky", [a, torch.tensor(0.25, device=device)], torch.nn.functional.leaky_relu(a, 0.25)),
    ]:
        y = torch.full((rows, 17), float("nan"), dtype=dtype, device=device)
        assert torch.equal(elementwise(name, operands, y, target), wanted), name


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", ["sigmoid", "silu", "gelu", "tanh", "exp", "elu"])
def test_activations(kernel_lane, target, dtype, name):
    x = torch.linspace(-9, 9, 501).to(dtype).to(kernel_lane.device)
    y = elementwise(name, [x], torch.empty_like(x), target)
    functional = torch.nn.functional
    wanted = (getattr(torch, name, None) or getattr(functional, name))(x.double())
    assert ((y.double() - wanted) / wanted.abs().clamp(min=1)).abs().max() < (2e-6 if dtype == torch.float32 else 4e-3)


@pytest.mark.parametrize("dtype", HALVES)
def test_a_norm_by_known_statistics(kernel_lane, target, dtype):
    """Of channels that lie side by side and of those that do not."""
    generator = torch.Generator().manual_seed(1)
    mean, scale, shift = (torch.randn(7, generator=generator).to(kernel_lane.device) for _ in range(3))
    x = torch.randn(3, 7, 5, 6, generator=generator).to(dtype).to(kernel_lane.device)
    vectors = [one.view(1, -1, 1, 1) for one in (mean, scale, shift)]
    wanted = (x.double() - vectors[0]) * vectors[1] + vectors[2]
    for own in (x, x.contiguous(memory_format=torch.channels_last)):
        y = torch.full_like(own, float("nan"))
        elementwise("norm", [own, *vectors], y, target)
        assert y.stride() == own.stride()
        assert (y.double() - wanted).abs().max() < (1e-5 if dtype == torch.float32 else 2e-2)
        # With a ReLU, the bits of one after the other: of -0, too, as values too small for the dtype round to.
        tiny = [one * 1e-12 for one in (own.float(), vectors[0], vectors[2])]
        for a, b, d in ((own, vectors[0], vectors[2]), (tiny[0].to(dtype), *tiny[1:])):
            operands = [a, b, vectors[1], d]
            one_by_one = elementwise("relu", [elementwise("norm", operands, torch.empty_like(y), target)], y, target)
            at_once = elementwise("norm_relu", operands, torch.full_like(own, float("nan")), target)
            bits = torch.int32 if dtype == torch.float32 else torch.int16
            assert torch.equal(at_once.view(bits), one_by_one.view(bits))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize(("rows", "channels"), [(1, 1), (3, 17), (130, 64), (129, 65), (5, 1030)])
def test_layer_norms(kernel_lane, target, dtype, affine, rows, channels):
    generator = torch.Generator().manual_seed(rows)
    x = (torch.randn(rows, channels, generator=generator) * 3 + 5).to(dtype).to(kernel_lane.device)
    vectors = tuple(torch.randn(channels, generator=generator).to(x.device) for _ in "wb") if affine else None
    y = row_norm(x, vectors, 1e-5, torch.full_like(x, float("nan")), target)
    own = [None, None] if vectors is None else [vector.double() for vector in vectors]
    wanted = torch.nn.functional.layer_norm(x.double(), [channels], *own, 1e-5)
    assert (y.double() - wanted).abs().max() < (2e-5 if dtype == torch.float32 else 1e-2)


def test_layer_norms_of_too_many_channels(kernel_lane, target):
    x = torch.zeros(1, 4097, device=kernel_lane.device)
    with pytest.raises(KernelError, match="at most 4096"):
        row_norm(x, None, 1e-5, torch.empty_like(x), target)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("mode", item_pools.MODES)
@pytest.mark.parametrize(("rows", "channels"), [(0, 3), (1, 1), (31, 17), (32, 64), (33, 65), (5000, 5)])
def test_pools_of_items(kernel_lane, target, dtype, mode, rows, channels):
    """Item 2 has no rows; rows of no item, and those behind the last one, take no part."""
    generator = torch.Generator().manual_seed(rows)
    coords = torch.randint(0, 2, (rows + 50, 4), generator=generator, dtype=torch.int32)
    coords[::7, 0], coords[3::11, 0] = 3, -1
    x = torch.randn(rows + 50, channels, generator=generator).to(dtype)
    wanted = torch.zeros(4, channels, dtype=torch.float64)
    for item in range(4):
        own = x[:rows][coords[:rows, 0] == item].double()
        if len(own):
            wanted[item] = own.amax(0) if mode == "max" else own.sum(0) / (len(own) if mode == "avg" else 1)
    own, places = x.to(kernel_lane.device), coords.to(kernel_lane.device)[:, 0]
    last = torch.tensor([rows - 1], dtype=torch.int32, device=own.device)
    y = item_pools.item_pool(own, places, last, 4, mode, target).cpu().double()
    scale = wanted.abs().clamp(min=1)
    assert ((y - wanted) / scale).abs().max() < (1e-5 if dtype == torch.float32 else 2e-3)
    if rows > 1:
        own[rows // 2], places[rows // 2] = float("nan"), 1
        assert item_pools.item_pool(own, places, last, 4, mode, target)[1].isnan().all()


@pytest.mark.parametrize("rows", [0, 1, 2047, 2048, 2049, 5000])
def test_where_rows_in_use_end(kernel_lane, target, rows):
    """Those that are too far out do not count, nor what lies behind the last one."""
    generator = torch.Generator().manual_seed(rows)
    coords = torch.randint(-50, 50, (rows + 40, 4), generator=generator, dtype=torch.int32)
    coords[:, 0] %= 3
    coords[rows:] = 1000
    if rows > 5:
        coords[1, 2], coords[2, 1], coords[3, 0], coords[4, 0] = 64, -65, 4, -1
    own = coords.to(kernel_lane.device)
    last = torch.tensor([rows - 1], dtype=torch.int32, device=own.device)
    for least in (None, 0):
        low, high = row_bounds(own, last, target, items=4, far=64, least=least).cpu()
        near, first = coords[:rows], -64 if least is None else least
        near = near[((near[:, 1:] >= first) & (near[:, 1:] < 64)).all(1) & (near[:, 0] >= 0) & (near[:, 0] < 4)]
        if len(near):
            assert torch.equal(torch.stack([low, high]), torch.stack([near.amin(0), near.amax(0)]))
        else:
            assert (high < low).all()
    if rows:
        low, high = row_bounds(own, last, target).cpu()
        assert torch.equal(low[1:], coords[:rows, 1:].amin(0)) and torch.equal(high[1:], coords[:rows, 1:].amax(0))


def test_only_the_part_is_written(kernel_lane, target):
    x = torch.arange(70.0, device=kernel_lane.device).view(10, 7)
    y = torch.full((10, 20), -1.0, device=kernel_lane.device)
    elementwise("copy", [x], y[:, 3:10], target)
    assert torch.equal(y[:, 3:10], x) and (y[:, :3] == -1).all() and (y[:, 10:] == -1).all()


def test_casts_and_permutations(kernel_lane, target):
    x = torch.randn(2, 3, 4, 5, device=kernel_lane.device)
    y = torch.empty(2, 4, 5, 3, dtype=torch.float16, device=x.device)
    assert torch.equal(elementwise("copy", [x.permute(0, 2, 3, 1)], y, target), x.permute(0, 2, 3, 1).half())
    whole = (x * 100).int()
    y = torch.empty(x.shape, dtype=torch.int64, device=x.device)
    assert torch.equal(elementwise("copy", [whole], y, target), whole.long())
    assert elementwise("copy", [x[:0]], x[:0].clone(), target).shape == (0, 3, 4, 5)


def test_not_a_number_stays(kernel_lane, target):
    x = torch.tensor([float("nan"), -1.0, 2.0, float("inf"), -float("inf")], device=kernel_lane.device)
    y = elementwise("relu", [x], torch.empty_like(x), target)
    assert y[0].isnan() and y[1:].tolist() == [0, 2, math.inf, 0]


def test_axes_merge_or_are_too_many(kernel_lane, target):
    x = torch.zeros(2, 3, 4, 5, 6, 7, device=kernel_lane.device)
    assert merged(x.shape, [x.stride()]) == ((x.numel(),), [(1,)])
    assert elementwise("relu", [x], torch.empty_like(x), target).sum() == 0
    with pytest.raises(KernelError, match="at most 4 axes"):
        elementwise(
            "relu", [x.permute(5, 3, 1, 4, 2, 0)], torch.empty_like(x.permute(5, 3, 1, 4, 2, 0).contiguous()), target
        )


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(
    ("sizes", "channels"), [((2, 3, 4, 5), 20), ((3, 9), 1), ((1, 7, 6), 70), ((2, 2, 3, 2, 4), 3)]
)
def test_rows_in_use_are_written(kernel_lane, target, dtype, first, sizes, channels):
    generator, device = torch.Generator().manual_seed(1), kernel_lane.device
    cells = torch.randperm(math.prod(sizes), generator=generator)
    coords = torch.stack(torch.unravel_index(cells, sizes), 1).int().to(device)
    x = torch.randn(len(cells), channels, generator=generator).to(dtype).to(device)
    live, shape = 2 * len(cells) // 3, ((sizes[0], channels, *sizes[1:]) if first else (*sizes, channels))
    coords[1, -1], coords[2, 0] = sizes[-1], -1  # outside, as rows of the user may be
    y = torch.zeros(shape, dtype=dtype, device=device)
    counts = torch.tensor([live - 1], dtype=torch.int32, device=device)
    dense_rows(x, coords, torch.tensor(sizes, dtype=torch.int32, device=device), counts, y, first, target)
    wanted = torch.zeros((*sizes, channels), dtype=dtype, device=device)
    rows = [row for row in range(live) if row not in (1, 2)]
    wanted[tuple(coords[rows].long().t())] = x[rows]
    assert torch.equal(y, wanted.permute(0, -1, *range(1, len(sizes))) if first else wanted)
