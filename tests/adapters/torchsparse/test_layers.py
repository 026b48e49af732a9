"""Constructors, parameters, norms, activations, pools, cropping, bird's-eye-view layers,
backbones."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from sparse_bridge.errors import SparseBridgeError, UnsupportedError
from tests import checks
from tests.clouds import cloud

from .conftest import DEVICES, speaking
from .test_conv import points

ONE, TWO = (1, 1, 1), (2, 2, 2)


def tensor(ts, channels=6, seed=0, batch=3, device="cpu", **kwargs):
    coords = points(ts.release, batch=batch, seed=seed).to(device)
    feats = torch.randn(len(coords), channels).to(device)
    return ts.SparseTensor(feats, coords, **kwargs)


def batch_of(ts, x):
    return x.C[:, 0 if ts.release == "2.1" else 3]


def test_attributes(ts):
    conv = ts.nn.Conv3d(4, 6, 3, 2, bias=True)
    assert (conv.in_channels, conv.out_channels, conv.kernel_volume) == (4, 6, 27)
    assert conv.kernel_size == (3, 3, 3) and conv.stride == TWO and conv.transposed is False
    assert conv.dilation == 1 and ts.nn.Conv3d(4, 6, 3, dilation=(1, 2, 1)).dilation == (1, 2, 1)
    assert conv.bias.shape == (6,) and ts.nn.Conv3d(4, 6).bias is None
    assert list(conv.state_dict()) == ["kernel", "bias"]
    assert list(ts.nn.Conv3d(4, 6).state_dict()) == ["kernel"]


@pytest.mark.parametrize("kernel, stride, shape", [
    (3, 1, (27, 4, 6)), (1, 1, (4, 6)), (1, 2, None), ((3, 1, 2), (1, 2, 1), (6, 4, 6)), (2, 2, (8, 4, 6)),
])  # fmt: skip
def test_kernel_shapes(ts, kernel, stride, shape):
    if shape is None:  # a strided layer of one tap is a matrix up to 2.0, a stack of one in 2.1
        shape = (1, 4, 6) if ts.release == "2.1" else (4, 6)
    for transposed in (False, True):
        conv = ts.nn.Conv3d(4, 6, kernel, stride=stride, transposed=transposed)
        assert tuple(conv.kernel.shape) == shape


def test_initial_weights(ts):
    for transposed, fan in ((False, 32), (True, 64)):
        conv = ts.nn.Conv3d(32, 64, 3, bias=True, transposed=transposed)
        bound = 1 / math.sqrt(fan * 27)
        for values in (conv.kernel, conv.bias):
            assert values.abs().max() <= bound
        assert conv.kernel.abs().max() > 0.99 * bound and abs(conv.kernel.mean()) < bound / 50
        assert conv.kernel.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.02)


def test_text(ts):
    conv = ts.nn.Conv3d(4, 6, 3, stride=2, transposed=True)
    assert repr(conv) == (
        "Conv3d(4, 6, kernel_size=(3, 3, 3), stride=(2, 2, 2), bias=False, transposed=True)"
    )
    assert repr(ts.nn.Conv3d(4, 6, 1, bias=True)) == "Conv3d(4, 6, kernel_size=(1, 1, 1))"


def test_positions_of_2_1(ts21):
    conv = ts21.nn.Conv3d(4, 6, 3, 2, 1, 1, True, True, False, None)
    assert conv.padding == ONE and conv.bias is not None and conv.transposed is True
    assert conv.generative is False and conv._config is None
    assert ts21.nn.Conv3d(4, 6, 3).padding == ONE
    assert ts21.nn.Conv3d(4, 6, 3, stride=2).padding == (0, 0, 0)
    assert ts21.nn.Conv3d(4, 6, (3, 1, 2), stride=(1, 2, 1), padding=5).padding == (1, 5, 5)
    assert "generative=True" in repr(ts21.nn.Conv3d(4, 6, 3, transposed=True, generative=True))


def test_positions_of_old_releases():
    for release in ("1.4", "2.0"):
        with speaking(release) as ts:
            conv = ts.nn.Conv3d(4, 6, 3, 2, 1, True, True)
            assert conv.bias is not None and conv.transposed is True and conv.dilation == 1
            with pytest.raises(TypeError, match=r"no argument 'padding' in torchsparse"):
                ts.nn.Conv3d(4, 6, 3, padding=1)
            with pytest.raises(TypeError, match=r"got 'bias' twice"):
                ts.nn.Conv3d(4, 6, 3, 2, 1, True, bias=True)
            with pytest.raises(TypeError, match=r"more positional arguments"):
                ts.nn.Conv3d(4, 6, 3, 2, 1, True, False, None, None)
    with speaking("2.0") as ts:
        assert ts.nn.Conv3d(4, 6).config == {"epsilon": 0.0, "mm_thresh": 0, "kmap_mode": "hashmap"}
        ts.release = "2.0"
        conv = ts.nn.Conv3d(4, 6, config={"epsilon": 0.5, "mm_thresh": 1, "kmap_mode": "hashmap"})
        assert conv(tensor(ts, 4)).F.shape[1] == 6
        conv.config = {"kmap_mode": "grid"}
        with pytest.raises(UnsupportedError, match="grid"):
            conv(tensor(ts, 4))


def test_bad_input(ts):
    nn_, x = ts.nn, tensor(ts, 4)
    conv = nn_.Conv3d(4, 6, 3)

    def made(feats=x.F, coords=x.C, stride=1):
        return ts.SparseTensor(feats, coords, stride)

    wrong = [
        (lambda: conv(made(feats=torch.randn(len(x.C), 5))), ValueError, "kernel size mismatch: 5"),
        (lambda: nn_.Conv3d(5, 6, 1)(x), ValueError, "kernel size mismatch: 4"),
        (lambda: conv(made(coords=x.C.long())), TypeError, "int64; expected torch.int32"),
        (lambda: conv(made(coords=x.C.float())), TypeError, "float32; expected torch.int32"),
        (lambda: conv(made(coords=x.C[:, :3])), ValueError, r"expected \[N, 4\]"),
        (lambda: conv(made(feats=x.F[:-1])), ValueError, r"expected \[N, C\] and \[N, 4\]"),
        (lambda: conv(made(feats=x.F[:, 0])), ValueError, r"expected \[N, C\] and \[N, 4\]"),
        (lambda: conv(made(feats=x.F.numpy())), TypeError, "features in a ndarray"),
        (lambda: conv(made(coords=x.C.numpy())), TypeError, "coordinates in a ndarray"),
        (lambda: conv(made(feats=x.F.to("meta"))), RuntimeError, "features on meta"),
        (lambda: conv(made(feats=x.F.double())), TypeError, "float64"),
        (lambda: nn_.Conv3d(4, 6, 1)(made(feats=x.F.double())), TypeError, "float64"),
        (lambda: conv(made(feats=x.F.long())), TypeError, "int64"),
        (lambda: conv(x.F), TypeError, "takes a torchsparse.SparseTensor, got Tensor"),
        (lambda: nn_.Conv3d(4, 6, 3, stride=0)(x), ValueError, "strides start at 1"),
        (lambda: nn_.functional.conv3d(x, conv.kernel, 0), ValueError, "sizes"),
        (lambda: nn_.functional.conv3d(x, conv.kernel[:9], 3), ValueError, "9 taps"),
        (lambda: nn_.functional.conv3d(x, conv.kernel, (3, 3)), ValueError, "one number or three"),
        (lambda: nn_.Conv3d(4, 6, (3, 3)), AssertionError, "3 numbers"),
        (lambda: nn_.functional.conv3d(x, conv.kernel, 3, torch.ones(5)), ValueError, "bias"),
        (lambda: nn_.Conv3d(4, 6, 41)(x), OverflowError, "68921 taps"),
    ]  # fmt: skip
    for call, kind, text in wrong:
        with pytest.raises(kind, match=text) as caught:
            call()
        assert isinstance(caught.value, SparseBridgeError), text


def test_bad_configs(ts21):
    ts21.release = "2.1"
    F, x = ts21.nn.functional, tensor(ts21, 4)
    weight = torch.zeros(27, 4, 4)
    config = F.conv_config.get_default_conv_config().copy()
    for name, value, kind in (
        ("dataflow", F.Dataflow.CodedCSR, AssertionError),
        ("dataflow", "nonesuch", ValueError),
        ("kmap_mode", "grid", AssertionError),
        ("downsample_mode", "nonesuch", AssertionError),
    ):
        wrong = config.copy()
        wrong[name] = value
        with pytest.raises(kind) as caught:
            F.conv3d(x, weight, 3, config=wrong)
        assert isinstance(caught.value, SparseBridgeError)
    for flow in (F.Dataflow.ImplicitGEMM, F.Dataflow.GatherScatter, F.Dataflow.FetchOnDemand):
        config.dataflow = flow
        assert F.conv3d(x, weight, 3, config=config).F.shape == x.F.shape


def test_configuration_objects(ts21):
    F = ts21.nn.functional
    from torchsparse.nn.functional.conv.utils.collections import AttributeDict

    default = F.conv_config.get_default_conv_config()
    assert (
        F.get_default_conv_config() is default
        and default is F.conv_config.get_default_conv_config()
    )
    assert default.kmap_mode == default["kmap_mode"] == "hashmap_on_the_fly"
    assert set(default) >= {
        "dataflow",
        "ifsort",
        "split_mask_num",
        "split_mask_num_bwd",
        "FOD_fusion",
    }
    copied = default.copy()
    copied.ifsort = True
    assert isinstance(copied, AttributeDict) and default.ifsort is False
    with pytest.raises(AttributeError, match="no field 'nonesuch'"):
        _ = copied.nonesuch
    del copied.ifsort
    assert "ifsort" not in copied and F.get_global_conv_config() is None
    F.set_global_conv_config(copied)
    assert F.conv_config.get_global_conv_config() is copied and copied.ifsort is False
    F.conv_config.clear_global_conv_config()
    assert F.get_global_conv_config() is None
    for mode in (2, 1, 0, F.ConvMode.mode2):
        F.set_conv_mode(mode)
        assert F.get_conv_mode() is F.ConvMode(mode)
    for wrong in (3, -1, "1", None, True):
        with pytest.raises(AssertionError):
            F.set_conv_mode(wrong)
    assert F.conv_config.get_default_conv_config(F.ConvMode.mode2).split_mask_num == 3
    for name, good, bad in (("kmap", "hashmap", "grid"), ("downsample", "minkowski", "dense")):
        getattr(F, f"set_{name}_mode")(good)
        assert getattr(F, f"get_{name}_mode")() == good
        with pytest.raises(AssertionError):
            getattr(F, f"set_{name}_mode")(bad)
    F.set_kmap_mode("hashmap_on_the_fly")
    F.set_downsample_mode("spconv")


def test_setters_change_no_result(ts21):
    """As in torchsparse: only the configuration counts."""
    ts21.release = "2.1"
    F, conv = ts21.nn.functional, ts21.nn.Conv3d(4, 4, 3, stride=2)
    want = conv(tensor(ts21, 4))
    F.set_kmap_mode("hashmap")
    F.set_downsample_mode("minkowski")
    F.set_conv_mode(2)
    got = conv(tensor(ts21, 4))
    assert torch.equal(got.C, want.C)
    F.conv_config.get_default_conv_config().kmap_mode = "hashmap"
    assert not torch.equal(conv(tensor(ts21, 4)).F[:5], want.F[:5])
    F.set_kmap_mode("hashmap_on_the_fly")
    F.set_downsample_mode("spconv")


def test_batch_norm_is_torchs(ts):
    x, ours, theirs = tensor(ts), ts.nn.BatchNorm(6), nn.BatchNorm1d(6)
    assert isinstance(ours, nn.BatchNorm1d)
    for mode in (True, False):
        y = ours.train(mode)(x)
        assert torch.equal(y.F, theirs.train(mode)(x.F)) and y.C is x.C and y._caches is x._caches
    assert torch.equal(ours.running_var, theirs.running_var)


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
    twin = x.F.detach().clone().requires_grad_()
    want = torch.zeros_like(twin)
    for item in range(4):
        rows = (batch_of(ts, x) == item).nonzero().squeeze(1)
        part = nn.functional.group_norm(
            twin[rows].t().unsqueeze(0), groups, layer.weight, layer.bias, layer.eps
        )
        want = want.index_copy(0, rows, part[0].t())
    checks.assert_close(y.F, want, torch.float64)
    up = torch.randn_like(want)
    got = torch.autograd.grad(y.F, [x.F, layer.weight, layer.bias], up)
    for one, other in zip(
        got, torch.autograd.grad(want, [twin, layer.weight, layer.bias], up), strict=True
    ):
        checks.assert_close(one, other, torch.float64)


def test_norms_of_bad_tensors(ts):
    layer = ts.nn.GroupNorm(2, 6)
    assert layer(
        ts.SparseTensor(torch.zeros(0, 6), torch.zeros(0, 4, dtype=torch.int32))
    ).F.shape == (0, 6)
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
    want = (x.F - x.F.mean(1, keepdim=True)) / (
        x.F.var(1, correction=0, keepdim=True) + 1e-5
    ).sqrt()
    torch.testing.assert_close(y.F, want)
    with pytest.raises(ValueError, match="channels|num_features"):
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
        "kernel": (shape[dim], 4, 3), "bias": (1, 3), "offset": (1, 4), "shape": (3,),
    }  # fmt: skip
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
    assert {k: tuple(v.shape) for k, v in convolution.state_dict().items()} == {
        "kernel": (5, 4, 3), "bias": (1, 3),
    }  # fmt: skip
    for layer in (reduction, convolution):
        assert repr(layer)
        with pytest.raises(UnsupportedError, match="every release of torchsparse"):
            layer(x)


def test_backbones(ts21):
    import torchsparse.backbones as backbones

    ts21.release = "2.1"
    coords = cloud((40, 40, 40), 1, 0.02, seed=5)
    x = ts21.SparseTensor(torch.randn(len(coords), 4), coords)
    net = backbones.SparseResNet21D().eval()
    state = net.state_dict()
    assert len(state) == 126 and sum(p.numel() for p in net.parameters()) == 2_693_920
    assert {"0.0.0.kernel", "0.1.main.3.kernel", "4.0.1.running_mean"} <= set(state)
    with torch.no_grad():
        outputs = net(x)
    assert [y.F.shape[1] for y in outputs] == [16, 32, 64, 128, 128]
    assert outputs[-1].stride == (8, 16, 8)
    net = backbones.SparseResUNet42(in_channels=4, width_multiplier=0.25).eval()
    full = backbones.SparseResUNet42()
    assert len(full.state_dict()) == 294
    assert sum(p.numel() for p in full.parameters()) == 21_721_472
    names = set(full.state_dict())
    assert {
        "stem.0.0.kernel",
        "encoders.1.1.shortcut.0.kernel",
        "decoders.0.upsample.0.kernel",
        "decoders.3.fuse.0.main.0.kernel",
    } <= names
    with torch.no_grad():
        outputs = net(ts21.SparseTensor(x.F, x.C))
    assert len(outputs) == 9 and torch.equal(outputs[-1].C, x.C)
    assert [y.stride[0] for y in outputs] == [1, 2, 4, 8, 16, 8, 4, 2, 1]
    block = backbones.modules.SparseResBlock(4, 8, 3, stride=(1, 2, 1))
    assert block.shortcut[0].kernel.shape == (1, 4, 8)
    assert isinstance(backbones.modules.SparseResBlock(4, 4, 3).shortcut, nn.Identity)
