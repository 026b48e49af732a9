"""Local and global pools against the reference, on every lane."""

import dataclasses

import pytest
import torch

from sparse_bridge.core import functional
from tests import oracle, reference
from tests.checks import assert_close
from tests.clouds import cloud, features
from tests.core.layers import layer, leaves
from tests.core.test_conv_edges import first_alone

pytestmark = [pytest.mark.interpreted, pytest.mark.emulated]

MODES = ("max", "sum", "avg")
INF = float("inf")


def check(made, lane, mode, channels=16, dtype=torch.float32, floor=-INF, x=None):
    """Forward and gradient of a pool against the reference, from the rounded inputs."""
    x = features(len(made.x_coords), channels, dtype=dtype) if x is None else x
    (rows,) = leaves([x], lane.device)
    y = functional.pool(rows, made.kmap, mode, floor)
    assert y.dtype == dtype
    want = reference.pool(x.detach(), made.pairs, len(made.y_coords), mode, floor)
    dy = features(len(made.y_coords), channels, seed=1, dtype=dtype)
    reached = torch.isfinite(want)
    assert torch.equal(torch.isfinite(y).cpu(), reached)
    assert_close(torch.where(reached, y.cpu(), 0), torch.where(reached, want, 0), dtype, "y")
    y.backward(dy.to(lane.device))
    gradient = reference.pool_gradient(x.detach(), dy, made.pairs, mode, floor)
    assert rows.grad.dtype == dtype
    assert_close(rows.grad, gradient, dtype, "dx")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "kind, dimension",
    [
        ("strided", 1),
        ("strided", 2),
        ("strided", 3),
        ("strided", 4),
        ("submanifold", 2),
        ("inverse", 2),
        ("generative", 2),
        ("between", 2),
    ],
)
def test_every_kind(map_lane, kind, dimension, mode):
    check(layer(kind, dimension, device=map_lane.device), map_lane, mode)


@pytest.mark.parametrize("mode", MODES)
def test_result_rows_that_repeat_and_lie_outside(map_lane, mode):
    """Nothing reaches a row outside the grid: it holds the floor, as other such rows do."""
    coords = torch.tensor([[0, 9], [0, 2], [0, 2], [0, -1]], dtype=torch.int32)
    made = layer(
        "inverse", kernel=1, stride=1, shape=(4,), coords=coords, batch_size=1, dense=False, device=map_lane.device
    )
    check(made, map_lane, mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("channels", [1, 5, 33, 130])
def test_channel_counts(map_lane, channels, mode):
    check(layer("strided", 2, kernel=2, padding=0, device=map_lane.device), map_lane, mode, channels)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_dtypes(map_lane, dtype, mode):
    check(layer("strided", 2, device=map_lane.device), map_lane, mode, dtype=dtype)


@pytest.mark.parametrize("n", [0, 1, 31, 32, 33])
@pytest.mark.parametrize("mode", MODES)
def test_row_counts_around_the_tile(map_lane, n, mode):
    coords = cloud((12, 13), 1, 1.0, seed=8)[:n].contiguous()
    made = layer("strided", shape=(12, 13), coords=coords, batch_size=1, device=map_lane.device)
    check(made, map_lane, mode)


def test_ties_and_the_floor(map_lane):
    """Every input equal to its window's maximum takes the gradient; below the floor none does."""
    made = layer("strided", 2, device=map_lane.device)
    x = torch.randint(-2, 3, (len(made.x_coords), 16), generator=torch.Generator().manual_seed(3))
    check(made, map_lane, "max", floor=0.0, x=x.float())
    check(made, map_lane, "max", floor=1.0, x=x.float())
    check(made, map_lane, "max", x=x.float())


def test_a_nan_stays_visible(map_lane):
    """As in dense max pooling: a window that holds a NaN gives NaN, others do not."""
    made = layer("strided", 2, kernel=2, padding=0, device=map_lane.device)
    x = features(len(made.x_coords), 16)
    x[4] = float("nan")
    y = functional.pool(x.to(map_lane.device), made.kmap, "max").cpu()
    hit = {j for _, i, j in oracle.pair_triples(made.pairs) if i == 4}
    assert hit and {j for j in range(len(y)) if y[j].isnan().any()} == hit


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["strided", "submanifold", "generative", "between"])
def test_repeated_and_dead_coordinates(map_lane, kind, mode):
    coords = cloud((9, 10), 2, 0.35, seed=2)
    coords = torch.cat([coords, coords[:6], coords[2:3]]).contiguous()
    coords[9, 0] = -1
    made = layer(kind, 2, coords=coords, dense=False, device=map_lane.device)
    check(made, map_lane, mode, channels=5)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["strided", "generative", "between"])
