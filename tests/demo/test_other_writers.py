"""Good files as other programs write them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sparse_bridge.errors import DataTypeError, ShapeError
from sparse_bridge.tools.demo.points import load_points

from .test_points import PCD_FORMS
from .writers import lzf_compress

WANT = np.array([[1, 2, 3], [4, 5, 6]], np.float32)
PLY_FORMS = ("ascii", "binary_little_endian", "binary_big_endian")


def same(path: Path, last=None) -> None:
    found = load_points(path).points
    np.testing.assert_allclose(found[:, :3], WANT)
    if last is not None:
        np.testing.assert_allclose(found[:, 3], last, atol=1e-7)


def write_pcd(path: Path, fields, form: str, rows: int = 2) -> None:
    """fields: (name, type, size, values of every row) each."""
    lines = ["# .PCD v0.7", "VERSION 0.7"]
    lines += ["FIELDS " + " ".join(f[0] for f in fields), "SIZE " + " ".join(f[2] for f in fields)]
    lines += ["TYPE " + " ".join(f[1] for f in fields)]
    lines += ["COUNT " + " ".join(str(np.shape(f[3])[1]) for f in fields)]
    lines += [f"WIDTH {rows}", "HEIGHT 1", f"POINTS {rows}", f"DATA {form}"]
    kinds = {"F": "f", "U": "u", "I": "i"}
    columns = [np.asarray(f[3]).astype("<" + kinds[f[1]] + f[2]) for f in fields if np.shape(f[3])[1]]
    if form == "ascii":
        text = [" ".join(str(v) for c in columns for v in c[row].tolist()) for row in range(rows)]
        body = "\n".join(text).encode() + b"\n"
    elif form == "binary":
        body = b"".join(c[row].tobytes() for row in range(rows) for c in columns)
    else:
        plain = b"".join(c.tobytes() for c in columns)
        packed = lzf_compress(plain)
        body = np.array([len(packed), len(plain)], "<u4").tobytes() + packed
    path.write_bytes("\n".join(lines).encode() + b"\n" + body)


def xyz():
    return [(name, "F", "4", WANT[:, at : at + 1]) for at, name in enumerate("xyz")]


NOTHING = np.zeros((2, 0))


@pytest.mark.parametrize("form", PCD_FORMS)
@pytest.mark.parametrize("padding", [("U", "1"), ("F", "4"), ("Q", "0"), ("I", "16")])
@pytest.mark.parametrize("place", [0, 2, 4])
def test_pcd_padding_of_no_value(tmp_path, form, padding, place):
    fields = [*xyz(), ("intensity", "U", "1", [[51], [255]])]
    fields.insert(place, ("_", *padding, NOTHING))
    write_pcd(tmp_path / "a.pcd", fields, form)
    same(tmp_path / "a.pcd", [0.2, 1])
    fields.insert(1, ("_", "U", "1", [[7, 7, 7], [8, 8, 8]]))
    write_pcd(tmp_path / "a.pcd", fields, form)
    same(tmp_path / "a.pcd", [0.2, 1])


def test_pcd_positions_of_no_value_are_missing(tmp_path):
    write_pcd(tmp_path / "a.pcd", [*xyz()[:2], ("z", "F", "4", NOTHING)], "ascii")
    with pytest.raises(ShapeError, match="field z is missing"):
        load_points(tmp_path / "a.pcd")
    body = (tmp_path / "a.pcd").read_bytes().replace(b"TYPE F F F", b"TYPE F Q F")
    (tmp_path / "a.pcd").write_bytes(body)
    with pytest.raises(DataTypeError, match="'Q4'"):
        load_points(tmp_path / "a.pcd")


@pytest.mark.parametrize(
    "head",
    [
        "VERSION .5\nCOLUMNS x y z\nSIZE 4 4 4\nTYPE F F F\nWIDTH 2\nHEIGHT 1\nPOINTS 2\nDATA ascii",
        "VERSION .5\nCOLUMNS x y z\nPOINTS 2\nDATA ascii",
        "columns x y z\nwidth 2\ndata ascii",
        "VERSION .6\nFIELDS x y z\nSIZE 4 4 4\nWIDTH 1\nHEIGHT 2\nDATA ascii",
        "\ufeffFIELDS x y z\nPOINTS 2\nDATA ascii",
        "# Gebäude Süd\r\nFIELDS x y z\r\nPOINTS 2\r\nDATA ascii\r",
    ],
)
def test_pcd_headers_of_early_versions_and_of_editors(tmp_path, head):
    (tmp_path / "a.pcd").write_bytes(f"{head}\n1 2 3\n4 5 6\n".encode())
    same(tmp_path / "a.pcd")


def test_pcd_headers_that_say_too_little(tmp_path):
    for head, text in (
        ("COLUMNS x y z\nDATA ascii", "lacks POINTS"),
        ("POINTS 2\nDATA ascii", "lacks FIELDS"),
        ("FIELDS x y z\nTYPE F F\nPOINTS 2\nDATA ascii", "differ in length"),
    ):
        (tmp_path / "a.pcd").write_bytes(f"{head}\n1 2 3\n4 5 6\n".encode())
        with pytest.raises(ShapeError, match=text):
            load_points(tmp_path / "a.pcd")


ABSENT = (
    "nan",
    "-nan",
    "NaN",
    "-nan(ind)",
    "nan(snan)",
    "-nan(0x8000000000000)",
    "1.#QNAN",
    "-1.#IND00",
    "1.#SNAN0",
    "1.#INF",
    "-1.#INF00",
    "inf",
    "-Infinity",
    "-1.#J",
    "1.#R",
    "-1.#IO",
    "1.#QO",
    "1.#QNB",
    "1.$",
)


@pytest.mark.parametrize("word", ABSENT)
def test_words_for_no_number(tmp_path, word):
    rows = f"1 2 3 51\n{word} {word} {word} {word}\n4 5 6 {word}\n"
    pcd = "FIELDS x y z intensity\nSIZE 4 4 4 4\nTYPE F F F F\nPOINTS 3\nDATA ascii\n"
    (tmp_path / "a.pcd").write_text(pcd + rows)
    same(tmp_path / "a.pcd")
    assert load_points(tmp_path / "a.pcd").dropped == 1
    pytest.importorskip("plyfile")
    names = "".join(f"property float {name}\n" for name in ("x", "y", "z", "intensity"))
    ply = f"ply\nformat ascii 1.0\nelement vertex 3\n{names}end_header\n"
    (tmp_path / "a.ply").write_text(ply + rows)
    same(tmp_path / "a.ply")


def test_words_that_mean_nothing_are_refused(tmp_path):
    head = "FIELDS x y z\nPOINTS 2\nDATA ascii\n"
    for word in ("1.#QNANX", "1.#RX", "nan(", "#", "$", "1,5", "(ind)"):
        (tmp_path / "a.pcd").write_text(f"{head}1 2 {word}\n4 5 6\n")
        with pytest.raises(ShapeError, match="not a readable"):
            load_points(tmp_path / "a.pcd")


def write_ply(path: Path, form: str, extra, note: bytes = b"", mark: bytes = b"") -> None:
    """extra: (type, name, values) each."""
    codes = {"uchar": "u1", "ushort": "u2", "uint16": "u2", "int": "i4", "float": "f4"}
    properties = [("float", name, WANT[:, at]) for at, name in enumerate("xyz")] + list(extra)
    lines = [b"ply", f"format {form} 1.0".encode(), *([note] if note else []), b"element vertex 2"]
    lines += [f"property {kind} {name}".encode() for kind, name, _ in properties]
    order = ">" if "big" in form else "<"
    columns = [np.asarray(v).astype(order + codes[kind]) for kind, _, v in properties]
    if form == "ascii":
        body = "".join(" ".join(str(c[i]) for c in columns) + "\n" for i in range(2)).encode()
    else:
        body = b"".join(c[i : i + 1].tobytes() for i in range(2) for c in columns)
    path.write_bytes(mark + b"\n".join([*lines, b"end_header"]) + b"\n" + body)


@pytest.mark.parametrize("form", PLY_FORMS)
@pytest.mark.parametrize(
    "note",
    [
        "comment Gebäude Süd".encode(),
        "comment Gebäude".encode("latin-1"),
        "obj_info Åge".encode(),
        "comment 点群\ncomment \x00".encode(),
        b"comment \xff\xfe",
    ],
)
def test_ply_notes_in_any_language(tmp_path, form, note):
    pytest.importorskip("plyfile")
    bytes_of_a_line = np.frombuffer(b"\n\x80\xff\n" * 2, "<f4")  # in the body, as data
    write_ply(tmp_path / "a.ply", form, [("float", "nx", bytes_of_a_line)], note)
    same(tmp_path / "a.ply")
    write_ply(tmp_path / "a.ply", form, [], note, mark=b"\xef\xbb\xbf")
    same(tmp_path / "a.ply")


@pytest.mark.parametrize("form", PLY_FORMS)
def test_ply_integers_have_the_scale_of_their_type(tmp_path, form):
    pytest.importorskip("plyfile")
    path = tmp_path / "a.ply"
    for kind, values, want in (
        ("ushort", [1, 0], [1 / 65535, 0]),
        ("uint16", [255, 200], [1 / 257, 200 / 65535]),
        ("uchar", [1, 0], [1 / 255, 0]),
        ("uchar", [51, 255], [0.2, 1]),
        ("int", [255, 51], [1, 0.2]),
        ("float", [51, 255], [0.2, 1]),
        ("float", [1, 0.5], [1, 0.5]),
    ):
        write_ply(path, form, [(kind, "intensity", values)])
        same(path, want)
    for kind, top in (("uchar", 255), ("ushort", 65535)):
        write_ply(path, form, [(kind, name, [1, 0]) for name in ("red", "green", "blue")])
        same(path, [1 / top, 0])


@pytest.mark.parametrize("form", PCD_FORMS)
def test_pcd_integers_have_the_scale_of_their_type(tmp_path, form):
    for size, top in (("1", 255), ("2", 65535)):
        write_pcd(tmp_path / "a.pcd", [*xyz(), ("intensity", "U", size, [[1], [0]])], form)
        same(tmp_path / "a.pcd", [1 / top, 0])
    write_pcd(tmp_path / "a.pcd", [*xyz(), ("rgb", "U", "4", [[0x010101], [0]])], form)
    same(tmp_path / "a.pcd", [1 / 255, 0])


def test_npz_features_have_the_scale_of_their_type(tmp_path):
    cells = np.arange(6, dtype=np.int32).reshape(2, 3)
    for dtype, want in ((np.uint8, 1 / 255), (np.uint16, 1 / 65535), (np.float32, 1)):
        for columns in (1, 3):
            feats = np.array([[1] * columns, [0] * columns], dtype)
            np.savez(tmp_path / "a.npz", coords=cells, feats=feats)
            found = load_points(tmp_path / "a.npz").points[:, 3]
            np.testing.assert_allclose(found, [want, 0], atol=1e-7)


def write_las(path: Path, points: int, kind: int, intensity=0) -> bytes:
    laspy = pytest.importorskip("laspy")
    pytest.importorskip("lazrs")
    content = laspy.LasData(laspy.LasHeader(point_format=kind, version="1.4" if kind > 5 else "1.2"))
    content.header.scales = np.array([0.01] * 3)
    side = int(points**0.5)
    x, y = np.meshgrid(np.arange(side, dtype=float), np.arange(side, dtype=float))
    content.x, content.y, content.z = x.ravel(), y.ravel(), 0 * x.ravel()
    content.intensity = np.full(side * side, intensity, np.uint16)
    content.write(str(path), do_compress=path.suffix == ".laz")
    return path.read_bytes()


@pytest.mark.parametrize("kind", [0, 1, 3, 6, 7])
def test_laz_packs_without_a_limit(tmp_path, kind):
    """A flat grid, more than 1000 : 1."""
    whole = write_las(tmp_path / "a.laz", 400 * 400, kind)
    assert len(load_points(tmp_path / "a.laz").points) == 160000
    at, width = (247, 8) if kind > 5 else (107, 4)
    for points in (400_000, 2**31, 2**32 - 1):  # more than its chunks have room for
        damaged = whole[:at] + points.to_bytes(width, "little") + whole[at + width :]
        (tmp_path / "a.laz").write_bytes(damaged)
        with pytest.raises(ShapeError, match=r"says \d+ points, more than"):
            load_points(tmp_path / "a.laz")


def test_packed_or_not_whatever_the_name_says(tmp_path):
    packed, plain = tmp_path / "a.laz", tmp_path / "b.las"
    write_las(packed, 10_000, 1)
    write_las(plain, 10_000, 1)
    for here, there in ((packed, tmp_path / "c.las"), (plain, tmp_path / "d.laz")):
        there.write_bytes(here.read_bytes())
        assert len(load_points(there).points) == 10_000


def test_las_intensities_are_of_16_bits(tmp_path):
    for name in ("a.las", "a.laz"):
        write_las(tmp_path / name, 16, 1, intensity=1)
        np.testing.assert_allclose(load_points(tmp_path / name).points[:, 3], 1 / 65535)
