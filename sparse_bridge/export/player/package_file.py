"""The file `model.sbp`: records of fixed sizes, little-endian, see docs/deployment_gpu.md. What the
player in C reads is written and read here."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import struct
import zlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from ..plugin_checks import ExportError
from .memory_plan import needed

MAGIC, VERSION = b"\x89SBP\r\n\x1a\n", 2
BACKENDS = {"cuda": 1, "hip": 2}
DTYPES = {torch.float16: 1, torch.float32: 2, torch.int32: 3, torch.int64: 4, torch.uint8: 5, torch.bfloat16: 6}
MOST_DIMS = 6
LAUNCH, FILL, COPY = range(3)
VALUE, ADDRESS = range(2)

# Sections in the order of the header, with the layout of their records; bytes where there is none.
SECTIONS = {
    "strings": "",
    "programs": "<2I4Q16I",
    "kernels": "<2Q4I",
    "code": "",
    "steps": "<8I3Q",
    "args": "<2IQ",
    "constants": "<3Q",
    "relocations": "<2Q",
    "tensors": "<2IiI8Q",
    "levels": "<2Q2i",
    "edges": "<2I",
    "data": "",
}
_HEAD = "<8s2IQ"
_ENTRY = "<2Q"


class Kernel(NamedTuple):
    """A compiled kernel.  shared: bytes of dynamic shared memory."""

    name: str
    code: bytes
    n_args: int
    threads: int
    shared: int


class Arg(NamedTuple):
    """kind: VALUE, the bits of a number of `size` bytes; or ADDRESS, an offset in the memory."""

    kind: int
    size: int
    value: int


class Step(NamedTuple):
    """kind: LAUNCH, of a kernel by its index; FILL, of `size` bytes at `to` with 32 bits; COPY."""

    kind: int
    kernel: int = 0
    grid: tuple[int, int, int] = (0, 0, 0)
    args: tuple[Arg, ...] = ()
    value: int = 0
    to: int = 0
    start: int = 0
    size: int = 0


class Constant(NamedTuple):
    """Bytes that lie at an offset of the memory before anything runs."""

    at: int
    data: bytes


class Tensor(NamedTuple):
    """level: whose rows it has; -1 for dense ones."""

    name: str
    dtype: torch.dtype
    level: int
    shape: tuple[int, ...]
    at: int


class Level(NamedTuple):
    """counters_at: int32 [4], as of `hash_table`."""

    level: int
    capacity: int
    counters_at: int


@dataclasses.dataclass(frozen=True)
class Program:
    """What runs on one target.  block: bytes of the memory that all offsets are of.  rows: of an input at
    most.  count_at: of the number of its last row, int32; flags_at: of the counters of its table, int32 [4].
    relocations: (offset of an address, offset that it is of).  edges: (earlier step, later step) that waits for it, in
    the order of the later ones, for a graph; without any, every step waits for the one before."""

    target: str
    block: int
    rows: int
    count_at: int
    flags_at: int
    kernels: tuple[Kernel, ...]
    steps: tuple[Step, ...]
    constants: tuple[Constant, ...]
    relocations: tuple[tuple[int, int], ...]
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    levels: tuple[Level, ...]
    edges: tuple[tuple[int, int], ...] = ()

    @property
    def memory(self) -> int:
        """Bytes that it takes on the GPU at most, the kernels' code included."""
        return needed(self.block, [len(kernel.code) for kernel in self.kernels])


class _Bytes:
    """Bytes of a section, where equal ones are kept once."""

    def __init__(self, aligned: int) -> None:
        self.content, self._aligned = bytearray(), aligned
        self._places: dict[bytes, int] = {}

    def place(self, content: bytes) -> int:
        """Where this content lies."""
        if content not in self._places:
            self.content += bytes(-len(self.content) % self._aligned)
            self._places[content] = len(self.content)
            self.content += content
        return self._places[content]


