"""Voxelizers: a loop over points as the reference, the real spconv wheel where it is installed."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_bridge.adapters.spconv.upstream import _voxel_fill, point2voxel
from sparse_bridge.adapters.spconv.upstream import tensorview as tv
from sparse_bridge.adapters.spconv.upstream._voxel_ops import NumpyOps, TorchOps
from sparse_bridge.adapters.spconv.upstream.voxelizer import PointToVoxel, gather_features_by_pc_voxel_id
from sparse_bridge.errors import ContractError, SparseBridgeError

DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
    ),
]
UNIT = ([1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 4.0, 4.0, 4.0])


def wheel(path: str):
    """A module of the real spconv or cumm; skips the test where it is absent."""
    module = pytest.importorskip(path)
    if "sparse_bridge" in (getattr(module, "__file__", "") or ""):
        pytest.skip("a stand-in answers the import")
    return module


def cloud(rng, geometry, n, width, dtype, on_borders):
    """Points around a grid, a share of them exactly on cell borders, some far away or NaN."""
    vsize, bounds = (np.asarray(part) for part in geometry)
    nd = len(vsize)
    points = rng.uniform(-1, 1, (n, width))
    cells = rng.integers(-1, 14, (n, nd))
    if on_borders:
        points[:, :nd] = np.float32(bounds[:nd]) + cells.astype("f4") * np.float32(vsize)
    else:
        points[:, :nd] = bounds[:nd] + (cells + rng.uniform(-0.5, 0.5, (n, nd))) * vsize
    if n:
        rows, axes = rng.integers(0, n, 3), rng.integers(0, nd, 3)
        points[rows, axes] = rng.choice([np.nan, np.inf, -np.inf, 1e30], 3)
    return torch.from_numpy(points.astype(dtype))


def random_case(seed):
    """((vsize, range), points [n, F], max voxels, points per voxel) for 1 to 4 axes."""
    rng = np.random.default_rng(seed)
    nd = int(rng.integers(1, 5))
    vsize = np.round(rng.uniform(0.05, 0.5, nd), int(rng.integers(1, 4))) + 0.05
    low = np.round(rng.uniform(-5, 5, nd), 1)
    # Half cells, too: the number of cells is rounded.
    high = low + vsize * (rng.integers(1, 12, nd) + rng.choice([0, 0.5]))
    geometry = (vsize.tolist(), [*low.tolist(), *high.tolist()])
    width = nd + int(rng.integers(0, 4))
    dtype = np.float64 if seed % 2 else np.float32
    points = cloud(rng, geometry, int(rng.integers(0, 600)), width, dtype, seed % 3 == 0)
    return geometry, points, int(rng.choice([3, 40, 2000])), int(rng.integers(1, 6))


def reference(voxelizer_, points):
    """The contract, one point at a time; geometry from the voxelizer's own (z, y, x) lists."""
    nd, limit = voxelizer_.ndim, voxelizer_.max_num_voxels
    dtype = points.numpy().dtype
    low = np.asarray(voxelizer_.coors_range[:nd], dtype)[::-1]
    size = np.asarray(voxelizer_.vsize, dtype)[::-1]
    slots, rows, ids = {}, [], []
    with np.errstate(all="ignore"):
        cells = np.floor((points.numpy()[:, :nd] - low) / size)[:, ::-1]
    for row, cell in enumerate(cells):
        inside = all(0 <= c < g for c, g in zip(cell, voxelizer_.grid_size, strict=True))
        key = tuple(cell)
        if inside and key not in slots and len(slots) < limit:
            slots[key] = len(slots)
            rows.append([])
        ids.append(slots.get(key, -1) if inside else -1)
        if ids[-1] >= 0:
            rows[ids[-1]].append(row)
    places = voxelizer_.max_num_points_per_voxel
    voxels = torch.zeros(len(rows), places, points.shape[1])
    for number, members in enumerate(rows):
        voxels[number, : len(members[:places])] = points[members[:places]].float()
    indices = torch.from_numpy(np.array(list(slots), dtype=np.int32).reshape(-1, nd))
    counts = torch.tensor([min(len(m), places) for m in rows], dtype=torch.int32)
    return voxels, indices, counts, torch.tensor(ids, dtype=torch.int64)


