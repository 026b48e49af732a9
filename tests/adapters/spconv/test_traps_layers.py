"""Awkward uses in real projects: weights, keys and what layers do with them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from sparse_bridge import settings
from sparse_bridge.errors import DataTypeError, TensorExpectedError

from . import apis

# name of the layer, arguments after the channels, whether it is the 1x1 short cut
UNIT_LAYERS = [
    ("SubMConv3d", (1,)),
    ("SubMConv3d", (1, 2)),
    ("SparseConv3d", (1,)),
    ("SparseConvTranspose3d", (1,)),
    ("SparseInverseConv3d", (1, "key")),
]


@pytest.mark.parametrize(("name", "arguments"), UNIT_LAYERS)
@pytest.mark.parametrize("channels", [(4, 4), (4, 6)])
def test_unit_kernels_reshape_their_weight(sp, name, arguments, channels):
    layer = getattr(sp, name)(*channels, *arguments)
    x = apis.tensor(sp, channels=channels[0])
    y = layer(x)
    matrix = layer.weight.reshape(channels)
    torch.testing.assert_close(y.features, x.features @ matrix + layer.bias)
    assert layer.weight.shape == (channels[1], 1, 1, 1, channels[0])
    if channels[0] == channels[1]:
        assert not torch.allclose(y.features, x.features @ matrix.T + layer.bias)
    assert y.indices is x.indices and y.indice_dict is x.indice_dict == {}
    assert y.spatial_shape == x.spatial_shape


def test_unit_kernel_with_stride_is_an_ordinary_layer(sp):
    layer = sp.SparseConv3d(4, 6, 1, stride=2, indice_key="down", bias=False)
    x = apis.tensor(sp)
    y = layer(x)
    rows = apis.by_site(x)
    assert y.spatial_shape == [4, 4, 5] and "down" in y.indice_dict
    for site, row in apis.by_site(y).items():
        source = rows[(site[0], *(2 * c for c in site[1:]))]
        torch.testing.assert_close(row, layer.weight.reshape(6, 4) @ source)
    back = sp.SparseInverseConv3d(6, 4, 1, indice_key="down")(y)
    assert back.indices is y.indices and back.spatial_shape == y.spatial_shape


def test_unit_kernels_share_a_key_with_others(sp):
    """Skip connections of TRELLIS and 2DPASS."""
    x = apis.tensor(sp)
    wide = sp.SubMConv3d(4, 6, 3, indice_key="res")
    skip = sp.SubMConv3d(4, 6, 1, indice_key="res")
    y = wide(x)
    z = sp.SubMConv3d(6, 6, 3, indice_key="res")(y)
    assert (skip(y.replace_feature(x.features)).features + z.features).shape == (60, 6)
    assert list(skip(x).indice_dict) == []


def reuse(sp, first, second, between=None):
    x = first(apis.tensor(sp))
    return second(x if between is None else between(x))


def test_submanifold_layers_reuse_a_key(sp):
    x = apis.tensor(sp)
    first, second = (sp.SubMConv3d(4, 4, 3, indice_key="a") for _ in range(2))
    y = first(x)
    z = second(y)
    assert z.indices is y.indice_dict["a"].out_indices
    assert z.indice_dict["a"] is y.indice_dict["a"]
    fresh = sp.SparseConvTensor(y.features, y.indices, y.spatial_shape, 2)
    torch.testing.assert_close(z.features, second(fresh).features)


def shrink(x):
    y = x.replace_feature(x.features[:9])
    y.indices = x.indices[:9]
    return y


def other_grid(x):
    x.spatial_shape = [7, 8, 10]
    return x


KEY_ERRORS = {
    "submanifold: kernel": (("SubMConv3d", 3, {}), ("SubMConv3d", 5, {}), None, ValueError),
    "submanifold: dilation": (("SubMConv3d", 3, {}), ("SubMConv3d", 3, {"dilation": 2}), None, ValueError),
    "submanifold: grid": (("SubMConv3d", 3, {}), ("SubMConv3d", 3, {}), other_grid, ValueError),
    "submanifold: rows": (("SubMConv3d", 3, {}), ("SubMConv3d", 3, {}), shrink, ValueError),
    "submanifold after a strided layer": (("SparseConv3d", 3, {}), ("SubMConv3d", 3, {}), None, AssertionError),
    "strided after submanifold": (("SubMConv3d", 3, {}), ("SparseConv3d", 3, {}), None, AssertionError),
    "strided after strided": (("SparseConv3d", 3, {}), ("SparseConv3d", 3, {}), None, AssertionError),
    "inverse of submanifold": (("SubMConv3d", 3, {}), ("SparseInverseConv3d", 3, {}), None, AssertionError),
    "inverse: kernel": (("SparseConv3d", 3, {}), ("SparseInverseConv3d", 2, {}), None, ValueError),
    "inverse: grid": (("SparseConv3d", 3, {}), ("SparseInverseConv3d", 3, {}), other_grid, ValueError),
    "inverse: rows": (("SparseConv3d", 3, {}), ("SparseInverseConv3d", 3, {}), shrink, ValueError),
    "pool: key taken": (("SubMConv3d", 3, {}), ("SparseMaxPool3d", 2, {}), None, ValueError),
}


@pytest.mark.parametrize("case", KEY_ERRORS)
def test_key_rules(sp, case):
    first, second, between, error = KEY_ERRORS[case]

    def build(name, kernel, options):
        channels = () if "Pool" in name else (4, 4)
        return getattr(sp, name)(*channels, kernel, indice_key="key", **options)

    with pytest.raises(error, match="key") as caught:
        reuse(sp, build(*first), build(*second), between)
    assert type(caught.value).__module__.startswith("sparse_bridge")


def test_pool_key_taken_satisfies_both_kinds_of_handlers(sp):
    with pytest.raises(AssertionError):
        reuse(sp, sp.SubMConv3d(4, 4, 3, indice_key="k"), sp.SparseMaxPool3d(2, indice_key="k"))


def test_algorithms_must_agree_on_a_key(standin):
    native, implicit = standin.ConvAlgo.Native, standin.ConvAlgo.MaskImplicitGemm
    first = standin.SubMConv3d(4, 4, 3, indice_key="k", algo=native)
    with pytest.raises(AssertionError, match="same algo"):
        reuse(standin, first, standin.SubMConv3d(4, 4, 3, indice_key="k", algo=implicit))


@pytest.mark.parametrize("pool", ("SparseAvgPool3d", "SparseMaxPool3d"))
@pytest.mark.parametrize("kernel", (2, 3, 4, 6))
def test_pools_are_inverted_by_default(sp, pool, kernel):
    """A build for CPUs gives its average pools an algorithm that no layer of it may have."""
    down = getattr(sp, pool)(kernel, 2, indice_key="p")
    torch.manual_seed(0)
    up = sp.SparseInverseConv3d(4, 5, kernel, indice_key="p")
    x = apis.tensor(sp)
    pooled = down(x)
    leaf = pooled.features.detach().requires_grad_()
    y = up(pooled.replace_feature(leaf))
    assert torch.equal(y.indices, x.indices)
    pairs, counts = pooled.indice_dict["p"].indice_pairs, pooled.indice_dict["p"].indice_pair_num
    want = up.bias.expand(len(x.indices), -1).clone()
    for v, matrix in enumerate(up.weight.reshape(5, -1, 4).unbind(1)):
        fine, coarse = (rows[: int(counts[v])].long() for rows in pairs[:, v])
        want = want.index_add(0, fine, leaf[coarse] @ matrix.t())
    torch.testing.assert_close(y.features, want)
    (got,) = torch.autograd.grad(y.features.sum(), leaf)
    torch.testing.assert_close(got, torch.autograd.grad(want.sum(), leaf)[0])


def test_a_key_belongs_to_its_tensor(sp):
    """LION reuses one key on unrelated tensors."""
    layer = sp.SubMConv3d(4, 4, 3, indice_key="subm")
    one, two = apis.tensor(sp, seed=1), apis.tensor(sp, seed=2, rows=40)
    layer(one)
    alone = sp.SubMConv3d(4, 4, 3)
    alone.load_state_dict(layer.state_dict())
    torch.testing.assert_close(layer(two).features, alone(two).features)


def test_siblings_do_not_see_each_others_keys(sp):
    x = apis.tensor(sp)
    left = sp.SubMConv3d(4, 4, 3, indice_key="left")(x)
    right = sp.SubMConv3d(4, 4, (1, 3, 3), indice_key="right")(x)
    assert (list(x.indice_dict), list(left.indice_dict)) == ([], ["left"])
    assert list(right.indice_dict) == ["right"]
    assert left.replace_feature(left.features).indice_dict is left.indice_dict
    new = sp.SparseConvTensor(left.features, left.indices, left.spatial_shape, 2)
    assert new.indice_dict == {}


def test_first_generation_key_sharing_on_request(sp):
    """Cylinder3D: a (3, 1, 3) kernel reads the map that a (1, 3, 3) one left under their key."""
    x = apis.tensor(sp)
    first = sp.SubMConv3d(4, 4, (1, 3, 3), indice_key="bef", bias=False)
    second = sp.SubMConv3d(4, 4, (3, 1, 3), indice_key="bef", bias=False)
    y = first(x)
    with pytest.raises(ValueError, match="SPARSE_BRIDGE_RULES=shared_keys"):
        second(y)
    with settings.override(shared_keys=True):
        got = second(y)
    same_map = sp.SubMConv3d(4, 4, (1, 3, 3), bias=False)
    same_map.weight.data = second.weight.data.reshape(4, 1, 3, 3, 4)
    fresh = sp.SparseConvTensor(y.features, y.indices, y.spatial_shape, 2)
    torch.testing.assert_close(got.features, same_map(fresh).features)


def test_branches_share_first_generation_keys(sp):
    """In spconv 1.x tensors of one origin had one `indice_dict`: a branch reads its sibling's."""
    x = apis.tensor(sp)
    one = sp.SubMConv3d(4, 4, (1, 3, 3), indice_key="bef", bias=False)
    other = sp.SubMConv3d(4, 4, (3, 1, 3), indice_key="bef", bias=False)
    with settings.override(shared_keys=True):
        y = one(x)
        assert y.indice_dict is x.indice_dict
        got = other(x)
    same_map = sp.SubMConv3d(4, 4, (1, 3, 3), bias=False)
    same_map.weight.data = other.weight.data.reshape(4, 1, 3, 3, 4)
    fresh = sp.SparseConvTensor(x.features, x.indices, x.spatial_shape, 2)
    torch.testing.assert_close(got.features, same_map(fresh).features)