class _Writer:
    """The sections of a file."""

    def __init__(self) -> None:
        self._bytes = {"strings": _Bytes(1), "code": _Bytes(64), "data": _Bytes(8)}
        self._records: dict[str, list[bytes]] = {name: [] for name, layout in SECTIONS.items() if layout}

    def _name(self, text: str) -> int:
        return self._bytes["strings"].place(text.encode() + b"\0")

    def _add(self, section: str, records: Iterable[Sequence[int]]) -> tuple[int, int]:
        """(the number of the first of these records, how many they are)."""
        own = self._records[section]
        first = len(own)
        own += [struct.pack(SECTIONS[section], *record) for record in records]
        return first, len(own) - first

    def add(self, it: Program) -> None:
        """A program; code and data that are there already are kept once."""
        code, data = self._bytes["code"], self._bytes["data"]
        kernels = [
            (code.place(kernel.code), len(kernel.code), self._name(kernel.name), *kernel[2:]) for kernel in it.kernels
        ]
        steps = [(step.kind, step.kernel, *step.grid, *self._add("args", step.args), *step[4:]) for step in it.steps]
        constants = [(constant.at, data.place(constant.data), len(constant.data)) for constant in it.constants]
        parts = [
            self._add("kernels", kernels),
            self._add("steps", steps),
            self._add("constants", constants),
            self._add("relocations", it.relocations),
            self._add("tensors", map(self._tensor, it.inputs)),
            self._add("tensors", map(self._tensor, it.outputs)),
            self._add("levels", [(level.counters_at, level.capacity, level.level, 0) for level in it.levels]),
            self._add("edges", it.edges),
        ]
        backend = BACKENDS[it.target.partition(":")[0]]
        numbers = (self._name(it.target), backend, it.block, it.rows, it.count_at, it.flags_at)
        self._add("programs", [(*numbers, *[number for part in parts for number in part])])

    def _tensor(self, it: Tensor) -> tuple[int, ...]:
        dims = (*it.shape, *[0] * (MOST_DIMS - len(it.shape)))
        return self._name(it.name), DTYPES[it.dtype], it.level, len(it.shape), *dims, it.at, 0

    def content(self) -> bytes:
        """The file."""
        at = struct.calcsize(_HEAD) + struct.calcsize(_ENTRY) * len(SECTIONS)
        entries, body = b"", bytearray()
        for name, layout in SECTIONS.items():
            section = b"".join(self._records[name]) if layout else bytes(self._bytes[name].content)
            count = len(self._records[name]) if layout else len(section)
            body += bytes(-(at + len(body)) % 64)
            entries += struct.pack(_ENTRY, at + len(body), count)
            body += section
        size = at + len(body)
        rest = struct.pack("<Q", size) + entries + bytes(body)
        return MAGIC + struct.pack("<2I", VERSION, zlib.crc32(rest)) + rest


def content_of(programs: Sequence[Program]) -> bytes:
    """The file that holds these programs."""
    writer = _Writer()
    for program in programs:
        writer.add(program)
    return writer.content()


def write(path: pathlib.Path, programs: Sequence[Program]) -> None:
    """Write the file that holds these programs, whole or not at all."""
    part = path.with_suffix(".part")
    try:
        part.write_bytes(content_of(programs))
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


class _Reader:
    """The sections of a file that has been checked."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        at, self._entries = struct.calcsize(_HEAD), dict[str, tuple[int, int]]()
        for name in SECTIONS:
            self._entries[name] = struct.unpack_from(_ENTRY, content, at)
            at += struct.calcsize(_ENTRY)

    def _records(self, section: str, first: int = 0, count: int | None = None) -> list[tuple[int, ...]]:
        start, total = self._entries[section]
        layout = struct.Struct(SECTIONS[section])
        count = total if count is None else count
        return [layout.unpack_from(self._content, start + (first + i) * layout.size) for i in range(count)]

    def _bytes(self, section: str, at: int, size: int) -> bytes:
        start = self._entries[section][0] + at
        return self._content[start : start + size]

    def _name(self, at: int) -> str:
        start = self._entries["strings"][0] + at
        return self._content[start : self._content.index(b"\0", start)].decode()

    def programs(self) -> list[Program]:
        return [self._program(record) for record in self._records("programs")]

    def _program(self, record: tuple[int, ...]) -> Program:
        target, _, block, rows, count_at, flags_at = record[:6]
        parts = ("kernels", "steps", "constants", "relocations", "tensors", "tensors", "levels", "edges")
        kernels, steps, constants, relocations, inputs, outputs, levels, edges = [
            self._records(name, *record[6 + 2 * i : 8 + 2 * i]) for i, name in enumerate(parts)
        ]
        return Program(
            self._name(target),
            block,
            rows,
            count_at,
            flags_at,
            tuple(Kernel(self._name(k[2]), self._bytes("code", k[0], k[1]), *k[3:]) for k in kernels),
            tuple(
                Step(s[0], s[1], (s[2], s[3], s[4]), tuple(Arg(*a) for a in self._records("args", s[5], s[6])), *s[7:])
                for s in steps
            ),
            tuple(Constant(c[0], self._bytes("data", c[1], c[2])) for c in constants),
            tuple((r[0], r[1]) for r in relocations),
            tuple(map(self._tensor, inputs)),
            tuple(map(self._tensor, outputs)),
            tuple(Level(level[2], level[1], level[0]) for level in levels),
            tuple((earlier, later) for earlier, later in edges),
        )

    def _tensor(self, record: tuple[int, ...]) -> Tensor:
        name, dtype, level, n_dims, *dims, at, _ = record
        own = next(key for key, number in DTYPES.items() if number == dtype)
        return Tensor(self._name(name), own, level, tuple(dims[:n_dims]), at)


def read(content: bytes) -> list[Program]:
    """The programs of a file. What lies where is not checked: the player does that.

    Raises: ExportError for what is no such file, or has changed.
    """
    if len(content) < struct.calcsize(_HEAD) or content[:8] != MAGIC:
        raise ExportError("this is no package: expected a file model.sbp.")
    version, crc = struct.unpack_from("<2I", content, 8)
    if version != VERSION:
        raise ExportError(f"the package has version {version} of its format; expected {VERSION}.")
    if zlib.crc32(content[16:]) != crc:
        raise ExportError("the package was cut short or has changed since it was written: its checksum differs.")
    return _Reader(content).programs()
