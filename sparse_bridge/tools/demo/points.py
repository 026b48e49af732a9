"""Reading scans from the file formats that lidar and indoor data sets come in.

| suffix | content |
|---|---|
| `.bin` | raw float32 rows: 4 columns (x, y, z, intensity), or 5 with a ring number (`.pcd.bin`) |
| `.npy` | one array [N, 3 or more] |
| `.npz` | an array `points` [N, 3 or more], or voxels: `coords` [N, 3], `feats`, `voxel_size` |
| `.ply` | ascii, little or big endian; vertex x, y, z and intensity, reflectance or colour |
| `.pcd` | ascii, binary or LZF-compressed binary; fields x, y, z and intensity or colour |
| `.las`, `.laz` | x, y, z and intensity or colour, 16 bits both |

`.ply`, `.las` and `.laz` need the extra `scans`.
"""

from __future__ import annotations

import dataclasses
import math
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ...errors import DataTypeError, SettingError, ShapeError, SparseBridgeError, UnsupportedError
from .las import read_las
from .pcd import read_pcd
from .ply import read_ply
from .tables import unreadable

Floats = npt.NDArray[np.floating]
_FAR = 2.0**14  # metres; float32 steps by 1 mm below


@dataclasses.dataclass(frozen=True)
class PointCloud:
    """A scan.

    `points` is [N, 4] float32: x, y, z in metres and an intensity in [0, 1] (0 where the file has
    none). `dropped` rows of the file were not finite in float32. `voxel_size` (metres) is set when
    the file stores voxels; `points` are then their centres. `origin` (metres) was subtracted from
    the positions: it is not zero for maps in a national grid, which float32 cannot hold.
    """

    points: npt.NDArray[np.float32]
    source: str
    dropped: int = 0
    voxel_size: float | None = None
    origin: tuple[float, float, float] = (0.0, 0.0, 0.0)


def require_scan(path: Path, columns: int | None) -> Callable[[Path], tuple[Floats, Floats | None]]:
    """What reads a file that says its columns. Raises as `load_points` for what is seen without opening the file."""
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "no such file"
        raise SettingError(f"{path}: {what}; expected one of {_suffixes()}.")
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise UnsupportedError(
            f"{path}: suffix {path.suffix or '(none)'!r} is not known; expected one of "
            f"{_suffixes()}. Convert the scan, for instance with numpy.save of an [N, 4] array."
        )
    if path.stat().st_size == 0:
        raise ShapeError(f"{path}: the file has 0 bytes; expected points. Download it again.")
    if columns is not None and path.suffix.lower() != ".bin":
        raise SettingError(
            f"{path}: got --points-columns {columns}, which only a .bin file needs; "
            "this format states its own columns. Leave the option out."
        )
    return reader


def require_crop(crop: Sequence[float]) -> None:
    """Raises SettingError unless these are x, y, z lowest, then x, y, z highest."""
    bounded = len(crop) == 6 and all(map(math.isfinite, crop))
    if not bounded or not all(crop[i] < crop[i + 3] for i in range(3)):
        raise SettingError(f"range is {list(crop)}; expected x, y, z lowest, then x, y, z highest, in finite metres.")


def load_points(path: str | Path, columns: int | None = None) -> PointCloud:
    """Read a scan; the suffix decides the format.

    Args:
        path: a `.bin`, `.npy`, `.npz`, `.ply`, `.pcd`, `.las` or `.laz` file.
        columns: float32 values per point of a `.bin` file; guessed when None.

    Raises:
        SettingError: no such file, `columns` for a format that describes itself, or a package
            that reads the format is not installed.
        UnsupportedError: unknown suffix or a variant of a format that is not read.
        ShapeError: the file is empty, truncated, or lacks a column.
        DataTypeError: the file's content is not numeric.
    """
    path = Path(path)
    reader = require_scan(path, columns)
    if path.suffix.lower() == ".bin":
        return _finish(path, *_read_bin(path, columns))
    try:
        return _finish(path, *reader(path))
    except SparseBridgeError:
        raise
    except _BROKEN as error:
        raise unreadable(path, error) from error


