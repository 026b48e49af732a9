"""The coordinate manager's own methods, against dictionaries; keys and row orders."""

from __future__ import annotations

import gc
import os
import weakref

import pytest
import torch

from tests.clouds import cloud

from . import reference


def managed(ME, dimension=2, seed=0):
    coords = cloud((7,) * dimension, 3, 0.3, seed)
    coords[:, 1:] -= 3
    manager = ME.CoordinateManager(D=dimension)
    key, maps = manager.insert_and_map(coords, tensor_stride=1)
    return manager, key, coords, maps


def test_insertion(ME):
    manager, key, coords, (unique, inverse) = managed(ME)
    assert key.get_key() == ([1, 1], "") and manager.size(key) == len(coords)
    assert unique.dtype == inverse.dtype == torch.int64
    assert torch.equal(manager.get_coordinates(key), coords)
    assert torch.equal(manager.get_coordinates(1), coords)
    again, (unique, inverse) = manager.insert_and_map(torch.cat([coords, coords]), [1, 1])
    assert again != key and len(again.get_key()[1]) == 5
    assert torch.equal(coords.repeat(2, 1)[unique], coords)
    assert torch.equal(coords[inverse], coords.repeat(2, 1))
    named, _ = manager.insert_and_map(coords, 1, "target")
    assert named.get_key() == ([1, 1], "target")
    other, _ = manager.insert_and_map(coords, 1, "target")
    assert other.get_key()[1].startswith("target-")
    stride, name = manager.get_unique_coordinate_map_key([1, 1])
    assert stride == [1, 1] and len(name) == 5
    assert manager.number_of_unique_batch_indices() == 3


def test_threads_of_managers_that_are_traced(ME, monkeypatch):
    """Dynamo of torch 2.11 refuses to ask the system, inside of what it compiles."""

    def refuse():
        raise AssertionError("asked the system")

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", refuse)
    assert 1 <= ME.CoordinateManager(D=3).num_threads <= 20
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert ME.CoordinateManager(D=3).num_threads == 3