def same(got, expected):
    for mine, other in zip(got, expected, strict=True):
        assert mine.dtype == other.dtype
        torch.testing.assert_close(mine.cpu(), other.cpu(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(12))
def test_matches_a_loop_over_points(seed, device):
    geometry, points, room, places = random_case(seed)
    made = PointToVoxel(*geometry, points.shape[1], room, places, torch.device(device))
    got = made.generate_voxel_with_id(points.to(device))
    same(got, reference(made, points))
    same(made(points.to(device)), got[:3])


@settings(max_examples=60)
@given(seed=st.integers(0, 10**6), clear=st.booleans())
def test_matches_the_wheel(seed, clear):
    upstream = wheel("spconv.pytorch.utils").PointToVoxel
    geometry, points, room, places = random_case(seed)
    mine = PointToVoxel(*geometry, points.shape[1], room, places)
    theirs = upstream(*geometry, points.shape[1], room, places)
    for name in ("ndim", "vsize", "grid_size", "grid_stride", "coors_range"):
        assert getattr(mine, name) == getattr(theirs, name)
    for call in (points, points.flip(0)[::2]):
        same(
            mine.generate_voxel_with_id(call, clear_voxels=clear),
            theirs.generate_voxel_with_id(call, clear_voxels=clear),
        )
        for name in ("voxels", "indices", "num_per_voxel"):
            same([getattr(mine, name)], [getattr(theirs, name)])


@pytest.mark.parametrize("seed", range(6))
def test_torch_and_numpy_primitives_agree(seed, monkeypatch):
    geometry, points, room, places = random_case(seed)
    made = PointToVoxel(*geometry, points.shape[1], room, places)
    expected = made.generate_voxel_with_id(points)
    monkeypatch.setattr(_voxel_fill, "ops_for", lambda device: TorchOps)
    same(made.generate_voxel_with_id(points), expected)


@pytest.mark.parametrize("ops", [NumpyOps, TorchOps])
def test_stable_sort_at_every_key_width(ops):
    keys = ops.array(torch.tensor([7, 3, 7, 0, 3, 2**62, 7]))
    ordered, order = ops.sort(keys, 2**62)
    assert order.tolist() == [3, 1, 4, 0, 2, 6, 5]
    assert ordered.tolist() == [0, 3, 3, 7, 7, 7, 2**62]


def test_strided_points_and_gradients():
    points = torch.rand(50, 8, dtype=torch.float32, requires_grad=True) * 4
    made = PointToVoxel(*UNIT, 4, 30, 3)
    same(made(points[:, ::2]), made(points[:, ::2].detach().contiguous()))
    assert not any(result.requires_grad for result in made(points[:, ::2]))


def test_a_grid_beyond_32_bits():
    points = torch.tensor([[1e4, 1e4, 1e4, 1.0], [0.0, 0.0, 0.0, 2.0], [1e4, 1e4, 1e4, 3.0]])
    made = PointToVoxel([0.1] * 3, [0, 0, 0, 2e4, 2e4, 2e4], 4, 5, 2)
    voxels, indices, counts = made(points)
    assert indices.tolist() == [[100000] * 3, [0, 0, 0]] and counts.tolist() == [2, 1]
    assert voxels[:, :, 3].tolist() == [[1, 3], [2, 0]]


@pytest.mark.parametrize("device", DEVICES)
def test_empty_mean_is_the_mean_of_each_voxel(device):
    points = torch.tensor([[0.5, 0, 0, 2], [1.5, 0, 0, 10], [0.5, 0, 0, 4], [1.5, 0, 0, 20.0]])
    made = PointToVoxel(*UNIT, 4, 9, 3, torch.device(device))
    voxels, _, counts = made(points.to(device), empty_mean=True)
    assert counts.tolist() == [2, 2]
    assert voxels[:, :, 3].tolist() == [[2, 4, 3], [10, 20, 15]]
    # Stale content, even NaN, is no part of a mean.
    made.voxels.fill_(float("nan"))
    voxels, _, _ = made(points.to(device), clear_voxels=False, empty_mean=True)
    assert voxels[:, :, 3].tolist() == [[2, 4, 3], [10, 20, 15]]


def test_stale_slots_stay_without_clearing():
    made = PointToVoxel([1.0, 1.0], [0, 0, 4, 4], 3, 3, 2)
    made(torch.tensor([[0, 0, 5.0], [0, 0, 7.0]]))
    voxels, _, counts = made(torch.tensor([[2, 0, 50.0]]), clear_voxels=False)
    assert voxels[:, :, 2].tolist() == [[50, 7]] and counts.tolist() == [1]
    assert made(torch.tensor([[2, 0, 50.0]]))[0][:, :, 2].tolist() == [[50, 0]]


@pytest.mark.parametrize("n", [0, 1])
def test_few_points(n):
    made = PointToVoxel(*UNIT, 4, 9, 3)
    voxels, indices, counts, ids = made.generate_voxel_with_id(torch.full((n, 4), 99.0))
    assert (voxels.shape, indices.shape, counts.shape) == ((0, 3, 4), (0, 3), (0,))
    assert ids.tolist() == [-1] * n


def test_results_are_copies_and_voxelizers_pickle():
    made = pickle.loads(pickle.dumps(PointToVoxel(*UNIT, 4, 9, 3)))
    first = made(torch.ones(1, 4))[0]
    made(torch.full((1, 4), 2.0))
    assert first[0, 0].tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("points", "error"),
    [
        (torch.zeros(3, 4, dtype=torch.float16), RuntimeError),
        (torch.zeros(3, 4, dtype=torch.int32), RuntimeError),
        (torch.zeros(3, 5), RuntimeError),
        (torch.zeros(4), RuntimeError),
        (torch.zeros(3, 4, device="meta"), AssertionError),
        (np.zeros((3, 4), np.float32), AttributeError),
    ],
)
def test_bad_points(points, error):
    with pytest.raises(error) as caught:
        PointToVoxel(*UNIT, 4, 9, 3)(points)
    assert isinstance(caught.value, SparseBridgeError)


