"""FlexGEMM 2.0: layers against dense torch in fp64, values and gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

import sparse_bridge
from sparse_bridge.adapters.flex_gemm.errors import ArgumentValueError
from sparse_bridge.errors import DataTypeError

from .conftest import DEVICES
from .test_later_names import compared, distinct

devices = pytest.mark.parametrize("device", DEVICES)
DENSE = {2: functional.conv2d, 3: functional.conv3d}
TRANSPOSED = {2: functional.conv_transpose2d, 3: functional.conv_transpose3d}


@pytest.fixture(autouse=True)
def flex_gemm():
    """The stand-in of 2.0."""
    torch.manual_seed(0)
    sparse_bridge.disable()
    with sparse_bridge.enable("flex_gemm", mode="standin", profile="2.0"):
        import flex_gemm

        yield flex_gemm


def grid_of(feats, coords, sizes, n_batch=1):
    """[B, C, S1 ..] of rows."""
    dense = feats.new_zeros((*sizes, feats.shape[1]))
    dense = dense.index_put(tuple(coords.long().t()), feats)
    return dense.flatten(0, n_batch - 1).movedim(-1, 1)


def read(dense, coords, sizes, n_batch=1):
    """Rows of [B, C, ..] at coordinates."""
    dense = dense.movedim(1, -1)
    dense = dense.view(*sizes[:n_batch], *dense.shape[1:])
    return dense[tuple(coords.long().t())]


def ascending(coords):
    rows = [tuple(row) for row in coords.tolist()]
    return rows == sorted(set(rows))


@devices
@pytest.mark.parametrize("n_batch", [1, 2])
@pytest.mark.parametrize("dimension, kernel, dilation", [(2, (3, 5), 1), (3, (3, 3, 1), (2, 1, 1))])
def test_submanifold(flex_gemm, dimension, kernel, dilation, n_batch, device):
    sizes = (2,) * n_batch + (6, 5, 4)[:dimension]
    coords = distinct(40, sizes)
    layer = flex_gemm.nn.SubmanifoldConv(3, 4, kernel, dilation).double().to(device)
    places = coords.to(device)
    leaves = [torch.randn(40, 3).double(), layer.weight.detach().cpu(), layer.bias.detach().cpu()]
    steps = (dilation,) * dimension if isinstance(dilation, int) else dilation
    padding = tuple(k // 2 * d for k, d in zip(kernel, steps, strict=True))

    def dense(x, w, b):
        y = DENSE[dimension](grid_of(x, coords, sizes, n_batch), w.movedim(-1, 1), b, 1, padding, steps)
        return read(y, coords, sizes, n_batch)

    name = f"submanifold_conv{dimension}d"
    call = getattr(flex_gemm.ops, name)
    out = compared(lambda x, w, b: call(x, places, (*sizes, 3), w, b, dilation=dilation)[0], dense, leaves, device)
    again, cache = layer(leaves[0].to(device), places, (*sizes, 3))
    torch.testing.assert_close(again, out)
    third, same = layer(leaves[0].to(device), places, None, cache)
    assert same is cache and torch.equal(third, again)
    assert getattr(flex_gemm, name) is call and cache.neighbor_map.shape == (40, math.prod(kernel))


STRIDED = [(2, (3, 3), 2, 1, 1), (3, (2, 2, 2), 2, 0, 1), (3, (3, 2, 1), (1, 2, 3), (1, 0, 0), (2, 1, 1))]


@devices
@pytest.mark.parametrize("dimension, kernel, stride, padding, dilation", STRIDED)
def test_strided(flex_gemm, dimension, kernel, stride, padding, dilation, device):
    sizes = (2, 7, 6, 5)[: dimension + 1]
    coords = distinct(30, sizes)
    layer = flex_gemm.nn.SparseConv(3, 4, kernel, stride, dilation, padding).double().to(device)
    places, found = coords.to(device), {}
    leaves = [torch.randn(30, 3).double(), layer.weight.detach().cpu(), layer.bias.detach().cpu()]

    def call(x, w, b):
        y, *found["rest"] = flex_gemm.ops.sparse_conv(
            x, places, (*sizes, 3), w, b, stride=stride, padding=padding, dilation=dilation
        )
        return y

    def dense(x, w, b):
        options = (stride, padding, dilation)
        y = DENSE[dimension](grid_of(x, coords, sizes), w.movedim(-1, 1), b, *options)
        rows, shape, _ = found["rest"]
        assert tuple(shape) == (2, *y.shape[2:], 4)
        ones = grid_of(torch.ones(30, 1).double(), coords, sizes)
        hit = DENSE[dimension](ones, torch.ones_like(w[:1, ..., :1]).movedim(-1, 1), None, *options)
        assert ascending(rows) and len(rows) == int((hit > 0).sum())
        return read(y, rows.cpu(), shape)

    compared(call, dense, leaves, device)
    y, rows, shape, cache = layer(leaves[0].to(device), places, (*sizes, 3))
    given = rows.flip(0).contiguous()
    other, same_rows, same_shape, _ = layer(leaves[0].to(device), places, (*sizes, 3), given)
    assert same_rows is given and same_shape == shape
    torch.testing.assert_close(other.flip(0), y)
    cached = layer(leaves[0].to(device), places, None, rows, neighbor_cache=cache)
    assert cached[3] is cache and torch.equal(cached[0], y) and cached[2] == shape


@devices
@pytest.mark.parametrize("dimension, kernel, stride, padding, dilation", STRIDED)
def test_transposed(flex_gemm, dimension, kernel, stride, padding, dilation, device):
    sizes = (2, 4, 3, 3)[: dimension + 1]
    coords = distinct(12, sizes)
    places, found = coords.to(device), {}
    layer = flex_gemm.nn.SparseConvTranspose(3, 4, kernel, stride, dilation, padding)
    layer = layer.double().to(device)
    leaves = [torch.randn(12, 3).double(), layer.weight.detach().cpu(), layer.bias.detach().cpu()]

    def call(x, w, b):
        y, *found["rest"] = flex_gemm.ops.sparse_conv_transpose(
            x, places, (*sizes, 3), w, b, stride=stride, padding=padding, dilation=dilation
        )
        return y

    def dense(x, w, b):
        y = TRANSPOSED[dimension](
            grid_of(x, coords, sizes), w.movedim(-1, 0).movedim(1, 1), b, stride, padding, 0, 1, dilation
        )
        rows, shape, _ = found["rest"]
        assert tuple(shape) == (2, *y.shape[2:], 4) and ascending(rows)
        return read(y, rows.cpu(), shape)

    compared(call, dense, leaves, device)
    y, rows, _, cache = layer(leaves[0].to(device), places, (*sizes, 3))
    again = layer(leaves[0].to(device), places, (*sizes, 3), rows, None, cache)
    assert torch.equal(again[0], y) and isinstance(cache, flex_gemm.ops.NeighborCacheT)


@devices
def test_down_and_up_again_by_one_cache(flex_gemm, device):
    sizes = (2, 6, 6, 6)
    coords, feats = distinct(50, sizes).to(device), torch.randn(50, 3).double().to(device)
    down = flex_gemm.nn.SparseConv3d(3, 5, 3, 2, padding=1).double().to(device)
    up = flex_gemm.nn.SparseConvTranspose3d(5, 3, 3, 2, padding=1).double().to(device)
    y, rows, shape, cache = down(feats, coords, (*sizes, 3))
    z, back, full, _ = up(y, rows, shape, coords, None, cache.T)
    assert back is coords and tuple(full) == (*sizes, 3)
    want, *_ = up(y, rows, shape, coords, (*sizes, 3))
    torch.testing.assert_close(z, want)
    dense = functional.conv_transpose3d(grid_of(y, rows, shape[:-1]), up.weight.movedim(-1, 0), up.bias, 2, 1, 1)
    torch.testing.assert_close(z, read(dense, coords, sizes))
    with pytest.raises(TypeError, match=r"cache\.T"):
        up(y, rows, shape, coords, None, cache)
    with pytest.raises(TypeError, match=r"cache\.T"):
        down(feats, coords, (*sizes, 3), neighbor_cache=cache.T)
    with pytest.raises(AssertionError, match="other input coordinates"):
        down(feats, coords.clone(), (*sizes, 3), neighbor_cache=cache)


@devices
def test_kernels_of_listed_offsets(flex_gemm, device):
    sizes = (2, 6, 6)
    coords, feats = distinct(30, sizes).to(device), torch.randn(30, 3).double().to(device)
    weight = torch.randn(4, 3, 3, 3).double().to(device)
    delta = [(a, b) for a in (-2, 0, 2) for b in (-2, 0, 2)]
    flat = weight.flatten(1, 2)
    same = flex_gemm.ops.submanifold_conv(feats, coords, (*sizes, 3), flat, kernel_delta=delta)
    want = flex_gemm.ops.submanifold_conv(feats, coords, (*sizes, 3), weight, dilation=2)
    assert torch.equal(same[0], want[0])
    for name, formula in (("sparse_conv", ""), ("sparse_conv_transpose", "_transpose")):
        call = getattr(flex_gemm.ops, name)
        got = call(feats, coords, (*sizes, 3), flat, kernel_delta=delta, stride=2, offset=(1, 0))
        want = call(feats, coords, (*sizes, 3), weight, stride=2, padding=(1, 2), dilation=2)
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
        ops = flex_gemm.ops
        of_delta = getattr(ops, f"compute_strided_kernel_delta{formula}_output_shape")
        of_size = getattr(ops, f"compute_strided_kernel_size{formula}_output_shape")
        assert got[2][:-1] == want[2][:-1] == of_delta((*sizes, 3), delta, 2, (1, 0))[:-1]
        assert of_size((*sizes, 3), (3, 3), 2, (1, 2), 2) == of_delta((*sizes, 3), delta, 2, (1, 0))


@pytest.mark.parametrize("kind", ["SubmanifoldConv", "SparseConv", "SparseConvTranspose"])
def test_half_autocast_frozen_and_empty(flex_gemm, kind):
    layer = getattr(flex_gemm.nn, f"{kind}4d")(2, 3, 3)
    coords = distinct(20, (2, 3, 3, 3, 3))
    feats, shape = torch.randn(20, 2, requires_grad=True), (2, 3, 3, 3, 3, 2)
    layer.weight.requires_grad_(False)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(feats, coords, shape)[0]
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert feats.grad.dtype == torch.float32 and layer.weight.grad is None
    nothing = layer(torch.zeros(0, 2), torch.zeros(0, 5, dtype=torch.int32), shape)
    assert nothing[0].shape == (0, 3)
    if kind != "SubmanifoldConv":
        assert nothing[1].shape == (0, 5) and len(nothing[2]) == 6


def test_parameters_and_wrong_arguments(flex_gemm):
    nn = flex_gemm.nn
    layer = nn.SparseConv3d(4, 6, 3, 2, bias=False)
    assert layer.weight.shape == (6, 3, 3, 3, 4) and layer.bias is None
    assert layer.weight.abs().max() <= 1 / math.sqrt(108)
    assert "kernel_size=(3, 3, 3)" in repr(layer) and type(layer).__module__ == "flex_gemm.nn"
    with pytest.raises(TypeError, match="takes a tuple"):
        nn.SparseConv(4, 6, 3)
    coords, feats = distinct(9, (2, 4, 4, 4)), torch.randn(9, 4)
    with pytest.raises(ValueError, match="channels last"):
        layer(feats, coords, (2, 4, 4, 4))
    with pytest.raises(AssertionError, match="features"):
        layer(feats[:, :3], coords, (2, 4, 4, 4, 4))
    with pytest.raises(AssertionError, match="one row per coordinate"):
        layer(feats[:3], coords, (2, 4, 4, 4, 4))
    with pytest.raises(ValueError, match="algorithm is 'fast'"):
        nn.SubmanifoldConv3d(4, 6, 3, algorithm="fast")(feats, coords, None)
    with pytest.raises(ValueError, match=r"k1 \.\. k2"):
        flex_gemm.ops.sparse_conv2d(feats, coords, (2, 4, 4, 4, 4), layer.weight)


@pytest.mark.parametrize("name", ["SubmanifoldConv3d", "SparseConv3d", "SparseConvTranspose3d"])
def test_sizes_that_no_layer_can_have(flex_gemm, name):
    layer = getattr(flex_gemm.nn, name)
    with pytest.raises(ArgumentValueError, match="kernel_size is 0"):
        layer(4, 4, 0)
    with pytest.raises(ArgumentValueError, match="in_channels=-1; expected 1 or more channels"):
        layer(-1, 4, 3)
    with pytest.raises(ArgumentValueError, match="out_channels=0; expected 1 or more channels"):
        layer(4, 0, 3)
    with pytest.raises(DataTypeError, match=r"in_channels is 2.0 \(float\)"):
        layer(2.0, 4, 3)
