"""Reader for `.pcd` scans: ascii, binary and LZF-compressed binary."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ...errors import DataTypeError, ShapeError, UnsupportedError
from .tables import BYTE_ORDER_MARK, pick_columns, read_ascii, truncated, unique_names

_KINDS = {"F": "f", "I": "i", "U": "u"}
_CODES = {"f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"}

Columns = dict[str, npt.NDArray]


@dataclasses.dataclass(frozen=True)
class _Header:
    """Column names, their numpy codes, values per column, rows, encoding, first byte of data."""

    names: list[str]
    codes: list[str]
    counts: list[int]
    rows: int
    encoding: str
    end: int


def read_pcd(path: Path) -> tuple[npt.NDArray[np.floating], npt.NDArray[np.floating] | None]:
    """Positions [N, 3] and intensity [N] or colour [N, 3].

    Raises:
        ShapeError: no header, x, y or z missing, or fewer points than the header says.
        DataTypeError: a field type that no number has.
        UnsupportedError: an encoding other than ascii, binary and binary_compressed.
    """
    data = path.read_bytes()
    header = _parse_header(path, data)
    body = data[header.end :]
    readers = {"ascii": _ascii, "binary": _binary, "binary_compressed": _compressed}
    if header.encoding not in readers:
        raise UnsupportedError(f"{path}: DATA {header.encoding}; expected one of {', '.join(readers)}.")
    return pick_columns(path, _unpack_colour(readers[header.encoding](path, header, body)))


def _parse_header(path: Path, data: bytes) -> _Header:
    fields: dict[str, list[str]] = {}
    at = len(BYTE_ORDER_MARK) if data.startswith(BYTE_ORDER_MARK) else 0
    while "DATA" not in fields:
        end = data.find(b"\n", at)
        if end < 0:
            raise ShapeError(f"{path}: no .pcd header; expected lines from FIELDS to DATA.")
        words = data[at:end].decode("ascii", "replace").split()
        at = end + 1
        if words and not words[0].startswith("#"):
            fields[words[0].upper()] = words[1:]
    listed = fields.get("FIELDS") or fields.get("COLUMNS")  # before version .6
    if not listed or not fields["DATA"]:
        raise ShapeError(f"{path}: the header lacks {'DATA' if listed else 'FIELDS'}.")
    names, codes, counts = _layout(path, fields, listed)
    if "POINTS" in fields:
        rows = int(fields["POINTS"][0])
    elif "WIDTH" in fields:
        rows = int(fields["WIDTH"][0]) * int(fields.get("HEIGHT", ["1"])[0])
    else:
        raise ShapeError(f"{path}: the header lacks POINTS.")
    if rows < 0 or min(counts) < 0:
        raise ShapeError(f"{path}: the header says {rows} points of {counts} values each.")
    return _Header(names, codes, counts, rows, fields["DATA"][0].lower(), at)


def _layout(path: Path, fields: dict[str, list[str]], listed: list[str]) -> tuple[list[str], list[str], list[int]]:
    """Names, codes and counts of the fields; what the header leaves out is float32, one each."""
    n = len(listed)
    kinds, sizes = fields.get("TYPE", ["F"] * n), fields.get("SIZE", ["4"] * n)
    counts = [int(count) for count in fields.get("COUNT", ["1"] * n)]
    if not n == len(kinds) == len(sizes) == len(counts):
        raise ShapeError(f"{path}: FIELDS, SIZE, TYPE and COUNT differ in length.")
    codes = [_KINDS.get(a.upper(), a.upper()) + b for a, b in zip(kinds, sizes, strict=True)]
    for at, count in enumerate(counts):
        if codes[at] in _CODES:
            continue
        if count:
            raise DataTypeError(f"{path}: field type {codes[at]!r}; expected F, I or U of 1-8 bytes.")
        codes[at] = "u1"  # padding of no value, whatever its type
    return unique_names(listed), codes, counts


def _ascii(path: Path, header: _Header, body: bytes) -> Columns:
    table = read_ascii(path, body, sum(header.counts), header.rows)
    starts = np.cumsum([0, *header.counts[:-1]])
    # A packed colour is written as the decimal number of its bits or of its float.
    with np.errstate(invalid="ignore"):  # no number in a field of integers
        return {
            name: table[:, start].astype("<" + code)
            for name, code, count, start in zip(header.names, header.codes, header.counts, starts, strict=True)
            if count
        }


def _binary(path: Path, header: _Header, body: bytes) -> Columns:
    dtype = np.dtype(
        [
            (name, "<" + code, (count,))
            for name, code, count in zip(header.names, header.codes, header.counts, strict=True)
        ]
    )
    if len(body) < header.rows * dtype.itemsize:
        raise truncated(path, len(body) // dtype.itemsize, header.rows)
    rows = np.frombuffer(body, dtype, header.rows)
    return {name: rows[name][:, 0] for name in header.names if rows[name].shape[1]}


def _compressed(path: Path, header: _Header, body: bytes) -> Columns:
    """One LZF block of whole columns, one after the other."""
    if len(body) < 8:
        raise truncated(path, 0, header.rows)
    packed, plain = (int(size) for size in np.frombuffer(body, "<u4", 2))
    if len(body) < 8 + packed:
        raise ShapeError(
            f"{path}: {len(body) - 8} compressed bytes; the header says {packed}. "
            "It is truncated: download or export it again."
        )
    try:
        data = lzf_decompress(body[8 : 8 + packed], plain)
    except ShapeError as error:
        raise ShapeError(f"{path}: {error}") from None
    columns: Columns = {}
    at = 0
    for name, code, count in zip(header.names, header.codes, header.counts, strict=True):
        dtype = np.dtype("<" + code)
        size = dtype.itemsize * count * header.rows
        if at + size > len(data):
            raise truncated(path, 0, header.rows)
        if count:
            column = np.frombuffer(data, dtype, count * header.rows, at)
            columns[name] = column.reshape(header.rows, count)[:, 0]
        at += size
    return columns


def _unpack_colour(columns: Columns) -> Columns:
    """Split a packed `rgb` column, 0x00RRGGBB even where it is called a float, into its bytes."""
    packed = next((name for name in columns if name.lower() in ("rgb", "rgba")), None)
    if packed is None or columns[packed].dtype.itemsize != 4:
        return columns
    bits = np.ascontiguousarray(columns[packed]).view("<u4")
    for shift, name in ((16, "red"), (8, "green"), (0, "blue")):
        columns[name] = (bits >> shift & 255).astype(np.uint8)
    return columns


def lzf_decompress(data: bytes, size: int) -> bytes:
    """Expand an LZF block to `size` bytes.

    A control byte below 32 announces that many plus one literal bytes. Any other one is a copy
    from what was already written: its top three bits are the length minus two (seven means that
    another byte adds to it), its low five bits and the next byte are the distance minus one.

    Raises:
        ShapeError: the block is corrupt or expands to another size.
    """
    out = bytearray()
    at = 0
    try:
        while at < len(data):
            control = data[at]
            at += 1
            if control < 32:
                out += data[at : at + control + 1]
                at += control + 1
                continue
            length = control >> 5
            if length == 7:
                length += data[at]
                at += 1
            start = len(out) - ((control & 31) << 8) - data[at] - 1
            at += 1
            if start < 0:
                raise IndexError
            length += 2
            if start + length <= len(out):
                out += out[start : start + length]
            else:  # the copy overlaps what it writes: a repeating pattern
                pattern = out[start:]
                out += (pattern * (length // len(pattern) + 1))[:length]
    except IndexError:
        out.clear()
    if len(out) != size:
        raise ShapeError(
            f"compressed block expands to {len(out)} bytes; its header says {size}. "
            "The file is corrupt: download or export it again."
        )
    return bytes(out)
