"""Gradients against finite differences in fp64, for every kind and dimension.

fp64 computes in torch on every lane; the maps come from the lane's own builders.
"""

import pytest
import torch

from sparse_bridge.core import functional
from sparse_bridge.core.ops.batch_norm import batch_norm
from tests.clouds import cloud
from tests.core.layers import KINDS, layer, leaves, tensors

pytestmark = [pytest.mark.interpreted, pytest.mark.emulated]

SHAPES = {1: (12,), 2: (4, 4), 3: (3, 3, 2), 4: (2, 2, 3, 2)}
KERNELS = {1: (3,), 2: (3, 2), 3: (1, 3, 2), 4: (2, 1, 2, 1)}


def small(kind, dimension, lane, **options):
    return layer(
        kind,
        dimension,
        KERNELS[dimension],
        stride=1 if kind == "submanifold" else 2,
        padding=tuple(k // 2 for k in KERNELS[dimension]),
        shape=SHAPES[dimension],
        share=0.4,
        device=lane.device,
        seed=6,
        **options,
    )


def gradcheck(made, lane, groups=1):
    *operands, _ = tensors(made, 2 * groups, 3 * groups, dtype=torch.float64, groups=groups)
    operands = leaves(operands, lane.device)
    with lane.serving(torch.float64):
        assert torch.autograd.gradcheck(
            lambda x, weight, bias: functional.conv(x, weight, bias, made.kmap, groups=groups), operands
        )


@pytest.mark.sample(6)
@pytest.mark.parametrize("dimension", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_convolution(map_lane, kind, dimension):
    gradcheck(small(kind, dimension, map_lane), map_lane)


@pytest.mark.parametrize("kind", ["submanifold", "inverse"])
def test_groups(map_lane, kind):
    gradcheck(small(kind, 2, map_lane), map_lane, groups=2)


@pytest.mark.parametrize("kind", ["submanifold", "strided", "generative", "inverse", "between"])
def test_repeated_coordinates(map_lane, kind):
    coords = cloud((4, 4), 2, 0.3, seed=7)
    coords = torch.cat([coords, coords[:3], coords[1:2]]).contiguous()
    gradcheck(small(kind, 2, map_lane, coords=coords, dense=False), map_lane)


@pytest.mark.parametrize("mode", ["max", "sum", "avg"])
@pytest.mark.parametrize("kind", ["submanifold", "strided", "inverse"])
def test_pools(map_lane, kind, mode):
    made = small(kind, 2, map_lane)
    x = torch.randn(len(made.x_coords), 2, dtype=torch.float64, device=map_lane.device)
    x.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: functional.pool(x, made.kmap, mode, -10.0), [x])


@pytest.mark.parametrize("mode", ["max", "sum", "avg"])
def test_global_pools(map_lane, mode):
    batch = torch.tensor([2, 0, 2, -1, 0, 4, 2], device=map_lane.device)
    x = torch.randn(7, 3, dtype=torch.float64, device=map_lane.device, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: functional.global_pool(x, batch, 4, mode), [x])


def test_what_a_transform_has_left_behind(lane):
    """Tensors that leak from a transform of torch.func are tensors like others afterwards."""
    made = small("submanifold", 2, lane)
    x, weight = (one.to(lane.device) for one in tensors(made, 6, 10)[:2])
    leaked = []

    def leak(values):
        leaked.append(values * 1)
        return values.sum()

    torch.func.grad(leak)(x)
    weight = weight.requires_grad_()
    y = functional.conv(leaked[0], weight, None, made.kmap)
    want = functional.conv(x, weight, None, made.kmap)
    assert torch.equal(y, want)
    y.sum().backward()
    assert weight.grad is not None
    norm = torch.nn.BatchNorm1d(6).to(lane.device)
    found = batch_norm(leaked[0], (norm.weight, norm.bias, None, None, None), momentum=0.1, eps=1e-5)
    torch.testing.assert_close(found, norm(x), rtol=1e-4, atol=1e-4)
