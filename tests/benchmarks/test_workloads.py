"""Inputs: how many voxels, which neighbours, which files."""

import itertools

import numpy as np
import pytest
import torch

from benchmarks.floor import Rates, layer_floor
from benchmarks.workloads import load, pair_count, scene_name, shell, stream


def brute_force_pairs(scan):
    cells = {tuple(row) for row in scan.coords.tolist()}
    steps = [(i, j, k) for i in (-1, 0, 1) for j in (-1, 0, 1) for k in (-1, 0, 1)]
    return sum((b, x + i, y + j, z + k) in cells for b, x, y, z in cells for i, j, k in steps)


@pytest.mark.parametrize(("res", "rows"), [(16, 848), (32, 3840)])
def test_shells_are_flexgemms(res, rows):
    scan = shell(res)
    assert len(scan.coords) == rows == len({tuple(row) for row in scan.coords.tolist()})
    radius = (scan.coords[:, 1:] - res / 2 + 0.5).norm(dim=1)
    assert radius.max() <= res / 2 and radius.min() >= res / 2 - 1.25


@pytest.mark.parametrize("rows", [1, 2, 99, 100, 101, 1000])
def test_sheets_have_the_rows_asked_for_and_one_surface(rows):
    scan = load(f"sheet:{rows}")
    assert scan.coords.shape == (rows, 4) and scan.feats.shape == (rows, 4)
    assert scan.coords.dtype == torch.int32 and scan.coords.min() >= 0
    assert all(top < size for top, size in zip(scan.coords.max(0).values[1:], scan.shape, strict=True))
    if rows >= 1000:
        assert 5 < pair_count(scan) / rows < 10


@pytest.mark.parametrize("source", ["shell:16", "sheet:300"])
@pytest.mark.parametrize("batch", [1, 2])
def test_pairs_are_counted_exactly(source, batch):
    scan = load(source, batch)
    assert pair_count(scan) == brute_force_pairs(scan)


def test_batch_items_are_mirror_images():
    scan = load("sheet:50", 4)
    assert scan.batch_size == 4 and scan.coords[:, 0].unique().tolist() == [0, 1, 2, 3]
    items = [scan.coords[scan.coords[:, 0] == item, 1:] for item in range(4)]
    assert torch.equal(items[0][:, 2], items[3][:, 2])
    assert torch.equal(items[3][:, 0], scan.shape[0] - 1 - items[0][:, 0])
    assert torch.equal(items[2][:, 0], items[0][:, 0])


def test_files_of_voxels_and_of_points(tmp_path):
    points = np.random.default_rng(0).uniform(0, 4, (500, 4)).astype(np.float32)
    cells = np.unique(np.floor(points[:, :3]).astype(np.int16), axis=0)
    np.savez(tmp_path / "cells.npz", coords=cells, feats=np.ones((len(cells), 6), np.float16))
    voxels = load(str(tmp_path / "cells.npz"))
    assert np.array_equal(voxels.coords[:, 1:].numpy(), cells) and voxels.name == "cells"
    np.save(tmp_path / "points.npy", points)
    points.tofile(tmp_path / "points.bin")
    for name in ("points.npy", "points.bin"):
        scan = load(str(tmp_path / name), voxel_size=1.0)
        want = np.unique(np.floor(points[:, :3] - points[:, :3].min(0)), axis=0)
        assert np.array_equal(np.unique(scan.coords[:, 1:].numpy(), axis=0), want)
        assert scan.feats.shape == (len(want), 4)


def test_names_hold_no_folders():
    assert scene_name("/somewhere/a_scan.pcd.bin", 4) == "a_scan_x4"
    assert scene_name("street:0.2") == "street_0.2"


def test_floor_is_the_longer_of_arithmetic_and_traffic():
    rates = Rates(matrix=1e12, copy=1e11)
    # 2 * 10,000 pairs * 64 * 64 flops; 2 * 1,000 * 64 * 2 bytes and a table of 27 * 1,000 * 4
    assert layer_floor("forward", 1000, 10_000, 64, "fp16", rates) == pytest.approx(0.08192)
    slow = Rates(matrix=1e15, copy=1e11)
    traffic = (2 * 1000 * 64 * 2 + 27 * 1000 * 4) / 1e11 * 1e3
    assert layer_floor("forward", 1000, 10_000, 64, "fp16", slow) == pytest.approx(traffic)
    assert layer_floor("train", 1000, 10_000, 64, "fp16", slow) == pytest.approx(3 * traffic)
    fresh = layer_floor("fresh", 1000, 10_000, 64, "fp16", slow)
    assert fresh == pytest.approx(traffic + (16 + 27 * 4) * 1000 / 1e11 * 1e3)
    wide = (2 * 1000 * 64 * 4 + 27 * 1000 * 4) / 1e11 * 1e3
    assert layer_floor("forward", 1000, 10_000, 64, "fp32", slow) == pytest.approx(wide)
    assert layer_floor("infer", 1000, 10_000, 64, "fp16", rates) is None


@pytest.mark.parametrize(("channels", "microseconds"), [(32, 5), (64, 8), (128, 14), (256, 48)])
def test_floor_of_a_lidar_scan_on_an_h200(channels, microseconds):
    floor = layer_floor("forward", 94_444, 284_298, channels, "fp16", Rates(780e12, 4.3e12))
    assert floor * 1e3 == pytest.approx(microseconds, abs=0.5)


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_stream_gives_new_scenes_and_the_same_in_every_process(batch, fixed):
    scans = [load("sheet:400"), load("shell:16")]
    first = list(itertools.islice(stream(scans, batch, fixed), 6))
    again = list(itertools.islice(stream(scans, batch, fixed), 6))
    for one, same, scan in zip(first, again, scans * 3, strict=True):
        assert torch.equal(one.coords, same.coords) and torch.equal(one.feats, same.feats)
        assert one.batch_size == batch and sorted(set(one.coords[:, 0].tolist())) == [*range(batch)]
        assert len(torch.unique(one.coords, dim=0)) == len(one.coords) == len(one.feats)
        assert 0.4 * batch * len(scan.coords) < len(one.coords) < batch * len(scan.coords)
        assert (one.coords[:, 1:] < torch.tensor(one.shape)).all() and one.coords.min() >= 0
        wanted = scan.shape if fixed else tuple((one.coords[:, 1:].amax(0) + 96).tolist())
        assert one.shape == wanted
    shapes = {one.shape for one in first}
    assert len(shapes) == 2 if fixed else len(shapes) > 3
    assert len({len(one.coords) for one in first}) == 6
