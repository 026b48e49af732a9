"""Machine code -> entries of the native core.

Memory, branches, moves across lanes, conversions to 8-bit floats and matrix instructions get a
function of core.c; ALU instructions go to `forms.form`.
"""

from __future__ import annotations

import re

from .forms import form
from .isa import ARCH, decode, encodings
from .matrix import GFX90A_MFMA, TYPES, matrix_entry
from .memory import memory_entry, native_entry, sign_extended, width
from .modifiers import dpp, sdwa
from .operands import base_name
from .structures import END, NATIVE, NOP, Unsupported

_BR = [
    "S_BRANCH",
    "S_CBRANCH_SCC0",
    "S_CBRANCH_SCC1",
    "S_CBRANCH_VCCZ",
    "S_CBRANCH_VCCNZ",
    "S_CBRANCH_EXECZ",
    "S_CBRANCH_EXECNZ",
]
_PCOPS = ["S_GETPC_B64", "S_SETPC_B64", "S_SWAPPC_B64", "S_CALL_B64"]
_XLANE = {
    "V_READFIRSTLANE_B32": 0,
    "V_READLANE_B32": 1,
    "V_WRITELANE_B32": 2,
    "V_PERMLANE16_B32": 3,
    "V_PERMLANEX16_B32": 4,
    "V_PERMLANE32_SWAP_B32": 5,
    "V_PERMLANE16_SWAP_B32": 6,
    "V_ACCVGPR_READ_B32": 10,
    "V_ACCVGPR_READ": 10,
    "V_ACCVGPR_WRITE_B32": 11,
    "V_ACCVGPR_WRITE": 11,
    "V_ACCVGPR_MOV_B32": 12,
    "V_PERMLANE64_B32": 13,
    "V_DOT2_F16_F16": 14,
    "V_DOT2_BF16_BF16": 15,
}
_cache = {}


def legacy(raw):
    """gfx90a instructions that gfx940 dropped: v_mad_f32 and v_mac_f32 become their fused forms."""
    w0 = int.from_bytes(raw[:4], "little")
    if w0 >> 16 == 0xD1C1:
        w0 += 0xA << 16
    elif w0 >> 25 == 0x16:
        w0 = w0 & 0x81FFFFFF | 0x3B << 25
    return w0.to_bytes(4, "little") + raw[4:]


def entry(raw, gfx):
    """16 instruction bytes -> (Entry, Inst or text). Equal instructions share one entry; its function may still be pending (forms.link)."""
    r = _cache.get((gfx, raw[:12]))
    if r is None:
        r = _cache[gfx, raw[:12]] = _make(legacy(raw) if gfx == "gfx90a" else raw, gfx)
    return r


