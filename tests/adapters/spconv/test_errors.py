"""Bad input: one clear typed error each, of the kind that spconv's contract names."""

from __future__ import annotations

import logging
import subprocess
import sys

import numpy as np
import pytest
import torch

from sparse_bridge import errors, log

from . import apis

SHAPE = [7, 8, 9]


def parts(rows=10, channels=4):
    generator = torch.Generator().manual_seed(0)
    flat = torch.randperm(7 * 8 * 9, generator=generator)[:rows]
    indices = torch.stack(torch.unravel_index(flat, (1, 7, 8, 9)), 1).int().contiguous()
    return torch.randn(rows, channels, generator=generator), indices


def refused(call, kind, match):
    """`call` raises one of our errors that is also a `kind`; its text."""
    with pytest.raises(kind, match=match) as caught:
        call()
    assert isinstance(caught.value, errors.SparseBridgeError), type(caught.value).__mro__
    return str(caught.value)


# what is wrong with features, indices, grid and batch size -> expected kind, part of the message
TENSORS = {
    "features of rank 1": (lambda f, i: (f[:, 0], i, SHAPE, 1), AssertionError, r"\[N, C\]"),
    "features of rank 3": (lambda f, i: (f[None], i, SHAPE, 1), AssertionError, r"\[N, C\]"),
    "indices of rank 1": (lambda f, i: (f, i[:, 0], SHAPE, 1), AssertionError, r"1 \+ nd"),
    "int64 indices": (lambda f, i: (f, i.long(), SHAPE, 1), AssertionError, "only int32"),
    "float indices": (lambda f, i: (f, i.float(), SHAPE, 1), AssertionError, "only int32"),
    "grid too short": (lambda f, i: (f, i, SHAPE[:2], 1), AssertionError, "must equal ndim"),
    "grid too long": (lambda f, i: (f, i, [*SHAPE, 3], 1), AssertionError, "must equal ndim"),
    "no batch item": (lambda f, i: (f, i, SHAPE, 0), AssertionError, "at least 1"),
    "batch size unknown": (lambda f, i: (f, i, SHAPE, None), TypeError, "batch_size is None"),
    "batch size as text": (lambda f, i: (f, i, SHAPE, "1"), TypeError, "batch_size is '1'"),
    "grid of one number": (lambda f, i: (f, i, 8, 1), TypeError, "spatial_shape is 8"),
    "no grid": (lambda f, i: (f, i, None, 1), TypeError, "spatial_shape is None"),
    "sparse features": (lambda f, i: (f.to_sparse(), i, SHAPE, 1), AssertionError, "to_dense"),
    "negative batch size": (lambda f, i: (f, i, SHAPE, -1), AssertionError, "at least 1"),
}


@pytest.mark.parametrize("case", TENSORS)
def test_tensor_constructor(standin, case):
    spoil, kind, match = TENSORS[case]
    refused(lambda: standin.SparseConvTensor(*spoil(*parts())), kind, match)


def test_keys_are_hashable(standin):
    for make in (standin.SubMConv3d, standin.SparseConv3d):
        refused(lambda make=make: make(4, 4, 3, indice_key=["a"]), TypeError, r"indice_key is \['a'\] \(list\)")
    refused(lambda: standin.SparseMaxPool3d(2, indice_key={}), TypeError, "indice_key is {}")
    assert standin.SubMConv3d(4, 4, 3, indice_key=("a", 1)).indice_key == ("a", 1)