def test_larger_kernels_read_a_shared_map_with_their_first_offsets(sp):
    """Cylinder3D's decoder: (3, 3, 3) under the key of a (1, 3, 3)."""
    x = apis.tensor(sp)
    first = sp.SubMConv3d(4, 4, (1, 3, 3), indice_key="up", bias=False)
    large = sp.SubMConv3d(4, 4, 3, indice_key="up", bias=False)
    with settings.override(shared_keys=True):
        got = large(first(x))
        small = sp.SubMConv3d(4, 4, (1, 1, 3), indice_key="up", bias=False)
        with pytest.raises(ValueError, match="no less volume"):
            small(first(x))
    got.features.sum().backward()
    by_offset = large.weight.grad.flatten(1, -2)
    assert by_offset[:, :9].abs().sum() > 0 and by_offset[:, 9:].eq(0).all()
    nine = sp.SubMConv3d(4, 4, (1, 3, 3), bias=False)
    nine.weight.data = large.weight.data.flatten(1, -2)[:, :9].reshape(4, 1, 3, 3, 4)
    fresh = sp.SparseConvTensor(first(x).features, x.indices, x.spatial_shape, 2)
    torch.testing.assert_close(got.features, nine(fresh).features)


def test_native_records_show_padded_pair_lists(sp):
    """SphereFormer averages positions along `indice_pairs`."""
    x = apis.tensor(sp)
    down = sp.SparseConv3d(4, 4, 3, 2, 1, indice_key="down", algo=sp.ConvAlgo.Native)
    y = down(x)
    record = y.indice_dict["down"]
    pairs, counts = record.indice_pairs, record.indice_pair_num
    assert pairs.dtype == counts.dtype == torch.int32 and pairs.shape == (2, 27, 60)
    fields = [record.out_indices, record.indices, pairs, counts, record.spatial_shape]
    assert all(one is field for one, field in zip(record, fields, strict=True))  # a tuple in spconv 1.x
    valid = pairs[0] != -1
    assert torch.equal(valid, pairs[1] != -1) and torch.equal(valid.sum(1).int(), counts)
    v, place = valid.nonzero().unbind(1)
    sites_in = x.indices[pairs[0, v, place].long()]
    sites_out = y.indices[pairs[1, v, place].long()]
    offsets = torch.stack(torch.unravel_index(v, (3, 3, 3)), 1) - 1
    assert torch.equal(sites_in[:, 1:], 2 * sites_out[:, 1:] + offsets)
    assert torch.equal(sites_in[:, 0], sites_out[:, 0])
    total = torch.zeros(len(y.indices)).index_add(0, pairs[1, v, place].long(), torch.ones(len(v)))
    assert total.min() >= 1


