"""Encodings of AMD's instructions, from tinygrad's tables, and their decoding."""

from __future__ import annotations

import functools
import importlib

from tinygrad.renderer.amd.dsl import OPERANDS, FixedBitField, SrcField, SSrcField

from .structures import Unsupported

ARCH = (
    dict.fromkeys(("gfx90a", "gfx942", "gfx950"), "cdna")
    | dict.fromkeys(("gfx1100", "gfx1101", "gfx1102", "gfx1103", "gfx1150", "gfx1151"), "rdna3")
    | dict.fromkeys(("gfx1200", "gfx1201"), "rdna4")
)
_ORDER = {
    "cdna": "VOP3PX2 VOP3P_MFMA VOP3P VOP3SD VOP3_SDST VOP3 DS GLOBAL SCRATCH FLAT MUBUF SMEM SOP1 SOPC SOPP SOPK VOPC_SDWA_SDST VOPC VOP1_SDWA VOP1 VOP2_SDWA SOP2 VOP2",
    "rdna3": "VOPD VOP3P VOP3SD VOP3_SDST VOP3 DS GLOBAL SCRATCH FLAT MUBUF SMEM SOP1 SOPC SOPP SOPK VOPC VOP1_SDST VOP1 SOP2 VOP2",
    "rdna4": "VOPD VOP3P VOP3SD VOP3_SDST VOP3 DS VGLOBAL VSCRATCH VFLAT VBUFFER SMEM SOP1 SOPC SOPP SOPK VOPC VOP1_SDST VOP1 SOP2 VOP2",
}
_ALU = (
    "VOP1",
    "VOP2",
    "VOPC",
    "VOP3",
    "VOP3P",
    "VOP3SD",
    "VOP3_SDST",
    "VOPD",
    "SOP1",
    "SOP2",
    "SOPC",
    "SOPK",
    "VOP1_SDST",
)


class Encoding:
    """One encoding: fixed bits, fields, opcodes (those that always carry a literal apart)."""

    def __init__(self, mod, name):
        cls = self.cls = getattr(mod, name)
        self.name, self.fields, self.mask, self.val = name, {}, 0, 0
        hi = 0
        lit = getattr(mod, name + "_LIT", None)
        for n, b in cls._fields:
            m = (1 << b.hi - b.lo + 1) - 1
            self.fields[n] = (b.lo, m)
            hi = max(hi, b.hi)
            if isinstance(b, FixedBitField):
                self.mask |= m << b.lo
                self.val |= b.default << b.lo
        if "SDWA" in name:
            self.mask |= 0x1FF
            self.val |= 0xF9
        self.size = (hi + 32) // 32 * 4
        self.opn = "op" if "op" in self.fields else "opx"
        b = getattr(cls, self.opn)
        self.ops = {e.value: e for e in (getattr(b, "allowed", None) or b._enum)}
        self.litops = {}
        if lit is not None:
            self.litops = {
                e.value: e for e in (getattr(getattr(lit, self.opn), "allowed", None) or ()) if e.value not in self.ops
            }
        if name == "VOPD":
            self.opy = {e.value: e for e in cls.opy._enum}
        self.srcs = (
            [
                (b.lo, m)
                for n, b in cls._fields
                if type(b) in (SrcField, SSrcField) and n not in ("vdst", "sdst")
                for m in [(1 << b.hi - b.lo + 1) - 1]
            ]
            if name in _ALU
            else []
        )


@functools.cache
def encodings(fam):
    mod = importlib.import_module(f"tinygrad.runtime.autogen.amd.{fam}.ins")
    encs = [Encoding(mod, n) for n in _ORDER[fam].split()]
    return [
        [e for e in encs if not ((i << 23) ^ e.val) & e.mask & 0x1FF << 23] for i in range(512)
    ]  # by the top 9 bits


class Inst:
    """A decoded instruction: class and operation names, fields by name."""

    __slots__ = ("cls", "enc", "lit", "name", "op", "opx", "opy", "size", "w")

    def f(self, n):
        lo, m = self.enc.fields[n]
        return self.w >> lo & m

    def has(self, n):
        return n in self.enc.fields

    def bits(self, names):
        """Width of an operand in the ISA tables."""
        t = OPERANDS.get(self.op, {})
        return next((t[n][1] for n in names if n in t), 32)

    def __repr__(self):
        try:
            return repr(self.enc.cls.from_bytes(self.w.to_bytes(16, "little")))
        except Exception:
            return self.name.lower()


def decode(raw, fam):
    w = int.from_bytes(raw, "little")
    for e in encodings(fam)[w >> 23 & 0x1FF]:
        if w & e.mask != e.val:
            continue
        lo, m = e.fields[e.opn]
        o = w >> lo & m
        op, forced = e.ops.get(o), False
        if op is None:
            op, forced = e.litops.get(o), True
        if op is None:
            continue
        d = Inst()
        d.enc, d.cls, d.op, d.w, d.name = e, e.name, op, w, op.name
        if e.name == "VOPD":
            lo, m = e.fields["opy"]
            d.opx, d.opy = op, e.opy[w >> lo & m]
            d.name = f"{op.name}_{d.opy.name}"
            forced = forced or "FMAA" in d.name or "FMAMK" in d.name
        forced = forced or any(x in d.name for x in ("FMAAK", "FMAMK", "MADAK", "MADMK", "SETREG_IMM32"))
        has = forced or any(w >> lo & m == 255 for lo, m in e.srcs)
        d.size = e.size + 4 * has
        d.lit = w >> 8 * e.size & 0xFFFFFFFF if has else None
        return d
    raise Unsupported(f"unknown {fam} instruction {w & 0xFFFFFFFF:#010x}")
