"""Layers called again: what a user assigns between two calls has its effect, and the quick look at
a record never passes what the checks refuse."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune

from sparse_bridge.adapters.spconv import geometry, keys, tensors
from sparse_bridge.core.device import trace
from sparse_bridge.errors import SparseBridgeError
from tests.adapters.spconv import apis


def twice(layer, x):
    layer(x)
    return layer(x)


def shared(sp, kind):
    """(layer, its input, its record): a layer that meets the record of another one."""
    x = apis.tensor(sp)
    if kind == "submanifold":
        x = sp.SubMConv3d(4, 4, 3, indice_key="key")(x)
        layer = sp.SubMConv3d(4, 6, 3, indice_key="key")
    else:
        x = sp.SparseConv3d(4, 4, 3, 2, 1, indice_key="key")(x)
        layer = sp.SparseInverseConv3d(4, 6, 3, "key")
    twice(layer, x)
    return layer, x, x.find_indice_pair("key")


def assign(name, value):
    return lambda layer, x, record: setattr(layer, name, value)


def on_tensor(name, value):
    return lambda layer, x, record: setattr(x, name, value(getattr(x, name)))


def on_record(name, value):
    return lambda layer, x, record: setattr(record, name, value(getattr(record, name)))


def in_place(layer, x, record):
    layer.kernel_size[0] = 5


CHANGES = {
    "nothing": lambda layer, x, record: None,
    "kernel size": assign("kernel_size", [3, 3, 5]),
    "kernel size in place": in_place,
    "kernel size as a tuple": assign("kernel_size", (3, 3, 3)),
    "kernel size as an array": assign("kernel_size", np.array([3, 3, 3])),
    "dilation": assign("dilation", [2, 2, 2]),
    "dilation as a tensor": assign("dilation", torch.tensor([1, 1, 1])),
    "algorithm": assign("algo", None),
    "submanifold": lambda layer, x, record: setattr(layer, "subm", not layer.subm),
    "inverse": lambda layer, x, record: setattr(layer, "inverse", not layer.inverse),
    "dimension": assign("ndim", 2),
    "grid": on_tensor("spatial_shape", lambda shape: [size + 1 for size in shape]),
    "grid of two axes": on_tensor("spatial_shape", lambda shape: shape[:2]),
    "grid as a tensor": on_tensor("spatial_shape", torch.tensor),
    "grid as an array": on_tensor("spatial_shape", np.array),
    "rows": on_tensor("indices", lambda rows: rows[:-1]),
    "features": on_tensor("_features", lambda rows: rows[:-1]),
    "columns": on_tensor("indices", lambda rows: rows[:, :3]),
    "grid of the record": on_record("spatial_shape", lambda shape: [9, 9, 9]),
    "output grid of the record": on_record("out_spatial_shape", lambda shape: [9, 9, 9]),
    "kernel size of the record": on_record("ksize", lambda size: [5, 3, 3]),
    "kernel size of the record, an array": on_record("ksize", np.array),
    "algorithm of the record": on_record("algo", lambda algo: "Native"),
    "rows of the record": on_record("indices", lambda rows: rows[:-1]),
    "output rows of the record": on_record("out_indices", lambda rows: rows[:-1]),
    "kind of the record": on_record("is_subm", lambda is_subm: not is_subm),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("kind", ["submanifold", "inverse"])
def test_what_fits_passes_all_checks(sp, kind, name):
    layer, x, record = shared(sp, kind)
    CHANGES[name](layer, x, record)
    fitting = keys.fits(layer, x, record, x.features)
    try:
        geometry.check_dimension(layer, x)
        keys.check_algo(layer, record)
        if layer.inverse:
            keys.check_inverse(layer, x, record)
        else:
            keys.check_reuse(layer, x, record)
            assert keys.used_offsets(layer.weight, layer, record) is layer.weight
        allowed = True
    except (SparseBridgeError, IndexError):
        allowed = False
    assert allowed or not fitting
    if name == "nothing":
        assert fitting, "or the quick look is never of use"
    if not allowed:
        with pytest.raises((SparseBridgeError, IndexError)):
            layer(x)


def test_parameters_may_be_replaced(sp):
    x = apis.tensor(sp)
    layer = sp.SubMConv3d(4, 6, 3, indice_key="key").eval()
    before = twice(layer, x).features
    with torch.no_grad():
        want = 2 * (before - layer.bias)
        layer.weight = nn.Parameter(2 * layer.weight)
        layer.bias = None
        after = twice(layer, x).features
        torch.testing.assert_close(after, want)
        permuted = layer.weight.data.permute(4, 0, 1, 2, 3).contiguous()
        layer.weight.data = permuted.permute(1, 2, 3, 4, 0)
        torch.testing.assert_close(layer(x).features, after)
        wide = layer.double()(x.replace_feature(x.features.double()))
        assert wide.features.dtype == torch.float64
        torch.testing.assert_close(wide.features.float(), after)


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


def test_parameters_may_be_computed(sp):
    """torch's parametrisations, pruning, and a plain tensor in the parameter's place."""
    x = apis.tensor(sp)
    plain = sp.SubMConv3d(4, 6, 3, bias=False)
    base = twice(plain, x).features.detach()
    layer = copy.deepcopy(plain)
    parametrize.register_parametrization(layer, "weight", Doubled())
    torch.testing.assert_close(twice(layer, x).features, 2 * base)
    layer(x).features.sum().backward()
    assert layer.parametrizations.weight.original.grad.abs().sum() > 0
    layer = copy.deepcopy(plain)
    prune.custom_from_mask(layer, "weight", torch.zeros_like(layer.weight))
    assert twice(layer, x).features.abs().sum() == 0
    layer = copy.deepcopy(plain)
    weight = layer.weight.detach()
    del layer.weight
    layer.weight = 3 * weight
    torch.testing.assert_close(twice(layer, x).features, 3 * base)
    net = sp.SparseSequential(layer, nn.BatchNorm1d(6)).eval()
    with torch.no_grad():
        torch.testing.assert_close(net(x).features, net[1](3 * base))


def test_switches_are_read_at_every_call(sp, calls_of, monkeypatch):
    from sparse_bridge.core.conv import convolution

    asked = calls_of(convolution, "convolve")
    import spconv

    x, layer = apis.tensor(sp), sp.SubMConv3d(4, 6, 3, indice_key="key", name="one")
    y = twice(layer, x)
    for allow in (True, False):
        monkeypatch.setattr(spconv.constants, "SPCONV_ALLOW_TF32", allow)
        layer(y.replace_feature(x.features))
        *_, form = asked[-1]
        assert form.precision == ("tf32" if allow else "ieee")
    with trace.record() as events:
        layer(x)
    assert len(events) == 1
    x.benchmark = True
    layer(x)
    assert x.benchmark_record["one"]["num_points"] == [len(x.indices)]


def test_counting_voxels_may_begin_later(standin):
    x, layer = apis.tensor(standin), standin.SparseConv3d(4, 6, 3, 2, 1)
    twice(layer, x)
    layer.register_buffer("max_num_voxels_during_training", torch.zeros(1, dtype=torch.int32))
    layer.record_voxel_count = True
    y = layer(x)
    assert int(layer.get_max_num_voxels()) == len(y.indices)


def test_a_fused_activation_may_be_assigned(standin):
    from cumm import tensorview as tv

    x, layer = apis.tensor(standin), standin.SubMConv3d(4, 6, 3, indice_key="key").eval()
    before = twice(layer, x).features
    layer.act_type = tv.gemm.Activation.LeakyReLU
    for alpha in (0.5, 0.1):
        layer.act_alpha = alpha
        for gradients in (False, True):
            with torch.set_grad_enabled(gradients):
                after = twice(layer, x).features
            assert after.requires_grad == gradients
            torch.testing.assert_close(after, torch.where(before >= 0, before, alpha * before))


def test_shapes_are_numbers_whatever_holds_them(sp):
    x = apis.tensor(sp)
    for shape in (
        [7, 8, 9],
        (7, 8, 9),
        np.array([7, 8, 9]),
        torch.tensor([7, 8, 9]),
        [np.int64(7), torch.tensor(8), 9],
    ):
        x.spatial_shape = shape
        found = tensors.shape_of(x)
        assert found == [7, 8, 9] and all(type(size) is int for size in found)
