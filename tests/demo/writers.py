"""Small writers of the formats that the demo reads, for round trips."""

from __future__ import annotations

from pathlib import Path

import numpy as np


def write_ply(path: Path, columns: dict[str, np.ndarray], form: str, tail: bytes = b"") -> None:
    """A `.ply` file with one vertex element; `form` is the header's format word."""
    kinds = {"f4": "float", "f8": "double", "u1": "uchar", "i4": "int"}
    rows = len(next(iter(columns.values())))
    lines = ["ply", f"format {form} 1.0", "comment a test", f"element vertex {rows}"]
    lines += [f"property {kinds[v.dtype.str[1:]]} {name}" for name, v in columns.items()]
    if tail:
        lines += ["element face 1", "property list uchar int vertex_indices"]
    header = ("\n".join([*lines, "end_header"]) + "\n").encode()
    if form == "ascii":
        text = "\n".join(" ".join(repr(c[i].item()) for c in columns.values()) for i in range(rows))
        body = text.encode() + b"\n"
    else:
        endian = "<" if "little" in form else ">"
        dtype = [(name, endian + v.dtype.str[1:]) for name, v in columns.items()]
        table = np.zeros(rows, dtype)
        for name, values in columns.items():
            table[name] = values
        body = table.tobytes()
    path.write_bytes(header + body + tail)


def pcd_header(columns: dict[str, np.ndarray], data: str, rows: int | None = None) -> bytes:
    """The header of a `.pcd` file with one value per field."""
    rows = len(next(iter(columns.values()))) if rows is None else rows
    kinds = [v.dtype.kind.upper() for v in columns.values()]
    lines = [
        "# .PCD v0.7 - Point Cloud Data file format",
        "VERSION 0.7",
        "FIELDS " + " ".join(columns),
        "SIZE " + " ".join(str(v.dtype.itemsize) for v in columns.values()),
        "TYPE " + " ".join(kinds),
        "COUNT " + " ".join("1" for _ in columns),
        f"WIDTH {rows}",
        "HEIGHT 1",
        "VIEWPOINT 0 0 0 1 0 0 0",
        f"POINTS {rows}",
        f"DATA {data}",
    ]
    return ("\n".join(lines) + "\n").encode()


def write_pcd(path: Path, columns: dict[str, np.ndarray], data: str) -> None:
    """A `.pcd` file; `data` is ascii, binary or binary_compressed."""
    rows = len(next(iter(columns.values())))
    if data == "ascii":
        lines = (" ".join(repr(c[i].item()) for c in columns.values()) for i in range(rows))
        body = "\n".join(lines).encode() + b"\n"
    elif data == "binary":
        table = np.zeros(rows, [(name, v.dtype) for name, v in columns.items()])
        for name, values in columns.items():
            table[name] = values
        body = table.tobytes()
    else:
        plain = b"".join(v.tobytes() for v in columns.values())
        packed = lzf_compress(plain)
        body = np.array([len(packed), len(plain)], "<u4").tobytes() + packed
    path.write_bytes(pcd_header(columns, data) + body)


def lzf_compress(data: bytes) -> bytes:
    """LZF by the plainest greedy search: last place of every three bytes, copies of 3 to 264."""
    out, literals, seen, at = bytearray(), bytearray(), {}, 0

    def flush() -> None:
        for start in range(0, len(literals), 32):
            block = literals[start : start + 32]
            out.append(len(block) - 1)
            out.extend(block)
        literals.clear()

    while at < len(data):
        key = data[at : at + 3]
        start = seen.get(key, -1)
        seen[key] = at
        if start < 0 or at - start > 8192 or len(key) < 3:
            literals.append(data[at])
            at += 1
            continue
        length = 3
        while length < 264 and at + length < len(data) and data[start + length] == data[at + length]:
            length += 1
        flush()
        distance, short = at - start - 1, length - 2
        if short < 7:
            out.append(short << 5 | distance >> 8)
        else:
            out += bytes([7 << 5 | distance >> 8, short - 7])
        out.append(distance & 255)
        at += length
    flush()
    return bytes(out)
