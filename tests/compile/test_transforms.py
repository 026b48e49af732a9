"""Transforms of torch.func, forward mode and second order: one clear error each, or support."""

from __future__ import annotations

import pytest
import torch

from sparse_bridge.core import functional as sparse
from sparse_bridge.core.ops import batch_norm, dense, max_rows, spread, voxel
from sparse_bridge.errors import UnsupportedError
from tests.clouds import cloud, features

GRID = (12, 12, 12)
REFUSED = r"no forward-mode derivative and run under no transform of torch\.func"


@pytest.fixture(scope="module")
def coords():
    return cloud(GRID, 2, 0.05)


def layers(coords, device="cpu"):
    """Functions of features [N, 4], by name."""
    coords = coords.to(device)
    n, batch = len(coords), coords[:, 0].contiguous()
    kmap = sparse.submanifold(sparse.coordinate_map(coords, GRID, 2), sparse.kernel_offsets((3, 3, 3)))
    weight = torch.randn(27, 4, 3, device=device)
    learned = weight.clone().requires_grad_()
    index, rows = (torch.arange(n, device=device) % 7).int(), torch.arange(50, device=device) % n
    counts = torch.bincount(index, minlength=7).int()
    return {
        "conv": lambda x: sparse.conv(x, weight, None, kmap),
        "learned conv": lambda x: sparse.conv(x, learned, None, kmap),
        "max pool": lambda x: sparse.pool(x, kmap, "max"),
        "mean pool": lambda x: sparse.pool(x, kmap, "avg"),
        "first max": lambda x: max_rows.window_max(x, kmap),
        "global max": lambda x: sparse.global_pool(x, batch, 2, "max"),
        "global mean": lambda x: sparse.global_pool(x, batch, 2, "avg"),
        "spread": lambda x: spread.spread(x, rows),
        "voxelize": lambda x: voxel.voxelize(x, index, counts),
    }


NAMES = tuple(layers(cloud(GRID, 1, 0.01)))
LINEAR = ("global mean", "spread", "voxelize")  # their gradients are functions of the same kind


def transforms(run, x, t):
    return (
        lambda: torch.func.vmap(run)(torch.stack([x, t])),
        lambda: torch.func.jvp(run, (x,), (t,)),
        lambda: torch.func.grad(lambda x: run(x).sum())(x),
    )


@pytest.mark.parametrize("name", NAMES)
def test_transforms_are_refused(name, coords, plain_settings):
    run = layers(coords)[name]
    for transform in transforms(run, *torch.randn(2, len(coords), 4)):
        with pytest.raises(UnsupportedError, match=REFUSED):
            transform()


@pytest.mark.parametrize("name", [name for name in NAMES if name not in LINEAR])
def test_second_order_is_refused(name, coords, plain_settings):
    x = torch.randn(len(coords), 4, requires_grad=True)
    y = layers(coords)[name](x)
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(UnsupportedError, match="no gradient of its own"):
        dx.sum().backward()


@pytest.mark.parametrize("name", LINEAR)
def test_second_order_of_linear_functions(name, coords, plain_settings):
    run = layers(coords)[name]
    x = torch.randn(len(coords), 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(run, x, fast_mode=True)


def test_coordinates_of_transforms_are_refused(coords):
    def run(given):
        return sparse.coordinate_map(given.int(), GRID, 2).coords

    for transform in transforms(lambda x: run(x).float(), coords.float(), coords.float()):
        with pytest.raises(UnsupportedError, match=REFUSED):
            transform()


def test_maps_made_in_a_transform_are_refused(coords, plain_settings):
    """Of coordinates that are none of its inputs: what torch makes of them there is wrapped, too."""

    def run(x):
        kmap = sparse.submanifold(sparse.coordinate_map(coords, GRID, 2), sparse.kernel_offsets((3, 3, 3)))
        return sparse.conv(x, torch.ones(27, 4, 3), None, kmap)

    for transform in transforms(run, *torch.randn(2, len(coords), 4)):
        with pytest.raises(UnsupportedError, match=REFUSED):
            transform()


def test_norms_and_dense_grids_in_torch_are_transformed(coords, plain_settings):
    def norm(x):
        return batch_norm.batch_norm(x, (None,) * 5, momentum=0.1, eps=1e-3)

    def grid(x):
        return dense.to_dense(x, coords, [2, *GRID])

    x, t = torch.randn(2, len(coords), 4)
    for run in (norm, grid):
        stacked, _, _ = (transform() for transform in transforms(run, x, t))
        torch.testing.assert_close(stacked, torch.stack([run(x), run(t)]))


@pytest.mark.interpreted
def test_norms_by_kernels_refuse_transforms(map_lane):
    def run(x):
        return batch_norm.batch_norm(x, (None,) * 5, momentum=0.1, eps=1e-3)

    x, t = (features(33, 4, seed, torch.float32, map_lane.device) for seed in (0, 1))
    if batch_norm.serves(x) is None:
        pytest.skip("torch computes norms here")
    for transform in transforms(run, x, t)[1:]:
        with pytest.raises(UnsupportedError, match=REFUSED):
            transform()
    x.requires_grad_()
    (dx,) = torch.autograd.grad(run(x).square().sum(), x, create_graph=True)
    with pytest.raises(UnsupportedError, match="no gradient of its own"):
        dx.sum().backward()
