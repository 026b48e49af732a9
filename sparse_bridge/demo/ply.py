"""Reader for `.ply` scans: the vertex element of ascii, little-endian and big-endian files."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..errors import ShapeError, UnsupportedError
from .tables import pick_columns, read_ascii, truncated, unique_names

_TYPES = {
    "char": "i1", "int8": "i1", "uchar": "u1", "uint8": "u1",
    "short": "i2", "int16": "i2", "ushort": "u2", "uint16": "u2",
    "int": "i4", "int32": "i4", "uint": "u4", "uint32": "u4",
    "float": "f4", "float32": "f4", "double": "f8", "float64": "f8",
}  # fmt: skip
_ENDIAN = {"ascii": "", "binary_little_endian": "<", "binary_big_endian": ">"}


@dataclasses.dataclass
class _Header:
    """Format name, rows of the vertex element, and its properties as (name, numpy code)."""

    format: str = ""
    rows: int = -1
    properties: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    elements: list[str] = dataclasses.field(default_factory=list)
    end: int = 0


def read_ply(
    path: Path,
) -> tuple[npt.NDArray[np.floating], npt.NDArray[np.floating] | None]:
    """Positions [N, 3] and intensity [N] or colour [N, 3] of the vertices.

    Raises:
        ShapeError: no `.ply` header, x, y or z missing, or fewer vertices than the header says.
        UnsupportedError: list properties among the vertices, or another element before them.
    """
    data = path.read_bytes()
    header = _parse_header(path, data)
    names = unique_names([name for name, _ in header.properties])
    if header.format == "ascii":
        table = read_ascii(path, data[header.end :], len(names), header.rows)
        return pick_columns(path, dict(zip(names, table.T, strict=True)))
    endian = _ENDIAN[header.format]
    codes = [endian + code for _, code in header.properties]
    dtype = np.dtype(list(zip(names, codes, strict=True)))
    complete = (len(data) - header.end) // max(dtype.itemsize, 1)
    if complete < header.rows:
        raise truncated(path, complete, header.rows)
    rows = np.frombuffer(data, dtype, header.rows, header.end)
    return pick_columns(path, {name: rows[name] for name in names})


def _parse_header(path: Path, data: bytes) -> _Header:
    stop = data.find(b"end_header")
    end = data.find(b"\n", stop) + 1
    if not data.startswith(b"ply") or stop < 0 or end == 0:
        raise ShapeError(f"{path}: no .ply header; expected 'ply' first and 'end_header' later.")
    header = _Header(end=end)
    for line in data[:stop].decode("ascii", "replace").splitlines()[1:]:
        _parse_line(path, header, line.split())
    if header.format not in _ENDIAN:
        raise UnsupportedError(
            f"{path}: format {header.format or '(none)'!r}; expected one of {', '.join(_ENDIAN)}."
        )
    if header.rows < 0:
        raise ShapeError(
            f"{path}: elements {', '.join(header.elements) or '(none)'}; expected 'vertex'."
        )
    return header


def _parse_line(path: Path, header: _Header, words: list[str]) -> None:
    match words:
        case ["format", name, *_]:
            header.format = name
        case ["element", name, count]:
            if name == "vertex":
                if header.elements:
                    raise UnsupportedError(
                        f"{path}: element {header.elements[0]!r} comes before 'vertex'; expected "
                        "the vertices first. Export the file as a plain point cloud."
                    )
                header.rows = int(count)
            header.elements.append(name)
        case ["property", *what] if header.elements[-1:] == ["vertex"]:
            if len(what) != 2 or what[0] not in _TYPES:
                raise UnsupportedError(
                    f"{path}: vertex property {' '.join(what)!r}; expected a number type "
                    f"({', '.join(sorted(_TYPES))}) and a name."
                )
            header.properties.append((what[1], _TYPES[what[0]]))
