"""Layers on int8 values: made of reference layers and in eager mode."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from sparse_bridge.errors import ContractError

from . import apis
from .test_quantization import converted, data, network, prepared, torchs_maps, trained_norms

__all__ = ["torchs_maps"]

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")


@pytest.mark.parametrize("is_qat", [False, True])
def test_layers_on_int8_values_take_the_place_of_reference_layers(standin, torchs_maps, is_qat):
    """With upstream's maps among torch's, as its example has them; the numbers are the same. (torch
    itself lowers no module of two inputs by these maps.)"""
    from spconv.pytorch.quantization import intrinsic
    from spconv.pytorch.quantization.backend_cfg import (
        SPCONV_STATIC_LOWER_FUSED_MODULE_MAP,
        SPCONV_STATIC_LOWER_MODULE_MAP,
    )
    from torch.ao.quantization.fx import _lower_to_native_backend as lowering

    graph, mapping = prepared(trained_norms(network(standin)), is_qat)
    for seed in range(4):
        graph.eval()(*data(seed))
    reference = converted(copy.deepcopy(graph), mapping)
    lowering.STATIC_LOWER_MODULE_MAP.update(SPCONV_STATIC_LOWER_MODULE_MAP)
    fused = dict(SPCONV_STATIC_LOWER_FUSED_MODULE_MAP)
    _, with_sum = fused.pop(intrinsic.SpconvAddReLUNd)
    lowering.STATIC_LOWER_FUSED_MODULE_MAP.update(fused)
    model = converted(graph, mapping)
    names = {type(module).__name__ for module in model.modules()}
    assert {"SparseConv", "SparseConvReLU"} <= names
    assert torch.equal(model(*data(1)), reference(*data(1)))
    (summed,) = (m for m in model.modules() if type(m) is intrinsic.SpconvAddReLUNd)
    layer, x = with_sum.from_reference(summed, 0.05, 0), apis.tensor(standin, (9, 9), 8)
    for other in (x, standin.quantization.quantize_per_tensor(x, 0.1, 0, torch.qint8)):
        want = summed(x, other.dequantize() if other.is_quantized else other)
        want = torch.quantize_per_tensor(want.features, 0.05, 0, torch.qint8)
        assert torch.equal(layer(x, other).features.int_repr(), want.int_repr())
    again = copy.deepcopy(model)
    again.load_state_dict(model.state_dict())
    assert torch.equal(again(*data(2)), model(*data(2)))


def observed(standin, layer, x, qat=False):
    """`layer` in a network that torch's eager mode has prepared and that has seen x."""
    from spconv.pytorch.quantization import fake_q, get_spconv_qat_to_static_mapping
    from torch.ao import quantization

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return self.layer(x)

    net = Net().train(qat)
    kind = "qat" if qat else "ptq"
    net.qconfig = getattr(fake_q, f"default_symmetric_spconv_{kind}_qconfig")
    static = get_spconv_qat_to_static_mapping()
    net = quantization.prepare(net, allow_list=set(static))
    net(x)
    return net.eval(), static


@pytest.mark.parametrize("kernel", [3, 1])
@pytest.mark.parametrize("kind", ["SparseConv", "SparseConvReLU", "qat"])
def test_eager_mode_makes_layers_on_int8_values(standin, kind, kernel):
    """Of what was observed, with the weight rounded as its observer says."""
    from spconv.pytorch.quantization import fake_q, intrinsic
    from torch.ao import quantization

    torch.manual_seed(0)
    conv, x = standin.SubMConv3d(4, 6, kernel), apis.tensor(standin)
    layer = conv if kind == "SparseConv" else intrinsic.SpconvReLUNd(conv, nn.ReLU())
    if kind == "qat":
        norm = nn.BatchNorm1d(6)
        with torch.no_grad():
            norm.weight.copy_(torch.tensor([1.0, -0.5, 2.0, 0.7, 0.3, 1.5]))
            norm.running_var.uniform_(0.5, 2)
        fused = intrinsic.SpconvBnReLUNd(conv, norm, nn.ReLU())
        fused.qconfig = fake_q.default_symmetric_spconv_qat_qconfig
        layer = intrinsic.qat.SparseConvBnReLU.from_float(fused.train())
    net, static = observed(standin, layer, x, kind == "qat")
    plain = net.layer.to_float() if kind == "qat" else net.layer
    plain = copy.deepcopy(plain if kind == "SparseConv" else plain[0]).eval()
    scale, _ = net.layer.activation_post_process.calculate_qparams()
    rounding = getattr(net.layer, "weight_fake_quant", None)
    made = quantization.convert(net, mapping=static).layer
    assert type(made).__name__ == ("SparseConv" if kind == "SparseConv" else "SparseConvReLU")
    weight = made.weight()
    steps = weight.q_per_channel_scales().float()
    if rounding is not None:
        torch.testing.assert_close(steps, rounding.calculate_qparams()[0])
    zeros = torch.zeros(6, dtype=torch.int32)
    rounded = torch.fake_quantize_per_channel_affine(plain.weight, steps, zeros, 0, -128, 127)
    torch.testing.assert_close(weight.dequantize(), rounded)
    torch.testing.assert_close(rounded, plain.weight, atol=0.1 * float(plain.weight.abs().max()), rtol=0)
    assert torch.equal(made.bias(), plain.bias)
    plain.weight = nn.Parameter(weight.dequantize())
    want = plain(x).features
    want = want if kind == "SparseConv" else want.relu()
    want = torch.quantize_per_tensor(want, float(scale), 0, torch.qint8)
    got = made(x)
    assert got.is_quantized and torch.equal(got.features.int_repr(), want.int_repr())
    through = standin.SparseSequential(made)(x)
    assert torch.equal(through.features.int_repr(), want.int_repr())