def test_the_first_of_repeated_coordinates(map_lane, kind, mode):
    coords = cloud((9, 10), 2, 0.35, seed=2)
    coords = torch.cat([coords, coords[:6], coords[2:3]]).contiguous()
    made = layer(kind, 2, coords=coords, dense=False, device=map_lane.device)
    check(first_alone(made), map_lane, mode, channels=5)


@pytest.mark.parametrize("mode", MODES)
def test_lists_that_name_a_row_twice(map_lane, mode):
    x_rows = torch.tensor([0, 1, 1, 2, 3], device=map_lane.device)
    y_rows = torch.tensor([2, 0, 2, 2, 1], device=map_lane.device)
    pairs = [(x_rows, y_rows), (y_rows[:2], x_rows[:2])]
    coords = torch.tensor([[0, i] for i in range(4)]).int()
    made = layer("submanifold", 1, coords=coords, device=map_lane.device)
    kmap = functional.kernel_map(pairs, 4, 4)
    host = [(x.cpu(), y.cpu()) for x, y in pairs]
    check(dataclasses.replace(made, kmap=kmap, pairs=host), map_lane, mode)


def global_case(n, batch_size, channels=5, dtype=torch.float32):
    """Rows in mixed order; items 1 and 3 hold none, a few rows belong to no item."""
    generator = torch.Generator().manual_seed(n)
    batch = torch.randint(0, max(1, batch_size), (n,), generator=generator).int()
    batch[(batch == 1) | (batch == 3)] = 0
    batch[::7] = batch_size
    batch[3::11] = -1
    return features(n, channels, dtype=dtype), batch


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("n", [0, 1, 31, 33, 200])
def test_global_pool(map_lane, n, mode):
    x, batch = global_case(n, 5)
    (rows,) = leaves([x], map_lane.device)
    y = functional.global_pool(rows, batch.to(map_lane.device), 5, mode)
    assert y.shape == (5, 5) and not y[1].any() and not y[3].any()
    (exact,) = leaves([x.double()], "cpu")
    want = reference.global_pool(exact, batch, 5, mode)
    assert_close(y, want)
    dy = features(5, 5, seed=2)
    y.backward(dy.to(map_lane.device))
    want.backward(dy.double())
    assert_close(rows.grad, torch.zeros_like(x) if exact.grad is None else exact.grad)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_global_pool_dtypes(map_lane, dtype, mode):
    x, batch = global_case(100, 5, 33, dtype)
    y = functional.global_pool(x.to(map_lane.device), batch.to(map_lane.device).long(), 5, mode)
    assert y.dtype == dtype
    assert_close(y, reference.global_pool(x, batch, 5, mode), dtype)


@pytest.mark.parametrize("mode", MODES)
def test_global_pool_in_shares(map_lane, mode):
    """Several programs reduce a long item; where values tie the first row takes the gradient."""
    if map_lane.slow:
        n, batch_size = 1100, 1
    else:
        n, batch_size = 5000, 2
    batch = torch.arange(n) % batch_size
    x = torch.randint(-3, 4, (n, 3), generator=torch.Generator().manual_seed(1)).float()
    (rows,) = leaves([x], map_lane.device)
    y = functional.global_pool(rows, batch.to(map_lane.device), batch_size, mode)
    assert_close(y, reference.global_pool(x, batch, batch_size, mode))
    if mode == "max":
        y.sum().backward()
        for item in range(batch_size):
            first = [x[item::batch_size, c].argmax() * batch_size + item for c in range(3)]
            assert all(rows.grad[row, c] == 1 for c, row in enumerate(first))
        assert rows.grad.sum() == 3 * batch_size


def test_global_pool_of_infinities(map_lane):
    x = torch.tensor([[-INF, INF, -INF], [-INF, 1.0, float("nan")]], device=map_lane.device)
    batch = torch.zeros(2, dtype=torch.int32, device=map_lane.device)
    y = functional.global_pool(x, batch, 2, "max").cpu()
    assert y[0, :2].tolist() == [-INF, INF] and y[0, 2].isnan() and not y[1].any()


def test_global_pool_of_no_items(map_lane):
    x = torch.ones(3, 4, device=map_lane.device)
    batch = torch.zeros(3, dtype=torch.int32, device=map_lane.device)
    for mode in MODES:
        assert functional.global_pool(x, batch, 0, mode).shape == (0, 4)


@pytest.mark.parametrize("mode", MODES)
def test_repeats_are_bitwise_equal(map_lane, mode):
    made = layer("strided", 2, device=map_lane.device)
    x = features(len(made.x_coords), 33).to(map_lane.device)
    batch = made.x_coords[:, 0].to(map_lane.device)
    first = functional.pool(x, made.kmap, mode), functional.global_pool(x, batch, 2, mode)
    again = functional.pool(x, made.kmap, mode), functional.global_pool(x, batch, 2, mode)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