def test_sizes_per_axis(standin):
    """The functions of `ops` take lists; layers expand single numbers before they call them."""
    ops, indices = standin.ops, parts()[1]
    refused(lambda: ops.get_conv_output_size([8, 8], 3, [2, 2], [1, 1], [1, 1]), TypeError, "kernel_size is 3")
    short = [8, 8], [3, 3], [2], [1, 1], [1, 1]
    refused(lambda: ops.get_conv_output_size(*short), ValueError, "stride has 1 entries")
    refused(lambda: ops.get_deconv_output_size(*short, [0, 0]), ValueError, "stride has 1 entries")
    ones, algo = [1] * 3, standin.ConvAlgo.Native
    for build in (ops.get_indice_pairs, ops.get_indice_pairs_implicit_gemm):
        wrong = indices, 1, SHAPE, algo, 3, ones, ones, ones, [0] * 3
        refused(lambda build=build, wrong=wrong: build(*wrong), TypeError, "ksize is 3")
        wrong = indices, 1, SHAPE[:2], algo, [3] * 3, ones, ones, ones, [0] * 3
        refused(lambda build=build, wrong=wrong: build(*wrong), ValueError, "ksize has 3 entries")


def test_dense_of_other_rows(sp):
    x = sp.SparseConvTensor(*parts(), SHAPE, 1)
    refused(lambda: x.replace_feature(torch.zeros(3, 4)).dense(), RuntimeError, "3 rows of features for 10 of indices")


def test_tensor_methods(standin):
    x = standin.SparseConvTensor(*parts(), SHAPE, 1)
    refused(lambda: x.replace_feature(torch.zeros(3)), AssertionError, r"\[N, C\]")
    refused(lambda: x + 1, AssertionError, "adds to another")
    with pytest.raises(ValueError):
        x.q_scale()
    with pytest.raises(TypeError):
        _ = -x


@pytest.mark.parametrize(("column", "value"), [(0, 1), (1, 7), (3, 9), (2, -9)])
def test_dense_of_sites_outside_the_grid(standin, column, value):
    features, indices = parts()
    indices[4, column] = value
    x = standin.SparseConvTensor(features, indices, SHAPE, 1)
    text = refused(x.dense, IndexError, "row 4")
    assert str(value) in text and ("batch index" in text) == (column == 0)


# arguments of the layer, what is done to the tensor -> kind, part of the message
LAYERS = {
    "channels, submanifold": ("SubMConv3d", (5, 4, 3), None, AssertionError, "channel size"),
    "channels, strided": ("SparseConv3d", (5, 4, 3), None, AssertionError, "channel size"),
    "channels, unit": ("SubMConv3d", (5, 4, 1), None, AssertionError, "channel size"),
    "even submanifold kernel": ("SubMConv3d", (4, 4, 2), None, RuntimeError, "odd"),
    "even axis": ("SubMConv3d", (4, 4, (3, 2, 3)), None, RuntimeError, "odd"),
    "grid vanishes": ("SparseConv3d", (4, 4, 12), None, RuntimeError, "at least one cell"),
    "transposed grid vanishes": ("SparseConvTranspose3d", (4, 4, 1, 2, 30), None, RuntimeError, "at least one cell"),
    "pool's grid vanishes": ("SparseMaxPool3d", (12,), None, RuntimeError, "at least one cell"),
    "stride 0": ("SparseConv3d", (4, 4, 3, 0), None, ZeroDivisionError, "stride"),
    "dilation 0": ("SparseConv3d", (4, 4, 3, 1, 1, 0), None, ValueError, "dilation"),
    "2-d layer": ("SparseConv2d", (4, 4, 3), None, RuntimeError, "2-dimensional"),
    "2-d submanifold layer": ("SubMConv2d", (4, 4, 3), None, RuntimeError, "2-dimensional"),
    "4-d pool": ("SparseMaxPool4d", (2,), None, RuntimeError, "4-dimensional"),
    "unknown key": ("SparseInverseConv3d", (4, 4, 3, "nope"), None, AssertionError, "'nope'"),
    "no key": ("SparseInverseConv3d", (4, 4, 3, None), None, AssertionError, "indice_key"),
    "integer features": ("SubMConv3d", (4, 4, 3), lambda f: f.int(), RuntimeError, "torch.int32"),
    "integer features, pool": ("SparseMaxPool3d", (2,), lambda f: f.int(), RuntimeError, "torch.int32"),
    "complex features": ("SubMConv3d", (4, 4, 1), lambda f: f.cfloat(), RuntimeError, "complex64"),
    "float64 features, float32 weight": ("SubMConv3d", (4, 4, 3), lambda f: f.double(), RuntimeError, "autocast"),
    "float16 features, float32 weight": ("SparseConv3d", (4, 4, 3), lambda f: f.half(), RuntimeError, "autocast"),
    "mixed types, unit": ("SubMConv3d", (4, 4, 1), lambda f: f.bfloat16(), RuntimeError, "autocast"),
    "fewer rows, submanifold": ("SubMConv3d", (4, 4, 3), lambda f: f[:9], ValueError, "9 rows"),
    "more rows, strided": ("SparseConv3d", (4, 4, 3), lambda f: f.repeat(2, 1), ValueError, "20 rows"),
    "fewer rows, pool": ("SparseMaxPool3d", (2,), lambda f: f[:9], ValueError, "10 rows"),
    "other device": ("SubMConv3d", (4, 4, 3), lambda f: f.to("meta"), RuntimeError, "one device"),
}


