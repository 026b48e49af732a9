"""Transposed layers that make their own sites (2.1, hashmap mode)."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests import checks

from . import oracle
from .test_conv import points, triple, weights


@pytest.fixture
def ts(ts21):
    ts21.release = "2.1"
    config = ts21.nn.functional.conv_config.get_default_conv_config()
    mode, config.kmap_mode = config.kmap_mode, "hashmap"
    yield ts21
    config.kmap_mode = mode


def generated(sites, kernel, stride, grid):
    """(output sites, [(v, input row, output row)]) as torchsparse has them."""
    out = set()
    for b, *p in sites:
        for t in itertools.product(*(range(k) for k in kernel)):
            moved = (c * s + i - (k - 1) // 2 for c, s, i, k in zip(p, stride, t, kernel, strict=True))
            out.add((b, *(min(max(c, 0), g - 1) for c, g in zip(moved, grid, strict=True))))
    out = sorted(out)
    row_of = {site: row for row, site in enumerate(sites)}
    triples = []
    for j, (b, *q) in enumerate(out):
        for v, t in enumerate(oracle.offsets_of(kernel)):
            p = [c + i - (k - 1) // 2 for c, i, k in zip(q, t, kernel, strict=True)]
            if all(c % s == 0 for c, s in zip(p, stride, strict=True)):
                site = (b, *(c // s for c, s in zip(p, stride, strict=True)))
                if site in row_of:
                    triples.append((v, row_of[site], j))
    return out, triples


@pytest.mark.parametrize("kernel, stride", [(3, 2), (2, 2), (3, 1), ((3, 1, 3), (2, 1, 2)), (4, 2)])
def test_sites_and_values(ts, kernel, stride):
    kernel, stride = triple(kernel), triple(stride)
    coords = points("2.1", shape=(3, 4, 3), seed=1, share=0.2)
    given = (2, *(40 * s for s in stride))
    grid = [(e - k) // s + 1 for e, k, s in zip(given[1:], kernel, stride, strict=True)]
    feats, weight = torch.randn(len(coords), 3).double(), weights(kernel, 3, 5)
    ours = [t.clone().requires_grad_() for t in (feats, weight)]
    theirs = [t.clone().requires_grad_() for t in (feats, weight)]
    x = ts.SparseTensor(ours[0], coords, (4, 4, 4), given)
    x.kmaps["anything"] = 1
    y = ts.nn.functional.conv3d(x, ours[1], kernel, stride=stride, transposed=True, generative=True)
    sites, triples = generated(oracle.to_sites(coords, "2.1"), kernel, stride, grid)
    assert oracle.to_sites(y.C, "2.1") == sites
    want = oracle.product(theirs[0], theirs[1], None, triples, len(sites))
    checks.assert_close(y.F, want, torch.float64)
    up = torch.randn(want.shape).double()
    y.F.backward(up)
    want.backward(up)
    for one, other in zip(ours, theirs, strict=True):
        checks.assert_close(one.grad, other.grad, torch.float64)
    assert y.stride == tuple(4 // s for s in stride) and y.spatial_range == (2, *grid)
    assert x.kmaps == {} == x._caches.hashmaps and x.cmaps[y.stride][0] is y.C
    F = ts.nn.functional
    assert torch.equal(F.spupsample_generative(coords, stride, kernel, 0, given), y.C)


def test_coordinates_stay_inside_the_smaller_range(ts):
    """The range behind the layer shrinks, as behind a strided one, and sites are moved into it."""
    coords = torch.tensor([[0, 0, 0, 0], [0, 3, 3, 3]], dtype=torch.int32)
    x = ts.SparseTensor(torch.ones(2, 1), coords, 2, (1, 4, 4, 4))
    conv = ts.nn.Conv3d(1, 1, 2, stride=2, transposed=True, generative=True)
    y = conv(x)
    assert y.spatial_range == (1, 2, 2, 2) and y.C.max() == 1


def test_a_stride_of_one_becomes_zero(ts):
    coords = torch.zeros(1, 4, dtype=torch.int32)
    conv = ts.nn.Conv3d(1, 1, 3, stride=2, transposed=True, generative=True)
    assert conv(ts.SparseTensor(torch.ones(1, 1), coords, 1, (1, 9, 9, 9))).stride == (0, 0, 0)


def test_refusals(ts):
    nn, coords = ts.nn, torch.zeros(1, 4, dtype=torch.int32)
    conv = nn.Conv3d(1, 1, 3, stride=2, transposed=True, generative=True)
    with pytest.raises(AssertionError, match="spatial_range"):
        conv(ts.SparseTensor(torch.ones(1, 1), coords, 2))
    with pytest.raises(ValueError, match="leaves nothing"):
        conv(ts.SparseTensor(torch.ones(1, 1), coords, 2, (1, 2, 2, 2)))
    with pytest.raises(AssertionError, match="transposed=True"):
        nn.Conv3d(1, 1, 3, generative=True)
    with pytest.raises(AssertionError, match="transposed=True"):
        x = ts.SparseTensor(torch.ones(1, 1), coords, 2)
        nn.functional.conv3d(x, torch.ones(27, 1, 1), 3, generative=True)
    with pytest.raises(AssertionError, match="spatial_range"):
        nn.functional.spupsample_generative(coords)
    nn.functional.conv_config.get_default_conv_config().kmap_mode = "hashmap_on_the_fly"
    with pytest.raises(ValueError, match="kmap_mode='hashmap'"):
        conv(ts.SparseTensor(torch.ones(1, 1), coords, 2, (1, 9, 9, 9)))
