"""The names of `dev/all_triton`: any dimension, any symmetric offsets, against loops in fp64."""

from __future__ import annotations

import itertools

import pytest
import torch

from sparse_bridge.adapters.flex_gemm.errors import ArgumentShapeError, ArgumentValueError

from .conftest import DEVICES
from .test_convolutions import voxels, weights

devices = pytest.mark.parametrize("device", DEVICES)


def distinct(n, sizes, seed=0):
    """int32 [n, len(sizes)] distinct rows, in no order."""
    generator = torch.Generator().manual_seed(seed)
    cells = torch.tensor(list(itertools.product(*map(range, sizes))))
    return cells[torch.randperm(len(cells), generator=generator)[:n]].int().contiguous()


def by_loop(feats, coords, weight, bias, offsets, n_batch):
    """out[n] = bias + sum of weight[:, v] feats at coords[n] + offsets[v]."""
    row_of = {tuple(row): i for i, row in enumerate(coords.tolist())}
    out = bias.expand(len(coords), -1).clone()
    for n, row in enumerate(coords.tolist()):
        for v, offset in enumerate(offsets):
            moved = (c + o for c, o in zip(row[n_batch:], offset, strict=True))
            found = row_of.get((*row[:n_batch], *moved))
            if found is not None:
                out[n] = out[n] + weight[:, v] @ feats[found]
    return out


def compared(call, want_of, leaves, device):
    """Values and gradients of `call` against those of `want_of`."""
    mine = [leaf.to(device).requires_grad_() for leaf in leaves]
    his = [leaf.clone().requires_grad_() for leaf in leaves]
    out, want = call(*mine), want_of(*his)
    torch.testing.assert_close(out.cpu(), want)
    grad = torch.randn(want.shape, dtype=want.dtype)
    got = torch.autograd.grad(out, mine, grad.to(device))
    for one, other in zip(got, torch.autograd.grad(want, his, grad), strict=True):
        torch.testing.assert_close(one.cpu(), other)
    return out


@devices
@pytest.mark.parametrize(
    "n_batch, kernel, dilation, shaped",
    [
        (1, (3,), 1, True),
        (0, (3, 3), 1, True),
        (1, (3, 5), (2, 1), False),
        (2, (3, 1, 3), 1, True),
        (1, (3, 3, 3, 1), 1, True),
    ],
)
def test_any_dimension(flex_gemm, n_batch, kernel, dilation, shaped, device):
    dimension = len(kernel)
    sizes = (2,) * n_batch + (6, 5, 3, 3)[:dimension]
    coords = distinct(min(40, torch.tensor(sizes).prod() * 2 // 3), sizes)
    steps = (dilation,) * dimension if isinstance(dilation, int) else dilation
    offsets = itertools.product(*([(t - k // 2) * d for t in range(k)] for k, d in zip(kernel, steps, strict=True)))
    leaves = [torch.randn(len(coords), 3).double(), torch.randn(4, *kernel, 3).double(), torch.randn(4).double()]
    shape = (*sizes[:n_batch], 3, *sizes[n_batch:]) if shaped else None
    places, caches = coords.to(device), []

    def call(feats, weight, bias):
        out, cache = flex_gemm.sparse_submanifold_conv(feats, places, shape, weight, bias, dilation=dilation)
        caches.append(cache)
        return out

    offsets = list(offsets)
    out = compared(call, lambda x, w, b: by_loop(x, coords, w.flatten(1, -2), b, offsets, n_batch), leaves, device)
    (cache,) = caches
    again, same = flex_gemm.sparse_submanifold_conv(
        leaves[0].to(device), None, None, leaves[1].to(device), leaves[2].to(device), cache
    )
    assert same is cache and torch.equal(again, out)
    assert cache.neighbor_map.dtype == torch.int32 and cache.neighbor_map.min() >= -1
    kind = flex_gemm.ops.spconv.submanifold_conv.SubMConvNeighborCache
    made = kind(cache.neighbor_map)
    out2, _ = flex_gemm.sparse_submanifold_conv(
        leaves[0].to(device), None, None, leaves[1].to(device), leaves[2].to(device), made
    )
    torch.testing.assert_close(out2, out)


@devices
def test_any_offset(flex_gemm, device):
    offsets = torch.tensor([[-2, 1], [0, -1], [0, 0], [0, 1], [2, -1]])
    coords = distinct(30, (2, 7, 6)) - torch.tensor([0, 3, 2], dtype=torch.int32)
    leaves = [torch.randn(30, 3).double(), torch.randn(4, 5, 3).double(), torch.randn(4).double()]
    places = coords.to(device)
    compared(
        lambda x, w, b: flex_gemm.sparse_submanifold_conv_any_offset(x, places, offsets, w, b)[0],
        lambda x, w, b: by_loop(x, coords, w, b, offsets.tolist(), 1),
        leaves,
        device,
    )
    with pytest.raises(AssertionError, match="negated flip"):
        flex_gemm.sparse_submanifold_conv_any_offset(
            leaves[0].to(device), places, offsets[:4], leaves[1][:, :4].to(device)
        )


def test_three_dimensions_without_a_shape(flex_gemm):
    feats, coords, shape = voxels(60, 3)
    weight = weights(3, 4, (3, 3, 3))
    want, _ = flex_gemm.ops.spconv.sparse_submanifold_conv3d(feats, coords, shape, weight, None, None, (2, 2, 2))
    got, _ = flex_gemm.sparse_submanifold_conv3d(feats, coords, None, weight, dilation=2, algorithm="explicit_gemm")
    torch.testing.assert_close(got, want)
    for call in (flex_gemm.sparse_submanifold_conv3d, flex_gemm.sparse_submanifold_conv):
        with pytest.raises(ArgumentValueError, match="algorithm is 'fast'"):
            call(feats, coords, shape, weight, algorithm="fast")


def test_generations_are_told_apart(flex_gemm):
    assert not hasattr(flex_gemm, "nn") and hasattr(flex_gemm, "config")
    assert flex_gemm.config.USE_AUTOTUNE_CACHE is flex_gemm.USE_AUTOTUNE_CACHE
    feats, coords, shape = voxels(40, 3, dtype=torch.float32)
    points = torch.rand(2, 9, 3) * 5
    default = flex_gemm.grid_sample_3d(feats, coords, shape, points)
    trilinear = flex_gemm.ops.grid_sample.grid_sample_3d(feats, coords, shape, points, "trilinear")
    assert torch.equal(default, trilinear)


def test_no_rows_and_wrong_arguments(flex_gemm):
    call = flex_gemm.sparse_submanifold_conv
    weight = torch.randn(4, 3, 3, 2)
    for shape in (None, (2, 2, 5, 5)):
        coords = torch.zeros(0, 3, dtype=torch.int32)
        out, _ = call(torch.zeros(0, 2, requires_grad=True), coords, shape, weight)
        assert out.shape == (0, 4)
        out.sum().backward()
    feats, coords = torch.randn(5, 2), distinct(5, (2, 5, 5))
    with pytest.raises(ArgumentValueError, match="odd"):
        call(feats, coords, None, weight[:, :2])
    with pytest.raises(ArgumentValueError, match="expected \\(batch sizes"):
        call(feats, coords, (2, 5, 5), weight)
    with pytest.raises(ArgumentShapeError, match="features"):
        call(feats[:, :1], coords, None, weight)
    with pytest.raises(TypeError, match="int32"):
        call(feats, coords.long(), None, weight)
