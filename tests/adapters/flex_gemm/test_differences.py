"""Lines of the page's table of differences that no other file holds."""

from __future__ import annotations

import pytest
import torch

from .test_convolutions import voxels, weights

ALGORITHMS = (
    "explicit_gemm",
    "implicit_gemm",
    "implicit_gemm_splitk",
    "masked_implicit_gemm",
    "masked_implicit_gemm_splitk",
)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_caches_made_without_gradients_or_by_another_algorithm(flex_gemm, algorithm):
    spconv = flex_gemm.ops.spconv
    feats, coords, shape = voxels(60, 4, dtype=torch.float32)
    weight = weights(4, 6, (3, 3, 3), dtype=torch.float32).requires_grad_()
    spconv.set_algorithm("explicit_gemm")
    with torch.no_grad():
        want, cache = spconv.sparse_submanifold_conv3d(feats, coords, shape, weight)
    spconv.set_algorithm(algorithm)
    got, same = spconv.sparse_submanifold_conv3d(feats.requires_grad_(), coords, shape, weight, None, cache)
    assert same is cache
    torch.testing.assert_close(got, want)
    fresh, _ = spconv.sparse_submanifold_conv3d(feats, coords, shape, weight)
    for one, other in zip(
        torch.autograd.grad(got.sum(), (feats, weight)), torch.autograd.grad(fresh.sum(), (feats, weight)), strict=True
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("mode", ["nearest", "trilinear"])
def test_gradients_of_sampling_repeat(flex_gemm, mode):
    feats, coords, shape = voxels(120, 5, dtype=torch.float32)
    grid, dy = torch.rand(2, 300, 3) * 5, torch.randn(2, 300, 5)
    found = []
    for _ in range(3):
        leaf = feats.clone().requires_grad_()
        y = flex_gemm.ops.grid_sample.grid_sample_3d(leaf, coords, shape, grid, mode)
        found.append(torch.autograd.grad(y, leaf, dy)[0])
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
