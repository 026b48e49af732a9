"""Sparse tensors: construction, quantisation, arithmetic, decomposition, dense forms, copies."""

from __future__ import annotations

import copy
import io
import operator
import pickle
import warnings

import pytest
import torch

from tests.clouds import cloud


def make(ME, seed=0, channels=3, dimension=2, **options):
    coords = cloud((6,) * dimension, 2, 0.4, seed)
    coords[:, 1:] -= 2
    generator = torch.Generator().manual_seed(seed)
    feats = torch.randn(len(coords), channels, generator=generator)
    return ME.SparseTensor(feats, coords, **options), feats, coords


def rows(x):
    return {tuple(site): row for site, row in zip(x.C.tolist(), x.F, strict=True)}


def test_rows_keep_their_order_and_nothing_is_shared_with_the_caller(ME):
    x, feats, coords = make(ME)
    assert torch.equal(x.F, feats) and torch.equal(x.C, coords)
    assert x.inverse_mapping.tolist() == x.unique_index.tolist() == list(range(len(coords)))
    kept = coords.clone()
    coords.zero_()
    feats.zero_()
    assert torch.equal(x.C, kept) and x.F.any()
    x.C[:, 0] = 9
    fresh = ME.SparseTensor(x.F, coordinate_map_key=x.coordinate_map_key, coordinate_manager=x.coordinate_manager)
    assert torch.equal(fresh.C, kept)