def test_submanifold_pair_lists_count_half_of_the_offsets(sp):
    x = apis.tensor(sp)
    y = sp.SubMConv3d(4, 4, 3, indice_key="s", algo=sp.ConvAlgo.Native)(x)
    record = y.indice_dict["s"]
    present = (record.indice_pairs[0] >= 0).sum(1)
    assert record.indice_pair_num[13:].eq(0).all()
    assert torch.equal(record.indice_pair_num[:13].long(), present[:13])
    assert torch.equal(present[:13], present[14:].flip(0)) and present[13] == 60


def test_default_algorithm_follows_the_kernel_volume(standin):
    algo = standin.ConvAlgo
    assert standin.SubMConv3d(4, 4, 3).algo is algo.MaskImplicitGemm
    assert standin.SubMConv3d(4, 4, 5).algo is algo.Native
    assert standin.SubMConv3d(4, 4, 5, large_kernel_fast_algo=True).algo is algo.MaskImplicitGemm
    assert standin.SparseMaxPool3d(5).algo is algo.MaskImplicitGemm
    assert standin.SparseMaxPool3d((6, 6, 6)).algo is algo.Native
    for chosen in (algo.Native, algo.MaskImplicitGemm):
        layer = standin.SubMConv3d(4, 6, (1, 3, 3), algo=chosen)
        assert layer.weight.shape == (6, 1, 3, 3, 4) and layer.algo is chosen