@pytest.mark.parametrize("fused", [False, True])
def test_linear_layers_in_eager_mode(standin, fused):
    from spconv.pytorch.quantization import fake_q, intrinsic, quantized
    from torch.ao import quantization
    from torch.ao.nn.intrinsic import LinearReLU

    torch.manual_seed(0)
    linear, x = nn.Linear(5, 7), torch.randn(20, 5)
    layer = LinearReLU(linear, nn.ReLU()) if fused else linear
    net = nn.Sequential(layer)
    net.qconfig = fake_q.default_symmetric_spconv_ptq_qconfig
    net = quantization.prepare(net)
    want = net(x)
    kind = intrinsic.quantized.LinearPerChannelWeightReLU if fused else None
    made = (kind or quantized.LinearPerChannelWeight).from_float(net[0])
    got = made(torch.quantize_per_tensor(x, 0.02, 0, torch.qint8))
    assert (got.dequantize() - want).abs().max() < 0.04 * want.abs().max()
    assert (got.dequantize() >= 0).all() == fused


def test_layers_on_int8_values_can_be_filled_by_hand(standin):
    from spconv.pytorch.quantization import fake_q, quantized

    conv, x = standin.SparseConv3d(4, 6, 3, 2, 1), apis.tensor(standin)
    qconfig = fake_q.default_symmetric_spconv_ptq_qconfig
    output = qconfig.activation()
    want = output(conv(x)).features
    made = quantized.SparseConv.get_qconv(conv, output, qconfig.weight())
    assert (made(x).dequantize().features - want).abs().max() < 0.04 * want.abs().max()
    empty = quantized.SparseConv(3, 4, 6, 3, 2, 1)
    assert empty.weight().shape == (6, 3, 3, 3, 4) and not empty.bias().any()
    empty.set_weight_bias(made.weight(), made.bias())
    empty.scale, empty.zero_point = made.scale, made.zero_point
    loaded = quantized.SparseConv(3, 4, 6, 3, 2, 1)
    loaded.load_state_dict(made.state_dict())
    for other in (empty, loaded):
        assert torch.equal(other(x).features.int_repr(), made(x).features.int_repr())
    assert "scale=" in repr(made) and quantized.SparseConv(3, 4, 6, bias=False).bias() is None


def test_what_was_not_observed_is_refused(standin):
    from spconv.pytorch.quantization import fake_q, intrinsic, quantized

    conv = standin.SubMConv3d(4, 4, 3)
    with pytest.raises(ContractError, match="observed no data"):
        quantized.SparseConv.from_float(conv)
    conv.qconfig = fake_q.default_symmetric_spconv_ptq_qconfig
    conv.activation_post_process = conv.qconfig.activation()
    fused = intrinsic.SpconvBnNd(conv, nn.BatchNorm1d(4))  # not folded
    for layer, given in (
        (quantized.SparseConv, fused),
        (intrinsic.quantized.SparseConvReLU, conv),
        (quantized.LinearPerChannelWeight, conv),
    ):
        with pytest.raises(ContractError, match=f"{layer.__name__} is made of"):
            layer.from_float(given)
    with pytest.raises(ContractError, match="qconfig"):
        intrinsic.qat.SparseConv(3, 4, 5)


def test_small_names(standin):
    from spconv.pytorch.quantization import backend_cfg, graph

    (config,) = backend_cfg.conv_dtype_configs
    assert config.input_dtype is config.weight_dtype is torch.qint8
    traced = torch.fx.symbolic_trace(lambda x: x.dequantize().relu())
    found = [graph.is_dequantize_node(node) for node in traced.graph.nodes]
    assert found == [False, True, False, False]
