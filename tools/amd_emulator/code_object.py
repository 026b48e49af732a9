"""Code objects: Triton's hsaco loaded into memory, its instructions decoded."""

from __future__ import annotations

import ctypes
import struct
from typing import NamedTuple

from .entries import entry
from .isa import ARCH
from .native import link
from .operands import F32_INLINE
from .structures import Unsupported

SCALARS = 260  # registers, constants and state of a wave, see alu.h
_LOADED, _EXECUTABLE = 1, 1
_SYMBOL_TABLES, _RELOCATIONS = (2, 11), 4


def wave_size(gfx: str) -> int:
    """Lanes of a wave."""
    return 64 if ARCH[gfx] == "cdna" else 32


class _Segment(NamedTuple):
    """kind, flags; where it lies in the file and in memory; bytes in the file and in memory."""

    kind: int
    flags: int
    offset: int
    address: int
    physical: int
    in_file: int
    in_memory: int
    align: int


def _read_elf(blob: bytes) -> tuple[list[_Segment], dict[str, int]]:
    """Segments, and addresses of symbols."""
    (at,) = struct.unpack_from("<Q", blob, 0x28)
    size, count, _ = struct.unpack_from("<HHH", blob, 0x3A)
    sections = [struct.unpack_from("<IIQQQQIIQQ", blob, at + i * size) for i in range(count)]
    (at,) = struct.unpack_from("<Q", blob, 0x20)
    size, count = struct.unpack_from("<HH", blob, 0x36)
    layout = "<IIQQQQQQ"
    segments = [_Segment(*struct.unpack_from(layout, blob, at + i * size)) for i in range(count)]
    symbols = {}
    for _, kind, _, _, begin, length, strings, *_ in sections:
        if kind == _RELOCATIONS and length:
            raise Unsupported("code object with relocations")
        if kind not in _SYMBOL_TABLES:
            continue
        names = sections[strings][4]
        for place in range(begin, begin + length, 24):
            name, _, _, _, value, _ = struct.unpack_from("<IBBHQQ", blob, place)
            end = blob.index(b"\0", names + name)
            symbols[blob[names + name : end].decode()] = value
    return segments, symbols


def _initial_scalars() -> list[int]:
    """Scalar registers are 0; behind them lie the inline constants."""
    scalars = [0] * SCALARS
    scalars[128:193] = range(65)
    scalars[193:209] = [-(i + 1) & 0xFFFFFFFF for i in range(16)]
    for place, bits in F32_INLINE.items():
        scalars[place] = bits
    return scalars


class CodeObject:
    """One kernel of an hsaco: its memory, its descriptor and its decoded instructions.

    name: the kernel.  gfx: architecture.  base, range: where it lies.  code, words: its
    instructions and how many 32-bit words they are.  table: entry of every word.  entry: address of
    the first.  lds, private, arguments: bytes that its descriptor asks for; rsrc1, rsrc2,
    properties: of the descriptor.
    """

    def __init__(self, hsaco: bytes, name: str, gfx: str) -> None:
        self.name, self.gfx = name, gfx
        segments, symbols = _read_elf(hsaco)
        loaded = [segment for segment in segments if segment.kind == _LOADED]
        high = max(segment.address + segment.in_memory for segment in loaded)
        self._memory = ctypes.create_string_buffer(high + 8192)
        base = self.base = (ctypes.addressof(self._memory) + 4095) & ~4095
        self.range = (base, base + high)
        for segment in loaded:
            begin = segment.offset
            content = hsaco[begin : begin + segment.in_file]
            ctypes.memmove(base + segment.address, content, segment.in_file)
            if segment.flags & _EXECUTABLE:
                self.code, self.words = base + segment.address, segment.in_memory // 4
        at = symbols[name + ".kd"]
        descriptor = ctypes.string_at(base + at, 64)
        self.lds, self.private, self.arguments = struct.unpack_from("<III", descriptor)
        (first,) = struct.unpack_from("<q", descriptor, 16)
        _, self.rsrc1, self.rsrc2, self.properties = struct.unpack_from("<IIIH", descriptor, 44)
        self.entry = base + at + first
        self.scalars = _initial_scalars()
        self.table = (ctypes.c_void_p * self.words)()
        self._decode_all()

    def _decode_all(self) -> None:
        """Entries for the whole code, and one compilation for all forms that are new. What cannot
        be decoded is said when it is reached: it may be data or padding."""
        code = ctypes.string_at(self.code, 4 * self.words) + bytes(16)
        word = 0
        while word < self.words:
            try:
                found, _ = entry(code[4 * word : 4 * word + 16], self.gfx)
            except Exception:
                word += 1
                continue
            self.table[word] = ctypes.addressof(found)
            word += found.size // 4
        link()

    def decode(self, pc: int) -> None:
        """The entry of an instruction that `_decode_all` passed over."""
        raw = ctypes.string_at(pc, min(16, self.code + 4 * self.words - pc)).ljust(16, b"\0")
        try:
            found, _ = entry(raw, self.gfx)
            link()
        except Exception as error:
            raise Unsupported(
                f"{self.gfx} kernel {self.name}: cannot run the instruction at "
                f"+{pc - self.entry:#x} ({raw.hex()}): {type(error).__name__}: {error}"
            ) from error
        self.table[(pc - self.code) // 4] = ctypes.addressof(found)

    def text(self, pc: int) -> str:
        """The instruction there, for messages."""
        try:
            return str(entry(ctypes.string_at(pc, 16), self.gfx)[1])
        except Exception:
            return "?"