def _finish(path: Path, xyz: Floats, extra: Floats | None, voxel_size: float | None = None) -> PointCloud:
    """Drop rows not finite in float32, scale the intensity to [0, 1], make one float32 array."""
    if len(xyz) == 0:
        raise ShapeError(f"{path}: got 0 points; expected at least one.")
    intensity = np.zeros(len(xyz)) if extra is None else _brightness(extra)
    # Some writers have no intensity for some points: that must not cost the point.
    intensity = np.nan_to_num(intensity.astype(np.float32), nan=0.0, posinf=1.0, neginf=0.0)
    # NaN fails the comparison too; the result is float32, less an origin.
    with np.errstate(invalid="ignore"):
        in_range = (np.abs(xyz.astype(np.float64)) < np.finfo(np.float32).max / 2).all(1)
    if not in_range.any():
        raise ShapeError(
            f"{path}: all {len(xyz)} points are NaN, infinite or beyond float32; expected finite coordinates."
        )
    finite = xyz[in_range].astype(np.float64)
    x, y, z = _origin(finite)
    rows = np.column_stack([finite - (x, y, z), intensity[in_range]]).astype(np.float32)
    return PointCloud(rows, path.name, len(xyz) - len(rows), voxel_size, (x, y, z))


def _origin(xyz: Floats) -> list[float]:
    """What to subtract, whole metres: nothing while float32 resolves a millimetre."""
    if np.abs(xyz).max() < _FAR:
        return [0.0, 0.0, 0.0]
    return [float(middle) for middle in np.floor(np.median(xyz, 0))]


def _brightness(extra: npt.NDArray) -> Floats:
    """One value in [0, 1] per row from an intensity [N] or a colour [N, 3].

    Unsigned integers of 8 and 16 bits have the scale of their type, so that the scans of a set go
    together; that of others is told by the largest value.
    """
    value = extra if extra.ndim == 1 else extra[:, :3].mean(1)
    if extra.dtype.kind == "u" and extra.dtype.itemsize <= 2:
        return value / np.iinfo(extra.dtype).max
    finite = value[np.isfinite(value)]
    top = float(np.abs(finite).max()) if finite.size else 1.0
    for scale in (1.0, 255.0, 65535.0):  # unit range, bytes, 16-bit words
        if top <= scale:
            return value / scale
    with np.errstate(invalid="ignore"):  # infinity; `_finish` mends it
        return value / top


def _split(table: Floats, path: Path) -> tuple[Floats, Floats | None]:
    """x, y, z and what follows, of a table [N, C]: colour when three columns follow. The type is
    that of the table, and says nothing of the scale."""
    if table.ndim != 2 or table.shape[1] < 3:
        raise ShapeError(
            f"{path}: got an array of shape {list(table.shape)}; expected [N, 3 or more] with x, y, z first."
        )
    if table.dtype.kind not in "fiu":
        raise DataTypeError(f"{path}: got dtype {table.dtype}; expected numbers.")
    after = table.shape[1] - 3
    extra = None if after == 0 else table[:, 3:6] if after == 3 else table[:, 3]
    return table[:, :3], None if extra is None else extra.astype(np.float64)


def _read_bin(path: Path, columns: int | None) -> tuple[Floats, Floats | None]:
    size = path.stat().st_size
    if columns is not None and columns < 3:
        raise SettingError(f"--points-columns is {columns}; expected 3 or more (x, y, z, ...).")
    if size % 4 or (columns is not None and size % (4 * columns)):
        text = f"{columns} float32 columns" if columns else "float32 values"
        raise ShapeError(
            f"{path}: {size} bytes are not a whole number of rows of {text}; expected a multiple "
            f"of {4 * (columns or 1)}. The file is truncated, or --points-columns is wrong."
        )
    values = np.fromfile(path, "<f4")
    return _split(values.reshape(-1, columns or _guess_columns(path, values)), path)


