"""Reader for `.ply` scans: the vertices of any file that the package plyfile reads."""

from __future__ import annotations

import io
import re
import warnings
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from ...errors import ShapeError
from .tables import BYTE_ORDER_MARK, pick_columns, plain_numbers, require, unreadable

_ASCII = bytes(range(128)) + b"?" * 128


def read_ply(path: Path) -> tuple[npt.NDArray[np.floating], npt.NDArray[np.floating] | None]:
    """Positions [N, 3] and intensity [N] or colour [N, 3] of the vertices.

    Raises:
        SettingError: plyfile is not installed.
        ShapeError: no vertices, x, y or z missing or a list, a broken or truncated file.
    """
    plyfile = require("plyfile", ".ply files")
    try:
        with path.open("rb") as file, warnings.catch_warnings():
            # Empty lists, and numbers out of their type's range; a wrong one is an error.
            warnings.simplefilter("ignore")
            content = plyfile.PlyData.read(_as_plyfile_reads(file))
    except (plyfile.PlyParseError, MemoryError) as error:
        raise unreadable(path, error) from error
    if "vertex" not in content:
        names = ", ".join(element.name for element in content.elements) or "none"
        raise ShapeError(f"{path}: elements {names}; expected 'vertex'.")
    rows = content["vertex"].data
    numbers = [name for name in rows.dtype.names or () if rows.dtype[name].kind in "fiu"]
    return pick_columns(path, {name: rows[name] for name in numbers})


def _as_plyfile_reads(file: BinaryIO) -> BinaryIO:
    """The file, or its content where plyfile would refuse it: for letters beyond ASCII in the
    header, usually in a comment, and for words that C libraries write in place of a number."""
    start = len(BYTE_ORDER_MARK) if file.read(len(BYTE_ORDER_MARK)) == BYTE_ORDER_MARK else 0
    file.seek(start)
    header = bytearray()
    for line in file:
        header += line
        if line.split() == [b"end_header"]:
            break
    text = re.search(rb"^format\s+ascii\b", header, re.MULTILINE)
    if text is None and not start and header.isascii():
        file.seek(0)
        return file
    plain = header.translate(_ASCII)
    return io.BytesIO(plain + (plain_numbers(file.read()) if text else file.read()))
