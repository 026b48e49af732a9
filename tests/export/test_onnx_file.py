"""Exported files: their nodes, and that they compute what the network computes."""

from __future__ import annotations

import copy
import sys

import pytest
import torch
from torch import nn

from sparse_bridge.errors import DataTypeError, SettingError, ShapeError
from tests.adapters.spconv import apis

onnx = pytest.importorskip("onnx")
from sparse_bridge.export import ExportError, evaluate, export_onnx  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

# What Autoware's plugins declare, and what files of before 2026 lack of it.
PAIRS = "batch_size spatial_shape algo ksize stride padding dilation out_padding subm transpose"
ATTRIBUTES = {
    "GetIndicePairsImplicitGemm": {*PAIRS.split(), "is_train", "do_sort"},
    "ImplicitGemm": {"is_train", "is_subm", "act_alpha", "act_beta", "output_scale", "output_add_scale", "act_type"},
    "GetIndicePairs": set(PAIRS.split()),
    "IndiceConv": {"is_subm"},
}
NEW = {"do_sort", "act_type"}
COUNTS = {"GetIndicePairsImplicitGemm": (1, 5), "ImplicitGemm": (5, 1), "GetIndicePairs": (1, 4), "IndiceConv": (5, 1)}
SHAPE = (9, 10, 11)


def encoder(sp, seed=0):
    torch.manual_seed(seed)

    class Encoder(nn.Module):
        """Shared keys, strides per axis, a residual sum, a layer of kernel size 1, a dense head."""

        def __init__(self):
            super().__init__()
            self.first = sp.SparseSequential(
                sp.SubMConv3d(4, 8, 3, bias=False, indice_key="a"),
                nn.BatchNorm1d(8),
                nn.ReLU(),
                sp.SubMConv3d(8, 8, 3, indice_key="a"),
            )
            self.down = sp.SparseSequential(
                sp.SparseConv3d(8, 12, 3, (2, 1, 2), (0, 1, 1), bias=False, indice_key="d"),
                nn.BatchNorm1d(12),
                nn.ReLU(),
            )
            self.block = sp.SubMConv3d(12, 12, 3, indice_key="b")
            self.wide = sp.SubMConv3d(12, 6, 5, dilation=1)
            self.project = sp.SubMConv3d(6, 5, 1)
            self.head = nn.Conv2d(5 * 4, 3, 3, padding=1)

        def forward(self, x):
            x = self.down(self.first(x))
            x = x.replace_feature(torch.relu(self.block(x).features + x.features))
            y = self.project(self.wide(x))
            return {"view": self.head(y.dense().flatten(1, 2)), "sparse": y}

    net = Encoder().eval()
    for norm in net.modules():
        if isinstance(norm, nn.BatchNorm1d):
            norm.running_mean.uniform_(-0.2, 0.2), norm.running_var.uniform_(0.5, 2)
    return net


def scene(sp, rows=200, seed=0):
    return apis.tensor(sp, SHAPE, rows=rows, seed=seed)


def inputs(x):
    return {"features": x.features, "indices": x.indices}


def test_a_file_computes_the_network_on_other_scenes(sp, tmp_path):
    net, path = encoder(sp), tmp_path / "encoder.onnx"
    export_onnx(net, scene(sp), path, verify=True)
    onnx.checker.check_model(onnx.load(path))
    for rows, seed in ((333, 5), (1, 2), (900, 3)):
        x = scene(sp, rows, seed)
        view, features, sites = evaluate(path, inputs(x))
        with torch.no_grad():
            want = net(x)
        torch.testing.assert_close(view, want["view"], atol=1e-5, rtol=1e-4)
        got = want["sparse"].replace_feature(features)
        got.indices = sites
        apis.assert_same(got, want["sparse"], 1e-4)


def sparse_nodes(proto):
    return [node for node in proto.graph.node if node.domain == "autoware"]


def values_of(node):
    return {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}