@pytest.mark.parametrize(
    ("arguments", "kind", "match"),
    [
        ((4, 4, 0), ZeroDivisionError, r"kernel size \[0, 0, 0\]"),
        ((4, 4, -1), ValueError, r"kernel size \[-1, -1, -1\]"),
        ((-1, 4, 3), ValueError, "in_channels=-1; expected 1 or more channels"),
        ((4, 0, 3), ValueError, "out_channels=0; expected 1 or more channels"),
        ((2.0, 4, 3), TypeError, r"in_channels is 2.0 \(float\)"),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["SubMConv3d", "SparseConv3d", "SparseConvTranspose3d"])
def test_sizes_that_no_layer_can_have(standin, name, arguments, kind, match):
    refused(lambda: getattr(standin, name)(*arguments), kind, match)


@pytest.mark.parametrize("case", LAYERS)
def test_layers(sp, case):
    name, arguments, spoil, kind, match = LAYERS[case]
    x = sp.SparseConvTensor(*parts(), SHAPE, 1)
    if spoil is not None:
        x = x.replace_feature(spoil(x.features))
    layer = getattr(sp, name)(*arguments)
    refused(lambda: layer(x), kind, match)


def test_weight_on_another_device(sp):
    x = sp.SparseConvTensor(*parts(), SHAPE, 1)
    for kernel in (1, 3):
        layer = sp.SubMConv3d(4, 4, kernel).to("meta")
        refused(lambda layer=layer: layer(x), RuntimeError, "weight on meta")


@pytest.mark.parametrize(
    ("name", "arguments", "kind", "words"),
    [
        ("SubMConv3d", (4, 4, np.int64(3)), TypeError, r"expected an int or a sequence of 3 ints, got int64: "),
        ("SubMConv3d", (4, 4, 3.0), TypeError, r"expected an int or a sequence of 3 ints, got float: 3\.0$"),
        ("SubMConv3d", (4, 4, [3, 3]), AssertionError, r"kernel_size: expected 3 values, got 2: \[3, 3\]$"),
        ("SparseConv3d", (4, 4, 0), ZeroDivisionError, r"kernel size \[0, 0, 0\]; every axis needs at least 1\.$"),
        ("SparseConv3d", (0, 4, 3), ZeroDivisionError, r"in_channels=0; expected 1 or more channels\.$"),
        ("SparseConv3d", (-4, 4, 3), RuntimeError, r"in_channels=-4; expected 1 or more channels\.$"),
        ("SparseConv3d", (4, 4, 1, 1, 1), AssertionError, r"size 1 takes no padding, got \[1, 1, 1\]\.$"),
    ],
)
def test_layer_constructors(standin, name, arguments, kind, words):
    refused(lambda: getattr(standin, name)(*arguments), kind, words)


def test_groups_must_divide(standin):
    from sparse_bridge import settings

    refused(lambda: standin.SubMConv3d(4, 4, 3, groups=2), AssertionError, "SPARSE_BRIDGE_RULES=groups")
    with settings.override(groups=True):
        for groups in (4, 0, -1):
            refused(
                lambda n=groups: standin.SubMConv3d(4, 6, 3, groups=n), AssertionError, f"{groups} groups do not divide"
            )


@pytest.mark.parametrize("algo", ["native", 0, 7, True])
def test_an_algorithm_is_one_of_the_enumeration(standin, algo):
    for make in (lambda: standin.SubMConv3d(4, 8, 3, algo=algo), lambda: standin.SparseMaxPool3d(2, algo=algo)):
        refused(make, AssertionError, f"algo is {algo!r}; expected one of ConvAlgo.Native, ConvAlgo.MaskImplicitGemm")
    assert standin.SubMConv3d(4, 8, 3, algo=standin.ConvAlgo.Native).algo is standin.ConvAlgo.Native


@pytest.mark.parametrize("size", [0, -8])
def test_grids_without_cells(sp, size):
    features, indices = parts()
    for rows in (10, 0):
        x = sp.SparseConvTensor(features[:rows], indices[:rows], [size, 8, 9], 1)
        native = sp.ConvAlgo.Native
        for layer in (sp.SubMConv3d(4, 4, 3, algo=native), sp.SparseMaxPool3d(2, algo=native)):
            refused(lambda layer=layer, x=x: layer(x), RuntimeError, "every axis needs at least one cell")
    if size < 0:
        refused(lambda: x.dense(), RuntimeError, "axis 0 has an extent of -8")


@pytest.mark.parametrize("size", [1.0, 2.9, np.float64(1)])
def test_batch_sizes_are_whole(sp, size):
    x = sp.SparseConvTensor(*parts(), SHAPE, size)
    native = sp.ConvAlgo.Native
    layers = sp.SubMConv3d(4, 4, 3, algo=native), sp.SparseMaxPool3d(2, algo=native), sp.SparseGlobalMaxPool()
    for call in (*layers, sp.SparseConvTensor.dense):
        refused(lambda call=call: call(x), TypeError, "expected a whole number")


def test_fused_activations(standin):
    from cumm import tensorview as tv

    relu = tv.gemm.Activation.ReLU
    fused = standin.conv.SparseConvolution(3, 4, 4, subm=True, act_type=relu)
    x = standin.SparseConvTensor(*parts(), SHAPE, 1)
    refused(lambda: fused(x), AssertionError, "eval")
    plain = standin.conv.SparseConvolution(3, 4, 4, subm=True)
    plain.load_state_dict(fused.state_dict())
    assert torch.equal(fused.eval()(x).features, plain(x).features.relu())
    added = fused(x, x).features
    assert torch.equal(added, (plain(x).features.relu() + x.features).relu())
    refused(lambda: standin.conv.SparseConvolution(3, 4, 4, 1, subm=True, act_type=relu), AssertionError, "activation")


def test_batch_indices_outside_the_batch(sp):
    """Defined behaviour: strided layers drop such rows, submanifold ones keep them alone."""
    features, indices = parts()
    indices[:3, 0] = torch.tensor([1, -1, 7], dtype=torch.int32)
    x = sp.SparseConvTensor(features, indices, SHAPE, 1)
    live = sp.SparseConvTensor(features[3:], indices[3:].contiguous(), SHAPE, 1)
    strided = sp.SparseConv3d(4, 5, 3, 2, 1)
    apis.assert_same(strided(x), strided(live))
    layer = sp.SubMConv3d(4, 5, 3)
    got = layer(x).features
    torch.testing.assert_close(got[3:], layer(live).features)
    torch.testing.assert_close(got[:3], features[:3] @ layer.weight[:, 1, 1, 1].T + layer.bias)


def test_kernel_without_any_output(sp):
    """Defined behaviour: no rows, and a gradient of zeros."""
    x = sp.SparseConvTensor(torch.randn(1, 4), torch.tensor([[0, 1, 1, 1]]).int(), SHAPE, 1)
    leaf = x.features.requires_grad_()
    layer = sp.SparseConv3d(4, 5, 1, stride=2)
    y = layer(x)
    assert y.features.shape == (0, 5) and y.spatial_shape == [4, 4, 5]
    y.features.sum().backward()
    assert not leaf.grad.any() and not layer.weight.grad.any()


def test_containers_of_the_wrong_kind(standin):
    layer = standin.SubMConv3d(4, 4, 3)
    text = refused(lambda: layer(torch.zeros(3, 4)), AttributeError, "SparseConvTensor")
    assert "SparseModule" in text
    x = standin.SparseConvTensor(*parts(), SHAPE, 1)
    holder = standin.SparseSequential(torch.nn.Sequential(layer))
    refused(lambda: holder(x), AttributeError, "SparseSequential")


def test_tables(standin):
    x = standin.SparseConvTensor(*parts(), SHAPE, 1)
    wide = x.replace_feature(torch.zeros(10, 5))
    few = standin.SparseConvTensor(*parts(rows=9), SHAPE, 1)
    other = standin.SparseConvTensor(*parts(), [7, 8, 10], 1)
    two = standin.SparseConvTensor(*parts(), SHAPE, 2)
    for table in (standin.JoinTable(), standin.AddTable()):
        refused(lambda t=table: t([x, wide]), AssertionError, "channel")
        refused(lambda t=table: t([x, few]), AssertionError, "different indices")
        refused(lambda t=table: t([x, other]), AssertionError, "spatial_shape")
        refused(lambda t=table: t([x, two]), AssertionError, "batch_size")
        with pytest.raises(IndexError):
            table([x])


def test_functional_sums_and_pairs(standin):
    x = standin.SparseConvTensor(*parts(), SHAPE, 1)
    other = standin.SparseConvTensor(*parts(), [7, 8, 10], 1)
    refused(lambda: standin.functional.sparse_add(x, other), AssertionError, "spatial_shape")
    pairs, counts = torch.zeros(2, 27, 10, dtype=torch.int32), torch.zeros(9, dtype=torch.int32)
    weight = torch.zeros(4, 3, 3, 3, 4)
    refused(lambda: standin.ops.indice_conv(x.features, weight, pairs, counts, 10), ValueError, r"\[2, V, N\]")
    refused(
        lambda: standin.ops.get_indice_pairs(
            x.indices, 1, SHAPE, None, [3] * 3, [1] * 3, [0] * 3, [1] * 3, [0] * 3, num_out_act_bound=9
        ),
        NotImplementedError,
        "num_out_act_bound",
    )
    with pytest.raises(ValueError, match="-1"):
        standin.ops.get_deconv_output_size([9], [-1], [1], [0], [1], [0])


def test_int8(standin):
    features, indices = parts()
    quantised = torch.quantize_per_tensor(features, 0.1, 0, torch.qint8)
    x = standin.SparseConvTensor(quantised, indices, SHAPE, 1)
    assert x.is_quantized and x.q_scale() == pytest.approx(0.1)
    for layer in (standin.SubMConv3d(4, 4, 3), standin.SparseMaxPool3d(2)):
        refused(lambda layer=layer: layer(x), NotImplementedError, "int8")
    assert standin.SubMConv3d(4, 4, 3)(x.dequantize()).features.shape == (10, 4)


def test_grid_too_large_for_keys(sp):
    grid = [1 << 20, 1 << 21, 1 << 21]
    x = sp.SparseConvTensor(*parts(), grid, 2)
    text = refused(lambda: sp.SubMConv3d(4, 4, 3)(x), OverflowError, "cells")
    assert "Use fewer batch items" in text


def test_benchmark_mode_wants_names(standin):
    x = standin.SparseConvTensor(*parts(), SHAPE, 1, benchmark=True)
    for layer in (standin.SubMConv3d(4, 4, 3), standin.SparseMaxPool3d(2)):
        refused(lambda layer=layer: layer(x), ValueError, "name")


def test_environment_values(tmp_path):
    code = "import sparse_bridge; sparse_bridge.enable('spconv', mode='standin'); import spconv"
    for variable, value, kind in (
        ("SPCONV_SAVED_WEIGHT_LAYOUT", "KCRS", "ContractError"),
        ("SPCONV_FILTER_HWIO", "1", "UnsupportedError"),
    ):
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            cwd=apis.ROOT,
            env={"PYTHONPATH": str(apis.ROOT), variable: value, "PATH": ""},
        )
        assert done.returncode == 1 and kind in done.stderr and variable in done.stderr


