"""Weighted sums of rows, interpolation, union, look-up: against dictionaries and dense matrices."""

from __future__ import annotations

import itertools

import pytest
import torch

from sparse_bridge.core.geometry.boxes import Box
from sparse_bridge.core.maps.coordinate_map import CoordinateMap
from sparse_bridge.core.maps.lookup import distinct_rows, find_rows, merge
from sparse_bridge.core.ops.interpolate import interpolation
from sparse_bridge.core.ops.row_matrix import RowMatrix
from sparse_bridge.core.ops.spread import spread
from tests import checks
from tests.clouds import cloud, features

pytestmark = [pytest.mark.interpreted, pytest.mark.emulated]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("weighted", [True, False])
def test_product_and_gradient(map_lane, dtype, weighted):
    generator = torch.Generator().manual_seed(0)
    out_rows = torch.randint(0, 9, (70,), generator=generator).to(map_lane.device)
    in_rows = torch.randint(0, 11, (70,), generator=generator).to(map_lane.device)
    w = features(70, 1, 3, torch.float64, map_lane.device)[:, 0] if weighted else None
    matrix = RowMatrix(out_rows, in_rows, w, 10, 12)
    dense = torch.zeros(10, 12, dtype=torch.float64)
    values = torch.ones(70, dtype=torch.float64) if w is None else w.cpu()
    dense.index_put_((out_rows.cpu(), in_rows.cpu()), values, accumulate=True)
    x = features(12, 5, 1, dtype, map_lane.device).requires_grad_()
    y = matrix.multiply(x)
    dy = features(10, 5, 2, dtype, map_lane.device)
    y.backward(dy)
    checks.assert_close(y, dense @ x.detach().double().cpu(), dtype)
    checks.assert_close(x.grad, dense.t() @ dy.double().cpu(), dtype)
    turned = matrix.transposed().multiply(dy)
    checks.assert_close(turned, dense.t() @ dy.double().cpu(), dtype)
    assert matrix.counts().tolist() == torch.bincount(out_rows.cpu(), minlength=10).tolist()
    assert torch.equal(matrix.multiply(x.detach()), y)


def test_plain_gathers_keep_their_gradient(map_lane):
    rows = torch.tensor([3, 0, 3, 1], device=map_lane.device)
    matrix = RowMatrix(torch.arange(4, device=map_lane.device), rows, None, 4, 5)
    x = features(5, 3, 1, device=map_lane.device).requires_grad_()
    y = matrix.multiply(x)
    assert torch.equal(y, x[rows])
    y.sum().backward()
    assert x.grad[:, 0].tolist() == [1, 1, 0, 2, 0]


def test_column_blocks_do_not_change_the_result(map_lane, monkeypatch):
    generator = torch.Generator().manual_seed(2)
    rows = torch.randint(0, 8, (200,), generator=generator).to(map_lane.device)
    cols = torch.randint(0, 30, (200,), generator=generator).to(map_lane.device)
    x = features(30, 70, 4, device=map_lane.device)
    want = RowMatrix(rows, cols, None, 8, 30).multiply(x)
    monkeypatch.setattr("sparse_bridge.core.ops.row_matrix._GATHER_BYTES", 1)
    assert torch.equal(RowMatrix(rows, cols, None, 8, 30).multiply(x), want)


def test_nothing_to_add_up(map_lane):
    none = torch.empty(0, dtype=torch.int64, device=map_lane.device)
    x = torch.zeros(0, 3, device=map_lane.device, requires_grad=True)
    y = RowMatrix(none, none, None, 4, 0).multiply(x)
    assert y.tolist() == [[0.0] * 3] * 4
    y.sum().backward()
    assert x.grad.shape == (0, 3)


