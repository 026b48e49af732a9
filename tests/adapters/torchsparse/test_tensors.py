"""SparseTensor and PointTensor, and what makes, joins and unpacks them."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from sparse_bridge.errors import GeometryError, SparseBridgeError

from .conftest import DEVICES, speaking
from .test_conv import points

ONE = (1, 1, 1)


def test_constructor_and_names(ts):
    coords = points(ts.release)
    feats = torch.randn(len(coords), 3)
    x = ts.SparseTensor(feats, coords, 2)
    assert x.F is x.feats is feats and x.C is x.coords is coords
    assert x.s == x.stride == (2, 2, 2) and x.spatial_range is None
    x.s = [1, 2, 4]
    assert x.stride == (1, 2, 4) and all(type(n) is int for n in x.s)
    x.F, x.C = feats + 1, coords + 1
    assert torch.equal(x.feats, feats + 1) and torch.equal(x.coords, coords + 1)
    y = ts.SparseTensor(feats=feats, coords=coords, stride=torch.tensor([1, 1, 2]))
    assert y.stride == (1, 1, 2) and y._caches is not x._caches
    y.anything = 1  # plug-ins hang attributes on it
    assert ts.SparseTensor(feats, coords, 1, [1, 4, 5, 6]).spatial_range == (1, 4, 5, 6)
    with pytest.raises(TypeError):
        ts.SparseTensor(feats, coords, 1, 5)
    from torchsparse.tensor import PointTensor, SparseTensor

    assert SparseTensor is ts.SparseTensor and PointTensor is ts.PointTensor


def test_methods_change_the_tensor_itself(ts):
    coords = points(ts.release)
    x = ts.SparseTensor(torch.randn(len(coords), 3, requires_grad=True), coords)
    assert x.detach() is x and not x.F.requires_grad
    assert x.half() is x and x.F.dtype == torch.float16 and x.C.dtype == torch.int32
    assert x.cpu() is x and x.to("cpu") is x
    assert x.to("meta") is x and x.F.is_meta and x.C.is_meta


@pytest.mark.gpu
def test_moving_to_a_gpu(ts):
    coords = points(ts.release)
    x = ts.SparseTensor(torch.randn(len(coords), 3), coords)
    conv = ts.nn.Conv3d(3, 3, 3)
    want = conv(x).F
    assert x.cuda() is x and x.C.is_cuda
    torch.testing.assert_close(conv.cuda()(x).F.cpu(), want)
    assert x.cpu().F.device.type == "cpu"
    z = ts.PointTensor(torch.randn(4, 3), torch.rand(4, 4))
    assert z.cuda() is z and z.F.is_cuda and z.C.is_cuda


def test_point_tensor(ts):
    feats, coords = torch.randn(5, 3, requires_grad=True), torch.rand(5, 4)
    z = ts.PointTensor(feats, coords)
    assert z.F is feats and z.C is coords and z.idx_query == z.weights == {}
    assert z.additional_features == {"idx_query": {}, "counts": {}}
    z.idx_query[ONE] = 1
    z.additional_features["counts"][1] = 2
    total = z + ts.PointTensor(feats, coords + 1, {"other": 1}, {"w": 1})
    assert torch.equal(total.F, 2 * feats) and total.C is coords and total.idx_query is z.idx_query
    assert total.additional_features is z.additional_features
    assert z.detach() is z and not z.F.requires_grad and z.to("meta") is z and z.F.is_meta


def test_subclasses(ts):
    """spvnas derives its own points, with float coordinates."""

    class Points(ts.SparseTensor):
        def __init__(self, feats, coords, more=None):
            super().__init__(feats, coords)
            self.more = more

    z = Points(torch.randn(5, 3), torch.rand(5, 4))
    y = z + z
    assert type(y) is ts.SparseTensor and torch.equal(y.F, 2 * z.F)
    coords = points(ts.release)
    out = ts.nn.Conv3d(3, 4, 3)(Points(torch.randn(len(coords), 3), coords))
    assert type(out) is ts.SparseTensor
    assert ts.nn.ReLU()(z).C.dtype == torch.float32


def test_sum(ts):
    coords = points(ts.release)
    a = ts.SparseTensor(torch.randn(len(coords), 3), coords, 2, (2, 6, 5, 7))
    b = ts.SparseTensor(torch.randn(len(coords), 3), coords.flip(0))
    y = a + b
    assert torch.equal(y.F, a.F + b.F) and y.C is a.C and y.stride == a.stride
    assert y._caches is a._caches and y.spatial_range == a.spatial_range
    with pytest.raises(ValueError, match=rf"{len(coords)}, 1 rows"):
        a + ts.SparseTensor(a.F[:1], a.C[:1])


def test_cat(ts):
    coords = points(ts.release)
    tensors = [ts.SparseTensor(torch.randn(len(coords), c), coords, 2) for c in (3, 1, 4)]
    for group in (tensors, tuple(tensors), (t for t in tensors)):
        y = ts.cat(group)
        assert torch.equal(y.F, torch.cat([t.F for t in tensors], 1)) and y.C is coords
        assert y.stride == (2, 2, 2) and y._caches is tensors[0]._caches
    assert ts.operators.cat is ts.cat
    with pytest.raises(AssertionError, match="no tensors"):
        ts.cat([])
    with pytest.raises(ValueError, match="1 rows"):
        ts.cat([tensors[0], ts.SparseTensor(tensors[0].F[:1], coords[:1])])


def test_generative_add(ts21):
    a, b = points("2.1", seed=1), points("2.1", seed=2, share=0.5)
    twice = torch.cat([a, a[:3]])
    fa, fb = (torch.randn(len(twice), 3, requires_grad=True), torch.randn(len(b), 3, requires_grad=True))
    x, y = ts21.SparseTensor(fa, twice), ts21.SparseTensor(fb, b, 2, (2, 6, 5, 7))
    assert len(b) > len(twice)
    out = ts21.generative_add(x, y)
    want = {}
    for row, feat in [*zip(twice.tolist(), fa, strict=True), *zip(b.tolist(), fb, strict=True)]:
        want[tuple(row)] = want.get(tuple(row), 0) + feat
    assert [tuple(row) for row in out.C.tolist()] == sorted(want)
    torch.testing.assert_close(out.F, torch.stack([want[k] for k in sorted(want)]))
    assert out.stride == (2, 2, 2) and out._caches is y._caches and out.spatial_range == (2, 6, 5, 7)
    out.F.sum().backward()
    assert torch.equal(fa.grad, torch.ones_like(fa)) and torch.equal(fb.grad, torch.ones_like(fb))
    assert ts21.operators.generative_add is ts21.generative_add
    with pytest.raises(AssertionError, match="channels"):
        ts21.generative_add(x, ts21.SparseTensor(fb[:, :2], b))


@pytest.mark.parametrize("device", DEVICES)
def test_dense(ts21, device):
    coords = points("2.1").to(device)
    feats = torch.randn(len(coords), 3, device=device, dtype=torch.float64, requires_grad=True)
    dense = ts21.SparseTensor(feats, coords, 1, (3, 7, 5, 8)).dense()
    assert dense.shape == (3, 7, 5, 8, 3)
    b, x, y, z = coords.long().t()
    assert torch.equal(dense[b, x, y, z], feats)
    assert int((dense != 0).any(-1).sum()) == len(coords)
    up = torch.randn_like(dense)
    dense.backward(up)
    assert torch.equal(feats.grad, up[b, x, y, z])
    to_dense = ts21.utils.to_dense
    half = to_dense(feats.half(), coords, [3, 7, 5, 8, 99])
    assert half.dtype == torch.float16 and half.shape == (3, 7, 5, 8, 3)
    again = torch.cat([coords, coords[:2]])
    values = torch.cat([feats.detach(), torch.full((2, 3), 9.0, device=device)])
    twice = to_dense(values, again, (3, 7, 5, 8))
    assert torch.equal(twice[b[:2], x[:2], y[:2], z[:2]], values[-2:]), "the last of equal rows stays"
    assert not to_dense(feats[:0], coords[:0], (1, 2, 2, 2)).any()


def test_dense_of_bad_tensors(ts21):
    coords = points("2.1")
    feats = torch.randn(len(coords), 3)
    to_dense = ts21.utils.to_dense
    with pytest.raises(AssertionError, match="spatial_range"):
        ts21.SparseTensor(feats, coords).dense()
    for limits, text in (((2, 6, 4, 7), "column y holds 4"), ((1, 6, 5, 7), "column b holds 1")):
        with pytest.raises(ValueError, match=text):
            to_dense(feats, coords, limits)
    with pytest.raises(ValueError, match=r"\(B, X, Y, Z\)"):
        to_dense(feats, coords, (6, 5, 7))
    with pytest.raises(ValueError, match=r"expected \[N, C\]"):
        to_dense(feats[1:], coords, (2, 6, 5, 7))
    with pytest.raises(TypeError, match="int64"):
        to_dense(feats, coords.long(), (2, 6, 5, 7))


def samples(ts, as_numpy):
    made = []
    for item, n in enumerate((4, 0, 3)):
        rng = np.random.default_rng(item)
        coords, feats = rng.integers(-5, 5, (n, 3)).astype(np.int32), rng.random((n, 2), np.float32)
        labels = rng.integers(0, 9, n)
        if not as_numpy:
            coords, feats, labels = map(torch.from_numpy, (coords, feats, labels))
        made.append((ts.SparseTensor(feats, coords, 2), ts.SparseTensor(labels, coords, 2)))
    return made


@pytest.mark.parametrize("as_numpy", [True, False])
def test_collate(ts, as_numpy):
    made = samples(ts, as_numpy)
    raw = [np.asarray(x.coords) for x, _ in made]
    y = ts.utils.collate.sparse_collate([x for x, _ in made])
    batch = np.repeat([0, 1, 2], [4, 0, 3])[:, None]
    parts = [batch, np.concatenate(raw)]
    want = np.concatenate(parts if ts.release == "2.1" else parts[::-1], 1)
    assert y.C.dtype == torch.int32 and y.C.tolist() == want.tolist() and y.stride == (2, 2, 2)
    assert isinstance(made[0][0].coords, torch.Tensor), "samples are converted in place"
    labels = ts.utils.collate.sparse_collate([t for _, t in made])
    assert labels.F.shape == (7,) and labels.F.dtype == torch.int64
    wide = [ts.SparseTensor(x.feats, x.coords.long(), 2) for x, _ in made]
    assert ts.utils.collate.sparse_collate(wide).C.dtype == torch.int64
    with pytest.raises(AssertionError, match="stride"):
        ts.utils.collate.sparse_collate([made[0][0], ts.SparseTensor(torch.ones(1, 2), torch.zeros(1, 3))])
    with pytest.raises(AssertionError, match="no samples"):
        ts.utils.collate.sparse_collate([])
    with pytest.raises(AssertionError, match="list coordinates"):
        ts.utils.collate.sparse_collate([ts.SparseTensor([1.0], [[0, 0, 0]])])


def test_collate_dictionaries(ts):
    collate = ts.utils.collate.sparse_collate_fn
    batch = [
        {"x": x, "deep": {"y": t}, "a": np.arange(3), "t": torch.ones(2), "name": str(i)}
        for i, (x, t) in enumerate(samples(ts, True))
    ]
    out = collate(batch)
    assert out["x"].C.shape == (7, 4) and out["deep"]["y"].F.shape == (7,)
    assert out["a"].shape == (3, 3) and out["t"].shape == (3, 2) and out["name"] == ["0", "1", "2"]
    assert collate([1, 2]) == [1, 2]


def test_quantize():
    rng = np.random.default_rng(0)
    cloud = rng.random((60, 3)) * 4 - 2
    for release in ("2.1", "2.0", "1.4"):
        with speaking(release) as ts:
            quantize = ts.utils.quantize.sparse_quantize
            for size in (1, 0.5, (0.5, 1, 0.25)):
                coords, index, inverse = quantize(cloud, size, return_index=True, return_inverse=True)
                cells = np.floor(cloud / np.array(size)).astype(np.int32)
                seen = {}
                for i, cell in enumerate(cells.tolist()):
                    seen.setdefault(tuple(cell), i)
                shift = cells.min(0) if release == "1.4" else 0
                want = np.array(sorted(seen)) - shift
                assert coords.dtype == np.int32 and np.array_equal(coords, want)
                assert index.tolist() == [seen[key] for key in sorted(seen)]
                assert np.array_equal(coords[inverse], cells - shift)
                assert np.array_equal(quantize(cloud, size), coords)
                assert len(quantize(cloud, size, return_inverse=True)) == 2
            for wrong in ([1, 1, 1], np.ones(3), np.float32(1), (1, 1)):
                with pytest.raises(AssertionError, match="voxel_size"):
                    quantize(cloud, wrong)
            for size in (0, (1, 0.0, 1), float("nan")):
                with pytest.raises(GeometryError, match="voxel_size is"):
                    quantize(cloud, size)
            assert quantize(cloud[:0]).shape == (0, 3)
            with pytest.raises(AssertionError, match=r"expected \(N, 3\)"):
                quantize(cloud[:, :2])
            for value in (np.nan, np.inf, 3e9):
                with pytest.raises(OverflowError, match="32-bit"):
                    quantize(np.full((1, 3), value))


def test_tuples_and_tensors(ts):
    utils = ts.utils
    assert utils.make_ntuple(2, 3) == utils.make_ntuple([2, 2, 2], ndim=3) == (2, 2, 2)
    assert utils.make_ntuple(torch.tensor([1, 2]), 2) == (1, 2)
    for wrong in ((1, 2), [1], "123", np.int64(3), None):
        with pytest.raises(AssertionError) as caught:
            utils.make_ntuple(wrong, 3)
        assert isinstance(caught.value, SparseBridgeError)
    one = utils.make_tensor((1, 2, 3), torch.int32, "cpu")
    assert one is utils.make_tensor((1, 2, 3), torch.int32, "cpu") and one.tolist() == [1, 2, 3]
    assert utils.make_divisible(13, 8) == 16 and utils.make_divisible(16, 8) == 16
    names: dict = {}
    exec("from torchsparse.utils import *\nfrom torchsparse.nn.utils import *", names)
    assert {"make_ntuple", "make_tensor", "fapply", "get_kernel_offsets"} <= set(names)


def test_kernel_offsets(ts):
    offsets = ts.nn.utils.get_kernel_offsets
    assert offsets(2).tolist() == [[x, y, z] for x in (0, 1) for y in (0, 1) for z in (0, 1)]
    third = offsets(3)
    assert third.dtype == torch.int32 and third[:4].tolist() == [[-1, -1, -1], [0, -1, -1], [1, -1, -1], [-1, 0, -1]]
    assert offsets((1, 1, 4)).tolist() == [[0, 0, n] for n in (-1, 0, 1, 2)]
    assert offsets(2, (2, 4, 8), 3)[-1].tolist() == [6, 12, 24]
    assert offsets((3, 1, 2))[:3].tolist() == [[-1, 0, 0], [-1, 0, 1], [0, 0, 0]]


def test_functions_of_the_features(ts):
    coords = points(ts.release)
    x = ts.SparseTensor(torch.randn(len(coords), 3), coords, 2)
    y = ts.nn.utils.fapply(x, torch.clamp, -0.5, max=0.5)
    assert torch.equal(y.F, x.F.clamp(-0.5, 0.5)) and y.C is x.C and y._caches is x._caches
    assert y.stride == (2, 2, 2) and y is not x


def test_negative_flag(ts21):
    tensor = ts21.tensor
    assert tensor.get_allow_negative_coordinates() is False
    tensor.set_allow_negative_coordinates(True)
    assert tensor.get_allow_negative_coordinates() is True
    tensor.set_allow_negative_coordinates(False)


def test_tuning_is_accepted(ts):
    net = ts.nn.Conv3d(3, 3, 3)
    before = copy.deepcopy(net.state_dict())
    with pytest.warns(UserWarning, match="torchsparse.tune does nothing") as caught:
        assert ts.tune(net, [1, 2], n_samples=5, save_dir="x", tune_with_bwd=True) is None
    assert caught[0].filename == __file__
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())


def test_switches(ts):
    backends = ts.backends
    assert backends.benchmark is False and backends.hash_rsv_ratio == 2
    backends.benchmark, backends.allow_tf32 = True, True
    backends.init()
    assert backends.benchmark is False
    if not torch.cuda.is_available():
        assert backends.device_capability == 0
        assert backends.allow_tf32 is False and backends.allow_fp16 is False
    with pytest.raises(AttributeError):
        _ = backends.nonesuch


def test_conversion_to_the_common_form(ts):
    from sparse_bridge.adapters.torchsparse import from_core, to_core

    coords = points(ts.release, scale=(2, 2, 2))
    x = ts.SparseTensor(torch.randn(len(coords), 3), coords, 2)
    data = to_core(x)
    first = coords if ts.release == "2.1" else coords[:, [3, 0, 1, 2]]
    cells = first if ts.release == "2.1" else first // torch.tensor([1, 2, 2, 2], dtype=torch.int32)
    assert torch.equal(data.coords, cells) and data.feats is x.F and data.tensor_stride == (2, 2, 2)
    y = from_core(data)
    assert torch.equal(y.C, x.C) and y.stride == x.stride and y._caches is not x._caches
    y = from_core(data, like=x)
    assert y.C is x.C and y._caches is x._caches
    with pytest.raises(TypeError, match="got Tensor"):
        to_core(x.F)
    if ts.release == "2.1":
        ranged = to_core(ts.SparseTensor(x.F, x.C, 1, (3, 20, 21, 22)))
        assert ranged.spatial_shape == (20, 21, 22) and ranged.batch_size == 3
        assert from_core(ranged).spatial_range == (3, 20, 21, 22)
