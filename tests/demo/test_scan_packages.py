"""Scans that packages read, plyfile and laspy; and whatever else a file may hold."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_bridge.errors import SettingError, ShapeError, SparseBridgeError
from sparse_bridge.tools.demo.points import load_points

from .test_points import PCD_FORMS, columns_of
from .writers import write_pcd, write_ply

laspy = pytest.importorskip("laspy")
plyfile = pytest.importorskip("plyfile")

PLY_FORMS = ("ascii", "binary_little_endian", "binary_big_endian")


@pytest.mark.parametrize("form", PLY_FORMS)
def test_ply_round_trip(tmp_path: Path, cloud: np.ndarray, form: str) -> None:
    faces = b"3 0 1 2\n" if form == "ascii" else b"\x03" + bytes(12)
    write_ply(tmp_path / "a.ply", columns_of(cloud, "reflectance"), form, tail=faces)
    np.testing.assert_array_equal(load_points(tmp_path / "a.ply").points, cloud)


@pytest.mark.parametrize("form", PLY_FORMS)
def test_ply_colour_becomes_brightness(tmp_path: Path, cloud: np.ndarray, form: str) -> None:
    columns = columns_of(cloud.astype(np.float64), "nx")
    columns |= {
        name: np.full(len(cloud), v, np.uint8) for name, v in zip(("red", "green", "blue"), (255, 0, 51), strict=True)
    }
    write_ply(tmp_path / "a.ply", columns, form)
    loaded = load_points(tmp_path / "a.ply").points
    np.testing.assert_allclose(loaded[:, :3], cloud[:, :3], atol=1e-6)
    np.testing.assert_allclose(loaded[:, 3], 0.4, atol=1e-6)


@pytest.mark.parametrize("form", PLY_FORMS)
def test_broken_ply(tmp_path: Path, cloud: np.ndarray, form: str) -> None:
    path = tmp_path / "a.ply"
    write_ply(path, columns_of(cloud), form)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ShapeError, match="early end-of"):
        load_points(path)
    path.write_bytes(whole.replace(b" z\n", b" w\n"))
    with pytest.raises(ShapeError, match="field z is missing"):
        load_points(path)
    path.write_bytes(whole.replace(b"element vertex 300", b"element vertex 300000000000"))
    with pytest.raises(ShapeError, match="not a readable"):
        load_points(path)
    path.write_bytes(whole[5:])
    with pytest.raises(ShapeError, match="expected 'ply'"):
        load_points(path)
    path.write_bytes(whole.replace(b"element vertex", b"element corner"))
    with pytest.raises(ShapeError, match="elements corner"):
        load_points(path)


@pytest.mark.parametrize("text", [True, False])
def test_ply_with_faces_first_and_lists_among_the_vertices(tmp_path: Path, cloud: np.ndarray, text: bool) -> None:
    """Both are valid."""
    corners = np.zeros(len(cloud), [("x", "f4"), ("y", "f4"), ("near", "O"), ("z", "f4")])
    for axis, values in zip("xyz", cloud.T, strict=False):
        corners[axis] = values
    for row in range(len(cloud)):
        corners["near"][row] = np.arange(row % 4, dtype=np.int32)
    faces = np.empty(1, [("vertex_indices", "i4", (3,))])
    faces["vertex_indices"] = [[0, 1, 2]]
    elements = [
        plyfile.PlyElement.describe(faces, "face"),
        plyfile.PlyElement.describe(corners, "vertex", val_types={"near": "i4"}),
    ]
    plyfile.PlyData(elements, text=text).write(str(tmp_path / "a.ply"))
    loaded = load_points(tmp_path / "a.ply").points
    np.testing.assert_allclose(loaded[:, :3], cloud[:, :3], rtol=1e-6)
    assert not loaded[:, 3].any()


def write_las(path: Path, cloud: np.ndarray, colour: bool = False, offset: float = 0.0) -> None:
    content = laspy.LasData(laspy.LasHeader(point_format=2, version="1.2"))
    content.header.scales, content.header.offsets = [0.001] * 3, [offset] * 3
    content.x, content.y, content.z = (cloud[:, axis].astype(float) + offset for axis in range(3))
    if colour:
        content.red = content.green = content.blue = np.full(len(cloud), 65535, np.uint16)
    else:
        content.intensity = np.round(cloud[:, 3] * 65535).astype(np.uint16)
    content.write(str(path))


@pytest.mark.parametrize("name", ["a.las", "b.laz"])
def test_las(tmp_path: Path, cloud: np.ndarray, name: str) -> None:
    write_las(tmp_path / name, cloud)
    loaded = load_points(tmp_path / name)
    np.testing.assert_allclose(loaded.points[:, :3], cloud[:, :3], atol=6e-4)
    np.testing.assert_allclose(loaded.points[:, 3], cloud[:, 3], atol=1e-4)
    assert loaded.origin == (0, 0, 0)
    write_las(tmp_path / name, cloud, colour=True)
    assert (load_points(tmp_path / name).points[:, 3] == 1).all()
    whole = (tmp_path / name).read_bytes()
    for size in (100, len(whole) // 2, len(whole) - 7):
        (tmp_path / name).write_bytes(whole[:size])
        with pytest.raises(ShapeError, match="again"):
            load_points(tmp_path / name)
    write_las(tmp_path / name, cloud[:0])
    with pytest.raises(ShapeError, match="0 points"):
        load_points(tmp_path / name)


def test_coordinates_of_a_national_grid_keep_their_millimetres(tmp_path: Path, cloud: np.ndarray) -> None:
    """In float32, 5,400,000 m has steps of half a metre."""
    write_las(tmp_path / "a.las", cloud, offset=5_400_000)
    loaded = load_points(tmp_path / "a.las")
    restored = loaded.points[:, :3].astype(np.float64) + loaded.origin - 5_400_000
    np.testing.assert_allclose(restored, cloud[:, :3], atol=2e-3)
    assert all(value == round(value) for value in loaded.origin)


@pytest.mark.parametrize(("suffix", "package"), [(".ply", "plyfile"), (".las", "laspy"), (".laz", "lazrs")])
def test_a_missing_package_is_named(tmp_path: Path, suffix, package, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / f"a{suffix}").write_bytes(b"LASF")
    with pytest.raises(SettingError, match=rf'{package}.*pip install "sparse-bridge\[scans\]"'):
        load_points(tmp_path / f"a{suffix}")


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, bytes]:
    """A small valid file of every kind."""
    folder = tmp_path_factory.mktemp("scans")
    rows = np.random.default_rng(0).uniform(0, 1, (12, 4)).astype(np.float32)
    rows.tofile(folder / "a.bin")
    np.save(folder / "a.npy", rows)
    np.savez(folder / "a.npz", points=rows)
    np.savez_compressed(folder / "b.npz", coords=(rows[:, :3] * 9).astype(np.int32), feats=rows, voxel_size=0.1)
    for form in PLY_FORMS:
        write_ply(folder / f"{form}.ply", columns_of(rows), form)
    for form in PCD_FORMS:
        write_pcd(folder / f"{form}.pcd", columns_of(rows), form)
    write_las(folder / "a.las", rows)
    write_las(folder / "a.laz", rows)
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@settings(max_examples=200)
@given(data=st.data())
def test_damaged_files_are_read_or_refused(files, tmp_path: Path, data) -> None:
    """Bytes changed, cut off or put in anywhere: points that are finite, or a typed error."""
    name = data.draw(st.sampled_from(sorted(files)))
    damaged = bytearray(files[name])
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(damaged)))
        ways = ["change", "cut", "insert", "drop"]
        # lazrs may panic, or read for minutes, on packed bytes that were changed.
        what = data.draw(st.sampled_from(["cut"] if name == "a.laz" else ways))
        if what == "change":
            damaged[place : place + 1] = bytes([data.draw(st.integers(0, 255))])
        elif what == "cut":
            del damaged[place:]
        elif what == "drop":
            del damaged[place : place + data.draw(st.integers(1, 8))]
        else:
            damaged[place:place] = data.draw(st.sampled_from([b"-", b"9", b" ", b"\n", b"\xff"]))
    path = tmp_path / name
    path.write_bytes(damaged)
    try:
        loaded = load_points(path)
    except SparseBridgeError as error:
        assert str(path) in str(error) and "\n" not in str(error)
    else:
        assert np.isfinite(loaded.points).all() and len(loaded.points)
