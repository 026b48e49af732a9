"""Every scan format: what was written comes back, and what is broken says so."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sparse_bridge.errors import DataTypeError, SettingError, ShapeError, UnsupportedError
from sparse_bridge.tools.demo.pcd import lzf_decompress
from sparse_bridge.tools.demo.points import load_points

from .writers import lzf_compress, pcd_header, write_pcd

PCD_FORMS = ("ascii", "binary", "binary_compressed")


def columns_of(cloud: np.ndarray, last: str = "intensity") -> dict[str, np.ndarray]:
    return dict(zip(("x", "y", "z", last), np.ascontiguousarray(cloud.T), strict=True))


def test_bin_with_four_columns(tmp_path: Path, cloud: np.ndarray) -> None:
    cloud.tofile(tmp_path / "000000.bin")
    loaded = load_points(tmp_path / "000000.bin")
    assert loaded.points.dtype == np.float32 and loaded.dropped == 0
    np.testing.assert_array_equal(loaded.points, cloud)


@pytest.mark.parametrize("name", ["sweep.pcd.bin", "sweep.bin"])
def test_bin_with_rings_is_recognised(tmp_path: Path, cloud: np.ndarray, name: str) -> None:
    rings = np.arange(len(cloud)) % 32
    table = np.column_stack([cloud, rings]).astype(np.float32)
    table[:, 3] = np.round(table[:, 3] * 255)
    table.tofile(tmp_path / name)
    loaded = load_points(tmp_path / name).points
    np.testing.assert_array_equal(loaded[:, :3], cloud[:, :3])
    np.testing.assert_allclose(loaded[:, 3], table[:, 3] / 255, atol=1e-6)


def test_bin_with_given_columns(tmp_path: Path, cloud: np.ndarray) -> None:
    np.column_stack([cloud, cloud[:, :2]]).astype(np.float32).tofile(tmp_path / "a.bin")
    np.testing.assert_array_equal(load_points(tmp_path / "a.bin", 6).points[:, :3], cloud[:, :3])


def test_npy_and_npz(tmp_path: Path, cloud: np.ndarray) -> None:
    np.save(tmp_path / "a.npy", cloud)
    np.savez(tmp_path / "a.npz", points=cloud)
    for name in ("a.npy", "a.npz"):
        np.testing.assert_array_equal(load_points(tmp_path / name).points, cloud)


def test_npz_voxels_become_their_centres(tmp_path: Path) -> None:
    coords = np.array([[0, 0, 0], [3, 1, 2]], np.int16)
    origin = np.array([-10.0, 5.0, -2.0])
    metric = (coords + 0.3) * 0.2 + origin
    feats = np.column_stack([metric, [0.1, 0.9]]).astype(np.float16)
    np.savez(tmp_path / "v.npz", coords=coords, feats=feats, voxel_size=np.float32(0.2))
    loaded = load_points(tmp_path / "v.npz")
    assert loaded.voxel_size == 0.2
    np.testing.assert_allclose(loaded.points[:, :3], (coords + 0.5) * 0.2 + origin, atol=1e-5)
    np.testing.assert_allclose(loaded.points[:, 3], [0.1, 0.9], atol=1e-3)
    np.savez(tmp_path / "c.npz", coords=coords, feats=np.float32([[255, 0, 0], [255, 255, 255]]))
    loaded = load_points(tmp_path / "c.npz")
    np.testing.assert_allclose(loaded.points[:, 3], [1 / 3, 1], atol=1e-6)
    np.testing.assert_allclose(loaded.points[1, :3], [0.35, 0.15, 0.25], atol=1e-6)


@pytest.mark.parametrize("form", PCD_FORMS)
def test_pcd_round_trip(tmp_path: Path, cloud: np.ndarray, form: str) -> None:
    columns = columns_of(cloud) | {"ring": np.arange(len(cloud), dtype=np.uint16)}
    write_pcd(tmp_path / "a.pcd", columns, form)
    np.testing.assert_array_equal(load_points(tmp_path / "a.pcd").points, cloud)


@pytest.mark.parametrize("form", PCD_FORMS)
def test_pcd_packed_colour(tmp_path: Path, cloud: np.ndarray, form: str) -> None:
    columns = columns_of(cloud)
    del columns["intensity"]
    columns["rgb"] = np.full(len(cloud), 0xFF0033, np.uint32)
    write_pcd(tmp_path / "a.pcd", columns, form)
    np.testing.assert_allclose(load_points(tmp_path / "a.pcd").points[:, 3], 0.4, atol=1e-6)


@pytest.mark.parametrize("seed", range(4))
def test_lzf_round_trip(seed: int) -> None:
    rng = np.random.default_rng(seed)
    plain = bytes(rng.integers(0, 2 + 3 * seed, 5000, dtype=np.uint8)) + b"ab" * 900 + bytes(700)
    packed = lzf_compress(plain)
    assert len(packed) < len(plain)
    assert lzf_decompress(packed, len(plain)) == plain


def test_lzf_rejects_corruption() -> None:
    packed = lzf_compress(b"hello hello hello hello")
    for broken in (packed[:-1], b"\xff\xff", bytes([0x20, 0xFF])):
        with pytest.raises(ShapeError, match="corrupt"):
            lzf_decompress(broken, 23)


def test_a_corrupt_block_names_its_file(tmp_path: Path, cloud: np.ndarray) -> None:
    path = tmp_path / "a.pcd"
    write_pcd(path, columns_of(cloud), "binary_compressed")
    whole = path.read_bytes()
    at = whole.index(b"binary_compressed\n") + len(b"binary_compressed\n") + 4
    path.write_bytes(whole[:at] + bytes(4) + whole[at + 4 :])  # it expands to nothing, it says
    with pytest.raises(ShapeError, match=rf"{path}: compressed block .* says 0\. The file is corr"):
        load_points(path)


def test_nan_rows_are_dropped_and_counted(tmp_path: Path, cloud: np.ndarray) -> None:
    broken = cloud.copy()
    broken[3, 0], broken[8, 2], broken[9, 3] = np.nan, np.inf, np.nan
    np.save(tmp_path / "a.npy", broken)
    loaded = load_points(tmp_path / "a.npy")
    assert loaded.dropped == 2 and len(loaded.points) == len(cloud) - 2
    assert np.isfinite(loaded.points).all()


def test_positions_beyond_float32_are_dropped_and_counted(tmp_path: Path, cloud) -> None:
    far = cloud.astype(np.float64)
    far[3, 1], far[5, 2] = 1e200, -1.7e308
    np.save(tmp_path / "a.npy", far)
    loaded = load_points(tmp_path / "a.npy")
    assert loaded.dropped == 2 and np.isfinite(loaded.points).all()
    far[:, 0] = 1e40
    np.save(tmp_path / "a.npy", far)
    with pytest.raises(ShapeError, match="NaN, infinite or beyond float32"):
        load_points(tmp_path / "a.npy")


def test_typed_errors_for_files(tmp_path: Path, cloud: np.ndarray) -> None:
    def file(name: str, data: bytes) -> Path:
        (tmp_path / name).write_bytes(data)
        return tmp_path / name

    rows = cloud.tobytes()
    cases = [
        (tmp_path / "absent.bin", SettingError, "no such file"),
        (file("a.e57", b"ASTM"), UnsupportedError, "not known"),
        (tmp_path, SettingError, "is a folder"),
        (file("empty.bin", b""), ShapeError, "0 bytes"),
        (file("odd.bin", rows[:-2]), ShapeError, "truncated"),
        (file("odd.bin", rows[:-4]), ShapeError, "truncated"),
        (file("bad.npy", rows), ShapeError, "not a readable"),
        (file("bad.npz", b"PK" + rows), ShapeError, "not a readable"),
        (file("bad.pcd", b"FIELDS x y z\n"), ShapeError, "no .pcd header"),
        (file("nan.bin", np.full((4, 4), np.nan, np.float32).tobytes()), ShapeError, "all 4"),
    ]
    for path, error, text in cases:
        with pytest.raises(error, match=text) as caught:
            load_points(path)
        assert path.name in str(caught.value)


def test_typed_errors_for_arrays(tmp_path: Path, cloud: np.ndarray) -> None:
    np.save(tmp_path / "flat.npy", cloud[:, 0])
    np.save(tmp_path / "text.npy", np.array([["a", "b", "c"]]))
    np.save(tmp_path / "none.npy", cloud[:0])
    np.savez(tmp_path / "other.npz", labels=cloud)
    np.savez(tmp_path / "rows.npz", coords=np.zeros((3, 3), int), feats=np.zeros((2, 4)))
    for name, error, text in (
        ("flat.npy", ShapeError, r"\[N, 3 or more\]"),
        ("text.npy", DataTypeError, "expected numbers"),
        ("none.npy", ShapeError, "0 points"),
        ("other.npz", ShapeError, "labels"),
        ("rows.npz", ShapeError, "feats"),
    ):
        with pytest.raises(error, match=text):
            load_points(tmp_path / name)
    with pytest.raises(SettingError, match="points-columns"):
        load_points(tmp_path / "flat.npy", 4)
    cloud.tofile(tmp_path / "a.bin")
    with pytest.raises(SettingError, match="3 or more"):
        load_points(tmp_path / "a.bin", 2)


@pytest.mark.parametrize("form", PCD_FORMS)
def test_broken_pcd(tmp_path: Path, cloud: np.ndarray, form: str) -> None:
    path = tmp_path / "a.pcd"
    columns = columns_of(cloud)
    write_pcd(path, columns, form)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ShapeError, match="truncated"):
        load_points(path)
    path.write_bytes(whole.replace(b"FIELDS x y z", b"FIELDS x y w"))
    with pytest.raises(ShapeError, match="field z is missing"):
        load_points(path)
    path.write_bytes(pcd_header(columns, "zipped"))
    with pytest.raises(UnsupportedError, match="zipped"):
        load_points(path)
    path.write_bytes(whole.replace(b"TYPE F", b"TYPE Q"))
    with pytest.raises(DataTypeError, match="field type"):
        load_points(path)