def test_strides(ME):
    manager, key, coords, _ = managed(ME)
    strided = manager.stride(key, 2)
    assert strided == manager.stride(key, [2, 2]) and strided.get_key() == ([2, 2], "")
    assert manager.stride(key, 1) is not key and manager.stride(key, 1) == key
    named = manager.stride(key, 2, "mine")
    assert named.get_key() == ([2, 2], "mine")
    cells = [(b, u // 2 * 2, v // 2 * 2) for b, u, v in coords.tolist()]
    assert [tuple(s) for s in manager.get_coordinates(strided).tolist()] == list(dict.fromkeys(cells))
    in_rows, out_rows = manager.stride_map(key, strided)
    assert in_rows.tolist() == list(range(len(coords)))
    assert [tuple(s) for s in manager.get_coordinates(strided)[out_rows].tolist()] == cells
    with pytest.raises(RuntimeError, match="multiple"):
        manager.stride_map(strided, key)


@pytest.mark.parametrize("region", ["HYPER_CUBE", "HYPER_CROSS"])
@pytest.mark.parametrize("dilation", [1, 2])
def test_kernel_maps(ME, region, dilation):
    manager, key, coords, _ = managed(ME)
    strided = manager.stride(key, 2)
    sites = {tuple(s): i for i, s in enumerate(coords.tolist())}
    coarse = manager.get_coordinates(strided).tolist()
    offsets = reference.offsets_of((3, 3))
    if region == "HYPER_CROSS":
        offsets = [(0, 0), (1, 0), (-1, 0), (0, 1), (0, -1)]
    found = manager.kernel_map(
        key, strided, stride=2, kernel_size=3, dilation=dilation, region_type=getattr(ME.RegionType, region)
    )
    turned = manager.kernel_map(
        strided,
        key,
        stride=2,
        kernel_size=3,
        dilation=dilation,
        is_transpose=True,
        region_type=getattr(ME.RegionType, region),
    )
    for k, (a, b) in enumerate(offsets):
        want = []
        for row, (batch, u, v) in enumerate(coarse):
            site = (batch, u + a * dilation, v + b * dilation)
            if site in sites:
                want.append([sites[site], row])
        if not want:
            assert k not in found and k not in turned
            continue
        assert found[k].dtype == torch.int32
        assert found[k].t().tolist() == sorted(want, key=lambda pair: pair[1])
        assert turned[k].t().tolist() == sorted([pair[::-1] for pair in want], key=lambda p: p[1])


def test_pool_and_pointwise_maps_keep_their_orders(ME):
    manager, key, coords, _ = managed(ME)
    strided = manager.stride(key, 3)
    found = manager.kernel_map(key, strided, stride=3, kernel_size=3, is_pool=True)
    assert list(found) == [0] and found[0][0].tolist() == list(range(len(coords)))
    in_rows, out_rows = manager.stride_map(key, strided)
    assert torch.equal(found[0].long(), torch.stack([in_rows, out_rows]))
    shuffled, _ = manager.insert_and_map(coords.flip(0).contiguous(), 1, "query")
    pairs = manager.kernel_map(shuffled, key, kernel_size=1, region_type=1)[0]
    assert pairs[1].tolist() == list(range(len(coords)))
    assert pairs[0].tolist() == list(range(len(coords)))[::-1]
    with pytest.warns(DeprecationWarning, match="kernel_map"):
        assert len(manager.get_kernel_map(1, 1, kernel_size=1)) == 1
    empty, _ = manager.insert_and_map(torch.zeros(0, 3, dtype=torch.int32), 1, "empty")
    assert manager.kernel_map(empty, key, kernel_size=3) == {}


def test_origin(ME):
    coords = managed(ME)[2]
    gapped = coords.clone()
    gapped[:, 0] = torch.tensor([5, 0, 2])[coords[:, 0].long()].int()
    other = ME.CoordinateManager(D=2)
    key, _ = other.insert_and_map(gapped, 1)
    origin = other.origin()
    assert origin.get_key() == ([0, 0], "")
    assert other.get_coordinates(origin).tolist() == [[0, 0, 0], [2, 0, 0], [5, 0, 0]]
    batches, rows = other.origin_map(key)
    assert batches.tolist() == [0, 2, 5] and len(rows) == 6
    for b, part in enumerate(rows):
        assert part.tolist() == (gapped[:, 0] == b).nonzero()[:, 0].tolist()
    late, _ = other.insert_and_map(torch.tensor([[9, 0, 0]], dtype=torch.int32), 1)
    assert other.get_coordinates(other.origin())[:, 0].tolist() == [0, 2, 5, 9]
    assert other.get_coordinates(origin)[:, 0].tolist() == [0, 2, 5]
    assert len(other.origin_map(late)[1]) == 10


def test_union(ME):
    manager, key, coords, _ = managed(ME)
    other = cloud((7, 7), 2, 0.3, 5)
    second, _ = manager.insert_and_map(other, 1)
    out = ME.CoordinateMapKey(3)
    maps = manager.union_map([key, second], out)
    union = manager.get_coordinates(out)
    for given, pairs in zip((coords, other), maps, strict=True):
        assert pairs.dtype == torch.int64 and torch.equal(union[pairs[1]], given[pairs[0]])
    assert len(union) == len({tuple(s) for s in [*coords.tolist(), *other.tolist()]})
    with pytest.raises(RuntimeError, match="unset"):
        manager.union_map([key, second], out)


def test_fields(ME):
    manager = ME.CoordinateManager(D=2)
    coords = torch.tensor([[0, 0.5, 1.5], [0, 0.6, 1.2], [1, -0.5, 3.0]])
    key = manager.insert_field(coords, [1, 1])
    assert torch.equal(manager.get_coordinate_field(key), coords)
    assert manager.size(key) == 3
    voxels, (unique, inverse) = manager.field_to_sparse_insert_and_map(key, [1, 1])
    assert unique.tolist() == [0, 2] and inverse.tolist() == [0, 0, 1]
    assert manager.exists_field_to_sparse(key, voxels)
    assert manager.field_to_sparse_keys(key) == [voxels]
    coarse = manager.stride(voxels, 2)
    rows, points = manager.field_to_sparse_map(key, coarse)
    assert rows.dtype == torch.int32 and points.tolist() == [0, 1, 2] and rows.tolist() == [0, 0, 1]
    assert manager.origin_field_map(key)[1][1].tolist() == [2]
    assert manager.size(voxels) == 2  # a map comes before a field of an equal key


def test_interpolation_weights(ME):
    manager, key, _, _ = managed(ME)
    query = torch.tensor([[0, 0.25, 0.5], [9, 0.0, 0.0]])
    in_rows, samples, weights = manager.interpolation_map_weight(key, query)
    sites = manager.get_coordinates(key)[in_rows.long()]
    for site, sample, weight in zip(sites.tolist(), samples.tolist(), weights.tolist(), strict=True):
        assert sample == 0 and site[0] == 0
        assert weight == pytest.approx((1 - abs(0.25 - site[1])) * (1 - abs(0.5 - site[2])))


def test_completion_networks_ask_the_manager_which_voxels_stay(ME):
    """Generative reconstruction: rows of an output whose cell is in a target."""
    target = cloud((8, 8, 8), 2, 0.1, 1)
    x = ME.SparseTensor(torch.ones(2, 1), torch.tensor([[0, 0, 0, 0], [1, 0, 0, 0]]).int(), tensor_stride=8)
    manager = x.coordinate_manager
    key, _ = manager.insert_and_map(target, string_id="target")
    up = ME.MinkowskiGenerativeConvolutionTranspose(1, 1, kernel_size=2, stride=2, dimension=3)
    for stride in (4, 2, 1):
        x = up(x)
        strided = manager.stride(key, stride)
        found = manager.kernel_map(x.coordinate_map_key, strided, kernel_size=1, region_type=1)
        keep = torch.zeros(len(x), dtype=torch.bool)
        for pairs in found.values():
            keep[pairs[0].long()] = True
        cells = {(b, *(c // stride * stride for c in u)) for b, *u in target.tolist()}
        assert keep.tolist() == [tuple(site) in cells for site in x.C.tolist()]
        x = ME.MinkowskiPruning()(x, keep)
    assert {tuple(s) for s in x.C.tolist()} == {tuple(s) for s in target.tolist()}


def test_everything_goes_with_the_last_tensor(ME):
    coords = cloud((9, 9, 9), 1, 0.2)
    net = torch.nn.Sequential(
        ME.MinkowskiConvolution(1, 4, kernel_size=3, stride=2, dimension=3),
        ME.MinkowskiConvolution(4, 4, kernel_size=3, dimension=3),
        ME.MinkowskiInstanceNorm(4),
        ME.MinkowskiMaxPooling(2, 2, dimension=3),
        ME.MinkowskiConvolutionTranspose(4, 1, kernel_size=2, stride=2, dimension=3),
    )
    gc.collect()
    gc.disable()
    try:
        x = ME.SparseTensor(torch.randn(len(coords), 1, requires_grad=True), coords)
        manager = x.coordinate_manager._manager
        refs = [weakref.ref(manager)]
        y = net(x)
        y.F.sum().backward()
        assert len((y + y).decomposed_features) == 1
        refs += [weakref.ref(kmap.rulebook) for kmap in manager.kernel_maps.values()]
        assert len(refs) >= 4
        del x, y, manager
        assert [ref() for ref in refs] == [None] * len(refs)
    finally:
        gc.enable()


@pytest.mark.gpu
def test_gpu_memory_does_not_grow(ME):
    net = torch.nn.Sequential(
        ME.MinkowskiConvolution(1, 8, kernel_size=3, stride=2, dimension=3),
        ME.MinkowskiConvolution(8, 8, kernel_size=3, dimension=3),
        ME.MinkowskiBatchNorm(8),
        ME.MinkowskiGenerativeConvolutionTranspose(8, 1, kernel_size=2, stride=2, dimension=3),
    ).cuda()
    seen = []
    for step in range(30):
        coords = cloud((20, 20, 20), 1, 0.2, seed=step % 3, device="cuda")
        x = ME.SparseTensor(torch.ones(len(coords), 1, device="cuda"), coords)
        y = net(x)
        (y + x).F.sum().backward()
        del x, y
        seen.append(torch.cuda.memory_allocated())
    assert max(seen[20:]) <= max(seen[5:15])


@pytest.mark.parametrize("kind", ["SparseTensor", "TensorField"])
def test_items_from_the_end_and_beyond(ME, kind):
    coords = torch.tensor([[0, 0], [0, 1], [2, 0], [2, 1]])  # no batch item 1
    coords = coords.float() if kind == "TensorField" else coords.int()
    x = getattr(ME, kind)(torch.arange(4.0)[:, None], coords)
    rows = [[0, 1], [], [2, 3]]
    assert [part.tolist() for part in x.decomposition_permutations] == rows
    for index in (-3, -2, -1, 0, 1, 2, torch.tensor(-1), torch.tensor(2)):
        assert x.features_at(index).flatten().tolist() == rows[int(index)]
        assert torch.equal(x.coordinates_at(index), coords[rows[int(index)], 1:])
        assert len(x.coordinates_and_features_at(index)[1]) == len(rows[int(index)])
    for index in (3, -4, 10**9):
        for call in (x.features_at, x.coordinates_at, x.coordinates_and_features_at):
            with pytest.raises(IndexError, match=f"batch index {index}"):
                call(index)
    with pytest.raises(TypeError):
        x.features_at(0.5)
