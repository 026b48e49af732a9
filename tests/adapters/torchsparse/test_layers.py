"""Constructors, parameters, bad input, configuration, backbones."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from sparse_bridge.errors import SparseBridgeError, UnsupportedError
from tests.clouds import cloud

from .conftest import speaking
from .test_conv import points

ONE, TWO = (1, 1, 1), (2, 2, 2)


def tensor(ts, channels=6, seed=0, batch=3, device="cpu", **kwargs):
    coords = points(ts.release, batch=batch, seed=seed).to(device)
    feats = torch.randn(len(coords), channels).to(device)
    return ts.SparseTensor(feats, coords, **kwargs)


def test_attributes(ts):
    conv = ts.nn.Conv3d(4, 6, 3, 2, bias=True)
    assert (conv.in_channels, conv.out_channels, conv.kernel_volume) == (4, 6, 27)
    assert conv.kernel_size == (3, 3, 3) and conv.stride == TWO and conv.transposed is False
    assert conv.dilation == 1 and ts.nn.Conv3d(4, 6, 3, dilation=(1, 2, 1)).dilation == (1, 2, 1)
    assert conv.bias.shape == (6,) and ts.nn.Conv3d(4, 6).bias is None
    assert list(conv.state_dict()) == ["kernel", "bias"]
    assert list(ts.nn.Conv3d(4, 6).state_dict()) == ["kernel"]


@pytest.mark.parametrize(
    "kernel, stride, shape",
    [(3, 1, (27, 4, 6)), (1, 1, (4, 6)), (1, 2, None), ((3, 1, 2), (1, 2, 1), (6, 4, 6)), (2, 2, (8, 4, 6))],
)
def test_kernel_shapes(ts, kernel, stride, shape):
    if shape is None:  # a strided layer of one offset is a matrix up to 2.0, a stack of one in 2.1
        shape = (1, 4, 6) if ts.release == "2.1" else (4, 6)
    for transposed in (False, True):
        conv = ts.nn.Conv3d(4, 6, kernel, stride=stride, transposed=transposed)
        assert tuple(conv.kernel.shape) == shape


def test_a_layer_pickled_by_another_release(ts):
    conv = ts.nn.Conv3d(6, 4, 3)
    want = conv(tensor(ts)).F
    for name in ("_config", "padding", "generative"):
        conv.__dict__.pop(name, None)
    torch.manual_seed(0)
    ts.nn.Conv3d(6, 4, 3)
    assert torch.equal(conv(tensor(ts)).F, want)


def test_a_layer_calls_the_function_that_stands_in_the_place_of_conv3d(ts, monkeypatch):
    F = ts.nn.functional
    own, seen = F.conv3d, []

    def counted(*args, **kwargs):
        seen.append(kwargs)
        return own(*args, **kwargs)

    layers = ts.nn.Conv3d(6, 4, 2, 2, bias=True), ts.nn.Conv3d(4, 6, 2, 2, transposed=True)
    x = tensor(ts)
    want = layers[1](layers[0](x))
    monkeypatch.setattr(F, "conv3d", counted)
    got = layers[1](layers[0](x))
    assert [given["transposed"] for given in seen] == [False, True]
    assert torch.equal(got.F, want.F) and torch.equal(got.C, want.C)


def test_a_layer_whose_geometry_is_changed_between_calls(ts):
    conv = ts.nn.Conv3d(6, 4, 3)
    x = tensor(ts)
    assert conv(x).s == ONE
    conv.stride = [2, 2, 2]
    strided = conv(x)
    conv.stride = 2
    again = conv(tensor(ts))
    assert strided.s == again.s == TWO and len(again.C) < len(x.C)
    assert torch.equal(strided.C, again.C)


def test_a_parametrised_kernel(ts):
    conv = ts.nn.Conv3d(6, 4, 3, bias=True)
    x = tensor(ts)
    with torch.no_grad():
        conv.bias.zero_()
    want = 2 * conv(x).F

    class Doubled(nn.Module):
        def forward(self, kernel):
            return 2 * kernel

    parametrize.register_parametrization(conv, "kernel", Doubled())
    torch.testing.assert_close(conv(x).F, want)


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
    assert repr(conv) == ("Conv3d(4, 6, kernel_size=(3, 3, 3), stride=(2, 2, 2), bias=False, transposed=True)")
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
        (lambda: conv(made(feats=x.F.numpy())), TypeError, "expected for feats, got numpy.ndarray"),
        (lambda: conv(made(coords=x.C.numpy())), TypeError, "expected for coords, got numpy.ndarray"),
        (lambda: conv(made(feats=x.F.to("meta"))), RuntimeError, "features on meta"),
        (lambda: conv(made(feats=x.F.double())), TypeError, "float64"),
        (lambda: nn_.Conv3d(4, 6, 1)(made(feats=x.F.double())), TypeError, "float64"),
        (lambda: conv(made(feats=x.F.long())), TypeError, "int64"),
        (lambda: conv(x.F), TypeError, "takes a torchsparse.SparseTensor, got Tensor"),
        (lambda: nn_.Conv3d(4, 6, 3, stride=0), ValueError, "strides start at 1"),
        (lambda: nn_.Conv3d(4, 6, 3, stride=(1, -1, 1), transposed=True), ValueError, "strides start at 1"),
        (lambda: nn_.Conv3d(4, 6, 0), ValueError, r"kernel size \(0, 0, 0\)"),
        (lambda: nn_.Conv3d(4, 6, -1), ValueError, r"kernel size \(-1, -1, -1\)"),
        (lambda: nn_.Conv3d(4, 6, 3, dilation=0), ValueError, r"dilation \(0, 0, 0\)"),
        (lambda: nn_.Conv3d(-1, 6, 3), AssertionError, "in_channels=-1; expected 1 or more channels"),
        (lambda: nn_.Conv3d(4, 0, 3), AssertionError, "out_channels=0; expected 1 or more channels"),
        (lambda: nn_.Conv3d(2.0, 6, 3), TypeError, r"in_channels is 2.0 \(float\); expected a whole number"),
        (lambda: nn_.functional.conv3d(x, conv.kernel, 3, stride=0, transposed=True), ValueError, "strides start at 1"),
        (lambda: nn_.functional.conv3d(x, conv.kernel, 0), ValueError, "sizes"),
        (lambda: nn_.functional.conv3d(x, conv.kernel[:9], 3), ValueError, "9 matrices"),
        (lambda: nn_.functional.conv3d(x, conv.kernel, (3, 3)), ValueError, "one number or three"),
        (lambda: nn_.Conv3d(4, 6, (3, 3)), AssertionError, "3 numbers"),
        (lambda: nn_.functional.conv3d(x, conv.kernel, 3, torch.ones(5)), ValueError, "bias"),
        (lambda: nn_.Conv3d(4, 6, 41)(x), OverflowError, "68921 offsets"),
    ]
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
    assert F.get_default_conv_config() is default and default is F.conv_config.get_default_conv_config()
    assert default.kmap_mode == default["kmap_mode"] == "hashmap_on_the_fly"
    assert set(default) >= {"dataflow", "ifsort", "split_mask_num", "split_mask_num_bwd", "FOD_fusion"}
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
