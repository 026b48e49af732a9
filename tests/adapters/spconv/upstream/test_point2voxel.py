"""The compiled voxelizers, as objects and as functions on buffers of the caller's, beside those of
the real spconv wheel where it is installed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sparse_bridge.adapters.spconv.upstream import point2voxel
from sparse_bridge.adapters.spconv.upstream import tensorview as tv
from sparse_bridge.adapters.spconv.upstream.extension import SpconvOps
from sparse_bridge.adapters.spconv.upstream.voxelizer import PointToVoxel
from sparse_bridge.errors import SparseBridgeError

from .test_voxelizer import DEVICES, UNIT, random_case, wheel


@pytest.mark.parametrize("seed", range(4, 12))
def test_low_level_matches_the_wheel(seed):
    upstream, real_tv = wheel("spconv.utils"), wheel("cumm.tensorview")
    geometry, points, room, places = random_case(seed)
    name = f"Point2VoxelCPU{len(geometry[0])}d"
    mine = getattr(point2voxel, name)(*geometry, points.shape[1], room, places)
    theirs = getattr(upstream, name)(*geometry, points.shape[1], room, places)
    assert mine.grid_size == theirs.grid_size
    assert type(mine).calc_meta_data(*geometry) == theirs.calc_meta_data(*geometry)
    got = mine.point_to_voxel(tv.from_numpy(points.numpy()))
    expected = theirs.point_to_voxel(real_tv.from_numpy(points.numpy()))
    # The real tensor type is taken as well.
    again = mine.point_to_voxel(real_tv.from_numpy(points.numpy()))
    for mine_one, real_input, other in zip(got, again, expected, strict=True):
        assert (mine_one.shape, mine_one.dtype, mine_one.device) == (other.shape, other.dtype, -1)
        np.testing.assert_array_equal(mine_one.numpy(), other.numpy())
        np.testing.assert_array_equal(real_input.numpy(), other.numpy())


def test_low_level_results_are_views():
    made = point2voxel.Point2VoxelCPU3d(
        vsize_xyz=UNIT[0],
        coors_range_xyz=np.asarray(UNIT[1]),
        num_point_features=4,
        max_num_points_per_voxel=2,
        max_num_voxels=3,
    )
    voxels = made.point_to_voxel(tv.from_numpy(np.ones((1, 4), np.float32)))[0]
    kept, view = voxels.numpy(), voxels.numpy_view()
    means = made.point_to_voxel_empty_mean(tv.from_numpy(np.full((1, 4), 2, np.float64)))[0]
    assert view[0, 0].tolist() == [2] * 4 and kept[0, 0].tolist() == [1] * 4
    assert means.numpy()[0, 1].tolist() == [2] * 4
    assert np.shares_memory(view, made.voxels.numpy_view())
    assert made.densehashdata.shape == made.grid_size
    with pytest.raises(TypeError):
        made.point_to_voxel(np.ones((1, 4), np.float32))


@pytest.mark.parametrize("device", DEVICES)
def test_low_level_hash_voxelizer(device):
    points = torch.rand(200, 4, device=device) * 4
    made = point2voxel.Point2VoxelGPU3d(*UNIT, 4, 40, 3)
    got = made.point_to_voxel_hash(tv.from_torch(points))
    expected = PointToVoxel(*UNIT, 4, 40, 3)(points.cpu())
    for mine, other in zip(got, expected, strict=True):
        assert mine.device == (-1 if device == "cpu" else 0)
        np.testing.assert_array_equal(mine.cpu().numpy(), other.numpy())
    stream = torch.cuda.current_stream().cuda_stream if device == "cuda" else 0
    filled = made.point_to_voxel_hash(tv.from_torch(points), True, True, stream)[0]
    mean = PointToVoxel(*UNIT, 4, 40, 3)(points.cpu(), empty_mean=True)[0]
    np.testing.assert_allclose(filled.numpy(), mean.numpy(), rtol=1e-6)


def buffers(module, grid, room, places, width, points):
    """voxels, indices, num_per_voxel, table of cells, ids: of `module`, a tensorview."""
    shapes = [room, places, width], [room, len(grid[0])], [room]
    made = [module.zeros(shape, kind) for shape, kind in zip(shapes, ("f4", "i4", "i4"), strict=True)]
    return [*made, module.full(grid[1], -1, np.int32), module.full([len(points)], 7, np.int64)]


@pytest.mark.parametrize("seed", range(4, 12))
@pytest.mark.parametrize("clear", [True, False])
def test_voxels_in_the_callers_buffers_match_the_wheel(seed, clear):
    upstream, real = wheel("spconv.utils"), wheel("cumm.tensorview")
    theirs_of = wheel("spconv.core_cc.csrc.sparse.all").SpconvOps
    geometry, points, room, places = random_case(seed)
    name = f"Point2VoxelCPU{len(geometry[0])}d"
    grid = theirs_of.calc_point2voxel_meta_data(*geometry)
    assert SpconvOps.calc_point2voxel_meta_data(*geometry) == grid
    # Not rounded to float32, as a program may write them.
    grid = ([float(v) for v in geometry[0]][::-1], *grid[1:])
    for call in ("point_to_voxel_static", "point2voxel_cpu"):
        results = []
        for module, ops, classes in ((tv, SpconvOps, point2voxel), (real, theirs_of, upstream)):
            held = buffers(module, grid, room, places, points.shape[1], points)
            held[0].fill_float_(3)
            given = module.from_numpy(points.numpy())
            if call == "point2voxel_cpu":
                made = ops.point2voxel_cpu(given, *held, *grid, False, clear)
            else:
                made = getattr(classes, name).point_to_voxel_static(given, *held, *grid, clear)
            results.append([ten.numpy() for ten in (*made, held[0], held[4])])
        for mine, theirs in zip(*results, strict=True):
            np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("device", DEVICES)
def test_means_and_hash_voxels_in_the_callers_buffers(device):
    points = torch.rand(200, 4) * 4
    want = PointToVoxel(*UNIT, 4, 40, 3).generate_voxel_with_id(points, empty_mean=True)
    grid = SpconvOps.calc_point2voxel_meta_data(*UNIT)
    cpu, gpu = point2voxel.Point2VoxelCPU3d, point2voxel.Point2VoxelGPU3d
    calls = [
        lambda p, v, i, n, table, ids: gpu.point_to_voxel_hash_static(
            p, v, i, n, table, None, ids, *grid, empty_mean=True
        ),
        lambda p, v, i, n, table, ids: SpconvOps.point2voxel_cuda(p, v, i, n, table, None, ids, *grid, empty_mean=True),
    ]
    if device == "cpu":
        calls.append(lambda p, *held: cpu.point_to_voxel_empty_mean_static(p, *held, *grid))
    for call in calls:
        held = [tv.from_torch(tv.to_torch(ten).to(device)) for ten in buffers(tv, grid, 40, 3, 4, points)]
        made = call(tv.from_torch(points.to(device)), *held)
        for mine, other in zip((*made, held[-1]), want, strict=True):
            np.testing.assert_allclose(mine.numpy(), other.numpy(), rtol=1e-6)
        assert made[0].byte_pointer() == held[0].byte_pointer()
    if device == "cuda":
        low = gpu(*UNIT, 4, 40, 3)
        assert low.hashdata.empty() and low.point_indice_data.device == 0


def test_buffers_that_do_not_fit_are_refused():
    points = np.random.default_rng(0).random((9, 4), np.float32) * 4
    grid = SpconvOps.calc_point2voxel_meta_data(*UNIT)

    def call(change, place):
        held = buffers(tv, grid, 5, 3, 4, points)
        held[place] = change(held[place])
        given = tv.from_numpy(points)
        return point2voxel.Point2VoxelCPU3d.point_to_voxel_static(given, *held, *grid)

    assert call(lambda ten: ten, 0)[2].shape == [5]
    for change, place in (
        (lambda _: tv.zeros([9], np.int32), 4),
        (lambda _: tv.zeros([8], np.int64), 4),
        (lambda _: tv.zeros([5, 3, 5]), 0),
        (lambda _: tv.zeros([5, 6, 4])[:, 0:3], 0),
        (lambda _: tv.zeros([5, 3, 4], np.float64), 0),
        (lambda _: tv.zeros([5, 2], np.int32), 1),
        (lambda _: tv.zeros([4], np.int32), 2),
        (lambda ten: ten.get_readonly(), 0),
    ):
        with pytest.raises(RuntimeError) as caught:
            call(change, place)
        assert isinstance(caught.value, SparseBridgeError)