def test_weights_are_plain_parameters_for_shape_driven_loaders(sp):
    """OpenPCDet tries transpose(-1, -2), then permute(4, 0, 1, 2, 3)."""
    layer = sp.SparseConv3d(3, 5, 3)
    assert type(layer.weight) is nn.Parameter and layer.weight.is_contiguous()
    stored = layer.weight.detach().permute(1, 2, 3, 4, 0).contiguous()  # 1.x: [*k, C, K]
    assert stored.transpose(-1, -2).shape != layer.weight.shape
    adapted = stored.permute(4, 0, 1, 2, 3)
    assert adapted.shape == layer.weight.shape
    torch.testing.assert_close(adapted, layer.weight.detach())


def test_arguments_that_upstream_ignores_or_refuses(sp):
    x = apis.tensor(sp)
    odd = sp.SubMConv3d(4, 4, 5, stride=2, padding=1)
    plain = sp.SubMConv3d(4, 4, 5)
    plain.load_state_dict(odd.state_dict())
    assert odd(x).spatial_shape == x.spatial_shape
    torch.testing.assert_close(odd(x).features, plain(x).features)
    with pytest.raises(AssertionError):
        sp.SparseConv3d(4, 4, 1, padding=1)
    with pytest.raises(AssertionError):
        sp.SubMConv3d(4, 4, 3, groups=2)
    with pytest.raises(TypeError):
        sp.SubMConv3d(4, 4, np.int64(3))
    with pytest.raises(AssertionError):
        sp.SubMConv3d(4, 4, [3, 3])


def test_transposed_layers_make_new_sites(sp):
    x = apis.tensor(sp, rows=5)
    y = sp.SparseConvTranspose3d(4, 4, 2, 2)(x)
    assert y.spatial_shape == [14, 16, 18] and len(y.indices) == 8 * 5
    parents = {(site[0], *(c // 2 for c in site[1:])) for site in y.indices.tolist()}
    assert parents == {tuple(site) for site in x.indices.tolist()}


def test_inverse_layers_restore_rows_exactly(sp):
    x = apis.tensor(sp)
    down = sp.SparseConv3d(4, 8, 3, 2, 1, indice_key="down")
    inner = sp.SubMConv3d(8, 8, 3, indice_key="inner")
    up = sp.SparseInverseConv3d(8, 4, 3, indice_key="down")
    z = up(inner(down(x)))
    assert z.indices is x.indices and z.spatial_shape == x.spatial_shape
    assert torch.equal(up(inner(down(x))).features, z.features)
    assert z.replace_feature(torch.cat([x.features, z.features], 1)).features.shape == (60, 8)


@pytest.mark.parametrize("kind", ["SubMConv3d", "SparseConv3d", "SparseConvTranspose3d"])
def test_use_hash_of_the_first_generation_is_accepted(standin, kind):
    import spconv

    for value in (True, False):
        layer = getattr(spconv, kind)(4, 5, 3, indice_key="a", use_hash=value)
        assert layer(apis.tensor(standin)).features.shape[1] == 5
    assert standin.SparseInverseConv3d(4, 5, 3, "a", use_hash=True).inverse
    base = standin.conv.SparseConvolution(3, 4, 5, use_hash=True)
    assert base.in_channels == 4
    with pytest.raises(TypeError, match="use_hashes"):
        getattr(spconv, kind)(4, 5, 3, use_hashes=True)


@pytest.mark.parametrize("value", [None, [1.0], "features", np.zeros((60, 4), np.float32)])
def test_features_are_assigned_tensors_only(sp, value):
    x = apis.tensor(sp)
    before = x.features
    with pytest.raises(TensorExpectedError, match=rf"expected for features, got .*{type(value).__name__};"):
        x.features = value
    with pytest.raises(DataTypeError, match="SparseConvTensor"):
        x.features = x
    assert x.features is before
    x.features = before * 2
    assert torch.equal(x.features, before * 2)
