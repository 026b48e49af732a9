"""Tracing and quantisation by torch's graph mode, on networks as upstream's guide writes them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from sparse_bridge.errors import ContractError, UnsupportedError

from . import apis

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")

SHAPE = [12, 12]


def block(sp, channels):
    class Block(sp.SparseModule):
        """A residual block that can be fused."""

        def __init__(self):
            super().__init__()
            first = sp.SubMConv2d(channels, channels, 3, 1, 1, bias=False)
            second = sp.SubMConv2d(channels, channels, 3, 1, 1, bias=False)
            self.conv1_bn_relu = sp.SparseSequential(
                conv=first, bn=nn.BatchNorm1d(channels), relu=nn.ReLU(inplace=True)
            )
            self.conv2_bn = sp.SparseSequential(conv=second, bn=nn.BatchNorm1d(channels))
            self.relu = sp.SparseReLU(inplace=True)
            self.iden_for_fx_match = sp.SparseIdentity()

        def forward(self, x):
            identity = x
            out = self.conv2_bn(self.conv1_bn_relu(x))
            return self.relu(out + self.iden_for_fx_match(identity))

    return Block()


def network(sp, seed=0):
    """Two kinds of convolution, a residual block, a pool, a projection, a dense classifier."""
    torch.manual_seed(seed)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = sp.SparseSequential(
                sp.SubMConv2d(1, 8, 3, 1, 1),
                nn.BatchNorm1d(8),
                nn.ReLU(),
                sp.SparseConv2d(8, 8, 2, 2),
                nn.BatchNorm1d(8),
                nn.ReLU(),
                block(sp, 8),
                sp.SubMConv2d(8, 6, 1),
                nn.BatchNorm1d(6),
                sp.SparseMaxPool2d(2, 2),
                sp.ToDense(),
            )
            self.fc1 = nn.Linear(3 * 3 * 6, 16)
            self.fc2 = nn.Linear(16, 10)

        def forward(self, features, indices, batch_size: int):
            x = sp.SparseConvTensor(features, indices, SHAPE, batch_size)
            x = torch.flatten(self.net(x), 1)
            return self.fc2(torch.relu(self.fc1(x)))

    return Net()


def data(seed=0, n=4):
    generator = torch.Generator().manual_seed(seed)
    indices = (torch.rand(n, *SHAPE, generator=generator) < 0.3).nonzero().int()
    return torch.rand(len(indices), 1, generator=generator), indices, n


def trained_norms(net):
    with torch.no_grad():
        for seed in range(4):
            net.train()(*data(seed))
        for parameter in net.parameters():
            if parameter.ndim == 1:
                parameter += 0.1 * torch.randn_like(parameter)
    return net.eval()


def prepared(net, is_qat, change=lambda mapping: None):
    import spconv.pytorch.quantization as spconvq
    import torch.ao.quantization.quantize_fx as qfx

    mapping = spconvq.get_default_spconv_qconfig_mapping(is_qat)
    change(mapping)
    prepare = qfx.prepare_qat_fx if is_qat else qfx.prepare_fx
    graph = prepare(
        copy.deepcopy(net).train(is_qat),
        mapping,
        (),
        backend_config=spconvq.get_spconv_backend_config(),
        prepare_custom_config=spconvq.get_spconv_prepare_custom_config(),
    )
    return graph, mapping


@pytest.fixture
def torchs_maps():
    """`prepare_spconv_torch_inference` changes two dictionaries of torch: put back afterwards."""
    from torch.ao.quantization.fx import _lower_to_native_backend as lowering

    names = "STATIC_LOWER_MODULE_MAP", "STATIC_LOWER_FUSED_MODULE_MAP"
    kept = [(getattr(lowering, name), dict(getattr(lowering, name))) for name in names]
    yield
    for live, before in kept:
        live.clear()
        live.update(before)


def converted(graph, mapping):
    import spconv.pytorch.quantization as spconvq
    import torch.ao.quantization.quantize_fx as qfx

    spconvq.prepare_spconv_torch_inference(True)
    model = qfx.convert_fx(graph.eval(), qconfig_mapping=mapping, backend_config=spconvq.get_spconv_backend_config())
    return spconvq.remove_conv_add_dq(spconvq.transform_qdq(model))


def calls(graph):
    return [(node.op, str(node.target)) for node in graph.graph.nodes]


def test_symbolic_tracing_gives_the_same_network(sp):
    net = trained_norms(network(sp))
    graph = torch.fx.symbolic_trace(net)
    for seed in (1, 2):
        torch.testing.assert_close(graph(*data(seed)), net(*data(seed)))
    layers = [target for op, target in calls(graph) if op == "call_module"]
    assert "net.6.conv1_bn_relu.conv" in layers and "net.9" in layers
    net.train(), graph.train()
    torch.testing.assert_close(graph(*data(3)), net(*data(3)))


def test_layers_over_lists_and_norms_are_nodes(standin):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.join = standin.JoinTable()
            self.add = standin.AddTable()
            self.norm = standin.SparseBatchNorm(8)
            self.mean = standin.SparseGlobalAvgPool()

        def forward(self, x):
            y = self.norm(self.join([x, self.add([x, x])]))
            return self.mean(y)

    net, x = Net(), apis.tensor(standin)
    graph = torch.fx.symbolic_trace(net)
    found = [target for op, target in calls(graph) if op == "call_module"]
    assert found == ["add", "join", "norm", "mean"]
    torch.testing.assert_close(graph(x), net(x))


@pytest.mark.parametrize("is_qat", [False, True])
def test_preparing_fuses_as_upstream_does(standin, is_qat):
    graph, _ = prepared(trained_norms(network(standin)), is_qat)
    kinds = {name: type(module).__name__ for name, module in graph.named_modules()}
    fused = {
        "net.0": "SparseConvBnReLU" if is_qat else "SpconvReLUNd",
        "net.3": "SparseConvBnReLU" if is_qat else "SpconvReLUNd",
        "net.6.conv1_bn_relu.conv": "SparseConvBnReLU" if is_qat else "SpconvReLUNd",
        "net.6.conv2_bn.conv": "SparseConvBnAddReLU" if is_qat else "SpconvAddReLUNd",
        "net.7": "SparseConvBn" if is_qat else "SubMConv2d",
        "net.9": "SparseMaxPool2d",
    }
    assert {name: kinds[name] for name in fused} == fused
    residual = next(n for n in graph.graph.nodes if n.target == "net.6.conv2_bn.conv")
    assert len(residual.args) == 2  # the other summand is the layer's second input
    assert sum("activation_post_process" in str(n.target) for n in graph.graph.nodes) >= 8
    if not is_qat:
        net = trained_norms(network(standin))
        torch.testing.assert_close(graph(*data()), net(*data()), atol=1e-5, rtol=1e-5)


def test_calibrated_model_is_near_the_float_one(standin, torchs_maps):
    net = trained_norms(network(standin))
    graph, mapping = prepared(net, False)
    for seed in range(4):
        graph(*data(seed))
    model = converted(graph, mapping)
    got, want = model(*data(1)), net(*data(1))
    assert not torch.equal(got, want)
    assert (got - want).abs().max() < 0.04 * want.abs().max()
    names = {type(module).__name__ for module in model.modules()}
    assert {"SpConv", "LinearPerChannelWeight"} <= names
    assert "Conv2d" not in names


@pytest.mark.parametrize("kernel", [3, 1])
def test_a_layer_gives_what_integers_give(standin, torchs_maps, kernel):
    """int8 inputs times int8 weights, summed as integers, scaled, rounded: bit for bit."""
    torch.manual_seed(3)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = standin.SubMConv2d(4, 6, kernel, 1, kernel // 2)

        def forward(self, features, indices):
            x = standin.SparseConvTensor(features, indices, SHAPE, 4)
            return self.conv(x).features

    net = Net()
    _, indices, _ = data()
    features = torch.randn(len(indices), 4)
    graph, mapping = prepared(net, False)
    graph(features, indices)
    model = converted(graph, mapping)
    got = model(features, indices)

    scales = dict(model.named_buffers())
    x_scale, y_scale = scales["_scale_0"], scales["conv_scale_0"]
    rounded = torch.quantize_per_tensor(features, x_scale, 0, torch.qint8).int_repr()
    weight = model.conv.get_quantized_weight()
    layer = standin.SubMConv2d(4, 6, kernel, 1, kernel // 2, bias=False).double()
    layer.weight = nn.Parameter(weight.int_repr().double())
    sums = layer(standin.SparseConvTensor(rounded.double(), indices, SHAPE, 4)).features
    assert torch.equal(sums, sums.round())
    if kernel == 3:
        per_channel = weight.q_per_channel_scales().double()
        y = sums * x_scale.double() * per_channel + net.conv.bias.double()
    else:  # kernel volume 1: memory read as [C_in, C_out], rows of the stored weight are scaled
        y = rounded.double() @ weight.dequantize().double().reshape(4, 6) * x_scale.double()
        y = y + net.conv.bias.double()
    want = torch.quantize_per_tensor(y.float(), y_scale, 0, torch.qint8).dequantize()
    steps = ((got - want) / y_scale).abs()
    assert steps.max() <= 1.001 and (steps > 0.5).float().mean() < 0.01  # ties round either way


def test_training_with_fake_quantisation_learns(standin, torchs_maps):
    net = network(standin)
    graph, mapping = prepared(net, True)
    labels = torch.randint(0, 10, (4,), generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.Adam(graph.parameters(), 2e-2)
    losses = []
    for _ in range(15):
        loss = nn.functional.cross_entropy(graph(*data()), labels)
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in graph.parameters())
        optimizer.step()
        losses.append(float(loss))
    assert losses[-1] < 0.8 * losses[0]
    graph.eval().apply(torch.ao.quantization.disable_observer)
    want = graph(*data())
    got = converted(copy.deepcopy(graph), mapping)(*data())
    assert (got - want).abs().max() < 0.05 * want.abs().max()


@pytest.mark.parametrize("kernel", [3, 1])
def test_a_norm_in_training_sees_the_convolution_as_it_is(standin, kernel):
    """With rounding off, a fused layer computes what its parts do, and keeps their statistics."""
    import spconv.pytorch.quantization as spconvq
    from spconv.pytorch.quantization import intrinsic

    torch.manual_seed(0)
    conv = standin.SubMConv3d(4, 6, kernel, bias=True)
    norm = nn.BatchNorm1d(6)
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([1.0, -0.5, 2.0, 0.0, 0.3, 1.5]))
        norm.running_var.uniform_(0.5, 2)
    x = apis.tensor(standin)
    fused = intrinsic.SpconvBnReLUNd(copy.deepcopy(conv), copy.deepcopy(norm), nn.ReLU())
    fused.qconfig = spconvq.get_default_spconv_trt_qat_qconfig("fbgemm", 0)
    layer = intrinsic.qat.SparseConvBnReLU.from_float(fused.train())
    layer.weight_fake_quant.apply(torch.ao.quantization.disable_fake_quant)
    for _ in range(2):
        want = norm(conv(x).features).relu()
        torch.testing.assert_close(layer(x).features, want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(layer.bn.running_mean, norm.running_mean, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(layer.bn.running_var, norm.running_var, atol=1e-5, rtol=1e-5)
    plain = layer.eval().to_float()
    assert type(plain) is intrinsic.SpconvReLUNd
    want = norm.eval()(conv.eval()(x).features).relu()
    torch.testing.assert_close(plain(x).features, want, atol=1e-5, rtol=1e-5)
    layer.freeze_bn_stats().train()
    before = layer.bn.running_mean.clone()
    layer(x)
    assert torch.equal(layer.bn.running_mean, before) and not layer.bn.training
    layer.update_bn_stats()(x)
    assert not torch.equal(layer.bn.running_mean, before)


def test_layers_may_be_left_in_float(standin, torchs_maps):
    def only_dense(mapping):
        mapping.set_module_name_regex("net.*", None)

    net = trained_norms(network(standin))
    graph, mapping = prepared(net, False, only_dense)
    graph(*data())
    model = converted(graph, mapping)
    assert "SpConv" not in {type(module).__name__ for module in model.modules()}
    want = net(*data())
    assert (model(*data()) - want).abs().max() < 0.03 * want.abs().max()


def test_a_batch_without_rows_passes_observers(standin):
    from spconv.pytorch.quantization import fake_q

    empty = standin.SparseConvTensor(torch.zeros(0, 4), torch.zeros(0, 3).int(), SHAPE, 1)
    for qconfig in (fake_q.default_symmetric_spconv_ptq_qconfig, fake_q.default_symmetric_spconv_qat_qconfig):
        observer = qconfig.activation()
        assert observer(empty).features.shape == (0, 4)
        x = apis.tensor(standin)
        assert observer(x).features.shape == x.features.shape
        assert observer(x.features).shape == x.features.shape


def test_quantised_tensors_are_seen_as_integers(standin):
    """In the same memory, whatever its strides."""
    from spconv.pytorch.cppcore import torch_tensor_to_tv

    q = torch.quantize_per_tensor(torch.arange(6.0).view(2, 3), 0.5, 0, torch.qint8)
    for ten in (q, q.t(), q[1:]):
        seen = torch_tensor_to_tv(ten)
        assert seen.dtype == 3 and seen.numpy().tolist() == ten.int_repr().tolist()
    torch_tensor_to_tv(q).numpy_view()[0, 0] = 9
    assert float(q[0, 0].dequantize()) == 4.5
    assert torch_tensor_to_tv(q, shape=[6]).shape == [6]


def test_sums_of_quantised_tensors(standin):
    from spconv.pytorch.quantization import quantize_per_tensor
    from spconv.pytorch.quantization.core import quantized_add

    x = apis.tensor(standin)
    q = quantize_per_tensor(x, 0.05, 0, torch.qint8)
    assert q.is_quantized and q.q_scale() == pytest.approx(0.05)
    assert (q.dequantize().features - x.features.clamp(-6.4, 6.35)).abs().max() <= 0.0251
    total = quantized_add(q, q, 0.1, 0)
    torch.testing.assert_close(total.dequantize().features, 2 * q.dequantize().features, atol=1e-6, rtol=0)
    both = quantize_per_tensor([x, x.features], 0.05, 0, torch.qint8)
    assert both[1].is_quantized and both[0].is_quantized


@pytest.mark.parametrize("act", [nn.ReLU(), nn.LeakyReLU(0.2), nn.Sigmoid()])
def test_activations_fold_into_convolutions(standin, act):
    from spconv.pytorch.quantization.utils import fuse_spconv_act_eval

    conv, x = standin.SubMConv3d(4, 6, 3).eval(), apis.tensor(standin)
    fused = fuse_spconv_act_eval(conv, act.eval())
    torch.testing.assert_close(fused(x).features, act(conv(x).features), atol=1e-6, rtol=1e-5)
    with pytest.raises(UnsupportedError, match="GELU"):
        fuse_spconv_act_eval(conv, nn.GELU().eval())
    with pytest.raises(ContractError, match="eval"):
        fuse_spconv_act_eval(conv.train(), act)
    with pytest.raises(ContractError, match="kernel size 1"):
        fuse_spconv_act_eval(standin.SubMConv3d(4, 6, 1).eval(), act.eval())


def test_a_network_is_made_by_handlers(standin):
    from spconv.pytorch.quantization.interpreter import (
        REGISTERED_NODE_HANDLERS,
        NetworkInterpreter,
        register_method_handler,
        register_node_handler,
    )

    net = trained_norms(network(standin))
    graph, seen = torch.fx.symbolic_trace(net), []

    @register_node_handler(standin.SubMConv2d, standin.SparseConv2d)
    def convolution(context, target, args, kwargs, name):
        context.append((name, tuple(target.weight.shape)))
        return target(*args, **kwargs)

    @register_method_handler("dense", standin.SparseConvTensor)
    def dense(context, target, args, kwargs, name):
        context.append((name, target))
        return args[0].dense()

    try:
        result = NetworkInterpreter(seen, graph, list(data())).run()
    finally:
        REGISTERED_NODE_HANDLERS.clear()
    torch.testing.assert_close(result, net(*data()))
    assert len(seen) == 6 and ("dense", "dense") in seen
    assert seen[0] == ("net_0", (8, 3, 3, 1))
