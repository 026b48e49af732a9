"""Sums of entries by segment: right, and in an order that a segment's own length decides."""

from __future__ import annotations

import pytest
import torch

from sparse_bridge.kernels.ops.segment_sum import CHUNK, segment_sum
from tests.checks import assert_close
from tests.kernels.calls import target_of

pytestmark = [pytest.mark.interpreted, pytest.mark.emulated]

LENGTHS = (0, 1, 2, 3, 7, 8, 9, 33, CHUNK - 1, CHUNK, CHUNK + 1, 0, 9 * CHUNK + 5)
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


class Problem:
    """Segments of such lengths, of entries in any order."""

    def __init__(self, lane, lengths, channels=19, dtype=torch.float32, per_row=1, weighted=False):
        self.lane, self.dtype, self.per_row = lane, dtype, per_row
        self.starts = torch.tensor([0, *lengths]).cumsum(0)
        n_entries = int(self.starts[-1])
        generator = torch.Generator().manual_seed(0)
        self.order = torch.randperm(n_entries, generator=generator)
        n_rows = -(-n_entries // per_row)
        self.x = torch.randn(n_rows, channels, generator=generator).to(dtype)
        self.weight = torch.randn(n_rows * per_row, generator=generator) if weighted else None
        self.count = torch.tensor(lengths)

    def entries(self, s):
        return self.order[self.starts[s] : self.starts[s + 1]]

    def truth(self, mean):
        rows = []
        for s, length in enumerate(self.count.tolist()):
            entries = self.entries(s)
            values = self.x.double()[entries // self.per_row]
            if self.weight is not None:
                values = values * self.weight.double()[entries].unsqueeze(1)
            rows.append(values.sum(0) / (max(1, length) if mean else 1))
        return torch.stack(rows)

    def run(self, order, starts, count, mean=False):
        device = self.lane.device
        weight = None if self.weight is None else self.weight.to(device)
        shape = len(starts) - 1, self.x.shape[1]
        y = torch.full(shape, float("nan"), dtype=self.dtype, device=device)
        segment_sum(
            self.x.to(device),
            order.to(device),
            starts.to(device),
            weight,
            count.to(device) if mean else None,
            y,
            self.per_row,
            target_of(self.lane),
        )
        return y


@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("weighted, per_row", [(False, 1), (True, 1), (True, 4)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums(kernel_lane, dtype, weighted, per_row, mean):
    one = Problem(kernel_lane, LENGTHS, 19, dtype, per_row, weighted)
    assert_close(one.run(one.order, one.starts, one.count, mean), one.truth(mean), dtype)


@pytest.mark.parametrize("channels", [5, 130])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_segment_does_not_see_the_others(kernel_lane, weighted, channels):
    """Alone, among a dozen, and among so many that none is shared by programs."""
    one = Problem(kernel_lane, LENGTHS, channels, weighted=weighted)
    many = one.run(one.order, one.starts, one.count)
    more = torch.cat([one.starts, one.starts[-1].expand(80)])
    assert torch.equal(one.run(one.order, more, one.count)[: len(LENGTHS)], many)
    for s, length in enumerate(LENGTHS):
        alone = one.run(one.entries(s), torch.tensor([0, length]), one.count[s : s + 1])
        assert torch.equal(alone[0], many[s]), length
