"""Texts of instructions, and their source operands as C."""

from __future__ import annotations

import functools
import importlib
import re
import struct

from .pcode import REPLACE
from .structures import Unsupported

F32 = [0.5, -0.5, 1.0, -1.0, 2.0, -2.0, 4.0, -4.0]
F32_INLINE = {240 + i: struct.unpack("<I", struct.pack("<f", f))[0] for i, f in enumerate(F32)} | {248: 0x3E22F983}
F64_INLINE = {240 + i: struct.unpack("<Q", struct.pack("<d", f))[0] for i, f in enumerate(F32)} | {
    248: 0x3FC45F306DC9C882
}
F16_INLINE = {240 + i: struct.unpack("<H", struct.pack("<e", f))[0] for i, f in enumerate(F32)} | {248: 0x3118}
M32, M64 = (1 << 32) - 1, (1 << 64) - 1


@functools.cache
def _texts(fam):
    P = importlib.import_module(f"tinygrad.runtime.autogen.amd.{fam}.str_pcode").PCODE
    out = {}
    for k, v in P.items():
        if type(k).__name__[:3] in ("VOP", "SOP"):
            out.setdefault(base_name(k.name), v)
    return out


def base_name(n):
    return re.sub(r"_E(32|64)$", "", n).replace("V_DUAL_", "V_")


def text_of(fam, name):
    t = REPLACE.get(name) or _texts(fam).get(name)
    if t is None:
        raise Unsupported(f"no pseudo-code for {name}")
    t = (
        t.replace("VGPR[laneId][VDST.u32]", "D0")
        .replace("VGPR[laneId][SRC0.u32]", "S0")
        .replace("EXEC.u64[laneId] = D0.u64[laneId]", "D0.u64[laneId]")
    )
    return re.sub(r"_SR\(", "_sr(", t)


def uses(text, x):
    return re.search(rf"\b{x}\b", text) is not None


class Src:
    """One source operand: a VGPR (kind V), or a scalar (kind S: an SGPR or a constant)."""

    def __init__(self, code, text, i, lit, packed=False, f16=None, w16=False):
        u = set(re.findall(rf"\bS{i}\.([a-z]+\d+)", text)) | (
            set(re.findall(rf"\bS{i}\[[^\]]*\]\.([a-z]+\d+)", text)) if packed else set()
        )
        self.wide = any(t.endswith("64") for t in u) or bool(re.search(rf"\bS{i}(\.u32)?\[(3[2-9]|[456]\d)", text))
        self.f64 = "f64" in u
        self.f16 = "f16" in u if f16 is None else f16
        self.w16 = w16 or (bool(u) and all(t in ("f16", "u16", "i16", "b16", "bf16") for t in u) and not packed)
        self.sign = 63 if self.f64 else 15 if self.w16 and not packed else 31
        self.i64 = "i64" in u
        self.hi = self.abs = self.neg = False
        self.kind = "V" if code >= 256 else "S"
        self.reg, self.const = (code - 256 if code >= 256 else code), 0
        if 128 <= code < 256 and code != 253:
            self.reg = -1
            self.const = self.value(code, lit)

    def value(self, c, lit):
        if c == 255:
            v = lit << 32 if self.f64 else (lit | M64 ^ M32 if self.i64 and lit >> 31 else lit)
        elif c <= 192:
            v = c - 128
        elif c <= 208:
            v = 192 - c
        elif 240 <= c <= 248:
            v = (F64_INLINE if self.wide else F16_INLINE if self.f16 else F32_INLINE)[c]
        elif 235 <= c <= 238:
            v = 0
        else:
            raise Unsupported(f"source operand {c}")
        return v & (M64 if self.wide else M32)

    def put(self, e, i):
        e.a[2 + i] = self.reg
        e.c[i] = self.const

    def key(self):
        return (self.kind, self.wide, self.hi, self.abs, self.neg, self.sign, self.w16)


def declaration(i, j, s, pair=False):
    """Declarations before the lane loop for source i, whose slot in the entry is j."""
    return (
        f"const u32 *p{j} = w->v + e->a[{2 + j}] * W_;"
        if s.kind == "V"
        else f"{'u64' if s.wide or pair else 'u32'} c{j} = {'sc64' if s.wide or pair else 'sc32'}(w, e, {j});"
    )


def fetch(pre, i, j, s, packed=None):
    """The statement that reads source i in a lane and applies its modifiers. packed: (op_sel, op_sel_hi, neg, neg_hi bits, 64-bit pair)."""
    T = "u64" if s.wide else "u32"
    x = f"c{j}" if s.kind == "S" else f"(p{j}[l] | (u64)p{j}[W_ + l] << 32)" if s.wide else f"p{j}[l]"
    n = f"{pre}S{i}"
    if packed:
        lo, hi, nlo, nhi, pair = packed
        half = (
            (lambda b: f"(u32)(c{j} >> {32 * b})" if s.kind == "S" else f"p{j}[{'W_ + ' if b else ''}l]")
            if pair
            else (lambda b: f"({x} >> {16 * b} & 0xffff)")
        )
        sg = "0x80000000u" if pair else "0x8000u"
        return f"{'u64' if pair else 'u32'} {n} = ({half(lo)}{' ^ ' + sg if nlo else ''}) | ({'u64' if pair else 'u32'})({half(hi)}{' ^ ' + sg if nhi else ''}) << {32 if pair else 16};"
    r = f"{T} {n} = {x}{' >> 16' if s.hi else ''};"
    if s.abs:
        r += f" {n} &= ~(({T})1 << {s.sign});"
    if s.neg:
        r += f" {n} ^= ({T})1 << {s.sign};"
    return r
