"""Pair tables as inputs of a file, and what computes them from coordinates."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sparse_bridge.errors import DataTypeError, ShapeError
from tests.quick import quick

onnx = pytest.importorskip("onnx")
from sparse_bridge.export import ExportError, evaluate, export_onnx, rulebook_inputs  # noqa: E402

from .test_onnx_file import encoder, inputs, scene, sparse_nodes  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.mark.parametrize("legacy", quick([False], [False, True]))
@pytest.mark.parametrize("do_sort", [False, True])
def test_the_same_values_as_nodes_in_the_file(sp, tmp_path, do_sort, legacy):
    net, path = encoder(sp), tmp_path / "encoder.onnx"
    options = {"do_sort": do_sort, "legacy": legacy, "verify": True}
    with_nodes = export_onnx(net, scene(sp), **options)
    proto = export_onnx(net, scene(sp), path, rulebooks="inputs", **options)
    onnx.checker.check_model(proto)
    assert {n.op_type for n in sparse_nodes(proto)} == {"ImplicitGemm", "IndiceConv"}
    for rows, seed in ((333, 5), (1, 2)):
        x = scene(sp, rows, seed)
        tables = rulebook_inputs(path, x.indices)
        got = evaluate(path, {"features": x.features, **tables})
        for one, other in zip(got, evaluate(with_nodes, inputs(x)), strict=True):
            assert torch.equal(one, other)
        again = evaluate(path, {"features": x.features * 2, **tables})  # other rows, same sites
        twice = evaluate(with_nodes, {**inputs(x), "features": x.features * 2})
        assert all(map(torch.equal, again, twice))


def test_inputs_are_declared_as_the_plugins_take_them(standin):
    proto = export_onnx(encoder(standin), scene(standin), rulebooks="inputs")
    assert {v.type.tensor_type.elem_type for v in proto.graph.input[1:]} == {onnx.TensorProto.INT32}
    declared = {v.name: [d.dim_value or d.dim_param for d in v.type.tensor_type.shape.dim] for v in proto.graph.input}
    first, down = "voxels_num", "map1_rows"
    assert declared == {
        "features": [first, 4],
        "map0_pair_fwd": [27, first],
        "map0_pair_mask": [first, 1],
        "map0_mask_argsort": [first],
        "map1_indices": [down, 4],
        "map1_pair_fwd": [27, down],
        "map1_pair_mask": [down, 1],
        "map1_mask_argsort": [down],
        "map2_pair_fwd": [27, down],
        "map2_pair_mask": [down, 1],
        "map2_mask_argsort": [down],
        "map3_pairs": [2, 125, down],
        "map3_pair_num": [125],
        "map3_voxels_num": [],
    }
    tables = rulebook_inputs(proto, scene(standin, 55, 1).indices)
    assert tables.keys() == declared.keys() - {"features"}
    sizes = {first: 55, down: len(tables["map1_indices"])}
    for name, table in tables.items():
        assert table.dtype == torch.int32
        assert list(table.shape) == [sizes.get(size, size) for size in declared[name]]


class Net(nn.Module):
    def __init__(self, sp, kind):
        super().__init__()
        self.sp, self.kind = sp, kind
        self.first, self.second = sp.SubMConv3d(4, 4, 3), sp.SubMConv3d(4, 4, 1)

    def forward(self, features, coords, more=None):
        if self.kind == "computed":
            coords = torch.cat([torch.zeros_like(coords[:, :1]), coords], 1)
        elif self.kind == "long":
            coords = coords.int()
        x = self.sp.SparseConvTensor(features, coords, [9, 10, 11], 2)
        if self.kind == "no maps":
            return self.second(x).features
        y = self.first(x)
        if self.kind == "two clouds":
            z = self.first(self.sp.SparseConvTensor(features, more, [9, 10, 11], 2))
            return y.features, z.features
        return y.features, y.indices


def test_networks_on_tensors(standin):
    x = scene(standin)
    names = ["voxels", "coors"]
    options = {
        "input_names": names,
        "rulebooks": "inputs",
        "verify": True,
        "dynamic_axes": {name: {0: "n"} for name in names},
    }
    proto = export_onnx(Net(standin, "plain").eval(), (x.features, x.indices), **options)
    y = scene(standin, 90, 4)
    tables = rulebook_inputs(proto, y.indices)
    assert torch.equal(tables["coors"], y.indices)  # the file gives them, too
    _, sites = evaluate(proto, {"voxels": y.features, **tables})
    assert torch.equal(sites, y.indices)
    proto = export_onnx(Net(standin, "no maps").eval(), (x.features, x.indices), **options)
    assert rulebook_inputs(proto, x.indices) == {}


def test_coordinates_that_are_no_input_are_refused(standin):
    x = scene(standin)
    for kind, coords in (("computed", x.indices[:, 1:]), ("long", x.indices.long())):
        with pytest.raises(ExportError, match="coordinates are an input"):
            export_onnx(Net(standin, kind).eval(), (x.features, coords.contiguous()), rulebooks="inputs")
    given = x.features, x.indices, x.indices.flip(0).contiguous()
    with pytest.raises(ExportError, match="one set of coordinates"):
        export_onnx(Net(standin, "two clouds").eval(), given, rulebooks="inputs")


def test_wrong_calls_are_refused_by_name(standin):
    net, x = standin.SparseSequential(standin.SubMConv3d(4, 4, 3)).eval(), scene(standin)
    with pytest.raises(ExportError, match="builds its pair tables itself"):
        rulebook_inputs(export_onnx(net, x), x.indices)
    proto = export_onnx(net, x, rulebooks="inputs")
    with pytest.raises(ShapeError, match="rulebook_inputs"):
        evaluate(proto, {"features": x.features})
    with pytest.raises(DataTypeError, match="int64"):
        rulebook_inputs(proto, x.indices.long())
    with pytest.raises(ShapeError, match=r"expected \[N, 4\]"):
        rulebook_inputs(proto, x.indices[:, 1:])
