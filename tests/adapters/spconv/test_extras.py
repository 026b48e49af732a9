"""Measuring, folding, tables, debugging helpers, and the form that all adapters share."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from torch import nn

from sparse_bridge import errors
from sparse_bridge.adapters.spconv import from_core, to_core
from sparse_bridge.core.geometry.sparse_data import SparseData

from . import apis


def test_benchmark_mode_writes_rows_and_seconds(sp):
    x = apis.tensor(sp)
    x.benchmark = True
    net = sp.SparseSequential(
        sp.SubMConv3d(4, 6, 3, indice_key="s", name="first"),
        sp.SubMConv3d(6, 6, 3, indice_key="s", name="second"),
        sp.SubMConv3d(6, 5, 1, name="unit"),
        sp.SparseConv3d(5, 5, 3, 2, 1, indice_key="d", name="down"),
        sp.SparseInverseConv3d(5, 4, 3, "d", name="up"),
        sp.SparseMaxPool3d(2, name="pool"),
    )
    y = net(net[0](x).replace_feature(x.features))
    record = y.benchmark_record
    assert record is x.benchmark_record
    assert list(record) == ["first", "second", "unit", "down", "up", "pool"]
    calls = {name: len(entry["time"]) for name, entry in record.items()}
    assert calls == {"first": 2, "second": 1, "unit": 0, "down": 1, "up": 1, "pool": 1}
    built = {name: len(entry["indice_gen_time"]) for name, entry in record.items()}
    assert built == {"first": 1, "second": 0, "unit": 0, "down": 1, "up": 0, "pool": 1}
    assert record["first"]["num_points"] == record["first"]["num_out_points"] == [60, 60]
    assert record["up"]["num_out_points"] == [60] == record["pool"]["num_points"]
    assert 0 < record["down"]["indice_gen_time"][0] <= record["down"]["time"][0]
    assert record["down"]["type"] == "SparseConvolution"
    assert record["down"]["params"] == {
        "kernel_size": [3, 3, 3],
        "stride": [2, 2, 2],
        "padding": [1, 1, 1],
        "dilation": [1, 1, 1],
        "output_padding": [0, 0, 0],
        "subm": False,
        "transposed": False,
        "input_channels": 5,
        "out_channels": 5,
    }
    assert record["pool"]["type"] == "SparseMaxPool" and record["pool"]["params"]["channels"] == 4


def test_an_enabled_timer_is_asked_by_name(sp):
    class Timer:
        enable, seen = True, []

        def record(self, name, stream=0):
            import contextlib

            self.seen.append(name)
            return contextlib.nullcontext()

    net = sp.SparseSequential(sp.SubMConv3d(4, 4, 3), sp.SparseMaxPool3d(2, name="pool"))
    sp.assign_name_for_sparse_modules(net)
    x = apis.tensor(sp)
    x._timer = Timer()
    net(x)
    assert Timer.seen == ["0", "1"] and net[0]._sparse_unique_name == "0"


def test_timers_do_nothing_without_a_gpu(standin):
    from spconv.tools import CUDAKernelTimer

    timer = CUDAKernelTimer()
    with timer.namespace("net"), timer.record("conv"):
        pass
    if not torch.cuda.is_available():
        assert timer.get_all_pair_time() == {}
    assert CUDAKernelTimer.collect_by_name("conv", {"net.conv": 1.0, "net.pool": 2.0}) == {"net.conv": 1.0}


@pytest.mark.parametrize("arguments", [(3,), (1,), (3, 2, 1), (1, 2)])
@pytest.mark.parametrize("bias", [True, False])
def test_batch_norms_fold_into_layers(standin, arguments, bias):
    from spconv.pytorch.quantization.utils import fuse_spconv_bn_eval

    kind = standin.SparseConv3d if len(arguments) > 1 else standin.SubMConv3d
    conv, norm = kind(4, 6, *arguments, bias=bias), nn.BatchNorm1d(6)
    for tensor in (norm.weight, norm.bias, norm.running_mean):
        nn.init.normal_(tensor)
    norm.running_var.uniform_(0.5, 2)
    with pytest.raises(AssertionError, match="eval"):
        fuse_spconv_bn_eval(conv, norm)
    conv.eval(), norm.eval()
    fused, x = fuse_spconv_bn_eval(conv, norm), apis.tensor(standin)
    torch.testing.assert_close(fused(x).features, norm(conv(x).features), rtol=1e-4, atol=1e-5)
    assert fused is not conv and conv.weight is not fused.weight


def test_simple_modules(sp):
    x = apis.tensor(sp)
    x.grid = torch.ones(3)
    assert sp.RemoveGrid()(x) is x and x.grid is None
    assert sp.Identity()(x) is x
    assert torch.equal(sp.ToDense()(x), x.dense())
    norm = sp.SparseBatchNorm(4)
    assert isinstance(norm, nn.BatchNorm1d) and isinstance(sp.SparseReLU(), nn.ReLU)
    assert torch.equal(norm(x).features, nn.BatchNorm1d(4)(x.features))
    assert torch.equal(sp.SparseReLU()(x).features, x.features.relu())
    assert torch.equal(sp.SparseReLU()(x.features), x.features.relu())
    assert sp.SparseIdentity()(x).features is x.features


def test_tables(sp):
    x = apis.tensor(sp)
    branches = sp.ConcatTable().add(sp.SubMConv3d(4, 5, 3)).add(sp.SubMConv3d(4, 5, 1))
    left, right = branches(x)
    joined, added = sp.JoinTable()([left, right]), sp.AddTable()([left, right])
    assert torch.equal(joined.features, torch.cat([left.features, right.features], 1))
    assert torch.equal(added.features, left.features + right.features)
    assert joined.indices is left.indices and joined.indice_dict is left.indice_dict
    other = apis.tensor(sp, channels=5, seed=4)
    union = sp.tables.AddTableMisaligned()([left, other])
    sites = {tuple(site) for site in torch.cat([left.indices, other.indices]).tolist()}
    assert sorted(sites) == [tuple(site) for site in union.indices.tolist()]


def test_sums_carry_maps_of_sorted_and_unsorted_operands(sp):
    x = apis.tensor(sp)
    inner = sp.SubMConv3d(4, 4, 3, indice_key="s")
    down, up = sp.SparseConv3d(4, 4, 3, 2, 1, indice_key="d"), sp.SparseInverseConv3d(4, 4, 3, "d")
    y = inner(down(x))
    zero = y.replace_feature(torch.zeros_like(y.features))
    add = sp.functional.sparse_add
    total = add(y, zero)
    assert total.indice_dict is not y.indice_dict and not torch.equal(total.indices, y.indices)
    apis.assert_same(up(inner(total)), up(inner(y)), 1e-5)
    record = total.indice_dict["s"]
    assert torch.equal(record.indices, total.indices) and record.is_subm
    again = add(total, total)
    assert again.indice_dict is total.indice_dict
    assert add(y, apis.tensor(sp, shape=(4, 4, 5), rows=80)).indice_dict == {}


def test_printing_modules(standin, capsys):
    x = apis.tensor(standin)
    assert standin.modules.PrintTensorMeta()(x) is x
    clock = standin.modules.PrintCurrentTime()
    assert clock(x, "now") is x and clock(x, reset=True) is x
    out = capsys.readouterr().out
    assert "(60, 4)" in out and out.count("now") == 1


def clocked(module, monkeypatch, capsys):
    """What the printing clock writes while time goes by."""
    now = [100.0]
    monkeypatch.setattr("time.time", lambda: now[0])
    clock = module.modules.PrintCurrentTime()
    for step, reset in ((1.5, False), (2.0, False), (0.5, True), (1.25, False)):
        now[0] += step
        assert clock(3, "now", reset) == 3
    return capsys.readouterr().out, clock.first_time


def test_a_printed_time_is_that_since_the_first(fake_gpu, monkeypatch, capsys):
    fake_gpu.has(synchronize=lambda *_: None)  # the wheel asks for a GPU
    want = clocked(apis.wheel(), monkeypatch, capsys)
    assert want[0].split() == ["now", "1.5", "now", "3.5", "now", "0.0", "now", "1.25"]
    with apis.standin() as standin:
        assert clocked(standin, monkeypatch, capsys) == want


def test_data_for_bug_reports(standin, monkeypatch, tmp_path, capsys):
    from spconv import constants, debug_utils

    data = {"indices": torch.arange(6), "what": "a layer"}
    for path, said in (("", "nothing was saved"), (tmp_path / "no" / "file", "not saved")):
        monkeypatch.setattr(constants, "SPCONV_DEBUG_SAVE_PATH", str(path))
        assert debug_utils.spconv_save_debug_data(data) is None
        assert said in capsys.readouterr().out and list(tmp_path.iterdir()) == []
    file = tmp_path / "data.pkl"
    monkeypatch.setattr(constants, "SPCONV_DEBUG_SAVE_PATH", str(file))
    debug_utils.spconv_save_debug_data(data)
    assert f"saved to {file}" in capsys.readouterr().out
    loaded = pickle.loads(file.read_bytes())
    assert torch.equal(loaded["indices"], data["indices"]) and loaded["what"] == "a layer"
    assert standin.functional.identity_decorator(data) is data


def test_helpers_of_upstreams_own_tests(standin):
    from spconv.test_utils import TestCase, generate_sparse_data, params_grid

    assert params_grid([1, 2], ["a"]) == [[1, "a"], [2, "a"]]
    data = generate_sparse_data([6, 7, 8], [5, 9], 3, shape_scale=2)
    assert data["features"].shape == (14, 3) and data["features_dense"].shape == (2, 3, 6, 7, 8)
    rows = data["indices"]
    assert rows[:, 3].tolist() == [0] * 5 + [1] * 9 and not (rows[:, :3] % 2).any()
    assert len(np.unique(rows, axis=0)) == 14
    picked = data["features_dense"][rows[:, 3], :, rows[:, 0], rows[:, 1], rows[:, 2]]
    TestCase().assertAllEqual(picked, data["features"])
    with pytest.raises(AssertionError):
        TestCase().assertAllClose(picked, picked + 1)


def test_tensorview_bridges(standin):
    from cumm import tensorview as tv
    from spconv.pytorch import cppcore

    rows = torch.arange(12, dtype=torch.int32).reshape(3, 4)
    view = cppcore.torch_tensor_to_tv(rows)
    assert view.shape == [3, 4] and view.dtype == tv.int32
    rows[0, 0] = 7
    assert view.numpy()[0, 0] == 7
    assert cppcore.torch_tensor_to_tv(rows, tv.uint8).shape == [3, 16]
    assert cppcore.torch_tensor_to_tv(rows, shape=[12]).shape == [12]
    assert cppcore.torch_tensor_to_tv(rows, shape=[2, 2], stride=[4, 1]).shape == [2, 2]
    assert view.type_view(tv.int64).shape == [3, 2]
    with pytest.raises(ValueError, match="whole number"):
        tv.from_torch(torch.zeros(3, 3)).type_view(tv.float64)
    one, two = cppcore.torch_tensors_to_tv(rows, rows.float())
    assert (one.dtype, two.dtype) == (tv.int32, tv.float32)
    if not torch.cuda.is_available():
        assert cppcore.get_current_stream() == 0


def test_to_core_and_back(sp):
    x = sp.SubMConv3d(4, 4, 3, indice_key="s")(apis.tensor(sp))
    data = to_core(x)
    assert data.feats is x.features and data.coords is x.indices
    assert (data.tensor_stride, data.spatial_shape, data.batch_size) == ((1, 1, 1), (7, 8, 9), 2)
    same = from_core(data, like=x)
    assert type(same) is sp.SparseConvTensor and same.indice_dict is x.indice_dict
    fresh = from_core(data)
    assert fresh.spatial_shape == [7, 8, 9] and fresh.batch_size == 2 and fresh.indice_dict == {}
    apis.assert_same(fresh, x)
    bare = SparseData(x.features, x.indices, (1, 1, 1))
    smallest = from_core(bare)
    assert smallest.spatial_shape == (x.indices[:, 1:].amax(0) + 1).tolist()
    moved = SparseData(x.features, x.indices.clone(), (2, 2, 2))
    other = from_core(moved, like=x)
    assert other.spatial_shape == [7, 8, 9] and other.indice_dict == {}
    assert other.indices is moved.coords and "s" in x.indice_dict


def test_core_form_refusals(sp):
    x = apis.tensor(sp)
    with pytest.raises(errors.DataTypeError, match="SparseConvTensor"):
        to_core(x.features)
    with pytest.raises(errors.ShapeError):
        to_core(x.replace_feature(x.features[:3]))
    negative = SparseData(x.features, x.indices - 1, (1, 1, 1))
    with pytest.raises(errors.CoordinateError, match="start at 0"):
        from_core(negative)
    flat = SparseData(x.features, x.indices[:, :3].contiguous(), (1, 1))
    with pytest.raises(errors.GeometryError, match="axes"):
        from_core(flat, like=x)
    empty = SparseData(x.features[:0], x.indices[:0], (1, 1, 1))
    assert from_core(empty).spatial_shape == [1, 1, 1]


def test_subclasses_of_the_tensor(sp):
    class Mixin:
        pass

    class Mine(sp.SparseConvTensor, Mixin):
        pass

    x = apis.tensor(sp)
    mine = Mine(x.features, x.indices, x.spatial_shape, 2)
    down, up = sp.SparseConv3d(4, 4, 2, 2, indice_key="d"), sp.SparseInverseConv3d(4, 4, 2, "d")
    apis.assert_same(up(down(mine)), up(down(x)))


def test_standin_models_outlive_the_standin():
    with apis.standin() as sp:
        net = sp.SparseSequential(sp.SparseConv3d(4, 4, 2, 2, indice_key="d"), sp.SparseInverseConv3d(4, 4, 2, "d"))
        x = apis.tensor(sp)
        want = net(x)
    apis.wheel()  # another spconv under the same name
    apis.assert_same(net(x), want)