def _guess_columns(path: Path, values: npt.NDArray[np.float32]) -> int:
    """4 or 5 values per point: from the name, else from the size, else from a column of rings."""
    fits = [columns for columns in (4, 5) if values.size % columns == 0]
    if not fits:
        raise ShapeError(
            f"{path}: {values.size} float32 values are not rows of 4 or 5; expected x, y, z, "
            "intensity (, ring). The file is truncated, or pass --points-columns."
        )
    if len(fits) == 1:
        return fits[0]
    if path.name.lower().endswith(".pcd.bin"):
        return 5
    # In a table of four columns every fifth value is a coordinate or an intensity by turns: only
    # rings are whole numbers throughout.
    ring = values[4::5]
    with np.errstate(invalid="ignore"):
        whole = (ring == np.floor(ring)) & (ring >= 0) & (ring < 256)
    return 5 if whole.all() else 4


def _read_npy(path: Path) -> tuple[Floats, Floats | None]:
    return _split(np.load(path, allow_pickle=False), path)


def _read_npz(path: Path) -> tuple[Floats, Floats | None, float | None]:
    with np.load(path, allow_pickle=False) as archive:
        if "points" in archive:
            return (*_split(archive["points"], path), None)
        if "coords" not in archive:
            raise ShapeError(
                f"{path}: got the arrays {sorted(archive.files)}; expected 'points', or 'coords' "
                "and 'feats' of a voxelised scan."
            )
        coords = archive["coords"]
        stored: npt.NDArray | None = archive.get("feats")
        feats = None if stored is None else stored.astype(np.float32)
        size = round(float(archive["voxel_size"]), 6) if "voxel_size" in archive else 0.1
    if coords.ndim != 2 or coords.shape[1] != 3 or coords.dtype.kind not in "iu":
        raise ShapeError(f"{path}: 'coords' is {coords.dtype} {list(coords.shape)}; expected integers [N, 3].")
    if feats is not None and (feats.ndim != 2 or len(feats) != len(coords)):
        raise ShapeError(f"{path}: 'feats' is {list(feats.shape)}; expected [{len(coords)}, C] as in 'coords'.")
    centers = (coords.astype(np.float64) + 0.5) * size
    if feats is None:
        return centers, None, size
    offset = _grid_offset(centers, feats, size)
    if offset is not None:
        centers = centers + offset
    if feats.shape[1] > 3:
        extra = _split(feats, path)[1]
    elif feats.shape[1] == 3:
        extra = stored if offset is None else None
    else:
        extra = None if stored is None else stored[:, 0]
    return centers, extra, size


def _grid_offset(
    centers: npt.NDArray[np.float64], feats: npt.NDArray[np.float32], size: float
) -> npt.NDArray[np.float64] | None:
    """Where the grid starts, if the first three features are the metric positions; else None."""
    if feats.shape[1] < 3:
        return None
    difference = feats[:, :3].astype(np.float64) - centers
    offset = np.median(difference, 0)
    spread = np.abs(difference - offset).max()
    # Half a voxel for the place inside a voxel, the rest for half-precision positions.
    if not np.isfinite(spread) or spread > max(1.5 * size, 0.1):
        return None
    return np.round(offset / size) * size


_READERS: dict[str, Callable[..., tuple]] = {
    ".bin": _read_bin,
    ".npy": _read_npy,
    ".npz": _read_npz,
    ".ply": read_ply,
    ".pcd": read_pcd,
    ".las": read_las,
    ".laz": read_las,
}
# What NumPy, zipfile and int() raise on bytes that are not what the suffix promises.
_BROKEN = (
    ValueError,
    ArithmeticError,
    LookupError,
    EOFError,
    OSError,
    MemoryError,
    NotImplementedError,
    zipfile.BadZipFile,
    zlib.error,
    tokenize.TokenError,  # of NumPy's header reader
)


def _suffixes() -> str:
    return ", ".join(_READERS)
