"""Small functions beside the layers: sums by index, row numbers, configurations, times."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
import torch

import sparse_bridge
from sparse_bridge.errors import UnsupportedError

from .conftest import DEVICES
from .test_conv import points


def summed(src, index, dim, size):
    """Element by element."""
    index = np.broadcast_to(index, src.shape)
    out = np.zeros([size if axis == dim % src.ndim else n for axis, n in enumerate(src.shape)])
    for place in np.ndindex(src.shape):
        target = list(place)
        target[dim] = index[place]
        out[tuple(target)] += src[place]
    return out


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape, dim", [((7,), 0), ((7, 3), 0), ((3, 7), -1), ((2, 7, 3), 1)])
def test_scatter_sum(ts21, shape, dim, device):
    scatter_sum = ts21.operators.scatter_sum
    src = torch.randn(shape, dtype=torch.float64)
    index = torch.tensor([4, 0, 4, 2, 2, 2, 0])
    along = index.view([7 if axis == dim % len(shape) else 1 for axis in range(len(shape))])
    x = src.clone().to(device).requires_grad_()
    y = scatter_sum(x, index.to(device), dim)
    torch.testing.assert_close(y.cpu(), torch.from_numpy(summed(src.numpy(), along.numpy(), dim, 5)))
    up = torch.randn_like(y)
    y.backward(up)
    wanted = up.cpu().index_select(dim, index)
    torch.testing.assert_close(x.grad.cpu(), wanted)
    # An index for every element, more places, and a result that is added to.
    every = torch.randint(0, 5, shape, generator=torch.Generator().manual_seed(0))
    y = scatter_sum(src.to(device), every.to(device), dim=dim, dim_size=6)
    want = torch.from_numpy(summed(src.numpy(), every.numpy(), dim, 6))
    torch.testing.assert_close(y.cpu(), want)
    out = torch.ones_like(y)
    assert scatter_sum(src.to(device), every.to(device), dim, out) is out
    torch.testing.assert_close(out.cpu(), want + 1)


def test_scatter_sum_at_its_edges(ts21):
    scatter_sum = ts21.operators.scatter_sum
    ones = torch.ones(3, dtype=torch.int64)
    assert scatter_sum(ones, torch.tensor([1, 1, 0])).tolist() == [1, 2]
    none = torch.empty(0, dtype=torch.int64)
    assert scatter_sum(torch.zeros(0, 2), none, 0).shape == (0, 2)
    assert scatter_sum(torch.zeros(0, 2), none, 0, dim_size=3).tolist() == [[0, 0]] * 3
    half = torch.full((3000,), 1.0, dtype=torch.float16)
    assert scatter_sum(half, torch.zeros(3000, dtype=torch.int32)).item() == 3000
    for index, more, error in (
        (torch.tensor([0, 3]), {"dim_size": 3}, ValueError),
        (torch.tensor([0, -1]), {}, ValueError),
        (torch.tensor([0, 1, 2]), {}, ValueError),
        (torch.tensor([0.0, 1.0]), {}, TypeError),
        (torch.tensor([0, 1]), {"out": torch.zeros(2, 3)}, ValueError),
    ):
        with pytest.raises(error):
            scatter_sum(torch.zeros(2, 2), index, 0, **more)


def test_broadcast(ts21):
    broadcast, other = ts21.operators.broadcast, torch.zeros(2, 3, 4)
    for src, dim, wanted in (
        (torch.arange(3), 1, torch.arange(3).view(1, 3, 1)),
        (torch.arange(4), -1, torch.arange(4).view(1, 1, 4)),
        (torch.arange(6).view(2, 3), 1, torch.arange(6).view(2, 3, 1)),
        (torch.arange(3).view(1, 3, 1), 0, torch.arange(3).view(1, 3, 1)),
    ):
        assert torch.equal(broadcast(src, other, dim), wanted.expand(2, 3, 4))
    with pytest.raises(ValueError, match="does not broadcast"):
        broadcast(torch.arange(4), other, 1)


def test_ravel_hash(ts):
    ravel_hash = ts.utils.quantize.ravel_hash
    rows = np.random.default_rng(0).integers(-5, 9, (60, 3)).astype(np.int32)
    given = rows.copy()
    found = ravel_hash(given)
    low, size = rows.min(0), np.ptp(rows, 0) + 1
    assert found.dtype == np.uint64
    assert (found == np.ravel_multi_index((rows - low).T, size)).all()
    assert (given == (rows - low if ts.release == "1.4" else rows)).all()
    assert ravel_hash(np.zeros((0, 3), np.int32)).shape == (0,)
    assert ravel_hash(np.array([[0.5, 2.0], [1.75, -1.0]])).tolist() == [3, 4]
    ends = np.array([[-(2**63)], [2**63 - 1]])
    assert ravel_hash(ends).tolist() == [0, 2**64 - 1]
    with pytest.raises(OverflowError, match="more than"):
        ravel_hash(np.array([[0, 0], [2**40, 2**40]]))
    for wrong in (np.zeros(3), [[1, 2]], np.array([["a"]])):
        with pytest.raises(AssertionError, match="expected an array"):
            ravel_hash(wrong)


def test_to_dense_by_its_function(ts21):
    module = importlib.import_module("torchsparse.utils.to_dense")
    coords = points("2.1")
    feats = torch.randn(len(coords), 3, requires_grad=True)
    y = module.ToDenseFunction.apply(feats, coords, (2, 6, 5, 7))
    assert torch.equal(y, ts21.utils.to_dense(feats, coords, (2, 6, 5, 7)))
    y.sum().backward()
    assert torch.equal(feats.grad, torch.ones_like(feats))


def test_configurations(ts21, caplog):
    conv = importlib.import_module("torchsparse.nn.functional.conv")
    config = conv.conv_config.keys_check(conv.utils.AttributeDict(ifsort=True))
    assert config.kmap_mode == "hashmap_on_the_fly" and config.ifsort is True
    inner = conv.utils.AttributeDict(a=1, b=[conv.utils.AttributeDict(c=2)])
    plain = conv.utils.AttributeDict(inner=inner).to_dict()
    assert plain == {"inner": {"a": 1, "b": [{"c": 2}]}}
    assert {type(plain), type(plain["inner"]), type(plain["inner"]["b"][0])} == {dict}
    hashes = importlib.import_module("torchsparse.nn.functional.conv.hash.hash")
    assert hashes.sphash is ts21.nn.functional.sphash
    queries = importlib.import_module("torchsparse.nn.functional.conv.hash.query")
    assert queries.sphashquery is ts21.nn.functional.sphashquery


@pytest.mark.parametrize("name", ["coords", "_coords"])
def test_coordinates_by_name(ts, name):
    F, coords = ts.nn.functional, points(ts.release)
    got = F.spdownsample(**{name: coords}, stride=2, kernel_size=2)
    assert torch.equal(got, F.spdownsample(coords, 2, 2))
    more = {"input_node_num": len(coords)} if ts.release == "2.1" else {}
    kmap = F.build_kernel_map(**{name: coords}, kernel_size=2, stride=2, **more)
    same = F.build_kernel_map(coords, *more.values(), 2, 2)
    assert kmap.keys() == same.keys() if more else torch.equal(kmap[0], same[0])
    if more:
        given = {"kernel_size": 3, "spatial_range": (2, 40, 40, 40)}
        made = F.spupsample_generative(**{name: coords}, **given)
        assert torch.equal(made, F.spupsample_generative(coords, 2, 3, 0, (2, 40, 40, 40)))
    for call in (lambda: F.spdownsample(coords, **{name: coords}), lambda: F.spdownsample(stride=2)):
        with pytest.raises(TypeError):
            call()


def test_times_of_layers(ts):
    net = torch.nn.Sequential(ts.nn.Conv3d(3, 4, 3), ts.nn.ReLU(), ts.nn.Conv3d(4, 4, 2, 2))
    coords = points(ts.release)
    batches = [torch.randn(len(coords), 3) for _ in range(5)]
    tune = importlib.import_module("torchsparse.utils.tune")
    times = tune.profile_model(net, batches, 4, lambda feats: ts.SparseTensor(feats, coords))
    assert set(times) == {"0", "2"} and all(len(one) == 4 for one in times.values())
    assert all(0 < one.mean < 60 for one in times.values())
    assert not net[0]._forward_hooks and not net[0]._forward_pre_hooks
    stable = tune.StableTimeAccumulator()
    with pytest.raises(AssertionError, match="no times"):
        _ = stable.mean
    for seconds in (1.0, 2.0, 3.0, 100.0):
        stable.update(seconds)
    assert stable.mean == 2.5
    assert ts.tune(net, batches, 5, enable_fp16=False) is None
    with pytest.raises(TypeError, match="nonesuch"):
        ts.tune(net, batches, nonesuch=1)


@pytest.mark.parametrize("device", DEVICES)
def test_names_of_compiled_code(ts21, device):
    """Counting, and what install scripts ask for."""
    backend = ts21.backend
    rows = torch.tensor([2, 0, 2, -1, 4, 9], dtype=torch.int32, device=device)
    counts = backend.count_cuda(rows, 5)
    assert counts.dtype == torch.int32 and counts.tolist() == [1, 0, 2, 0, 1]
    assert hasattr(backend, "build_kernel_map_subm_hashmap")
    with pytest.raises(UnsupportedError, match="build_kernel_map makes kernel maps"):
        backend.build_kernel_map_subm_hashmap(rows)


def test_maps_and_sites_at_their_paths_in_2_0():
    with sparse_bridge.enable("torchsparse", mode="standin", profile="2.0"):
        F = importlib.import_module("torchsparse").nn.functional
        build_kernel_map = F.build_kmap.build_kernel_map
        assert importlib.import_module("torchsparse.nn.functional.build_kmap") is F.build_kmap
        coords = points("2.0")
        nbmaps, nbsizes, sites = build_kernel_map(coords, kernel_size=2, stride=2)
        wanted = F.build_kernel_map(coords, 2, 2)
        assert torch.equal(nbmaps, wanted[0]) and nbsizes.sum() == len(nbmaps) == len(coords)
        assert torch.equal(sites, F.downsample.spdownsample(coords))
