"""Vector operations: one C function that runs an instruction on all lanes of a wave."""

from __future__ import annotations

import re

from .operands import declaration, fetch, uses
from .pcode import Translator
from .structures import Unsupported


def lane_body(text, pre, srcs, j0, d, W, mods, packed=None, carry=5):
    """Declarations, per-lane statements and stores of one vector operation. mods: opsel_dst, clamp, omod, zero_hi, consts."""
    hi, clamp, omod, zero, consts, name = mods
    fty = re.search(r"\bD0\.(f16|f32|f64) = ", text)
    wide = clamp and not fty and "_F" not in name
    if wide and not re.search(r"ADD|SUB|MAD|SAD", name):
        raise Unsupported(f"{name} with clamp")
    tr = Translator(text, pre, consts, wide)
    lines = tr.run()
    dw = "u64" if tr.dw == 64 else "u32"
    D = f"{pre}D0"
    old = tr.d0_old or ("if " in text and "else" not in text)
    dst = f"{pre}d"
    pro = [f"u32 *{dst} = w->v + e->a[{d}] * W_;"] if tr.d0 else []
    pro += [
        declaration(i, i + j0, s, packed and packed[i] and packed[i][4])
        for i, s in enumerate(srcs)
        if uses(text, f"S{i}")
    ]
    if uses(text, "SIMM32") or uses(text, "SIMM16"):
        pro.append(f"u32 {pre}SIMM32 = e->c[3], {pre}SIMM16 = {pre}SIMM32;")
    if uses(text, "VCC"):
        pro.append(
            f"u64 vcc = {'s64(w, ' if W == 64 else '(w->s['}e->a[{carry}]{')' if W == 64 else '])'};"
            if not pre or pre == "x"
            else ""
        )
    ini = [fetch(pre, i, i + j0, s, packed[i] if packed else None) for i, s in enumerate(srcs) if uses(text, f"S{i}")]
    if tr.d0:
        ini.append(
            f"{dw} {D} = "
            + (
                "0;"
                if not old
                else f"{dst}[l] | (u64){dst}[W_ + l] << 32;"
                if dw == "u64"
                else f"{dst}[l]{' >> 16' if tr.d16 and hi else ''};"
            )
        )
    if tr.cb:
        ini.append("u8 cb = 0;")
    post = []
    if (omod or clamp) and fty:
        t = fty[1]
        get, put = {"f16": ("h2f", "f2h"), "f32": ("bf", "fb"), "f64": ("bd", "db")}[t]
        T = "double" if t == "f64" else "float"
        post.append(f"{T} {pre}r = {get}({D}){['', ' * 2', ' * 4', ' * 0.5'][omod]};")
        if clamp:
            post.append(f"{pre}r = {pre}r > 0 ? ({pre}r < 1 ? {pre}r : 1) : 0;")
        post.append(f"{D} = {put}({pre}r);")
    elif clamp and not wide:
        if not re.match(r"V_PK_\w+_F(16|32)$", name):
            raise Unsupported(f"{name} with clamp")
        g, p, sh, T, m = (
            ("bf", "fb", 32, "u64", "0xffffffffull") if name.endswith("F32") else ("h2f", "f2h", 16, "u32", "0xffff")
        )
        post.append(
            f"{T} {pre}k = 0; for (int q = 0; q < {2 * sh}; q += {sh}) {{ float r = {g}({D} >> q & {m}); {pre}k |= ({T}){p}(r > 0 ? (r < 1 ? r : 1) : 0) << q; }} {D} = {pre}k;"
        )
    st = []
    if tr.d0:
        v = D
        if tr.d16:
            v = (
                f"(({dst}[l] & 0xffff) | {D} << 16)"
                if hi
                else f"({D} & 0xffff)"
                if zero
                else f"(({dst}[l] & 0xffff0000) | ({D} & 0xffff))"
            )
        if tr.heavy:
            st += [f"{dst}[l] = {v};"] + ([f"{dst}[W_ + l] = {D} >> 32;"] if dw == "u64" else [])
        else:
            st += [f"{dst}[l] = ({dst}[l] & ~m) | ((u32){v} & m);"] + (
                [f"{dst}[W_ + l] = ({dst}[W_ + l] & ~m) | ((u32)({D} >> 32) & m);"] if dw == "u64" else []
            )
    return pro, ini + lines + post, st, tr


def lane_fn(parts, W, out=None):
    """A C function body that runs parts over all lanes. out: how the carry or compare bits are stored."""
    cb = any(p[3].cb for p in parts)
    heavy = any(p[3].heavy for p in parts)
    swap = any("S0" in p[3].wrote for p in parts)
    o = (
        [f"enum {{ W_ = {W} }}; const u32 *M = lanes(w); u64 ex = {'s64(w, 126)' if W == 64 else 'w->s[126]'};"]
        + ["u8 cbs[64];"] * cb
        + [x for p in parts for x in p[0]]
    )
    if heavy:
        o += ["for (int l = 0; l < W_; l++) { " + ("cbs[l] = 0; " if cb else "") + "if (!M[l]) continue;"]
    else:
        o += ["\n#pragma GCC ivdep\nfor (int l = 0; l < W_; l++) { u32 m = M[l];"]
    if any(uses(" ".join(p[1]), "EXEC") for p in parts):
        o.insert(1, "u64 EXEC = ex;")
    o += [x for p in parts for x in p[1]] + [x for p in parts for x in p[2]] + (["cbs[l] = cb;"] if cb else [])
    if swap:
        o.append("((u32 *)p0)[l] = S0;" if heavy else "((u32 *)p0)[l] = (p0[l] & ~m) | (S0 & m);")
    o.append("}")
    if cb:
        o.append("u64 r_ = pack(cbs, W_) & ex;" + "".join(f" wmask(w, {x}, r_, W_);" for x in out))
    return " ".join(o)
