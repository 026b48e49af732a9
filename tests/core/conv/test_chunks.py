"""Blocks of pairs on the CPU, and the integers they are cut by."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
import torch

from sparse_bridge.core import functional
from sparse_bridge.core.conv import chunks
from sparse_bridge.core.conv.dataflows import per_offset
from sparse_bridge.core.geometry.weights import layout_of
from sparse_bridge.core.maps import host_integers
from sparse_bridge.core.maps.kernel_map import KernelMap
from sparse_bridge.core.maps.pair_lists import PairLists
from sparse_bridge.core.maps.rulebook import Rulebook
from tests.checks import assert_close
from tests.clouds import features
from tests.core.layers import layer


def rows_per_block(monkeypatch, n):
    """Blocks of about `n` rows, whatever caches hold."""
    monkeypatch.setattr(chunks, "_FEW", n)
    monkeypatch.setattr(chunks, "_ROWS", 0)


def pairs_of(kmap):
    return {(v, int(i), int(j)) for v in range(kmap.n_offsets) for i, j in zip(*kmap.pair_list(v), strict=True)}


def check_slots(part):
    """Every pair has a slot of its own, and rows add theirs up in the order of the pairs, behind
    what they have."""
    heights = [size + 3 for size in part.sizes]
    x_rows, order, starts = part.slots(heights)
    assert len(x_rows) == sum(heights) and part.slots(heights)[0] is x_rows, "made once"
    begins = torch.tensor([0, *heights]).cumsum(0)
    slots = torch.cat([at + torch.arange(n) for at, n in zip(begins, part.sizes, strict=False)])
    assert torch.equal(x_rows[slots], part.x_rows)
    for row in range(part.n_rows):
        own = slots[part.rows == row + part.begin].tolist()
        before = [len(x_rows) + row] if part.behind else []
        assert order[starts[row] : starts[row + 1]].tolist() == before + own


def pairs_in(kmap, cut):
    """The pairs of chunks, every one of which must be there once and inside its block."""
    found = []
    for block in cut.blocks:
        for part in block.parts:
            assert sum(part.sizes) == len(part.rows)
            assert part.behind == (part is not block.parts[0])
            check_slots(part)
            for v, n_pairs, x_rows, y_rows in part.items:
                v = kmap.n_offsets - 1 - v if cut.reverse else v
                assert n_pairs == len(x_rows)
                assert bool(((y_rows >= block.begin) & (y_rows < block.end)).all())
                found += [(v, int(i), int(j)) for i, j in zip(x_rows, y_rows, strict=True)]
    if cut.dense >= 0:
        dense = kmap.n_offsets - 1 - cut.dense if cut.reverse else cut.dense
        found += [(dense, row, row) for row in range(kmap.n_out)]
    assert len(set(found)) == len(found)
    return set(found)


@pytest.mark.parametrize("n", [16, 100, 1 << 15])
@pytest.mark.parametrize("kind", ["submanifold", "strided", "inverse"])
def test_chunks_hold_every_pair_once(kind, n, monkeypatch):
    rows_per_block(monkeypatch, n)
    kmap = layer(kind, shape=(11, 9, 8), share=0.3, batch_size=1).kmap
    for direction in (kmap, kmap.transposed()):
        cut = chunks.chunks_of(direction, 16)
        assert len(cut.blocks) == max(1, round(direction.n_out / n))
        assert pairs_in(direction, cut) == pairs_of(direction)
        assert chunks.chunks_of(direction, 16) is cut


def products(kmap, x, weight, dy):
    w, dw = layout_of(weight, "vio"), torch.empty_like(weight)
    y = per_offset.gather_matmul(kmap, x, weight, w)
    dx = per_offset.gradients(kmap, x, weight, dy, dw, w)
    alone = torch.empty_like(weight)
    per_offset.weight_gradient(kmap, x, dy, alone, w)
    return y, dx, dw, alone


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", ["submanifold", "strided", "inverse"])
def test_blocks_do_not_change_the_products(kind, dtype, monkeypatch):
    made = layer(kind, shape=(11, 9, 8), share=0.3, batch_size=1)
    kmap = made.kmap
    x, dy = features(kmap.n_in, 12, dtype=dtype), features(kmap.n_out, 7, 1, dtype)
    weight = features(kmap.n_offsets * 12, 7, 2, dtype).view(-1, 12, 7)
    want = products(kmap, x, weight, dy)
    rows_per_block(monkeypatch, 30)
    got = products(kmap, x, weight, dy)
    assert len(chunks.chunks_of(kmap, 12).blocks) > 1
    for a, b in zip(got, want, strict=True):
        assert_close(a, b)
    assert all(map(torch.equal, got, products(kmap, x, weight, dy)))


def test_a_row_with_more_pairs_than_a_part_has_room_for(monkeypatch):
    monkeypatch.setattr(chunks, "_MOST", 50)
    monkeypatch.setattr(chunks, "_LONGEST", 20)
    generator = torch.Generator().manual_seed(0)
    x_rows = torch.randint(0, 9, (330,), generator=generator)
    y_rows = torch.where(torch.arange(330) % 3 > 0, 2, 5)  # two of six rows have all pairs
    lists = PairLists(x_rows, y_rows, [0, 300, 310, 330], False)
    kmap = KernelMap(Rulebook(9, 6, 3, torch.device("cpu"), lists=lists, regular=False))
    cut = chunks.chunks_of(kmap, 4)
    parts = [part for block in cut.blocks for part in block.parts]
    assert len(parts) > 5 and max(len(part.rows) for part in parts) <= 50
    x, dy = features(9, 4), features(6, 5, 1)
    weight = features(12, 5, 2).view(3, 4, 5)
    want, dx = torch.zeros(6, 5), torch.zeros(9, 4)
    dw = torch.zeros_like(weight)
    for v in range(3):
        i, j = kmap.pair_list(v)
        want.index_add_(0, j, x[i] @ weight[v])
        dx.index_add_(0, i, dy[j] @ weight[v].t())
        dw[v] = x[i].t() @ dy[j]
    for got, truth in zip(products(kmap, x, weight, dy), (want, dx, dw, dw), strict=True):
        assert_close(got, truth)


@pytest.mark.parametrize("kind", ["submanifold", "strided", "inverse"])
def test_rows_gathered_at_once_give_the_same_products(kind, monkeypatch):
    made = layer(kind, shape=(11, 9, 8), share=0.3, batch_size=1)
    x, dy = features(made.kmap.n_in, 12), features(made.kmap.n_out, 7, 1)
    weight = features(made.kmap.n_offsets * 12, 7, 2).view(-1, 12, 7)
    monkeypatch.setattr(per_offset, "TOGETHER", 0)
    want = products(made.kmap, x, weight, dy)
    monkeypatch.setattr(per_offset, "TOGETHER", 1 << 30)
    for got, truth in zip(products(made.kmap, x, weight, dy), want, strict=True):
        assert_close(got, truth)


@pytest.mark.parametrize("bound", [1, 200, 1 << 8, 1 << 15, 1 << 16, (1 << 16) + 1, 1 << 40])
@pytest.mark.parametrize("n", [0, 1, 2, 777])
def test_integers_as_torch_has_them(n, bound):
    keys = torch.randint(0, bound, (n,), generator=torch.Generator().manual_seed(n))
    keys[n // 2 :] = keys[: n - n // 2].clone()  # equal ones, too
    keys[:1] = bound - 1
    values, order = (part.numpy() for part in torch.sort(keys, stable=True))
    assert np.array_equal(host_integers.stable_order(keys.numpy(), bound), order)
    for got, want in zip(host_integers.sort_keys(keys.numpy(), bound), (values, order), strict=True):
        assert np.array_equal(got, want) and got.dtype == np.int64
    first = [keys.tolist().index(key) for key in keys.tolist()]
    for as_table in (False, True)[: 1 + (bound <= 1 << 16)]:
        assert host_integers.leaders(keys.numpy(), bound, as_table).tolist() == first
    wanted = torch.cat([keys, keys + 1, keys - 1]).numpy()
    for threads in (1, 1000):
        with mock.patch.object(host_integers, "_THREADS", threads):
            got = host_integers.search(values, wanted)
        assert np.array_equal(got, np.searchsorted(values, wanted))


def test_keys_that_leave_no_room_for_rows():
    keys = np.array([3, (1 << 62) - 1, 3, 0])
    values, order = host_integers.sort_keys(keys, 1 << 62)
    assert values.tolist() == [0, 3, 3, (1 << 62) - 1] and order.tolist() == [3, 0, 2, 1]
    assert host_integers.leaders(keys, 1 << 62, False).tolist() == [0, 1, 0, 3]


def test_equal_digits_on_every_run():
    made = layer("submanifold", shape=(16, 16, 16), share=0.3, batch_size=1)
    x = features(made.kmap.n_in, 16)
    weight = features(27 * 16, 16, 2).view(27, 16, 16)
    first = functional.conv(x, weight, None, made.kmap)
    again = layer("submanifold", shape=(16, 16, 16), share=0.3, batch_size=1)
    assert torch.equal(functional.conv(x, weight, None, again.kmap), first)


def test_whatever_the_default_device_is(monkeypatch):
    rows_per_block(monkeypatch, 30)
    x, weight = features(9 * 9 * 9, 4), features(27 * 4, 4, 2).view(27, 4, 4)
    made = layer("submanifold", shape=(9, 9, 9), share=0.3, batch_size=1)
    with torch.device("meta"):  # where no number can be read
        cut = chunks.chunks_of(made.kmap, 4)
        y = functional.conv(x[: made.kmap.n_in], weight, None, made.kmap)
    assert len(cut.blocks) > 1 and y.device.type == "cpu"