def _make(raw, gfx):
    fam = ARCH[gfx]
    w = int.from_bytes(raw, "little")
    w0 = w & 0xFFFFFFFF
    if fam == "cdna" and w0 >> 26 == 0b111000 and w0 >> 18 & 0x7F in (0x3E, 0x3F, 40, 41):
        return native_entry(NOP, 8), "buffer cache control"
    if (r := dpp(raw, w, gfx)) is not None:
        return r
    if gfx == "gfx90a" and w0 >> 23 == 0x1A7 and w0 >> 16 & 0x7F in GFX90A_MFMA:
        d, name = None, "V_MFMA_" + GFX90A_MFMA[w0 >> 16 & 0x7F]
    else:
        d = decode(raw, fam)
        name = d.name
    if d is None or (d.cls == "VOP3P" and "MFMA" in name):
        fl = next(e for es in encodings("cdna") for e in es if e.name == "VOP3P_MFMA").fields
        return matrix_entry(name, lambda n: w >> fl[n][0] & fl[n][1], gfx), d or name
    cls, size, f = d.cls, d.size, d.f
    if cls in ("DS", "FLAT", "GLOBAL", "SCRATCH", "VFLAT", "VGLOBAL", "VSCRATCH", "MUBUF", "VBUFFER"):
        return memory_entry(d, gfx), d
    if cls == "SOPP":
        if name in _BR:
            return native_entry(NATIVE, size, "br", [_BR.index(name), sign_extended(f("simm16"), 16) * 4]), d
        if name == "S_ENDPGM":
            return native_entry(END, size), d
        if name == "S_TRAP":
            raise Unsupported("s_trap reached (device assertion?)")
        return native_entry(NOP, size, stop=int(name in ("S_BARRIER", "S_BARRIER_WAIT"))), d
    if cls == "SMEM":
        if "LOAD" not in name:
            return native_entry(NOP, size), d
        nb, s = width(name)
        so = f("soffset") if fam != "cdna" or f("soffset_en") else -1
        n = "ioffset" if d.has("ioffset") else "offset"
        return native_entry(
            NATIVE,
            size,
            "smem",
            [
                f("sbase") * 2,
                f("sdata"),
                sign_extended(f(n), d.enc.fields[n][1].bit_length()),
                so,
                nb,
                s,
                int("BUFFER" in name),
            ],
        ), d
    if cls.startswith("SOP1") and name.startswith("S_BARRIER"):
        return native_entry(NOP, size), d
    if cls.startswith("SOPK") and ("SETREG" in name or "WAITCNT" in name or "VERSION" in name):
        return native_entry(NOP, size), d
    if name in _PCOPS:
        return native_entry(
            NATIVE,
            size,
            "pcop",
            [_PCOPS.index(name), f("sdst"), sign_extended(f("simm16"), 16) * 4 if cls == "SOPK" else f("ssrc0")],
        ), d
    if ("MFMA" in name and cls != "VOP3PX2") or "V_WMMA" in name:
        return matrix_entry(name, f, gfx), d
    if name.startswith("V_NOP"):
        return native_entry(NOP, size), d
    if cls == "VOP3PX2":
        raise Unsupported(f"{name} (scaled MFMA)")
    base, g = base_name(name), lambda n: f(n) if d.has(n) else 0
    if base in _XLANE:
        return native_entry(
            NATIVE, size, "xlane", [_XLANE[base], f("vdst"), f("src0"), g("src1"), g("src2"), d.lit or 0, g("opsel")]
        ), d
    if m := re.match(r"V_CVT_SCALEF32_PK_(?:(FP8|BF8)_(F32|F16|BF16)|(F32|F16|BF16)_(FP8|BF8))$", base):
        to, wide = int(bool(m[1])), m[2] or m[3]
        s1 = f("src1")
        _plain_mods(d)
        return native_entry(
            NATIVE,
            size,
            "cvt8",
            [
                to,
                3 if (m[1] or m[4]) == "FP8" else 2,
                TYPES[wide],
                f("vdst"),
                f("src0"),
                s1,
                f("src2") if to and wide == "F32" else s1,
                f("opsel"),
            ],
        ), d
    if fam == "cdna" and (
        m := re.match(r"V_CVT_(PK_)?(?:(FP8|BF8)_F32|F32_(FP8|BF8))$", re.sub("_SDWA$", "", base))
    ):  # scale 1 through src 242; the 8-bit types of gfx942 are FNUZ
        sel = f("src0_sel") if "SDWA" in cls else 0
        _plain_mods(d)
        if "SDWA" in cls and (f("src0_sext") or f("dst_sel") != 6):
            raise Unsupported(repr(d))
        src = 256 + f("vsrc0") if "SDWA" in cls else f("src0")
        ops = g("opsel")
        return native_entry(
            NATIVE,
            size,
            "cvt8",
            [
                int(bool(m[2])),
                3 if (m[2] or m[3]) == "FP8" else 2,
                2,
                f("vdst"),
                src,
                f("src1") if m[2] else 0,
                242,
                ops,
                int(gfx == "gfx942"),
                0 if m[1] else 1,
                sel,
            ],
        ), d
    if "SDWA" in cls:
        return sdwa(w, d), d
    return form(d, fam), d


def _plain_mods(d):
    if any(d.has(n) and d.f(n) for n in ("neg", "abs", "omod", "clmp")):
        raise Unsupported(f"{d.name} with source modifiers or clamp")
