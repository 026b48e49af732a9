"""Instructions that reach memory: global, LDS, scratch and buffers; atomics."""

from __future__ import annotations

import ctypes
import re

from . import native
from .isa import ARCH
from .structures import NATIVE, NOP, Entry, Unsupported

(SPACE, KIND, NB, SX, D16, VA, VD, VR, SA, OFF, AD, RTN, AOP, OFF2, RS, SO, OE, IE, TOLDS, SVE, VD2, GFX9) = range(22)
GLOBAL, LDS, SCRATCH, BUFFER = range(4)
LOAD, STORE, ATOMIC, LOAD2, STORE2, LOADTR = range(6)
_AOPS = [
    "SWAP",
    "CMPSWAP",
    "ADD",
    "SUB",
    "RSUB",
    "SMIN",
    "UMIN",
    "SMAX",
    "UMAX",
    "AND",
    "OR",
    "XOR",
    "INC",
    "DEC",
    "FADD",
    "FMIN",
    "FMAX",
    "PKF16",
    "PKBF16",
]


def width(name):  # -> bytes, sign-extend
    m = re.search(
        r"(UBYTE|SBYTE|USHORT|SSHORT|BYTE|SHORT|DWORDX?(\d*)|([UIB])(8|16|32|64|96|128|256|512))(?=_|$)", name
    )
    if not m:
        raise Unsupported(name)
    if m[1].startswith("DWORD"):
        return 4 * int(m[2] or 1), 0
    if m[3]:
        return int(m[4]) // 8, int(m[3] == "I" and m[4] in ("8", "16"))
    return (1 if "BYTE" in m[1] else 2), int(m[1][0] == "S" and m[1] != "SHORT")


def _atomic(name):  # -> op index, bytes
    n = re.sub(r"^(GLOBAL|FLAT|BUFFER|DS)_(ATOMIC_)?|_RTN|_NUM", "", name)
    m = re.match(
        r"(SWAP|WRXCHG|STOREXCHG|CMPSWAP|CMPSTORE|CMPST|PK_ADD|RSUB|ADD|SUB|SMIN|UMIN|SMAX|UMAX|MIN|MAX|AND|OR|XOR|INC|DEC)(?:_(X2|[UIBF]\d+|BF16))?$",
        n,
    )
    if not m:
        raise Unsupported(name)
    op, ty = m[1], m[2] or "B32"
    nb = 8 if ty == "X2" or ty.endswith("64") else 4
    op = {"WRXCHG": "SWAP", "STOREXCHG": "SWAP", "CMPSTORE": "CMPSWAP", "CMPST": "CMPSWAP"}.get(op, op)
    if op == "PK_ADD":
        op = "PK" + ty
    elif op in ("ADD", "MIN", "MAX") and ty[0] == "F":
        op = "F" + op
    elif op in ("MIN", "MAX"):
        op = ("S" if ty[0] == "I" else "U") + op
    return _AOPS.index(op), nb


def native_entry(kind, size, fn=None, a=None, stop=0):
    e = Entry(kind=kind, size=size, stop=stop)
    if fn:
        e.fn = native.function(fn)
    for i, v in a.items() if isinstance(a, dict) else enumerate(a or ()):
        e.a[i] = ctypes.c_int32(v & 0xFFFFFFFF).value
    return e


def sign_extended(v, b):
    """The low b bits of v as a signed number."""
    return v - (1 << b) if v >> (b - 1) & 1 else v


def memory_entry(d, gfx):
    A, fam, kind, name, size, f = {}, ARCH[gfx], d.cls, d.name, d.size, d.f
    g9 = fam == "cdna"
    A[GFX9] = int(g9)
    A[AD] = f("acc") if g9 else 0
    A[SA] = -1
    if kind == "DS":
        if any(x in name for x in ("NOP", "GWS")):
            return native_entry(NOP, size)
        off = f("offset0") | f("offset1") << 8
        if "PERMUTE" in name or "SWIZZLE" in name:
            which = 9 if "SWIZZLE" in name else 7 if "BPERMUTE" in name else 8
            return native_entry(
                NATIVE, size, "xlane", [which, f("vdst"), f("addr") if which == 9 else f("data0"), f("addr"), 0, off]
            )
        A |= {SPACE: LDS, VA: f("addr"), VD: f("data0"), VD2: f("data1"), VR: f("vdst"), OFF: off}
        m = (
            re.match(r"DS_(READ|LOAD|WRITE|STORE)(_?2(?:ADDR)?)?(_?ST(?:RIDE)?64)?_", name)
            if "XCHG" not in name
            else None
        )
        if "_TR_" in name:
            n, eb = re.search(r"B(\d+)_TR_B(\d+)", name).groups()
            if eb not in ("8", "16"):
                raise Unsupported(name)
            A |= {KIND: LOADTR, NB: int(n) // 8, AOP: int(eb) // 8}
        elif m:
            n, s = width(name[m.end() - 1 :])
            ld = m[1] in ("READ", "LOAD")
            A |= {NB: n, SX: s, KIND: LOAD if ld else STORE}
            if m[2]:
                k = n * (64 if m[3] else 1)
                A |= {KIND: LOAD2 if ld else STORE2, OFF: f("offset0") * k, OFF2: f("offset1") * k}
        else:
            A[KIND] = ATOMIC
            A[AOP], A[NB] = _atomic(name)
            A[RTN] = int("_RTN" in name)
    else:
        if re.search(r"_(INV|WB|WBL2|WBINV|WBINVL1|WBINVL1_VOL|GL0_INV|GL1_INV)$", name):
            return native_entry(NOP, size)
        if kind in ("MUBUF", "VBUFFER"):
            A |= {
                SPACE: BUFFER,
                VA: f("vaddr"),
                VD: f("vdata"),
                VR: f("vdata"),
                OE: f("offen"),
                IE: f("idxen"),
                SO: f("soffset"),
                RS: f("srsrc") * 4 if kind == "MUBUF" else f("rsrc"),
                OFF: f("offset") if kind == "MUBUF" else sign_extended(f("ioffset"), 24),
                TOLDS: f("lds") if g9 else 0,
            }
        else:
            v4 = kind[0] == "V"
            sp = SCRATCH if "SCRATCH" in kind else GLOBAL
            saddr = f("saddr")
            A |= {
                SPACE: sp,
                VA: f("vaddr" if v4 else "addr"),
                VD: f("vsrc" if v4 else "data"),
                VR: f("vdst"),
                SA: saddr if saddr not in (0x7F, 124) else -1,
                OFF: sign_extended(f("ioffset"), 24)
                if v4
                else f("offset")
                if kind == "FLAT" and g9
                else sign_extended(f("offset"), 13),
                SVE: f("sve"),
            }
            if gfx == "gfx90a" and sp == SCRATCH:
                A[SVE] = int(saddr == 0x7F)
            if kind == "FLAT" and g9:
                A[SA] = -1
        rtn = f("sc0") if g9 else f("th") & 1 if fam == "rdna4" else f("glc")
        if "ATOMIC" in name:
            A[KIND] = ATOMIC
            A[AOP], A[NB] = _atomic(name)
            A[RTN] = rtn
        else:
            if "FORMAT" in name or "BLOCK" in name or "ADDTID" in name or "_TR_" in name:
                raise Unsupported(name)
            A[NB], A[SX] = width(name.replace("_LDS", ""))
            A[KIND] = STORE if "STORE" in name else LOAD
            if "LOAD_LDS" in name:
                A[TOLDS] = 1
    if "D16" in name:
        A[D16] = 2 if "D16_HI" in name else 1
    return native_entry(NATIVE, size, "mem", A)