@pytest.mark.parametrize("legacy", [False, True])
def test_nodes_have_what_the_plugins_check(standin, legacy):
    proto = export_onnx(encoder(standin), scene(standin), legacy=legacy)
    assert {(part.domain, part.version) for part in proto.opset_import} == {("", 17), ("autoware", 1)}
    nodes = sparse_nodes(proto)
    kinds = [node.op_type for node in nodes]
    assert kinds == [
        "GetIndicePairsImplicitGemm",
        "ImplicitGemm",
        "ImplicitGemm",  # one key, two layers
        "GetIndicePairsImplicitGemm",
        "ImplicitGemm",
        "GetIndicePairsImplicitGemm",
        "ImplicitGemm",
        "GetIndicePairs",
        "IndiceConv",  # 125 offsets
    ]
    for node in nodes:
        expected = ATTRIBUTES[node.op_type] - (NEW if legacy else set())
        assert {a.name for a in node.attribute} == expected
        inputs, outputs = COUNTS[node.op_type]
        fused = not legacy and node.op_type == "ImplicitGemm"  # norm or bias behind each
        assert (len(node.input), len(node.output)) == (inputs + fused, outputs)
    assert values_of(nodes[3]) == {
        "batch_size": 2,
        "spatial_shape": [9, 10, 11],
        "algo": 1,
        "ksize": [3, 3, 3],
        "stride": [2, 1, 2],
        "padding": [0, 1, 1],
        "dilation": [1, 1, 1],
        "out_padding": [0] * 3,
        "subm": 0,
        "transpose": 0,
        "is_train": 0,
        **({} if legacy else {"do_sort": 0}),
    }
    others = {node.op_type for node in proto.graph.node if node.domain == ""}
    assert {"ScatterND", "Relu", "Add", "ConstantOfShape", "Conv"} <= others
    assert legacy == ("BatchNormalization" in others) == ("MatMul" in others)
    held = {one.name: list(one.dims) for one in proto.graph.initializer}
    assert held[nodes[1].input[1]] == [8, 3, 3, 3, 4]


def test_native_layers_and_sorting_are_written_as_asked(standin):
    native = standin.ConvAlgo.Native
    net = standin.SparseSequential(standin.SubMConv3d(4, 4, 3, algo=native)).eval()
    for legacy, kinds in (
        (True, ["GetIndicePairs", "IndiceConv"]),
        (False, ["GetIndicePairsImplicitGemm", "ImplicitGemm"]),
    ):
        proto = export_onnx(net, scene(standin), verify=True, legacy=legacy)
        assert [n.op_type for n in sparse_nodes(proto)] == kinds
    net = standin.SparseSequential(standin.SparseConv3d(4, 4, 2, 2, algo=native)).eval()
    orders = []
    for value in (False, True):
        proto = export_onnx(net, scene(standin), do_sort=value, verify=True)
        maps = sparse_nodes(proto)[0]
        assert values_of(maps)["do_sort"] == value
        proto.graph.output.append(onnx.ValueInfoProto(name=maps.output[3]))
        orders.append(evaluate(proto, inputs(scene(standin)))[-1])
    rows = torch.arange(len(orders[0]), dtype=torch.int32)
    assert torch.equal(orders[0], rows) and not torch.equal(orders[1], rows)


def test_models_that_take_tensors(standin, tmp_path):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = standin.SubMConv3d(4, 6, 3)
            self.fc = nn.Linear(6, 2)

        def forward(self, voxels, coors):
            x = standin.SparseConvTensor(voxels, coors, list(SHAPE), 2)
            return self.fc(self.conv(x).features)

    net, x = Net().eval(), scene(standin)
    names = ["voxels", "coors"]
    proto = export_onnx(
        net,
        (x.features, x.indices),
        input_names=names,
        output_names=["scores"],
        dynamic_axes={name: {0: "n"} for name in names},
        verify=True,
    )
    y = scene(standin, 77, 4)
    (got,) = evaluate(proto, {"voxels": y.features, "coors": y.indices})
    torch.testing.assert_close(got, net(y.features, y.indices).detach(), atol=1e-5, rtol=1e-5)
    with pytest.raises(ShapeError, match="coors"):
        evaluate(proto, {"voxels": y.features})


