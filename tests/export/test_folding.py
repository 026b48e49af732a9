"""Norms, biases and activations become part of the nodes before them, and nothing else does."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.adapters.spconv import apis

onnx = pytest.importorskip("onnx")
from sparse_bridge.export import ExportError, evaluate, export_onnx  # noqa: E402

from .networks import basic_block, with_statistics  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:overflow encountered in cast")
SHAPE = (9, 10, 11)


def scene(sp, rows=200, seed=0):
    return apis.tensor(sp, SHAPE, rows=rows, seed=seed)


def kinds_of(proto):
    return [node.op_type for node in proto.graph.node]


def attribute(node, name):
    return {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}[name]


def assert_computes(proto, net, x):
    """The file gives the network's rows. Folding rounds each weight once more: a few units in the
    last place of fp32 per layer, far below 1e-5 of the RMS."""
    got = evaluate(proto, {"features": x.features, "indices": x.indices})[0]
    with torch.no_grad():
        want = net(x)
    want = want if isinstance(want, torch.Tensor) else want.features
    assert (got - want).square().mean().sqrt() <= 1e-5 * want.square().mean().sqrt()


def layers(sp, *following, conv=None, seed=0):
    torch.manual_seed(seed)
    return with_statistics(sp.SparseSequential(conv or sp.SubMConv3d(4, 6, 3), *following))


CHAINS = {
    "norm and ReLU": (lambda: [nn.BatchNorm1d(6), nn.ReLU()], 1, 0.0),
    "norm and leaky ReLU": (lambda: [nn.BatchNorm1d(6), nn.LeakyReLU(0.2)], 3, 0.2),
    "norm and sigmoid": (lambda: [nn.BatchNorm1d(6), nn.Sigmoid()], 2, 0.0),
    "norm": (lambda: [nn.BatchNorm1d(6, eps=0.1)], 0, 0.0),
    "norm of no parameters": (lambda: [nn.BatchNorm1d(6, affine=False), nn.ReLU()], 1, 0.0),
    "two norms": (lambda: [nn.BatchNorm1d(6), nn.BatchNorm1d(6), nn.ReLU()], 1, 0.0),
    "ReLU": (lambda: [nn.ReLU()], 1, 0.0),
    "nothing": (list, 0, 0.0),
}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("chain", CHAINS)
def test_what_follows_a_layer_is_in_its_node(sp, chain, bias):
    following, act_type, alpha = CHAINS[chain]
    for conv in (
        sp.SubMConv3d(4, 6, 3, bias=bias),
        sp.SparseConv3d(4, 6, 3, 2, 1, bias=bias),
        sp.SparseConv3d(4, 6, 1, 2, bias=bias),
    ):
        net = layers(sp, *following(), conv=conv)
        proto = export_onnx(net, scene(sp), verify=True)
        assert kinds_of(proto)[:2] == ["GetIndicePairsImplicitGemm", "ImplicitGemm"]
        assert set(kinds_of(proto)[2:]) <= {"Identity"}  # of the sites, which the file gives
        gemm = proto.graph.node[1]
        assert attribute(gemm, "act_type") == act_type
        assert attribute(gemm, "act_alpha") == pytest.approx(alpha)
        assert len(gemm.input) == 5 + (bias or "norm" in chain)
        assert_computes(proto, net, scene(sp, 77, 3))


def test_kernel_size_1_and_pair_lists_keep_what_their_nodes_lack(standin):
    net = layers(standin, nn.BatchNorm1d(6), nn.ReLU(), conv=standin.SubMConv3d(4, 6, 1))
    proto = export_onnx(net, scene(standin), verify=True)
    assert [k for k in kinds_of(proto) if k != "Identity"] == ["Gemm", "Relu"]
    assert len(proto.graph.node[0].input) == 3
    assert_computes(proto, net, scene(standin, 77, 3))
    net = layers(standin, nn.BatchNorm1d(6), nn.ReLU(), conv=standin.SubMConv3d(4, 6, 5))
    proto = export_onnx(net, scene(standin), verify=True)
    assert [k for k in kinds_of(proto) if k != "Identity"] == ["GetIndicePairs", "IndiceConv", "Add", "Relu"]
    assert_computes(proto, net, scene(standin, 77, 3))


def test_an_activation_of_the_layer_itself(standin):
    activation = standin.conv.tv.gemm.Activation
    for act_type, code in ((activation.ReLU, 1), (activation.LeakyReLU, 3)):
        conv = standin.SubMConv3d(4, 6, 3)
        conv.act_type, conv.act_alpha = act_type, 0.3
        net = layers(standin, conv=conv)
        proto = export_onnx(net, scene(standin), verify=True)
        assert attribute(proto.graph.node[1], "act_type") == code
        assert_computes(proto, net, scene(standin, 77, 3))


@pytest.mark.parametrize("bias", [False, True])
def test_a_residual_block_keeps_its_sum_alone(sp, bias):
    torch.manual_seed(0)
    net = with_statistics(sp.SparseSequential(basic_block(sp, 4, "a", bias), basic_block(sp, 4, None, bias)))
    proto = export_onnx(net, scene(sp), verify=True)
    block = ["ImplicitGemm", "ImplicitGemm", "Add", "Relu"]
    assert kinds_of(proto)[:9] == ["GetIndicePairsImplicitGemm", *block, *block]
    gemms = [node for node in proto.graph.node if node.op_type == "ImplicitGemm"]
    assert [attribute(node, "act_type") for node in gemms] == [1, 0, 1, 0]
    assert all(len(node.input) == 6 for node in gemms)
    assert_computes(proto, net, scene(sp, 300, 3))


class Shared(nn.Module):
    """Values that others read, too, layers that are called twice, and constants in other shapes."""

    def __init__(self, sp, kind):
        super().__init__()
        self.kind = kind
        self.conv, self.norm = sp.SubMConv3d(4, 4, 3, bias=False), nn.BatchNorm1d(4)
        self.other = nn.BatchNorm1d(4)
        self.gain = nn.Parameter(torch.rand(1, 4) + 0.5)
        self.column = nn.Parameter(torch.rand(4, 1, 1))

    def forward(self, x):
        y = self.conv(x).features
        if self.kind == "two readers":
            return self.norm(y) + y
        if self.kind == "two norms":
            return self.norm(y) * self.other(y)
        if self.kind == "product of itself":
            return torch.relu(y * y)
        if self.kind == "one layer, two norms":
            z = self.conv(x.replace_feature(self.norm(y))).features
            return self.other(z)
        if self.kind == "gain, shift, scalar":
            return torch.relu((y * self.gain + self.gain) * 0.5)
        if self.kind == "another rank":
            return y * self.column
        return y + x.features  # not a constant


FOLDED = {  # norms, products and sums that stay
    "two readers": ["BatchNormalization", "Add"],
    "two norms": ["BatchNormalization", "BatchNormalization", "Mul"],
    "product of itself": ["Mul", "Relu"],
    "one layer, two norms": [],
    "gain, shift, scalar": [],
    "another rank": ["Mul"],
    "a residual": ["Add"],
}


@pytest.mark.parametrize("kind", FOLDED)
def test_only_what_alone_follows_is_folded(standin, kind):
    torch.manual_seed(0)
    net = with_statistics(Shared(standin, kind))
    proto = export_onnx(net, scene(standin), verify=True)
    onnx.checker.check_model(proto)
    ours = {"Constant", "ImplicitGemm", "GetIndicePairsImplicitGemm"}
    assert [k for k in kinds_of(proto) if k not in ours] == FOLDED[kind]
    assert_computes(proto, net, scene(standin, 77, 3))


def test_several_exports_leave_the_network_and_each_other_alone(standin):
    net = layers(standin, nn.BatchNorm1d(6), nn.ReLU())
    x = scene(standin)
    kept, before = {k: v.clone() for k, v in net.state_dict().items()}, net(x).features
    first = export_onnx(net, x).SerializeToString()
    for options in ({"legacy": True}, {"dtype": torch.float16}, {"rulebooks": "inputs"}):
        export_onnx(net, x, verify=True, **options)
    assert export_onnx(net, x).SerializeToString() == first
    assert torch.equal(net(x).features, before)
    assert all(torch.equal(kept[name], value) for name, value in net.state_dict().items())


def test_norms_without_statistics_are_refused_by_name(standin):
    norm = nn.BatchNorm1d(6, track_running_stats=False)
    net = standin.SparseSequential(standin.SubMConv3d(4, 6, 3), norm).eval()
    with pytest.raises(ExportError, match=r"^1 normalises by the scene"):
        export_onnx(net, scene(standin))


class TestHalf:
    """Files in float16."""

    def test_sparse_nodes_and_rows_between_them_are_float16(self, sp):
        torch.manual_seed(0)
        net = with_statistics(
            sp.SparseSequential(
                basic_block(sp, 4, "a", False),
                sp.SparseConv3d(4, 8, 3, 2, 1),
                nn.BatchNorm1d(8),
                nn.ReLU(),
                sp.SubMConv3d(8, 6, 1),
                nn.BatchNorm1d(6),
                sp.ToDense(),
                nn.Flatten(1, 2),
                nn.Conv2d(30, 3, 1),
            )
        )
        x = scene(sp)
        proto = export_onnx(net, x, dtype=torch.float16, verify=True)
        onnx.checker.check_model(proto)
        casts = [node for node in proto.graph.node if node.op_type == "Cast"]
        half, wide = onnx.TensorProto.FLOAT16, onnx.TensorProto.FLOAT
        assert sorted(attribute(node, "to") for node in casts) == [wide, 7, half]
        ends = [*proto.graph.input, *proto.graph.output]
        int32 = onnx.TensorProto.INT32
        assert [v.type.tensor_type.elem_type for v in ends] == [wide, int32, wide]
        (dense,) = evaluate(proto, {"features": x.features, "indices": x.indices})
        with torch.no_grad():
            want = net(x)
        error = (dense - want).square().mean().sqrt() / want.square().mean().sqrt()
        # Half precision rounds by 2 ** -11 = 4.9e-4, in weights, rows and results alike.
        assert 1e-5 < error < 4e-3

    def test_rows_that_are_joined_and_read_by_others(self, standin):
        """Two layers side by side in float16; a sum of channels stays float32."""

        class Joined(nn.Module):
            def __init__(self):
                super().__init__()
                self.a, self.b = standin.SubMConv3d(4, 4, 3), standin.SubMConv3d(4, 4, 1)
                self.c = standin.SubMConv3d(8, 4, 3)

            def forward(self, x):
                y = self.a(x)
                z = self.b(y)
                joined = self.c(y.replace_feature(torch.cat([y.features, z.features], 1)))
                return joined.features, joined.features.sum(1)

        torch.manual_seed(0)
        proto = export_onnx(Joined().eval(), scene(standin), dtype=torch.float16, verify=True)
        onnx.checker.check_model(proto)
        made = {name: node.op_type for node in proto.graph.node for name in node.output}
        inputs = {node.op_type: [made.get(name) for name in node.input] for node in proto.graph.node}
        assert inputs["ReduceSum"][0] == "Cast" and inputs["Concat"] == ["ImplicitGemm", "Gemm"]

    def test_values_that_float16_lacks_are_refused(self, standin):
        net = layers(standin, nn.BatchNorm1d(6))
        net[0].weight.data[0, 0, 0, 0, 0] = 1e6
        with pytest.raises(ExportError, match="float16 ends at 65504"):
            export_onnx(net, scene(standin), dtype=torch.float16)

    def test_verifying_notices_rows_that_float16_lacks(self, standin):
        net, x = layers(standin), scene(standin)
        x = x.replace_feature(x.features * 1e6)
        export_onnx(net, x, verify=True)
        with pytest.raises(ExportError, match="leaves float16"):
            export_onnx(net, x, dtype=torch.float16, verify=True)

    def test_older_files_can_be_float16(self, standin):
        net = layers(standin, nn.BatchNorm1d(6), nn.ReLU())
        proto = export_onnx(net, scene(standin), dtype=torch.float16, legacy=True, verify=True)
        assert "BatchNormalization" in kinds_of(proto)
        assert all(one.data_type == onnx.TensorProto.FLOAT16 for one in proto.graph.initializer)
