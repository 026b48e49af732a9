"""DPP and SDWA: the plain form of an instruction runs on operands put in temporary registers."""

from __future__ import annotations

import ctypes

from .forms import form
from .isa import ARCH, decode
from .memory import native_entry
from .operands import Src, base_name, text_of
from .structures import DPP, SDWA, Unsupported

_keep = []  # entries that others point to


def _plain(b, fam):
    d = decode(b.ljust(16, b"\0"), fam)
    e = form(d, fam)
    _keep.append(e)
    return d, e


def dpp(raw, w, gfx):
    """DPP forms of VOP1/VOP2/VOPC/VOP3: permute src0 into a temporary VGPR, mask EXEC, run the plain form."""
    fam = ARCH[gfx]
    w0 = w & 0xFFFFFFFF
    if w0 >> 31 == 0:
        n, sh = 4, 0
    elif fam != "cdna" and w0 >> 26 == 0b110101:
        n, sh = 8, 32
    else:
        return None
    s0 = w >> sh & 0x1FF
    if not (s0 == 0xFA or (fam != "cdna" and s0 in (0xE9, 0xEA))):
        return None
    c = w >> (8 * n) & 0xFFFFFFFF
    src = c & 0xFF
    used = {src, w0 >> 17 & 0xFF, w0 >> 9 & 0xFF} if n == 4 else {src, w0 & 0xFF, w >> 41 & 0xFF, w >> 50 & 0xFF}
    tmp = next(t for t in (range(255, 250, -1) if fam == "cdna" else range(127, 120, -1)) if t not in used)
    d = decode((w & (1 << 8 * n) - 1 & ~(0x1FF << sh) | (256 + tmp) << sh).to_bytes(16, "little"), fam)
    name = d.name
    if "READFIRSTLANE" in name or "PERMLANE" in name:
        raise Unsupported(f"DPP {name}")
    if s0 == 0xFA:
        if c >> 20 & 0xC:
            raise Unsupported(f"DPP {name} with src1 modifiers")
        a = [
            c >> 8 & 0x1FF,
            c >> 28,
            c >> 24 & 15,
            c >> 19 & 1,
            c >> 18 & 1 if fam != "cdna" else 0,
            src,
            tmp,
            0,
            c >> 21 & 1,
            c >> 20 & 1,
            int("F16" in name),
        ]
    else:
        a = [c >> 8, 15, 15, 1, int(s0 == 0xEA), src, tmp, 1, 0, 0, 0]
    sub = form(d, fam)
    _keep.append(sub)
    e = native_entry(DPP, n + 4, None, a + [int("V_CMP" in name)])
    e.sub = ctypes.addressof(sub)
    return e, f"dpp {d!r} ctrl={c:#x}"


def sdwa(w, d):
    """SDWA (GFX9): the selected bytes or words go to temporary VGPRs, the plain form runs, and the result is merged into the destination."""
    c = w >> 32 & 0xFFFFFFFF
    w0 = w & 0xFFFFFFFF
    vopc, vop1 = w0 >> 25 == 0b0111110, w0 >> 25 == 0b0111111
    vdst = 0 if vopc else w0 >> 17 & 0xFF
    t0, t1 = [t for t in range(255, 250, -1) if t not in (vdst, vdst + 1)][:2]
    plain, sub = _plain(
        (w0 & ~0x1FF & (~0 if vop1 else ~(0xFF << 9)) | 256 + t0 | (0 if vop1 else t1 << 9)).to_bytes(4, "little"),
        "cdna",
    )
    if not vopc and c >> 13 & 7:
        raise Unsupported(f"SDWA clamp/omod: {d!r}")
    text = text_of("cdna", base_name(plain.name))

    def src(code, k, i):
        """The operand, where its modifiers lie in the control word, and its width."""
        modifiers = [c >> k + 7 & 1, c >> k & 7, c >> k + 3 & 1, c >> k + 5 & 1, c >> k + 4 & 1]
        return [code, *modifiers, 16 if Src(256, text, i, 0).w16 else 32]

    a = (
        src(c & 0xFF, 16, 0)
        + src(w0 >> 9 & 0xFF, 24, 1)
        + [t0, -1 if vop1 else t1]
        + ([6, 0, vdst, c >> 8 & 0x7F if c >> 15 & 1 else -1] if vopc else [c >> 8 & 7, c >> 11 & 3, vdst, -1])
    )
    e = native_entry(SDWA, 8, None, a)
    e.sub = ctypes.addressof(sub)
    return e