def at(sites, x, batch, position, spacing):
    """Multilinear interpolation by hand."""
    value = torch.zeros(x.shape[1], dtype=torch.float64)
    low = [int((p // s) * s) for p, s in zip(position, spacing, strict=True)]
    for corner in itertools.product((0, 1), repeat=len(spacing)):
        site = tuple(c + up * s for c, up, s in zip(low, corner, spacing, strict=True))
        weight = 1.0
        for p, c, s in zip(position, site, spacing, strict=True):
            weight *= 1 - abs(p - c) / s
        row = sites.get((batch, *site))
        if row is not None:
            value += weight * x[row].double()
    return value


@pytest.mark.parametrize(("shape", "spacing"), [((6, 7), (1, 1)), ((4, 5, 4), (2, 1, 3)), ((9,), (4,))])
def test_interpolation(map_lane, shape, spacing):
    coords = cloud(shape, 2, 0.6, seed=3)
    coords[:, 1:] -= 2
    scaled = coords.clone()
    scaled[:, 1:] *= torch.tensor(spacing, dtype=torch.int32)
    lo, hi = (b.tolist() for b in scaled.aminmax(dim=0))
    box = Box.spanning(tuple(lo), tuple(h - c + 1 for c, h in zip(lo, hi, strict=True)))
    cmap = CoordinateMap(scaled.to(map_lane.device), box)
    generator = torch.Generator().manual_seed(1)
    span = torch.tensor([s * n for s, n in zip(spacing, shape, strict=True)], dtype=torch.float64)
    position = torch.rand(40, len(shape), generator=generator, dtype=torch.float64) * (span + 4) - 6
    position[:3] = scaled[:3, 1:]
    batch = torch.randint(0, 2, (40,), generator=generator)
    batch[:3] = scaled[:3, 0]
    matrix = interpolation(cmap, batch.to(map_lane.device), position.to(map_lane.device), spacing)
    x = features(len(scaled), 4, 6, device=map_lane.device)
    sites = {tuple(site): row for row, site in enumerate(scaled.tolist())}
    want = [at(sites, x.cpu(), int(b), p, spacing) for b, p in zip(batch, position.tolist(), strict=True)]
    got = matrix.multiply(x)
    checks.assert_close(got, torch.stack(want))
    assert torch.equal(got[:3], x[:3])


def test_find_rows(map_lane):
    coords = cloud((6, 5, 4), 3, 0.4, seed=7, empty_items=(1,))
    cmap = CoordinateMap(coords.to(map_lane.device), Box.grid(3, (6, 5, 4)))
    generator = torch.Generator().manual_seed(3)
    query = torch.randint(-2, 8, (80, 4), generator=generator)
    query[:20] = coords[:20]
    query[20] = torch.tensor([0, 1 << 33, 1, 1])
    sites = {tuple(site): row for row, site in enumerate(coords.tolist())}
    want = [sites.get(tuple(q), -1) for q in query.tolist()]
    assert find_rows(cmap, query.to(map_lane.device)).tolist() == want
    small = query[:20].int().to(map_lane.device)
    assert find_rows(cmap, small).tolist() == want[:20]
    assert find_rows(cmap, small[:0]).tolist() == []


@pytest.mark.parametrize("spread_out", [1, 1 << 29])
def test_distinct_rows(spread_out):
    generator = torch.Generator().manual_seed(4)
    table = torch.randint(-2, 3, (90, 3), generator=generator).int() * spread_out
    first, inverse = distinct_rows(table)
    seen = {}
    for row, site in enumerate(table.tolist()):
        seen.setdefault(tuple(site), row)
    assert first.tolist() == list(seen.values())
    assert torch.equal(table[first][inverse], table)
    assert [len(part) for part in distinct_rows(table[:0])] == [0, 0]


def test_merge_keeps_the_first_map_and_adds_the_rest(map_lane):
    clouds = [cloud((5, 4), 2, 0.4, seed=s) for s in range(3)] + [cloud((5, 4), 2, 0.0)]
    maps = [CoordinateMap(c.to(map_lane.device), Box.grid(2, (5, 4))) for c in clouds]
    merged, rows = merge(maps)
    seen = dict.fromkeys(tuple(site) for c in clouds for site in c.tolist())
    assert [tuple(site) for site in merged.coords.tolist()] == list(seen)
    for c, place in zip(clouds, rows, strict=True):
        assert torch.equal(merged.coords[place].cpu(), c)
    found = find_rows(merged, merged.coords)
    assert torch.equal(found.cpu(), torch.arange(merged.n_rows))


def test_folding_duplicates_through_either_index(map_lane):
    coords = cloud((6, 5), 2, 0.5, seed=2)
    generator = torch.Generator().manual_seed(1)
    coords = coords[torch.randint(0, len(coords), (90,), generator=generator)]
    cmap = CoordinateMap(coords.to(map_lane.device), Box.grid(2, (6, 5)))
    assert not cmap.unique
    fold = cmap.duplicates()
    seen = {}
    for row, site in enumerate(coords.tolist()):
        seen.setdefault(tuple(site), row)
    assert fold.first.tolist() == list(seen.values())
    assert torch.equal(cmap.distinct_map().coords[fold.inverse].cpu(), coords)
    assert torch.equal(find_rows(cmap.distinct_map(), cmap.coords), fold.inverse)


def test_spread(map_lane):
    x = features(3, 4, 1, device=map_lane.device).requires_grad_()
    rows = torch.tensor([2, 0, 2, 2, 0], device=map_lane.device)
    y = spread(x, rows)
    assert torch.equal(y, x[rows])
    dy = features(5, 4, 2, device=map_lane.device)
    y.backward(dy)
    want = torch.zeros(3, 4, dtype=torch.float64).index_add(0, rows.cpu(), dy.double().cpu())
    checks.assert_close(x.grad, want)