def test_bad_settings():
    with pytest.raises(AttributeError):
        PointToVoxel(*UNIT, 4, 9, 3, device="cpu")
    for vsize, bounds in (
        ([1.0], UNIT[1]),
        ([0.0, 1.0, 1.0], UNIT[1]),
        ([-1.0, 1.0, 1.0], UNIT[1]),
        ([9.0, 1.0, 1.0], UNIT[1]),
        ([1.0] * 5, [0.0] * 5 + [1.0] * 5),
    ):
        with pytest.raises(RuntimeError):
            PointToVoxel(vsize, bounds, 5, 9, 3)
    with pytest.raises(ValueError):
        PointToVoxel(*UNIT, 4, 0, 3)(torch.zeros(1, 4))
    with pytest.raises(TypeError):
        point2voxel.Point2VoxelCPU2d(*UNIT, 4, 9, 3)


@pytest.mark.parametrize("device", DEVICES)
def test_gather_by_id(device):
    features = torch.arange(6.0, device=device).view(3, 2).requires_grad_()
    got = gather_features_by_pc_voxel_id(features, torch.tensor([0, -1, 2, 2]), 9)
    assert got.tolist() == [[0, 1], [9, 9], [4, 5], [4, 5]] and got.device == features.device
    got.sum().backward()
    assert features.grad.tolist() == [[1, 1], [0, 0], [2, 2]]
    wide = gather_features_by_pc_voxel_id(torch.ones(2, 3, 4, dtype=torch.int64), torch.tensor([-1]))
    assert wide.dtype == torch.int64 and wide.shape == (1, 3, 4) and not wide.any()
    nothing = gather_features_by_pc_voxel_id(torch.zeros(0, 2), torch.tensor([-1, -1]), 3)
    assert nothing.tolist() == [[3, 3], [3, 3]]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_points_must_share_the_device():
    with pytest.raises(ContractError):
        PointToVoxel(*UNIT, 4, 9, 3)(torch.zeros(1, 4, device="cuda"))
    with pytest.raises(SparseBridgeError):
        low = point2voxel.Point2VoxelCPU3d(*UNIT, 4, 9, 3)
        low.point_to_voxel(tv.from_torch(torch.zeros(1, 4, device="cuda")))
