"""Reader for `.las` and `.laz` scans, by the package laspy."""

from __future__ import annotations

import contextlib
import logging
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..errors import ShapeError
from .tables import require, truncated, unreadable


def read_las(
    path: Path,
) -> tuple[npt.NDArray[np.floating], npt.NDArray[np.floating] | None]:
    """Positions [N, 3] in the file's unit, and intensity [N]; colour [N, 3] where it is all zero.

    Raises:
        SettingError: laspy, or what it needs for `.laz`, is not installed.
        ShapeError: a broken or truncated file.
    """
    laspy = require("laspy", ".las and .laz files")
    compressed = path.suffix.lower() == ".laz"
    unpacking = (require("lazrs", ".laz files").LazrsError,) if compressed else ()
    _check_header(path, compressed)
    try:
        with _quiet():
            content = laspy.read(path)
    except (laspy.LaspyException, MemoryError, struct.error, *unpacking) as error:
        raise unreadable(path, error) from error
    if len(content.points) < content.header.point_count:
        raise truncated(path, len(content.points), content.header.point_count)
    xyz = np.asarray(content.xyz, np.float64)
    intensity = np.asarray(content.intensity, np.float64)
    if not intensity.any() and "red" in content.point_format.dimension_names:
        return xyz, np.column_stack([content.red, content.green, content.blue]).astype(np.float64)
    return xyz, intensity


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without laspy's log lines: what is wrong with a file is said once, by the exception."""
    log = logging.getLogger("laspy")
    before = log.level
    log.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        log.setLevel(before)


def _check_header(path: Path, compressed: bool) -> None:
    """Refuse a header that counts more than the file has room for: laspy believes it, and reads
    or allocates without end. Places are those of tables 3 and 4 of the LAS 1.4 specification."""
    size = path.stat().st_size
    with path.open("rb") as file:
        header = file.read(375)

    def number(at: int, width: int = 4) -> int:
        return int.from_bytes(header[at : at + width], "little")

    newest = header[24:26] == b"\x01\x04"
    points = number(247, 8) if newest else number(107)
    counts = [
        ("variable-length records", number(100), 54),
        ("extended variable-length records", number(243) if newest else 0, 60),
        # No scan is packed better than one to a thousand.
        ("points", points, number(105, 2) / (1000 if compressed else 1)),
    ]
    for what, count, each in counts:
        if count * each > size:
            raise ShapeError(
                f"{path}: the header says {count} {what}, more than the file holds. "
                "It is truncated or damaged: download or export it again."
            )
