"""Rows by segment: what is taken, who gets the gradient, and in which order sums run."""

from __future__ import annotations

import pytest
import torch

from sparse_bridge.core.maps.segments import SegmentOperator, Segments, multiply, segment_max
from tests.clouds import features

INF, NAN = float("inf"), float("nan")
pytestmark = [pytest.mark.interpreted, pytest.mark.emulated]


def test_entries_are_sorted_and_strangers_come_last():
    segments = Segments(torch.tensor([2, -1, 0, 2, 7, 0], dtype=torch.int32), 3)
    assert segments.order.tolist() == [2, 5, 0, 3, 1, 4]
    assert segments.starts.tolist() == [0, 2, 2, 4]
    assert segments.inside[:, 0].tolist() == [2, 3, 0, 2, 3, 0]


@pytest.mark.parametrize("n", [40, 1200], ids=["short", "long"])
def test_a_nan_is_larger_than_any_number(map_lane, n):
    """Also than an infinity before it, in a reduction by one program or by several."""
    x = torch.zeros(n, 3)
    x[2, 0], x[n - 3, 0] = INF, NAN
    x[:, 1] = -INF
    x[7, 2] = x[9, 2] = 5
    rows = x.to(map_lane.device).requires_grad_()
    y = segment_max(rows, Segments(torch.zeros(n, dtype=torch.int64, device=map_lane.device), 2))
    assert y[0, 0].isnan() and y[0, 1:].tolist() == [-INF, 5] and not y[1].any()
    y.nansum().backward()
    assert rows.grad.nonzero().tolist() == [[0, 1], [7, 2]]


def test_ties_take_the_whole_gradient_where_they_are_told(map_lane):
    x = torch.tensor([[1.0], [3.0], [3.0], [2.0], [9.0]], device=map_lane.device)
    segments = Segments(torch.tensor([0, 0, 0, 1, 5], device=map_lane.device), 3)
    for ties, want in ((False, [0, 1, 0, 1, 0]), (True, [0, 1, 1, 1, 0])):
        rows = x.clone().requires_grad_()
        y = segment_max(rows, segments, ties)
        assert y[:, 0].tolist() == [3, 2, 0]
        y.sum().backward()
        assert rows.grad[:, 0].tolist() == want


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("n, count", [(90, 7), (1500, 2)], ids=["short", "long"])
def test_sums_repeat_bit_by_bit(map_lane, n, count, dtype):
    if map_lane.slow and n > 1000:
        pytest.skip("the larger sizes run on other lanes")
    index = torch.randint(-1, count + 1, (n,), generator=torch.Generator().manual_seed(3))
    x = features(n, 5, dtype=dtype).to(map_lane.device)
    first = multiply(x, SegmentOperator(Segments(index.to(map_lane.device), count)))
    again = multiply(x, SegmentOperator(Segments(index.to(map_lane.device).int(), count)))
    assert first.dtype == dtype and torch.equal(first, again)
    want = torch.zeros(count + 2, 5, dtype=torch.float64)
    want.index_add_(0, index + 1, x.double().cpu())
    torch.testing.assert_close(
        first.double().cpu(), want[1:-1], rtol=2e-3 if dtype == torch.float16 else 1e-5, atol=1e-4
    )


def test_second_derivatives_of_linear_maps():
    segments = Segments(torch.tensor([[0, 1], [1, 4], [-1, 1]]), 3)
    weight = features(3, 2, dtype=torch.float64)
    divisor = torch.tensor([2, 3, 0])
    x = features(3, 2, 5, dtype=torch.float64).requires_grad_()
    for gathers in (False, True):
        operator = SegmentOperator(segments, weight, divisor, gathers)
        assert torch.autograd.gradcheck(lambda x: multiply(x, operator), (x,))  # noqa: B023
        assert torch.autograd.gradgradcheck(lambda x: multiply(x, operator) ** 2, (x,))  # noqa: B023


def test_a_column_of_coordinates_may_have_gaps(map_lane):
    coords = torch.tensor([[1, 9], [0, 9], [1, 9]], dtype=torch.int32, device=map_lane.device)
    x = torch.tensor([[1.0], [2.0]], device=map_lane.device)
    copies = SegmentOperator(Segments(coords[:, 0], 2), gathers=True)
    assert multiply(x, copies)[:, 0].tolist() == [2, 1, 2]
    assert multiply(torch.ones(3, 1, device=map_lane.device), copies.transposed())[:, 0].tolist() == [1, 2]