REFUSED = {
    "inverse or transposed": lambda sp: sp.SparseConvTranspose3d(4, 4, 3),
    "inverse": lambda sp: sp.SparseSequential(
        sp.SparseConv3d(4, 4, 3, 2, indice_key="k"), sp.SparseInverseConv3d(4, 4, 3, "k")
    ),
    "no pooling": lambda sp: sp.SparseMaxPool3d(2),
    "64 kernel offsets": lambda sp: sp.SparseConv3d(4, 4, 4, 4),
    "float64": lambda sp: sp.SubMConv3d(4, 4, 3).double(),
    "float16": lambda sp: sp.SubMConv3d(4, 4, 3).half(),
    "another geometry": lambda sp: sp.SparseSequential(
        sp.SubMConv3d(4, 4, 3, indice_key="k"), sp.SubMConv3d(4, 4, 5, indice_key="k")
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_the_plugins_lack_is_refused_by_name(standin, message):
    net, x = REFUSED[message](standin).eval(), scene(standin)
    if message == "another geometry":  # an eager run refuses this one itself
        with pytest.raises(ValueError, match="kernel"):
            export_onnx(net, x)
        return
    if message.startswith("float"):
        x = x.replace_feature(x.features.to(getattr(torch, message)))
    with pytest.raises(ExportError, match=message):
        export_onnx(net, x)
    assert net(x).features.shape[1] == 4  # and everything is as it was


def test_arguments_that_do_not_fit_are_refused_by_name(standin):
    layer, x = standin.SparseSequential(standin.SubMConv3d(4, 4, 3)).eval(), scene(standin)
    for args, message in ((x.features, "args is a Tensor"), ((x,), r"args\[0\] is a SparseConvTensor")):
        with pytest.raises(DataTypeError, match=message):
            export_onnx(layer, args)
    for options in ({"input_names": ["a"]}, {"input_names": list("abc")}, {"output_names": list("abc")}):
        with pytest.raises(SettingError, match=next(iter(options))):
            export_onnx(layer, x, **options)


def test_outputs_without_a_name_keep_ours(standin):
    layer = standin.SparseSequential(standin.SubMConv3d(4, 4, 3)).eval()
    proto = export_onnx(layer, scene(standin), output_names=["rows"], verify=True)
    assert [value.name for value in proto.graph.output] == ["rows", "out_indices"]


def test_what_torch_does_not_trace_is_one_error(standin):
    class Net(nn.Module):
        def forward(self, x):
            return torch.special.bessel_j0(x.features)

    with pytest.raises(ExportError, match=r"runs, but torch\.onnx does not trace it") as caught:
        export_onnx(Net().eval(), scene(standin))
    assert caught.value.__cause__ is not None


def test_other_refusals(standin):
    x = scene(standin)
    layers = standin.SparseSequential(standin.SubMConv3d(4, 4, 3))
    with pytest.raises(ExportError, match=r"^the network is in training mode; call"):
        export_onnx(layers, x)
    layers.eval()[0].train()
    with pytest.raises(ExportError, match=r"^0, a part of the network, is in training mode; call"):
        export_onnx(layers, x)
    flat = apis.tensor(standin, (9, 10))
    with pytest.raises(ExportError, match="2 dimensions"):
        export_onnx(standin.SubMConv2d(4, 4, 3).eval(), flat)

    class Net(nn.Module):
        def forward(self, x):
            return x.features, "text"

    with pytest.raises(DataTypeError, match="str at output_1"):
        export_onnx(Net().eval(), x)
    layer = standin.SubMConv3d(4, 4, 3).eval()
    for options in ({"dtype": torch.bfloat16}, {"rulebooks": "outputs"}):
        with pytest.raises(SettingError, match=next(iter(options))):
            export_onnx(layer, x, **options)


def test_inputs_that_do_not_fit_are_refused_by_name(standin, tmp_path):
    x = scene(standin)
    proto = export_onnx(standin.SparseSequential(standin.SubMConv3d(4, 4, 3)).eval(), x)
    good = inputs(x)
    for name, value, error in (
        ("features", x.features.double(), DataTypeError),
        ("indices", x.indices.long(), DataTypeError),
        ("features", x.features[:, :3], ShapeError),
        ("indices", x.indices[:, 0], ShapeError),
        ("indices", x.indices[:-1], ShapeError),  # of another scene than the features
    ):
        with pytest.raises(error, match=name):
            evaluate(proto, {**good, name: value})
    (tmp_path / "text.onnx").write_bytes(b"no graph \x00\xff")
    with pytest.raises(ExportError, match=r"text\.onnx is no ONNX file"):
        evaluate(tmp_path / "text.onnx", good)
    with pytest.raises(ExportError, match="dict"):
        evaluate(good, good)
    with pytest.raises(DataTypeError, match="inputs are a list"):
        evaluate(proto, list(good.values()))
    arrays = {name: value.numpy() for name, value in good.items()}
    for got, expected in zip(evaluate(proto, arrays), evaluate(proto, good), strict=True):
        assert torch.equal(got, expected)
    with pytest.raises(FileNotFoundError):
        evaluate(tmp_path / "absent.onnx", good)


def test_verifying_notices_values_that_were_fixed(standin):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = standin.SubMConv3d(4, 4, 3)

        def forward(self, x):
            return self.conv(x).features * float(x.features.abs().sum())

    export_onnx(Net().eval(), scene(standin))
    with pytest.raises(ExportError, match="fixed"):
        export_onnx(Net().eval(), scene(standin), verify=True)


def test_masks_that_do_not_fit_are_noticed(standin):
    net = standin.SparseSequential(standin.SubMConv3d(4, 4, 3)).eval()
    proto = export_onnx(net, scene(standin))
    wrong = copy.deepcopy(proto)
    gemm = next(node for node in wrong.graph.node if node.op_type == "ImplicitGemm")
    pairs = next(node for node in wrong.graph.node if node.op_type.startswith("GetIndice"))
    ones = onnx.helper.make_node("Sub", [pairs.output[2], pairs.output[2]], ["no_masks"])
    gemm.input[3] = "no_masks"
    wrong.graph.node.insert(1, ones)
    with pytest.raises(ShapeError, match="masks"):
        evaluate(wrong, inputs(scene(standin)))


def test_the_missing_package_is_named(standin, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(ImportError, match=r"sparse-bridge\[onnx\]"):
        export_onnx(standin.SubMConv3d(4, 4, 3).eval(), scene(standin))
