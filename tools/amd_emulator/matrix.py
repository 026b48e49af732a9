"""Matrix instructions: MFMA and WMMA."""

from __future__ import annotations

import re

from .isa import ARCH
from .memory import native_entry
from .structures import NATIVE, Unsupported

TYPES = {"F16": 0, "BF16": 1, "F32": 2, "XF32": 3, "F64": 4, "I8": 5, "FP8": 6, "BF8": 7, "I32": 8, "U8": 9}
GFX90A_MFMA = {
    0x63: "F32_32X32X4_2B_BF16",
    0x64: "F32_16X16X4_4B_BF16",
    0x65: "F32_4X4X4_16B_BF16",
    0x66: "F32_32X32X8_BF16",
    0x67: "F32_16X16X16_BF16",
    0x54: "I32_32X32X8_I8",
    0x55: "I32_16X16X16_I8",
}


def matrix_entry(name, f, gfx):
    m = re.match(r"V_(MFMA|WMMA)_(F32|F64|I32|F16|BF16)_(\d+)X(\d+)X(\d+)(?:_(\d+)B)?_(\w+)$", name)
    if not m:
        raise Unsupported(name)
    mf, (M, N, K), B, ty = m[1] == "MFMA", map(int, m.group(3, 4, 5)), int(m[6] or 1), m[7]
    neg = [0, 0]
    if mf:
        if ty == "F8F6F4":
            if f("cbsz") > 1 or f("blgp") > 1:
                raise Unsupported(f"{name} with FP6/FP4 operands")
            tys = [("FP8", "BF8")[f("cbsz")], ("FP8", "BF8")[f("blgp")]]
        else:
            tys = ty.split("_") if "8_" in ty else [ty, ty]
            if f("cbsz") or (f("blgp") and ty != "F64"):
                raise Unsupported(f"{name} with cbsz/blgp broadcast")
            if ty == "F64":
                neg = [f("blgp") & 1, f("blgp") >> 1 & 1]
    elif ty == "IU8":
        tys = ["I8" if f("neg") >> i & 1 else "U8" for i in (0, 1)]
    elif ty == "IU4":
        raise Unsupported(name)
    else:
        tys = ty.split("_") if "8_" in ty else [ty, ty]
        neg = [f("neg") >> i & 1 for i in (0, 1)]
        if (f("neg") ^ f("neg_hi")) & 3 or (f("neg") | f("neg_hi")) & 4:
            raise Unsupported(f"{name} with neg modifiers")
    acc = f("acc") if mf else 0
    cd = f("acc_cd") if mf else 0
    return native_entry(
        NATIVE,
        8,
        "mma",
        [
            M,
            N,
            K,
            B,
            TYPES[tys[0]],
            TYPES[tys[1]],
            TYPES[m[2]],
            f("vdst"),
            f("src0"),
            f("src1"),
            f("src2"),
            acc & 1,
            acc >> 1,
            cd,
            0 if mf else 3 if ARCH[gfx] == "rdna3" else 4,
            0 if mf else f("opsel"),
            *neg,
            int(gfx == "gfx942"),
        ],
    )
