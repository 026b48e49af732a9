"""FlexGEMM 2.0: pools, finer and coarser grids, points, against dense torch and loops in fp64."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch.nn import functional

from .test_later_names import compared, distinct
from .test_v2_layers import ascending, devices, flex_gemm, grid_of, read

__all__ = ["flex_gemm"]  # the fixture
REDUCE = {
    "sum": lambda x: x.sum(0),
    "mean": lambda x: x.mean(0),
    "max": lambda x: x.amax(0),
    "min": lambda x: x.amin(0),
    "prod": lambda x: x.prod(0),
}


def by_loop(x, coords, targets, windows, stride, reduce):
    """Each target from the rows at target * stride + offset."""
    row_of = {tuple(row): i for i, row in enumerate(coords.tolist())}
    out = []
    for b, *q in targets.tolist():
        moved = ((b, *(c * s + o for c, s, o in zip(q, stride, w, strict=True))) for w in windows)
        rows = [row_of[key] for key in moved if key in row_of]
        out.append(REDUCE[reduce](x[rows]) if rows else x.new_full(x[0].shape, reduce == "prod"))
    return torch.stack(out)


@devices
@pytest.mark.parametrize("reduce", list(REDUCE))
def test_pools(flex_gemm, reduce, device):
    sizes = (2, 5, 6, 4)
    coords = distinct(60, sizes)
    places, found = coords.to(device), {}
    leaves = [torch.randn(60, 3).double()]
    layer = flex_gemm.nn.SparsePool3d((3, 2, 2), (2, 2, 1), (1, 0, 0), reduce)
    windows = list(itertools.product((-1, 0, 1), (0, 1), (0, 1)))

    def strided(x):
        y, *found["rest"] = layer(x, places, (*sizes, 3))
        return y

    def loop(x):
        rows, shape, _ = found["rest"]
        assert ascending(rows) and tuple(shape) == (2, 3, 3, 3, 3)
        return by_loop(x, coords, rows.cpu(), windows, (2, 2, 1), reduce)

    y = compared(strided, loop, leaves, device)
    rows, _, cache = found["rest"]
    again = layer(leaves[0].to(device), places, None, rows, neighbor_cache=cache)
    assert torch.equal(again[0], y)
    given = torch.tensor([[0, 2, 2, 2], [1, 9, 9, 9]], dtype=torch.int32)
    got, *_ = layer(leaves[0].to(device), places, (*sizes, 3), given.to(device))
    want = by_loop(leaves[0], coords, given, windows, (2, 2, 1), reduce)
    torch.testing.assert_close(got.cpu(), want)
    around = flex_gemm.nn.SubmanifoldPool3d(3, reduce)
    windows = list(itertools.product((-1, 0, 1), repeat=3))
    compared(
        lambda x: around(x, places, (*sizes, 3))[0],
        lambda x: by_loop(x, coords, coords, windows, (1, 1, 1), reduce),
        leaves,
        device,
    )


@devices
@pytest.mark.parametrize("dimension", [2, 3])
def test_pixel_unshuffle_and_shuffle(flex_gemm, dimension, device):
    sizes = (2, 4, 6, 2)[: dimension + 1]
    coords = distinct(25, sizes)
    places, found = coords.to(device), {}
    factor = (2, 3, 2)[:dimension]
    volume = math.prod(factor)
    layer = flex_gemm.nn.SparsePixelUnshuffle(factor)

    def unshuffle(x):
        y, *found["rest"] = layer(x, places, (*sizes, 3))
        return y

    def blocks(x):
        rows, shape, _ = found["rest"]
        coarse = tuple(s // f for s, f in zip(sizes[1:], factor, strict=True))
        assert tuple(shape) == (2, *coarse, 3 * volume) and ascending(rows)
        dense = grid_of(x, coords, sizes).movedim(1, -1)
        split = [n for pair in zip(coarse, factor, strict=True) for n in pair]
        dense = dense.reshape(2, *split, 3)
        order = (0, *range(1, 2 * dimension, 2), *range(2, 2 * dimension + 1, 2))
        dense = dense.permute(*order, 2 * dimension + 1).reshape(2, *coarse, 3 * volume)
        return dense[tuple(rows.cpu().long().t())]

    y = compared(unshuffle, blocks, [torch.randn(25, 3).double()], device)
    rows, shape, cache = found["rest"]
    shuffle = flex_gemm.nn.SparsePixelShuffle(factor)
    feats = torch.randn(len(rows), 3 * volume).double()
    places_cpu = coords.long()

    def scattered(x):
        rows_of = {tuple(row): i for i, row in enumerate(rows.tolist())}
        values = x.view(len(rows), volume, 3)
        out = []
        for b, *q in places_cpu.tolist():
            parent = rows_of[(b, *(c // f for c, f in zip(q, factor, strict=True)))]
            slot = 0
            for c, f in zip(q, factor, strict=True):
                slot = slot * f + c % f
            out.append(values[parent, slot])
        return torch.stack(out)

    compared(lambda x: shuffle(x, rows, shape, places)[0], scattered, [feats], device)
    back, same, full, _ = shuffle(y, rows, shape, places, None, cache.T)
    assert same is places and tuple(full) == (*sizes, 3)
    again, *_ = shuffle(y, rows, shape, places, None, cache)
    assert torch.equal(again, back)
    every, children, *_ = shuffle(y, rows, shape)
    assert len(children) == len(rows) * volume and ascending(children)
    assert every.abs().sum() == back.abs().sum()


def test_blocks_that_are_cut(flex_gemm):
    coords = torch.tensor([[0, 4, 4]], dtype=torch.int32)
    y, rows, shape, _ = flex_gemm.ops.sparse_pixel_unshuffle2d(torch.ones(1, 2), coords, (1, 5, 5, 2), 2)
    assert rows.tolist() == [[0, 2, 2]] and tuple(shape) == (1, 3, 3, 8)
    assert y.tolist() == [[1.0, 1.0, 0, 0, 0, 0, 0, 0]]
    with pytest.raises(AssertionError, match="multiple of 4"):
        flex_gemm.ops.sparse_pixel_shuffle2d(torch.ones(1, 2), coords, (1, 5, 5, 2), 2)


@devices
def test_upsample_equals_interpolate(flex_gemm, device):
    sizes = (2, 3, 4, 2)
    coords = torch.tensor(list(itertools.product(*map(range, sizes)))).int()
    feats = torch.randn(len(coords), 3)
    places = coords.to(device)
    for mode, name in (("nearest", "nearest"), ("linear", "trilinear")):
        layer = flex_gemm.nn.SparseUpsample3d((2, 3, 1), mode)
        options = {} if mode == "nearest" else {"align_corners": False}
        found = {}

        def call(x, layer=layer, found=found):
            y, *found["rest"] = layer(x, places, (*sizes, 3))
            return y

        def dense(x, name=name, options=options, found=found):
            rows, shape, _ = found["rest"]
            assert tuple(shape) == (2, 6, 12, 2, 3) and len(rows) == math.prod(shape[:-1])
            grid = grid_of(x, coords, sizes)
            y = functional.interpolate(grid, scale_factor=(2, 3, 1), mode=name, **options)
            return read(y, rows.cpu(), shape)

        compared(call, dense, [feats], device)
    some = places[::3].contiguous()
    cut = flex_gemm.ops.sparse_upsample3d(feats[::3].to(device), some, (*sizes, 3), 2, "linear")
    zeros = flex_gemm.ops.sparse_upsample3d(feats[::3].to(device), some, (*sizes, 3), 2, "linear", "zeros")
    assert cut[0].isfinite().all() and not torch.equal(cut[0], zeros[0])
    ones, *_ = flex_gemm.ops.sparse_upsample3d(torch.ones(len(some), 1, device=device), some, (*sizes, 1), 2, "linear")
    torch.testing.assert_close(ones, torch.ones_like(ones))


@devices
def test_pool_and_back(flex_gemm, device):
    sizes = (2, 5, 5, 5)
    coords = distinct(60, sizes).to(device)
    feats = torch.randn(60, 4, device=device)
    y, rows, shape, cache = flex_gemm.nn.SparsePool3d(2, padding=(1, 1, 1))(feats, coords, (*sizes, 4))
    y, rows, shape, cache = flex_gemm.nn.SparsePool3d(2)(feats, coords, (2, 6, 6, 6, 4))
    up = flex_gemm.nn.SparseUpsample3d(2)
    z, back, full, _ = up(y, rows, shape, coords, None, cache)
    want, *_ = up(y, rows, shape, coords)
    assert torch.equal(z, want) and back is coords and tuple(full) == (2, 6, 6, 6, 4)
    row_of = {tuple(row): i for i, row in enumerate(rows.tolist())}
    parents = [row_of[(b, i // 2, j // 2, k // 2)] for b, i, j, k in coords.tolist()]
    assert torch.equal(z, y[parents])


@devices
@pytest.mark.parametrize("padding_mode", ["normalize", "zeros"])
def test_grid_sample(flex_gemm, padding_mode, device):
    sizes = (2, 4, 5, 3)
    coords = distinct(50, sizes)
    generator = torch.Generator().manual_seed(3)
    points = torch.rand(2, 20, 3, generator=generator).double() * 6 - 1
    grid = torch.cat([torch.tensor([0.0, 1.0]).double().view(2, 1, 1).expand(2, 20, 1), points], 2)
    places, at = coords.to(device), grid.to(device)
    row_of = {tuple(row): i for i, row in enumerate(coords.tolist())}
    found = {}

    def loop(x):
        out, mask = [], []
        for b, *p in grid.view(-1, 4).tolist():
            total, value = 0.0, x.new_zeros(3)
            for corner in itertools.product((0, 1), repeat=3):
                cell = [math.floor(c) + o for c, o in zip(p, corner, strict=True)]
                row = row_of.get((int(b), *cell))
                if row is not None:
                    weight = math.prod(1 - abs(c - q) for c, q in zip(p, cell, strict=True))
                    total, value = total + weight, value + weight * x[row]
            mask.append(total > 0)
            out.append(value / max(total, 1e-12) if padding_mode == "normalize" else value)
        assert found["mask"].flatten().tolist() == mask
        return torch.stack(out).view(2, 20, 3).float()

    def call(x):
        y, found["mask"] = flex_gemm.ops.sparse_grid_sample(x, places, at, padding_mode=padding_mode, return_mask=True)
        return y.float()

    compared(call, loop, [torch.randn(50, 3)], device)


def test_nearest_points_without_a_batch_column(flex_gemm):
    coords = torch.tensor([[0, 0], [1, 2]], dtype=torch.int32)
    feats = torch.tensor([[1.0], [2.0]])
    grid = torch.tensor([[-0.4, 0.4], [1.4, 1.6], [0.6, 0.6], [float("inf"), 0]])
    call = flex_gemm.ops.sparse_grid_sample
    got = call(feats, coords, grid, mode="nearest", n_spatial_dims=2)
    assert got.tolist() == [[1.0], [2.0], [0.0], [0.0]]
    assert call(feats, coords, grid[:0], n_spatial_dims=2).shape == (0, 1)
    assert call(feats[:0], coords[:0], grid, n_spatial_dims=2).tolist() == [[0.0]] * 4
    with pytest.raises(ValueError, match="mode"):
        call(feats, coords, grid, mode="cubic", n_spatial_dims=2)


@devices
def test_dense_sorted_and_coalesced(flex_gemm, device):
    sizes = (2, 4, 3)
    coords = distinct(15, sizes).to(device)
    feats = torch.randn(15, 2, device=device)
    dense = flex_gemm.ops.sparse_to_dense(feats, coords, (*sizes, 2))
    assert torch.equal(dense.movedim(-1, 1), grid_of(feats, coords, sizes))
    with pytest.raises(ValueError, match="leaves the shape"):
        flex_gemm.ops.sparse_to_dense(feats, coords, (2, 2, 3, 2))
    twice = torch.cat([coords, coords[:4]])
    rows, order = flex_gemm.ops.sort_coords(twice)
    assert rows.tolist() == sorted(twice.tolist()) and torch.equal(twice[order], rows)
    rows, inverse = flex_gemm.ops.coalesce_coords(twice)
    assert ascending(rows) and torch.equal(rows[inverse], twice)


def test_nothing(flex_gemm):
    coords, feats = torch.zeros(0, 4, dtype=torch.int32), torch.zeros(0, 8, requires_grad=True)
    shape = (2, 4, 4, 4, 8)
    for layer, channels in (
        (flex_gemm.nn.SparsePool3d(2), 8),
        (flex_gemm.nn.SparsePool3d(2, reduce="prod"), 8),
        (flex_gemm.nn.SparseUpsample3d(2), 8),
        (flex_gemm.nn.SparseUpsample3d(2, "linear"), 8),
        (flex_gemm.nn.SparsePixelShuffle3d(2), 1),
        (flex_gemm.nn.SparsePixelUnshuffle3d(2), 64),
    ):
        y, rows, _, _ = layer(feats, coords, shape)
        assert y.shape == (0, channels) and rows.shape == (0, 4)
        y.sum().backward()
    assert flex_gemm.nn.SubmanifoldPool3d(3)(feats, coords, shape)[0].shape == (0, 8)
    assert flex_gemm.ops.coalesce_coords(coords)[0].shape == (0, 4)
