"""The pooling kernels against the reference, into memory full of NaN."""

from __future__ import annotations

import pytest
import torch

from sparse_bridge.kernels.ops.pooling import first_largest, pool_backward, pool_forward
from tests import reference
from tests.checks import assert_close
from tests.clouds import features
from tests.kernels.calls import target_of

pytestmark = [pytest.mark.interpreted, pytest.mark.emulated]

N_IN, N_OUT, V = 40, 33, 9


def tables(seed=0):
    """(nbr [V, N_OUT], its transpose [V, N_IN], pairs): an offset meets every row at most once."""
    generator = torch.Generator().manual_seed(seed)
    nbr = torch.full((V, N_OUT), -1, dtype=torch.int32)
    back = torch.full((V, N_IN), -1, dtype=torch.int32)
    pairs = []
    for v in range(V):
        x_rows = torch.randperm(N_IN, generator=generator)[:12]
        y_rows = torch.randperm(N_OUT, generator=generator)[:12]
        nbr[v, y_rows] = x_rows.int()
        back[v, x_rows] = y_rows.int()
        pairs.append((x_rows, y_rows))
    return nbr, back, pairs


def spoiled(*shape, lane, dtype):
    fill = float("nan") if dtype.is_floating_point else 113
    return torch.full(shape, fill, dtype=dtype, device=lane.device)


@pytest.mark.parametrize(
    "channels, dtype",
    [(1, torch.float32), (16, torch.float32), (130, torch.float32), (16, torch.float16), (16, torch.bfloat16)],
)
@pytest.mark.parametrize("mode", ["max", "sum", "avg"])
def test_pool(kernel_lane, mode, channels, dtype):
    target, device = target_of(kernel_lane), kernel_lane.device
    nbr, back, pairs = tables()
    x, dy = features(N_IN, channels, dtype=dtype), features(N_OUT, channels, 1, dtype)
    floor = -0.5 if mode == "max" else 0.0
    y = spoiled(N_OUT, channels, lane=kernel_lane, dtype=dtype)
    count = spoiled(N_OUT, lane=kernel_lane, dtype=torch.int32)
    pool_forward(x.to(device), nbr.to(device), y, count, mode, floor, target)
    assert_close(y, reference.pool(x, pairs, N_OUT, mode, floor), dtype)
    if mode == "avg":
        assert count.tolist() == (nbr >= 0).sum(0).tolist()
    dx = spoiled(N_IN, channels, lane=kernel_lane, dtype=dtype)
    pool_backward(x.to(device), y, dy.to(device), back.to(device), count, dx, mode, target)
    assert_close(dx, reference.pool_gradient(x, dy, pairs, mode, floor), dtype)


@pytest.mark.parametrize("shares", [1, 3])
def test_the_first_largest_row_of_segments(kernel_lane, shares):
    """Segments of 0, 1 and many rows, cut into more shares than some have rows."""
    device, lengths = kernel_lane.device, [0, 1, 2, 70, 0, 33]
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    order = torch.randperm(106, generator=torch.Generator().manual_seed(1))
    order = torch.cat([part.sort().values for part in order.split(lengths)])
    x = torch.randint(-9, 9, (106, 5), generator=torch.Generator().manual_seed(2)).float()
    got = first_largest(x.to(device), order.to(device), starts.to(device), shares, target_of(kernel_lane)).cpu()
    assert got.shape == (shares, 6, 5)
    for s in range(6):
        rows = order[starts[s] : starts[s + 1]]
        length = -(-len(rows) // shares)
        for share in range(shares):
            part = rows[share * length : (share + 1) * length]
            want = [-1] * 5
            if len(part):
                top = x[part].amax(0)
                want = [int(part[x[part, c] == top[c]].min()) for c in range(5)]
            assert got[share, s].tolist() == want
