"""Maps of few rows on the CPU, whose offsets all go together."""

from __future__ import annotations

import pytest
import torch

from sparse_bridge.core import functional
from sparse_bridge.core.conv import host_products
from sparse_bridge.core.conv.batches import steps
from sparse_bridge.core.conv.batches.rule import Limits
from sparse_bridge.core.conv.chunks import chunks_of
from sparse_bridge.core.conv.dataflows import per_offset
from tests.checks import assert_close
from tests.clouds import features
from tests.conftest import Lane
from tests.core.layers import check, layer

CPU = Lane("cpu", "per_offset")
ALL = Limits(0.99, 1 << 14, 1 << 20, 1)


@pytest.fixture(autouse=True)
def batches(monkeypatch):
    """MKL's products, whatever this machine prefers, and the shapes of batched ones."""
    monkeypatch.setattr(host_products, "onednn", lambda: None)
    found, bmm = [], torch.bmm

    def counted(left, right, *, out=None):
        found.append((tuple(left.shape), tuple(right.shape)))
        return bmm(left, right, out=out)

    monkeypatch.setattr(torch, "bmm", counted)
    return found


def times(made, n, c_in=6, c_out=10):
    x, weight = features(made.kmap.n_in, c_in), features(made.volume * c_in, c_out, 2)
    weight = weight.view(-1, c_in, c_out)
    results = [functional.conv(x, weight, None, made.kmap) for _ in range(n)]
    return made.truth(x.double(), weight.double()), results


@pytest.mark.parametrize("kind, kernel, together", [
    ("strided", 3, True), ("inverse", 3, True), ("strided", 2, False), ("submanifold", 3, False),
])  # fmt: skip
def test_who_goes_together(kind, kernel, together, batches):
    """27 lists, none of them dense: eight are too few, and the dense one leaves a gap."""
    made = layer(kind, kernel=kernel, padding=kernel // 2, shape=(12, 12, 12), batch_size=1)
    want, results = times(made, 3)
    for got in results:
        assert_close(got, want)
        assert torch.equal(got, results[0]), "the same bits from the first time on"
    assert len(batches) == 3 * together
    assert {(left[0], *right) for left, right in batches} <= {(27, 27, 6, 10)}


@pytest.mark.parametrize("channels", [1, 3, 24])
@pytest.mark.parametrize("kind", ["submanifold", "strided", "inverse", "generative", "between"])
def test_layers(kind, channels, batches, monkeypatch):
    monkeypatch.setattr(per_offset, "host_limits_of", lambda c_in, c_out: ALL)
    made = layer(kind, batch_size=2)
    check(made, channels, 5, CPU)
    check(made, 2 * channels, 6, CPU, groups=2)
    assert bool(batches) or kind in ("submanifold", "between")  # whose lists have gaps


def test_lists_of_different_size_stay_alone(batches):
    """A sheet between cells of the next level: some offsets meet all of it, others little."""
    coords = torch.cartesian_prod(*map(torch.arange, (1, 1, 30, 30))).int()
    coords = torch.cat([coords, torch.tensor([[0, 2, 5, 5], [0, 2, 9, 20]], dtype=torch.int32)])
    made = layer("strided", shape=(4, 30, 30), coords=coords, batch_size=1)
    want, (result,) = times(made, 1)
    assert not batches
    assert_close(result, want)


def test_sums_of_a_part_are_in_the_same_order():
    made = layer("strided", shape=(12, 12, 12), batch_size=1)
    (block,) = chunks_of(made.kmap, 8).blocks
    (part,) = block.parts
    lists, order, starts = steps.whole_of(part, ALL)
    assert torch.equal(starts, part.sums[1])
    assert torch.equal(lists.x_rows[order.long()], part.x_rows[part.sums[0].long()])
    slots = order[part.sums[0].argsort()].long()
    assert torch.equal(
        slots // lists.height, torch.arange(27).repeat_interleave(torch.tensor(part.sizes))
    )