# layout -> weight of layout from KRSC
SAVED = {
    "RSCK": lambda w: w.permute(1, 2, 3, 4, 0).contiguous(),
    "RSKC": lambda w: w.permute(1, 2, 3, 0, 4).contiguous(),
}


@pytest.mark.parametrize("layout", SAVED)
def test_checkpoints_of_older_versions(sp, layout, monkeypatch, caplog):
    """Loaded once the layout is named; until then the refusal says which layout it looks like."""
    import spconv

    def net():
        return sp.SparseSequential(
            sp.SubMConv3d(4, 6, 3), sp.SparseConv3d(6, 4, (1, 3, 2), stride=2), sp.SubMConv3d(4, 7, 1)
        )

    saved = net()
    old = saved.state_dict()
    for key in ("0.weight", "1.weight"):
        old[key] = SAVED[layout](old[key])
    raw = old["2.weight"]  # both versions read the memory of a unit kernel as [C, K]
    old["2.weight"] = raw.reshape(1, 1, 1, 4, 7) if layout == "RSCK" else raw.reshape(1, 1, 1, 7, 4)
    with pytest.raises(RuntimeError, match=f"SPCONV_SAVED_WEIGHT_LAYOUT={layout} if it was (?s:.*)size") as info:
        net().load_state_dict(dict(old))
    assert str(info.value).count("an older layout") == 1
    with pytest.raises(RuntimeError, match=f"unit.weight is stored as (?s:.*)={layout} if it was saved by"):
        sp.SparseSequential(unit=sp.SubMConv3d(4, 7, 1)).load_state_dict({"unit.weight": old["2.weight"]})
    log.reset()
    monkeypatch.setattr(spconv.constants, "SAVED_WEIGHT_LAYOUT", layout)
    loaded = net()
    with caplog.at_level(logging.INFO, "sparse_bridge"):
        loaded.load_state_dict(dict(old))
    assert f"layout {layout} is converted to KRSC" in caplog.text
    x = apis.tensor(sp)
    assert torch.equal(loaded(x).features, saved(x).features)
    refused(lambda: sp.SubMConv3d(4, 6, 3).load_state_dict({}, strict=False), AssertionError, "'weight'")


@pytest.mark.parametrize("kernel", [1, 3])
def test_a_shape_of_two_layouts_names_both(sp, kernel):
    old = {"weight": torch.zeros(kernel, kernel, kernel, 4, 4), "bias": torch.zeros(4)}
    both = r"=RSKC if it was saved by spconv 2.0 / 2.1 .*=RSCK if it was saved by spconv 1.x"
    layer = sp.SubMConv3d(4, 4, kernel)
    with pytest.raises(RuntimeError, match=both):
        layer.load_state_dict(old)

    def convert(state, *_):
        state["weight"] = state["weight"].movedim(-1, 0)

    layer._register_load_state_dict_pre_hook(convert)  # as projects do
    layer.load_state_dict(dict(old))


def test_voxel_counters_missing_from_a_checkpoint(sp):
    layer = sp.SparseConv3d(4, 4, 3, record_voxel_count=True)
    state = layer.state_dict()
    assert set(state) == {"weight", "bias", "max_num_voxels_during_training"}
    del state["max_num_voxels_during_training"]
    layer.load_state_dict(state)
    y = layer(apis.tensor(sp))
    assert layer.get_max_num_voxels().tolist() == [len(y.indices)]