MODES = ["RANDOM_SUBSAMPLE", "UNWEIGHTED_AVERAGE", "UNWEIGHTED_SUM", "MAX_POOL"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_duplicates(ME, mode, dtype):
    generator = torch.Generator().manual_seed(1)
    coords = torch.randint(-2, 2, (60, 3), generator=generator).int()
    coords[:, 0] = torch.randint(0, 2, (60,), generator=generator)
    feats = torch.randn(60, 4, generator=generator).to(dtype).requires_grad_()
    x = ME.SparseTensor(feats, coords, quantization_mode=getattr(ME.SparseTensorQuantizationMode, mode))
    first = {}
    for row, site in enumerate(coords.tolist()):
        first.setdefault(tuple(site), []).append(row)
    assert x.C.tolist() == [list(site) for site in first]
    assert torch.equal(x.C[x.inverse_mapping], coords)
    assert x.unique_index.tolist() == [members[0] for members in first.values()]
    reduce = {
        "RANDOM_SUBSAMPLE": lambda part: part[0],
        "UNWEIGHTED_AVERAGE": lambda part: part.mean(0),
        "UNWEIGHTED_SUM": lambda part: part.sum(0),
        "MAX_POOL": lambda part: part.max(0).values,
    }[mode]
    other = feats.detach().double().requires_grad_()
    want = torch.stack([reduce(other[members]) for members in first.values()])
    tolerance = {"rtol": 2e-3, "atol": 2e-3} if dtype == torch.float16 else {}
    torch.testing.assert_close(x.F, want.to(dtype), **tolerance)
    up = torch.randn(want.shape, generator=generator, dtype=torch.float64)
    x.F.backward(up.to(dtype))
    want.backward(up)
    torch.testing.assert_close(feats.grad, other.grad.to(dtype), **tolerance)


def test_any_dtype_can_be_subsampled(ME):
    coords = torch.tensor([[0, 1], [0, 1], [0, 2]], dtype=torch.int32)
    flags = torch.tensor([[True], [False], [True]])
    assert ME.SparseTensor(flags, coords).F.tolist() == [[True], [True]]
    with pytest.raises(RuntimeError, match=r"torch\.bool"):
        ME.SparseTensor(flags, coords, quantization_mode=ME.SparseTensorQuantizationMode.UNWEIGHTED_SUM)


def test_other_coordinate_dtypes_are_floored_with_a_warning(ME):
    sites = torch.tensor([[0, -0.5, 1.9], [1, 2.0, -3.1]])
    for given in (sites, sites.double(), sites.floor().long()):
        with pytest.warns(UserWarning, match="floored") as warned:
            x = ME.SparseTensor(torch.ones(2, 1), given)
        assert warned[0].filename == __file__
        assert x.C.tolist() == [[0, -1, 1], [1, 2, -4]] and x.C.dtype == torch.int32


def test_attributes(ME):
    x, feats, _ = make(ME, tensor_stride=[2, 4])
    assert x.tensor_stride == [2, 4] and x.D == x.dimension == 2
    assert x.shape == feats.shape and x.size() == feats.size() and len(x) == len(feats)
    assert x.dtype == torch.float32 and x.device == feats.device and not x.requires_grad
    assert x.coordinate_key is x.coordinate_map_key
    assert x.coordinate_map_key.get_key() == ([2, 4], "")
    assert x.requires_grad_() is None and x.requires_grad
    assert x.detach() is x and not x.requires_grad
    assert x.double() is x and x.dtype == torch.float64
    y = x + x
    for name in ("inverse_mapping", "unique_index"):
        with pytest.raises(AttributeError):
            getattr(y, name)
    with pytest.raises(AttributeError):
        x.anything = 1
    for name in ("cuda", "cpu", "clone", "half", "_sorted_batchwise_row_indices"):
        assert not hasattr(x, name)
    with pytest.raises(SyntaxError):
        x.tensor_stride = 1
    assert y.quantization_mode is ME.SparseTensorQuantizationMode.RANDOM_SUBSAMPLE
    assert "coordinates" in repr(x)


def test_names_of_0_4(ME):
    _, feats, coords = make(ME)
    x = ME.SparseTensor(feats, coords=coords, force_creation=True, allow_duplicate_coords=False)
    y = ME.SparseTensor(feats=feats, coords_key=x.coords_key, coords_manager=x.coords_man)
    assert y.coords_man is x.coordinate_manager and torch.equal(y.coords, coords)
    assert y.feats is feats and x.to("cpu") is x
    assert ME.RegionType.HYPERCUBE is ME.RegionType.HYPER_CUBE
    assert {m.value: m for m, _ in getattr(ME.RegionType, "__entries").values()}[1].name == "HYPER_CROSS"
    conv = ME.MinkowskiConvolution(3, 4, kernel_size=3, has_bias=True, dimension=2)
    assert conv.bias is not None
    grow = ME.MinkowskiConvolutionTranspose(
        3, 4, kernel_size=2, stride=2, has_bias=True, generate_new_coords=True, dimension=2
    )
    cells = coords * torch.tensor([1, 2, 2], dtype=torch.int32)
    coarse = ME.SparseTensor(feats, coords=cells, tensor_stride=2)
    assert len(grow(coarse)) == 4 * len(coarse)
    with pytest.raises(TypeError, match="generate_new_coords"):
        ME.MinkowskiConvolution(3, 4, kernel_size=2, generate_new_coords=True, dimension=2)
    sites, kept = ME.utils.sparse_quantize(coords=coords[:, 1:], feats=feats, quantization_size=1, hash_type="fnv")
    assert len(sites) == len(kept) == len(coords[:, 1:].unique(dim=0))
    for layer in (
        ME.MinkowskiInstanceNorm(3, dimension=2),
        ME.MinkowskiGlobalPooling(dimension=2),
        ME.MinkowskiBroadcastAddition(dimension=2),
        ME.MinkowskiPruning(D=2),
        ME.MinkowskiBatchNorm(3, D=2),
    ):
        assert isinstance(layer, ME.MinkowskiModuleBase)


OPERATIONS = [operator.add, operator.sub, operator.mul, operator.truediv]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_arithmetic_on_different_maps(ME, operation):
    x, feats, _ = make(ME, 0)
    other_coords = cloud((6, 6), 2, 0.4, 5)
    other_feats = torch.randn(len(other_coords), 3)
    leaves = feats.requires_grad_(), other_feats.requires_grad_()
    x = ME.SparseTensor(leaves[0], x.C)
    t = ME.SparseTensor(leaves[1], other_coords, coordinate_manager=x.coordinate_manager)
    z = operation(x, t)
    a, b = rows(x), rows(t)
    got = rows(z)
    assert list(got) == list(dict.fromkeys([*a, *b]))
    zero = torch.zeros(3)
    for site, row in got.items():
        want = a[site] if site not in b else operation(a.get(site, zero), b[site])
        torch.testing.assert_close(row, want)
    z.F.sum().backward()
    assert all(torch.isfinite(leaf.grad).all() for leaf in leaves)
    assert z.coordinate_map_key.get_key()[1].startswith("merge-")


def test_union_takes_the_finest_stride(ME):
    x, feats, coords = make(ME)
    down = ME.MinkowskiSumPooling(2, 2, dimension=2)(x)
    z = down + x
    assert z.tensor_stride == [1, 1]
    sites = {tuple(s) for s in coords.tolist()} | {tuple(s) for s in down.C.tolist()}
    assert {tuple(s) for s in z.C.tolist()} == sites
    torch.testing.assert_close(z.F.sum(0), 2 * feats.sum(0))
    u = ME.MinkowskiUnion()(down, x, x)
    torch.testing.assert_close(u.F.sum(0), 3 * feats.sum(0))


def test_in_place_and_same_key(ME):
    x, feats, _ = make(ME)
    y = ME.MinkowskiReLU()(x)
    memory = y.F.data_ptr()
    y += x
    y -= x
    y *= x
    assert y.F.data_ptr() == memory
    torch.testing.assert_close(y.F, feats.relu() * feats)
    before = y
    y /= x
    assert y is not before
    torch.testing.assert_close((x + torch.ones(3)).F, feats + 1)
    torch.testing.assert_close(x.__power__(2).F, feats**2)


def test_decomposition(ME):
    x, feats, coords = make(ME, 3)
    batch = coords[:, 0]
    for b, part in enumerate(x.decomposition_permutations):
        assert part.tolist() == (batch == b).nonzero()[:, 0].tolist()
        assert torch.equal(x.decomposed_coordinates[b], coords[part, 1:])
        assert torch.equal(x.decomposed_features[b], feats[part])
        assert torch.equal(x.coordinates_at(b), coords[part, 1:])
        assert torch.equal(x.features_at(b), feats[part])
        both = x.coordinates_and_features_at(b)
        assert torch.equal(both[0], coords[part, 1:]) and torch.equal(both[1], feats[part])
    x.decomposed_features.clear()
    assert len(x.decomposed_coordinates_and_features[1]) == 2
    with pytest.raises(AssertionError, match="batch index 2"):
        x.features_at(2)


def test_dense(ME):
    coords = cloud((4, 5), 3, 0.4, 1, empty_items=(2,))
    feats = torch.randn(len(coords), 3, requires_grad=True)
    x = ME.SparseTensor(feats, coords)
    index = tuple(coords.long().t())
    dense, low, stride = x.dense(torch.Size([3, 1, 4, 5]))
    want = torch.zeros(3, 4, 5, 3).index_put(index, feats.detach()).permute(0, 3, 1, 2)
    assert torch.equal(dense, want) and stride.tolist() == [1, 1]
    assert low.tolist() == [coords[:, 1:].amin(0).tolist()]
    dense.square().sum().backward()
    torch.testing.assert_close(feats.grad, 2 * feats.detach())
    shifted, low, _ = x.dense(min_coordinate=torch.IntTensor([-1, -2]))
    assert low.tolist() == [[-1, -2]]
    assert torch.equal(shifted[:, :, 1:, 2:], want[:2, :, : shifted.shape[2] - 1, : shifted.shape[3] - 2])
    down = ME.MinkowskiSumPooling(2, 2, dimension=2)(x)
    assert down.dense()[0].shape[2:] == (2, 3)
    assert down.dense(contract_stride=False)[0].shape[2:] == (3, 5)


def test_sparse_leaves_the_tensor_alone(ME):
    x, feats, coords = make(ME)
    sparse, low, stride = x.sparse()
    assert torch.equal(x.C, coords) and stride.tolist() == [1, 1]
    assert low.tolist() == [coords[:, 1:].amin(0).tolist()]
    dense = sparse.to_dense()
    at = (coords - torch.tensor([[0, *low[0].tolist()]])).long()
    assert torch.equal(dense[tuple(at.t())], feats)
    bounded, low, _ = x.sparse(torch.IntTensor([-3, -3]), torch.IntTensor([6, 6]))
    assert bounded.shape == (2, 10, 10, 3)


def test_conversions_from_dense(ME):
    image = torch.randn(2, 3, 4, 5)
    image[:, :, 1] = 0
    x = ME.to_sparse(image)
    assert len(x) == 2 * 3 * 5
    torch.testing.assert_close(x.dense(torch.Size([2, 3, 4, 5]))[0], image)
    last = ME.to_sparse(image.permute(0, 2, 3, 1), format="BXXC")
    assert torch.equal(last.C, x.C) and torch.equal(last.F, x.F)
    every = ME.to_sparse_all(image, ME.dense_coordinates(image.shape))
    assert len(every) == 2 * 4 * 5
    torch.testing.assert_close(every.dense()[0], image)
    module = ME.MinkowskiToSparseTensor()
    assert len(module(image)) == 40
    assert len(ME.MinkowskiToSparseTensor(coordinates=every.C)(image)) == 30
    assert torch.equal(ME.MinkowskiToFeature()(x), x.F)


def test_shared_manager(ME):
    a, _, coords = make(ME)
    ME.set_sparse_tensor_operation_mode(ME.SparseTensorOperationMode.SHARE_COORDINATE_MANAGER)
    assert ME.sparse_tensor_operation_mode().name == "SHARE_COORDINATE_MANAGER"
    x, y = (ME.SparseTensor(torch.ones(len(coords), 1), coords) for _ in range(2))
    assert x.coordinate_manager is y.coordinate_manager is ME.global_coordinate_manager()
    assert x.coordinate_map_key != y.coordinate_map_key
    assert ((x + y).F == 2).all() and len(x + y) == len(x)
    assert a.coordinate_manager is not x.coordinate_manager
    ME.clear_global_coordinate_manager()
    assert ME.global_coordinate_manager() is None


def test_tensors_and_modules_copy_and_pickle(ME):
    x, feats, coords = make(ME)
    net = torch.nn.Sequential(
        ME.MinkowskiConvolution(3, 4, kernel_size=3, stride=2, dimension=2),
        ME.MinkowskiBatchNorm(4),
        ME.MinkowskiReLU(),
        ME.MinkowskiInstanceNorm(4),
        ME.MinkowskiMaxPooling(2, 2, dimension=2),
        ME.MinkowskiChannelwiseConvolution(4, kernel_size=3, dimension=2),
        ME.MinkowskiGELU(),
        ME.MinkowskiConvolutionTranspose(4, 2, kernel_size=2, stride=2, dimension=2),
        ME.MinkowskiGlobalPooling(),
        ME.MinkowskiLinear(2, 3),
    ).eval()
    want = net(x)
    buffer = io.BytesIO()
    torch.save(net, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net)), torch.load(buffer, weights_only=False)):
        assert torch.equal(other(x).F, want.F) and repr(other) == repr(net)
    for layer in (
        ME.MinkowskiPruning(),
        ME.MinkowskiUnion(),
        ME.MinkowskiBroadcast(),
        ME.MinkowskiInterpolation(),
        ME.MinkowskiToFeature(),
    ):
        assert type(pickle.loads(pickle.dumps(layer))) is type(copy.deepcopy(layer)) is type(layer)
    down = ME.MinkowskiSumPooling(2, 2, dimension=2)(x)
    for duplicate in (copy.deepcopy((x, down)), pickle.loads(pickle.dumps((x, down)))):
        a, b = duplicate
        assert torch.equal(a.C, coords) and torch.equal(a.F, feats)
        assert a.coordinate_manager is b.coordinate_manager is not x.coordinate_manager
        assert a.coordinate_map_key == x.coordinate_map_key
        up = ME.MinkowskiPoolingTranspose(2, 2, dimension=2)(b)
        assert up.coordinate_map_key == a.coordinate_map_key
        assert torch.equal((up + a).F, (ME.MinkowskiPoolingTranspose(2, 2, dimension=2)(down) + x).F)


def test_keys(ME):
    key = ME.CoordinateMapKey([2, 1], "x")
    assert key == ME.CoordinateMapKey([2, 1], "x") and hash(key) == hash(ME.CoordinateMapKey([2, 1], "x"))
    assert key != ME.CoordinateMapKey([2, 1], "") and key in {ME.CoordinateMapKey([2, 1], "x"): 1}
    unset = ME.CoordinateMapKey(3)
    assert not unset.is_key_set() and unset != ME.CoordinateMapKey(3)
    unset.set_key(([4, 4], "y"))
    assert unset.get_key() == ([4, 4], "y") and unset.get_tensor_stride() == [4, 4]
    assert pickle.loads(pickle.dumps(key)) == copy.deepcopy(key) == key
    assert repr(key) == "coordinate map key:[2, 1]:x"
    with pytest.raises(TypeError):
        _ = key == 3


def test_no_warning_for_plain_use(ME):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        x, _, _ = make(ME)
        ME.MinkowskiConvolution(3, 4, kernel_size=2, stride=2, dimension=2)(x)
