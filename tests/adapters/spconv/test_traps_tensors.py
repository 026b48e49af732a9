"""Awkward uses in real projects: tensors, containers, copies, precision."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict

import numpy as np
import pytest
import torch
from torch import nn

from . import apis


def test_features_may_have_other_rows_than_sites(sp):
    """VoxelNeXt concatenates three sets of features, then assigns the sites."""
    x = apis.tensor(sp, rows=30)
    more = apis.tensor(sp, rows=45, seed=1)
    wide = x.replace_feature(torch.cat([x.features, more.features]))
    assert wide.features.shape == (75, 4) and wide.indices is x.indices
    everything = torch.cat([x.indices, more.indices])
    sites, inverse = torch.unique(everything, dim=0, return_inverse=True)
    summed = torch.zeros(len(sites), 4).index_add(0, inverse, wide.features)
    out = wide.replace_feature(summed)
    out.indices = sites
    conv = sp.SubMConv3d(4, 4, 3)
    want = conv(sp.SparseConvTensor(summed, sites, [7, 8, 9], 2))
    torch.testing.assert_close(conv(out).features, want.features)
    pooled = x.replace_feature(torch.stack([x.features.mean(0)] * 2))  # one row per batch item
    assert pooled.features.shape == (2, 4)


@pytest.mark.parametrize("kind", ["SubMConv3d", "SparseConv3d"])
def test_sites_edited_in_place_are_seen(sp, kind):
    x = apis.tensor(sp, shape=(14, 16, 18), rows=80)
    layer = getattr(sp, kind)(4, 4, 3)
    before = layer(x).features
    x.indices[:, 1:] //= 2
    x.indices[:, 1:] += 3
    unique = torch.unique(x.indices, dim=0, return_inverse=True)[1]
    keep = torch.full((int(unique.max()) + 1,), -1).scatter_(0, unique, torch.arange(80))
    x = x.replace_feature(x.features[keep])
    x.indices = x.indices[keep]
    layer(x)
    x.indices[:, 1:] += 1
    fresh = sp.SparseConvTensor(x.features, x.indices.clone(), x.spatial_shape, 2)
    apis.assert_same(layer(x), layer(fresh))
    assert before.shape[1] == 4


def test_sites_assigned_between_layers(sp):
    x = apis.tensor(sp)
    conv = sp.SubMConv3d(4, 4, 3)
    conv(x)
    x.indices = x.indices.flip(0).contiguous()
    fresh = sp.SparseConvTensor(x.features, x.indices.clone(), x.spatial_shape, 2)
    torch.testing.assert_close(conv(x).features, conv(fresh).features)


def test_sites_that_are_not_contiguous(sp):
    x = apis.tensor(sp)
    layer = sp.SparseConv3d(4, 4, 3, 2, 1)
    want = layer(x)
    view = x.indices.t().contiguous().t()
    assert not view.is_contiguous()
    apis.assert_same(layer(sp.SparseConvTensor(x.features, view, x.spatial_shape, 2)), want)


SHAPES = [
    [7, 8, 9],
    (7, 8, 9),
    torch.Size([7, 8, 9]),
    np.array([9, 8, 7])[::-1],
    torch.tensor([7, 8, 9]),
    torch.tensor([7, 8, 9], dtype=torch.int32),
    [torch.tensor(7), torch.tensor(8), torch.tensor(9)],
    [np.int64(7), 8, 9],
]


@pytest.mark.parametrize("shape", SHAPES, ids=[type(shape).__name__ for shape in SHAPES])
def test_grids_of_any_type_read_back_as_a_list_of_ints(sp, shape):
    x = apis.tensor(sp)
    y = sp.SparseConvTensor(x.features, x.indices, shape, 2)
    assert type(y.spatial_shape) is list
    z = sp.SparseConv3d(4, 4, 3, 2, 1)(y)
    assert z.spatial_shape == [4, 4, 5] and all(type(size) is int for size in z.spatial_shape)
    assert z.spatial_shape[1:] + [1] == [4, 5, 1]
    y.spatial_shape = shape  # assigned later, it stays what it is until a layer reads it
    assert sp.SubMConv3d(4, 4, 3)(y).spatial_shape == [7, 8, 9]


@pytest.mark.parametrize("batch_size", [2, torch.tensor(2)])
def test_batch_size_may_be_a_tensor(sp, batch_size):
    x = apis.tensor(sp)
    y = sp.SparseConvTensor(x.features, x.indices, x.spatial_shape, batch_size)
    assert sp.SparseConv3d(4, 4, 2)(y).batch_size is y.batch_size
    assert y.dense().shape == (2, 4, 7, 8, 9)


def test_containers(sp):
    layers = [sp.SubMConv3d(4, 6, 3), nn.BatchNorm1d(6), nn.ReLU()]
    net = sp.SparseSequential(OrderedDict(conv=layers[0], norm=layers[1]), act=layers[2])
    assert len(net) == 3 and net[0] is layers[0] and net[-1] is layers[2]
    assert list(net) == layers
    for wrong in (3, -4):
        with pytest.raises(IndexError):
            net[wrong]
    with pytest.raises(TypeError):
        net[0:1]
    with pytest.raises(ValueError, match="exists"):
        sp.SparseSequential(layers[0], **{"0": layers[1]})
    net.add(nn.Linear(6, 5))
    net.add(sp.SparseSequential(nn.Tanh(), sp.SubMConv3d(5, 3, 1)), name="head")
    assert list(dict(net.named_children())) == ["conv", "norm", "act", "3", "head"]
    assert net(apis.tensor(sp)).features.shape == (60, 3)
    assert set(sp.SparseSequential(layers[0]).state_dict()) == {"0.weight", "0.bias"}


def test_containers_skip_ordinary_modules_without_points(sp):
    x = apis.tensor(sp, rows=0)
    net = sp.SparseSequential(sp.SubMConv3d(4, 6, 3), nn.BatchNorm1d(6), nn.Linear(6, 5)).train()
    y = net(x)
    assert y.features.shape == (0, 6)  # the Linear did not run


def test_containers_pass_dense_tensors_on(sp):
    net = sp.SparseSequential(sp.SubMConv3d(4, 6, 3), sp.ToDense(), nn.Conv3d(6, 2, 3))
    assert net(apis.tensor(sp)).shape == (2, 2, 5, 6, 7)


def test_which_modules_take_the_sparse_tensor(sp):
    takes = sp.modules.is_spconv_module
    inside = [
        sp.SubMConv3d(2, 2, 3),
        sp.SparseConv2d(2, 2, 3),
        sp.SparseInverseConv3d(2, 2, 3, "k"),
        sp.SparseMaxPool3d(2),
        sp.SparseGlobalMaxPool(),
        sp.ToDense(),
        sp.RemoveGrid(),
        sp.SparseSequential(),
        sp.SparseModule(),
        sp.JoinTable(),
        sp.AddTable(),
        sp.ConcatTable(),
        sp.SparseBatchNorm(2),
        sp.SparseReLU(),
    ]
    outside = [nn.ReLU(), nn.BatchNorm1d(2), nn.Linear(2, 2), sp.Identity(), sp.SparseIdentity()]
    assert all(map(takes, inside)) and not any(map(takes, outside))
    assert sp.modules.is_sparse_conv(inside[0]) and not sp.modules.is_sparse_conv(inside[3])


def test_private_attributes_that_wrappers_copy(sp):
    """TRELLIS builds a tensor positionally, overwrites `_features` and copies everything else."""
    x = apis.tensor(sp)
    x.grid, x.voxel_num = torch.ones(2), torch.tensor([3])
    y = sp.SubMConv3d(4, 4, 3, indice_key="res")(x)
    new = sp.SparseConvTensor(
        torch.zeros(60, 1), y.indices, y.spatial_shape, y.batch_size, y.grid, y.voxel_num, y.indice_dict
    )
    new._features = torch.randn(60, 2, 4)
    for name in ("benchmark", "benchmark_record", "thrust_allocator", "_timer", "force_algo"):
        setattr(new, name, getattr(y, name))
    new.int8_scale = y.int8_scale
    assert new.features.shape == (60, 2, 4) and new.grid is x.grid
    assert new.indice_dict is y.indice_dict and new.voxel_num is x.voxel_num
    assert new._timer is not None and not new._timer.enable
    new._features = y.features
    assert sp.SubMConv3d(4, 4, 3, indice_key="res")(new).voxel_num is x.voxel_num


def test_features_are_assignable(sp):
    """spconv 1.x code: `x.features = f(x.features)` and `x.features += y.features`."""
    x = apis.tensor(sp)
    before = x.features.clone()
    x.features = torch.relu(x.features)
    assert torch.equal(x.features, before.relu()) and x._features is x.features
    x.features += before
    assert torch.equal(x.features, before.relu() + before)
    assert "replace_feature" in x.__dir__()
    y = x.replace_feature(x.features)
    y.features = torch.cat([y.features, y.features], 1)
    assert (x.features.shape[1], y.features.shape[1]) == (4, 8)


def first_row_convolution(x, layer):
    """Submanifold convolution by dictionary; of rows at one site, neighbours see the first."""
    weight, rows = layer.weight.detach().double(), {}
    inside = [
        0 <= site[0] < x.batch_size and all(0 <= c < size for c, size in zip(site[1:], x.spatial_shape, strict=True))
        for site in x.indices.tolist()
    ]
    for row, site in enumerate(x.indices.tolist()):
        if inside[row]:
            rows.setdefault(tuple(site), row)
    features = x.features.detach().double()
    out = torch.zeros(len(x.indices), weight.shape[0], dtype=torch.float64)
    for row, site in enumerate(x.indices.tolist()):
        for index in np.ndindex(*weight.shape[1:-1]):
            offset = [t - k // 2 for t, k in zip(index, weight.shape[1:-1], strict=True)]
            if any(offset):
                there = (site[0], *(c + o for c, o in zip(site[1:], offset, strict=True)))
                source = rows.get(there) if inside[row] else None
            else:
                source = row
            if source is not None:
                out[row] += weight[(slice(None), *index)] @ features[source]
    return out + layer.bias.detach().double()


def test_duplicate_and_outlying_sites_keep_their_rows(sp):
    """GaussianFormer feeds several Gaussians per voxel, and some on the upper border."""
    x = apis.tensor(sp, rows=40)
    again = torch.randint(0, 40, (25,), generator=torch.Generator().manual_seed(0))
    indices = torch.cat([x.indices, x.indices[again], torch.tensor([[0, 7, 3, 3], [1, 2, 8, 9]])])
    features = torch.randn(len(indices), 4)
    y = sp.SparseConvTensor(features, indices.int().contiguous(), [7, 8, 9], 2)
    layer = sp.SubMConv3d(4, 5, 3)
    got = layer(y)
    assert torch.equal(got.indices, y.indices)
    torch.testing.assert_close(got.features.double(), first_row_convolution(y, layer), rtol=1e-4, atol=1e-5)


def test_strided_layers_sum_duplicates(sp):
    x = apis.tensor(sp, rows=40)
    features = torch.cat([x.features, x.features * 3])
    twice = sp.SparseConvTensor(features, torch.cat([x.indices] * 2), [7, 8, 9], 2)
    layer = sp.SparseConv3d(4, 5, 3, 2, 1)
    want = layer(x.replace_feature(x.features * 4))
    apis.assert_same(layer(twice), want, 1e-4)


@pytest.mark.parametrize("shape", [(5,), (4, 6), (3, 4, 5), (2, 3, 4, 5)])
def test_dense_is_channels_first_and_differentiable(sp, shape):
    x = apis.tensor(sp, shape=shape, rows=9)
    leaf = x.features.requires_grad_()
    y = x.replace_feature(leaf)
    dense = y.dense()
    assert dense.shape == (2, 4, *shape) and dense.is_contiguous()
    places = tuple(x.indices.long().t())
    assert torch.equal(dense.movedim(1, -1)[places], leaf) and dense.count_nonzero() == 36
    assert torch.equal(y.dense(channels_first=False), dense.movedim(1, -1))
    weight = torch.randn_like(dense)
    (dense * weight).sum().backward()
    assert torch.equal(leaf.grad, weight.movedim(1, -1)[places])


def test_copies_and_pickles(sp):
    net = sp.SparseSequential(
        sp.SubMConv3d(4, 6, 3, indice_key="a"), nn.ReLU(), sp.SparseConv3d(6, 5, 2, 2, indice_key="d")
    ).requires_grad_(False)  # torch copies no tensor with a history
    x = apis.tensor(sp)
    y = net(x)
    for clone in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert type(clone[0]) is sp.SubMConv3d
        assert torch.equal(clone(x).features, y.features)
        assert clone[0].weight is not net[0].weight
    up = sp.SparseInverseConv3d(5, 4, 2, indice_key="d")
    for tensor in (copy.deepcopy(y), pickle.loads(pickle.dumps(y))):
        assert isinstance(tensor, sp.SparseConvTensor)
        assert torch.equal(tensor.features, y.features) and tensor.spatial_shape == y.spatial_shape
        torch.testing.assert_close(up(tensor).features, up(y).features)
        assert torch.equal(up(tensor).indices, x.indices)


def test_sync_batch_norm_conversion(sp):
    net = sp.SparseSequential(sp.SubMConv3d(4, 6, 3), nn.BatchNorm1d(6), sp.SparseBatchNorm(6))
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(net)
    assert isinstance(converted[1], nn.SyncBatchNorm) and converted is net
    assert converted.eval()(apis.tensor(sp)).features.shape == (60, 6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_parameters_and_autocast(sp, dtype):
    layer = sp.SubMConv3d(4, 6, 3)
    for parameter in layer.parameters():
        parameter.data = parameter.data.to(dtype)
    assert layer(apis.tensor(sp, dtype=dtype)).features.dtype == dtype
    layer, x = sp.SubMConv3d(4, 6, 3), apis.tensor(sp)
    with torch.autocast("cpu", dtype):
        y = layer(x).features
    assert y.dtype == dtype
    y.float().sum().backward()
    assert layer.weight.grad.dtype == torch.float32


def test_voxelizers_return_copies_and_ids(standin):
    from spconv.pytorch.utils import PointToVoxel

    make = PointToVoxel([1, 1, 1], [0, 0, 0, 4, 4, 4], 3, 10, 2, torch.device("cpu"))
    points = torch.tensor([[0.5, 0.5, 0.5], [0.6, 0.5, 0.5], [0.7, 0.5, 0.5], [9.0, 0, 0]])
    voxels, sites, counts, ids = make.generate_voxel_with_id(points)
    make(points + 1)
    assert torch.equal(voxels[0], points[:2]) and sites.tolist() == [[0, 0, 0]]
    assert counts.tolist() == [2] and ids.tolist() == [0, 0, 0, -1]
