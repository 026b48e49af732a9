"""Norms, activations, global pools, cropping and bird's-eye-view layers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sparse_bridge.errors import UnsupportedError
from tests import checks

from .conftest import DEVICES
from .test_conv import points
from .test_layers import tensor


def batch_of(ts, x):
    return x.C[:, 0 if ts.release == "2.1" else 3]


@pytest.mark.parametrize(
    "options", [{}, {"affine": False}, {"momentum": None, "eps": 1e-2}, {"track_running_stats": False}], ids=str
)
def test_batch_norm_is_torchs(ts, options):
    x, ours, theirs = tensor(ts), ts.nn.BatchNorm(6, **options), nn.BatchNorm1d(6, **options)
    assert isinstance(ours, nn.BatchNorm1d)
    if ours.affine:
        nn.init.normal_(ours.weight)
        nn.init.normal_(ours.bias)
        theirs.load_state_dict(ours.state_dict())
    for mode in (True, False):
        y = ours.train(mode)(x)
        assert torch.equal(y.F, theirs.train(mode)(x.F)) and y.C is x.C and y._caches is x._caches
    for name, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value)
    x.F = torch.randn(len(x.C), 5)
    with pytest.raises(RuntimeError):
        ours(x)


def test_activations(ts):
    F = ts.nn.functional
    for layer, function, want in (
        (ts.nn.ReLU(), F.relu, nn.functional.relu),
        (ts.nn.SiLU(), F.silu, nn.functional.silu),
        (ts.nn.LeakyReLU(0.1), F.leaky_relu, lambda v: nn.functional.leaky_relu(v, 0.1)),
    ):
        x = tensor(ts)
        kept = x.F.clone()
        assert torch.equal(layer(x).F, want(kept)) and torch.equal(x.F, kept)
        y = function(x)
        assert torch.equal(y.F, want(kept)) and y.F is x.F, "in place unless told otherwise"
        y = function(tensor(ts), inplace=False)
        assert y.F.shape == kept.shape
    x = tensor(ts)
    y = ts.nn.ReLU(True)(x)
    assert y.F.data_ptr() == x.F.data_ptr() and x.F.min() == 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("groups", [1, 2, 6])
def test_group_norm(ts, groups, device):
    x = tensor(ts, batch=4, device=device)
    x.F = x.F.double().requires_grad_()
    layer = ts.nn.GroupNorm(groups, 6).double().to(device)
    nn.init.normal_(layer.weight)
    nn.init.normal_(layer.bias)
    y = layer(x)
    clone = x.F.detach().clone().requires_grad_()
    want = torch.zeros_like(clone)
    for item in range(4):
        rows = (batch_of(ts, x) == item).nonzero().squeeze(1)
        part = nn.functional.group_norm(clone[rows].t().unsqueeze(0), groups, layer.weight, layer.bias, layer.eps)
        want = want.index_copy(0, rows, part[0].t())
    checks.assert_close(y.F, want, torch.float64)
    up = torch.randn_like(want)
    got = torch.autograd.grad(y.F, [x.F, layer.weight, layer.bias], up)
    for one, other in zip(got, torch.autograd.grad(want, [clone, layer.weight, layer.bias], up), strict=True):
        checks.assert_close(one, other, torch.float64)


def test_norms_of_bad_tensors(ts):
    layer = ts.nn.GroupNorm(2, 6)
    assert layer(ts.SparseTensor(torch.zeros(0, 6), torch.zeros(0, 4, dtype=torch.int32))).F.shape == (0, 6)
    with pytest.raises(ValueError, match="channels"):
        layer(tensor(ts, 4))
    x = tensor(ts)
    x.C[0, 0 if ts.release == "2.1" else 3] = -1
    with pytest.raises(ValueError, match="batch index -1"):
        layer(x)
    with pytest.raises(ValueError, match="batch index -1"):
        ts.nn.GlobalAvgPool()(x)


def test_group_norm_in_half_precision(ts):
    x = tensor(ts)
    want = ts.nn.GroupNorm(3, 6)(ts.SparseTensor(x.F.half().float(), x.C)).F
    got = ts.nn.GroupNorm(3, 6)(ts.SparseTensor(x.F.half(), x.C)).F
    assert got.dtype == torch.float16
    torch.testing.assert_close(got.float(), want, atol=4e-3, rtol=4e-3)


def test_instance_norm(ts21):
    ts21.release = "2.1"
    x = tensor(ts21)
    with pytest.warns(UserWarning, match="num_features"):
        y = ts21.nn.InstanceNorm(6)(x)
    want = (x.F - x.F.mean(1, keepdim=True)) / (x.F.var(1, correction=0, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(y.F, want)
    with pytest.raises(ValueError, match=r"channels|num_features"):
        ts21.nn.InstanceNorm(6, affine=True)(x)
    layer = ts21.nn.InstanceNorm(6, affine=True, per_batch=True)
    y = layer(x)
    for item in range(3):
        rows = x.C[:, 0] == item
        want = nn.functional.instance_norm(x.F[rows].t().unsqueeze(0))[0].t()
        torch.testing.assert_close(y.F[rows], want, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_global_pools(ts, device):
    x = tensor(ts, batch=4, device=device)
    x.F.requires_grad_()
    F = ts.nn.functional
    items = [x.F[batch_of(ts, x) == b] for b in range(4)]
    for layer, function, want in (
        (ts.nn.GlobalAvgPool(), F.global_avg_pool, torch.stack([i.mean(0) for i in items])),
        (ts.nn.GlobalMaxPool(), F.global_max_pool, torch.stack([i.amax(0) for i in items])),
    ):
        y = layer(x)
        torch.testing.assert_close(y, want)
        assert torch.equal(function(x), y)
        up = torch.randn_like(want)
        got, other = (torch.autograd.grad(v, x.F, up, retain_graph=True)[0] for v in (y, want))
        torch.testing.assert_close(got, other)


def test_pools_of_missing_items(ts):
    x = tensor(ts)
    keep = batch_of(ts, x) != 1
    some = ts.SparseTensor(x.F[keep], x.C[keep])
    y = ts.nn.GlobalAvgPool()(some)
    assert y[1].isnan().all() and y[[0, 2]].isfinite().all()
    with pytest.raises(ValueError, match="item 1 has no rows"):
        ts.nn.GlobalMaxPool()(some)
    none = ts.SparseTensor(x.F[:0], x.C[:0])
    for layer in (ts.nn.GlobalAvgPool(), ts.nn.GlobalMaxPool()):
        with pytest.raises(ValueError, match="without rows"):
            layer(none)


def test_crop(ts):
    x = tensor(ts)
    y = ts.nn.SparseCrop((1, 0, 2), (3, 4, 5))(x)
    columns = x.C[:, :3]
    keep = ((columns >= torch.tensor([1, 0, 2])) & (columns < torch.tensor([3, 4, 5]))).all(1)
    assert torch.equal(y.C, x.C[keep]) and torch.equal(y.F, x.F[keep])
    assert y.stride == x.stride and y._caches is not x._caches and y.cmaps == {}
    F = ts.nn.functional
    assert len(F.spcrop(x).C) == len(x.C)
    assert torch.equal(F.spcrop(x, torch.tensor([1, 0, 2]), torch.tensor([3, 4, 5])).C, y.C)
    assert len(F.spcrop(x, coords_max=(0, 0, 0)).C) == 0
    with pytest.raises(ValueError, match="expected three"):
        F.spcrop(x, (1, 2))


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("stride", [1, 2])
def test_dense_bev_convolution(ts, dim, stride):
    shape, offset = (6, 5, 7), (0, 0, 0)
    coords = points(ts.release, scale=(stride,) * 3, seed=3)
    x = ts.SparseTensor(torch.randn(len(coords), 4), coords, stride)
    layer = ts.nn.ToDenseBEVConvolution(4, 3, shape, offset, dim, bias=True)
    assert {k: tuple(v.shape) for k, v in layer.state_dict().items()} == {
        "kernel": (shape[dim], 4, 3),
        "bias": (1, 3),
        "offset": (1, 4),
        "shape": (3,),
    }
    nn.init.normal_(layer.bias)
    u, v = (a for a in range(3) if a != dim)
    want = torch.zeros(2, 3, shape[u], shape[v])
    sites = coords.tolist() if ts.release == "2.1" else coords[:, [3, 0, 1, 2]].tolist()
    for (b, *p), feat in zip(sites, x.F, strict=True):
        p = [c // stride for c in p]
        want[b, :, p[u], p[v]] += feat @ layer.kernel[p[dim]] + layer.bias[0]
    torch.testing.assert_close(layer(x), want)
    assert layer.kernel.abs().max() <= 0.5 and "n_kernels" in repr(layer)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_height_compression(ts, dim):
    shape, offset = (7, 6, 8), (1, 1, 1)
    coords = points(ts.release, seed=4, low=offset)
    x = ts.SparseTensor(torch.randn(len(coords), 4), coords)
    layer = ts.nn.ToBEVHeightCompression(4, shape, offset, dim)
    u, v = (a for a in range(3) if a != dim)
    want = torch.zeros(2, shape[dim] * 4, shape[u], shape[v])
    sites = coords.tolist() if ts.release == "2.1" else coords[:, [3, 0, 1, 2]].tolist()
    for (b, *p), feat in zip(sites, x.F, strict=True):
        p = [c - 1 for c in p]
        want[b, p[dim] * 4 : p[dim] * 4 + 4, p[u], p[v]] = feat
    torch.testing.assert_close(layer(x), want)
    assert list(layer.state_dict()) == ["offset", "shape"] and f"dim={dim}" in repr(layer)
    small = ts.nn.ToBEVHeightCompression(4, (5, 5, 5), offset, dim)
    with pytest.raises(ValueError, match="Correct shape or offset"):
        small(x)


def test_layers_that_never_worked(ts):
    x = tensor(ts, 4)
    reduction, convolution = ts.nn.ToBEVReduction(), ts.nn.ToBEVConvolution(4, 3, 5, bias=True)
    assert {k: tuple(v.shape) for k, v in convolution.state_dict().items()} == {"kernel": (5, 4, 3), "bias": (1, 3)}
    for layer in (reduction, convolution):
        assert repr(layer)
        with pytest.raises(UnsupportedError, match="every release of torchsparse"):
            layer(x)
