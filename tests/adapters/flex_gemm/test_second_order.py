"""Gradients of gradients: every function of FlexGEMM refuses them by one typed error."""

from __future__ import annotations

import pytest
import torch

import sparse_bridge
from sparse_bridge.errors import UnsupportedError
from tests.adapters.flex_gemm.test_convolutions import voxels, weights

F32 = torch.float32


@pytest.fixture
def spconv():
    sparse_bridge.disable()
    with sparse_bridge.enable("flex_gemm", mode="standin"):
        import flex_gemm

        yield flex_gemm.ops


def functions(ops):
    feats, coords, shape = voxels(60, 4, dtype=F32)
    weight, bias = (made.requires_grad_() for made in (weights(4, 8, (3, 3, 3), F32), torch.rand(8)))
    grid, conv = torch.rand(2, 9, 3) * 5, ops.spconv
    layer = coords, shape
    return feats.requires_grad_(), {
        "submanifold": lambda x: conv.sparse_submanifold_conv3d(x, *layer, weight, bias)[0],
        "strided": lambda x: conv.sparse_conv3d(x, *layer, weight, bias)[0],
        "SubMConv3dFunction": lambda x: conv.SubMConv3dFunction.apply(x, *layer, None, weight, bias, (1, 1, 1))[0],
        "SparseConv3dFunction": lambda x: conv.SparseConv3dFunction.apply(x, *layer, None, weight, bias)[0],
        "grid sample": lambda x: ops.grid_sample.grid_sample_3d(x, *layer, grid),
    }


NAMES = ("submanifold", "strided", "SubMConv3dFunction", "SparseConv3dFunction")


@pytest.mark.parametrize("name", NAMES)
def test_second_order_is_refused(name, spconv, plain_settings):
    x, known = functions(spconv)
    y = known[name](x)
    (plain,) = torch.autograd.grad(y.square().sum(), x, retain_graph=True)
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    assert torch.equal(dx, plain)
    with pytest.raises(UnsupportedError, match="no gradient of its own"):
        dx.square().sum().backward()


def test_samples_have_gradients_of_gradients(spconv, plain_settings):
    x, known = functions(spconv)
    wide = x.detach().double().requires_grad_()
    assert torch.autograd.gradgradcheck(known["grid sample"], wide, fast_mode=True)
