"""Reader for `.las` and `.laz` scans, by the package laspy."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ...errors import ShapeError
from .tables import require, truncated, unreadable

_DIFFERENT = 0xFFFFFFFF  # the chunk size of files whose chunks are of many


def read_las(path: Path) -> tuple[npt.NDArray[np.floating], npt.NDArray[np.floating] | None]:
    """Positions [N, 3] in the file's unit, and intensity [N]; colour [N, 3] where it is all zero.

    Raises:
        SettingError: laspy, or what it needs for `.laz`, is not installed.
        ShapeError: a broken or truncated file.
    """
    laspy = require("laspy", ".las and .laz files")
    header = _Header.of(path)
    unpacking = (require("lazrs", ".laz files").LazrsError,) if header.compressed else ()
    header.check(path)
    try:
        with _quiet():
            content = laspy.read(path)
    except (laspy.LaspyException, MemoryError, struct.error, *unpacking) as error:
        raise unreadable(path, error) from error
    if len(content.points) < content.header.point_count:
        raise truncated(path, len(content.points), content.header.point_count)
    xyz = np.asarray(content.xyz, np.float64)
    intensity = np.asarray(content.intensity)  # 16 bits, as the colours
    if not intensity.any() and "red" in content.point_format.dimension_names:
        return xyz, np.column_stack([content.red, content.green, content.blue])
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


@dataclasses.dataclass(frozen=True)
class _Header:
    """What a file says of its size. Places are those of tables 3 and 4 of the LAS 1.4
    specification, and of LASzip's.

    length: bytes of a point that is not packed.  start: of the points.
    """

    compressed: bool
    points: int
    length: int
    start: int
    records: int
    further_records: int

    @staticmethod
    def of(path: Path) -> _Header:
        with path.open("rb") as file:
            header = file.read(375)
        newest = header[24:26] >= b"\x01\x04"
        return _Header(
            # bits of the point format
            compressed=bool(header[104] & 0xC0) if len(header) > 104 else path.suffix != ".las",
            points=_number(header, 247, 8) if newest else _number(header, 107),
            length=_number(header, 105, 2),
            start=_number(header, 96),
            records=_number(header, 100),
            further_records=_number(header, 243) if newest else 0,
        )

    def check(self, path: Path) -> None:
        """ShapeError for a header that counts more than the file has room for: laspy believes it,
        and reads or allocates without end."""
        size = path.stat().st_size
        room = self._room_for_points(path, size)
        for what, count, most in (
            ("variable-length records", self.records, size // 54),
            ("extended variable-length records", self.further_records, size // 60),
            ("points", self.points, room),
        ):
            if most is not None and count > most:
                raise ShapeError(
                    f"{path}: the header says {count} {what}, more than the file holds. "
                    "It is truncated or damaged: download or export it again."
                )

    def _room_for_points(self, path: Path, size: int) -> int | None:
        """Points that fit; None where only unpacking tells. Packed points come in chunks of which
        the first one is not packed; how much the others take has no lower limit."""
        if not self.compressed:
            return size // max(self.length, 1)
        with path.open("rb") as file:
            each = _chunk_size(file.read(self.start))
            file.seek(self.start)
            table = int.from_bytes(file.read(8), "little", signed=True)
            if table < 0:  # of a writer that cannot go back: at the end
                file.seek(-8, os.SEEK_END)
                table = int.from_bytes(file.read(8), "little", signed=True)
            if not 0 < table <= size - 8:
                return 0
            file.seek(table)
            chunks = _number(file.read(8), 4)
        if each is None or chunks * self.length > size:
            return None if each is None else 0
        return chunks * each


def _number(data: bytes, at: int, width: int = 4) -> int:
    return int.from_bytes(data[at : at + width], "little")


def _chunk_size(records: bytes) -> int | None:
    """Points per chunk, by the record that LASzip adds; None where they differ, or without it."""
    at = records.find(b"laszip encoded\0\0")
    size = _number(records, at + 52 + 12) if at >= 0 else _DIFFERENT
    return None if size == _DIFFERENT else size
