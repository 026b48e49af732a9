"""ALU instructions as compiled C functions.

`form(inst)` describes one instruction form (operation, kinds of operands, modifiers), writes its C
function from the pseudo-code and returns an entry; `native.link` fills in the function.
"""

from __future__ import annotations

import re

from .lanes import lane_body, lane_fn
from .native import emit, entry_for
from .operands import M32, Src, base_name, fetch, text_of, uses
from .pcode import Translator
from .structures import Unsupported


def form(d, fam):
    """The entry of a decoded ALU instruction."""
    W = 64 if fam == "cdna" else 32
    f, lit, c = d.f, d.lit, d.cls
    if c == "VOPD":
        return _vopd(d, fam)
    name = base_name(d.name)
    if c.startswith("SOP") or name.startswith("V_S_"):
        return _scalar(d, fam, name, W)
    text, g = text_of(fam, name), lambda n, z=0: f(n) if d.has(n) else z
    vop3 = c.startswith("VOP3")
    opsel, neg, abs_ = g("opsel"), g("neg"), g("abs")
    clamp, omod = g("clmp"), g("omod")
    consts = {}
    if name.startswith("V_BITOP3"):
        ttbl = omod << 6 | abs_ << 3 | neg
        omod = abs_ = neg = 0
        b = name[-3:].lower()
        t = [
            " & ".join(f"{'' if k >> (2 - i) & 1 else '~'}S{i}.{b}" for i in range(3))
            for k in range(8)
            if ttbl >> k & 1
        ]
        text = f"D0.{b} = " + (" | ".join(f"({x})" for x in t) or f"{b[1:]}'0U")
    packed, n = None, 3 if vop3 else 1 if c == "VOP1" else 2
    codes = [f("src0")] + ([f("src1"), f("src2")] if vop3 else [256 + f("vsrc1")] if n == 2 else [])
    if "MIX" in name:  # op_sel_hi: f16 operand, op_sel: its upper half, neg_hi: absolute value
        oh = f("opsel_hi") | f("opsel_hi2") << 2
        x = []
        for i in range(3):
            v = f"S{i}.f32" if not oh >> i & 1 else f"f16_to_f32(S{i}[{'31 : 16' if opsel >> i & 1 else '15 : 0'}].f16)"
            v = f"abs({v})" if f("neg_hi") >> i & 1 else v
            x.append(f"-{v}" if neg >> i & 1 else v)
        r = f"fma({', '.join(x)})"
        text = (
            f"D0.f32 = {r}"
            if "MIX_F32" in name
            else f"D0[{'31 : 16' if 'HI' in name else '15 : 0'}].f16 = f32_to_f16({r})"
        )
        if clamp:
            raise Unsupported(f"{name} with clamp")
        srcs = [Src(q, text, i, lit, f16=bool(oh >> i & 1)) for i, q in enumerate(codes)]
    elif c == "VOP3P":
        oh, nh = f("opsel_hi") | f("opsel_hi2") << 2, f("neg_hi")
        pair = ("F32" in name and "PK" in name) or "PK_MOV" in name
        if "PK_MOV" in name:
            text = "D0.u64 = { S1.u64[31 : 0], S0.u64[31 : 0] }"
            nh = neg = 0
        if "_IU" in name:
            consts["NEG"] = neg
            neg = nh = 0
        srcs, packed = [], []
        for i, q in enumerate(codes):
            s = Src(q, text, i, lit, packed=True)
            raw = re.search(rf"\bS{i}\.[fiu]32(?!\[)", text) and not pair
            s.wide = False
            srcs.append(s)
            if raw:
                s.neg = bool(neg >> i & 1)
                s.abs = bool(nh >> i & 1)
                packed.append(None)
            else:
                packed.append((opsel >> i & 1, oh >> i & 1, neg >> i & 1, nh >> i & 1, pair))
            if pair and s.reg < 0:
                s.const = s.value(q, lit) * (1 << 32 | 1)  # an inline constant serves both halves
    else:
        srcs = []
        for i, q in enumerate(codes):
            w16 = d.bits(("src0", "vsrc0", "ssrc0") if i == 0 else (f"src{i}", f"vsrc{i}")) == 16
            s = Src(q, text, i, lit, w16=w16)
            srcs.append(s)
            if vop3:
                s.abs, s.neg, s.hi = (bool(abs_ >> i & 1), bool(neg >> i & 1), bool(s.w16 and opsel >> i & 1))
            elif fam != "cdna" and s.w16 and s.kind == "V" and s.reg >= 128:
                s.hi = True
                s.reg -= 128
        consts["OPSEL"] = opsel
    if name.startswith("V_CMP"):
        mods = (False, 0, 0, False, consts, name)
        x = "CMPX" in name
        out = [126] if x and (fam != "cdna" or not vop3) else [126, "e->a[1]"] if x else ["e->a[1]"]
        key = (fam, name, tuple(s.key() for s in srcs if s), tuple(out))
        sym = emit(key, lambda: lane_fn([lane_body(text, "", srcs[:2], 0, 0, W, mods)], W, out))
        e = entry_for(sym, d.size)
        e.a[1] = f("vdst") if vop3 else 106
        for i, s in enumerate(srcs[:2]):
            s.put(e, i)
        return e
    vdst = f("vdst")
    hi = bool(opsel >> 3 & 1) if vop3 else False
    if fam != "cdna" and not vop3 and vdst >= 128 and (re.search(r"\bD0\.[fiub]16 = ", text)):
        hi = True
        vdst -= 128
    sd = c == "VOP3SD"
    simm = uses(text, "SIMM32") or uses(text, "SIMM16")
    mods = (hi, clamp, omod, fam == "cdna", consts, name)
    if sd and clamp:
        raise Unsupported(f"{name} with clamp")
    key = (
        fam,
        name,
        c[:4],
        tuple(s.key() for s in srcs),
        tuple(packed or ()),
        hi,
        clamp,
        omod,
        tuple(consts.items()),
        text if "MIX" in name or "BITOP" in name else "",
    )
    sym = emit(key, lambda: lane_fn([lane_body(text, "", srcs, 0, 0, W, mods, packed)], W, ["e->a[1]"]))
    e = entry_for(sym, d.size)
    e.a[0], e.a[1], e.a[5] = vdst, f("sdst") if sd else 106, 106
    for i, s in enumerate(srcs):
        s.put(e, i)
    if (sd and "DIV_SCALE" not in name and "MAD" not in name) or ("CNDMASK" in name and vop3):
        e.a[5] = codes[2]
    if simm:
        e.c[3] = lit
    return e


def _vopd(d, fam):
    f, parts, fill = d.f, [], []
    vx = f("vdstx")
    vy = f("vdsty") << 1 | (vx & 1 ^ 1)
    key = []
    for k, (op, s0, s1) in enumerate(((d.opx, "srcx0", "vsrcx1"), (d.opy, "srcy0", "vsrcy1"))):
        name = base_name(op.name)
        text = text_of(fam, name)
        srcs = [Src(f(s0), text, 0, d.lit), Src(256 + f(s1), text, 1, d.lit)]
        if uses(text, "S2"):
            raise Unsupported(d.name)
        fill += [(4 * k + i, s) for i, s in enumerate(srcs)]
        key += [name, *(s.key() for s in srcs)]
        parts.append((text, "xy"[k], srcs, 4 * k, 8 * k, 32, (False, 0, 0, False, {}, name), None, 5))
    both = all(uses(p[0], "VCC") for p in parts)

    def make():
        ps = [lane_body(*p) for p in parts]
        if not both and uses(parts[1][0], "VCC"):
            ps[1][0].append("u64 vcc = w->s[e->a[5]];")
        return lane_fn(ps, 32)

    e = entry_for(emit((fam, "VOPD", *key), make), d.size)
    e.a[0], e.a[8], e.a[5] = vx, vy, 106
    for i, s in fill:
        s.put(e, i)
    if "FMAAK" in d.name or "FMAMK" in d.name:
        e.c[3] = d.lit
    return e


def _scalar(d, fam, name, W):
    f, c, text = d.f, d.cls, text_of(fam, name)
    if re.search(r"\b(SGPR|VGPR|PC|HW_REGISTERS|BARRIER_STATE)\b", text):
        raise Unsupported(name)
    imm = {}
    if c == "SOPK":
        k = f("simm16")
        k = k - 65536 if k >= 32768 else k
        first = re.search(r"MOVK|ADDK|MULK", name)
        srcs = [None if first else Src(f("sdst"), text, 0, 0)]
        imm = {"S1": k, "SIMM16": k} | ({"S0": k} if first else {})
    elif c.startswith("VOP"):
        srcs = [Src(f("src0"), text, 0, d.lit)]
        srcs[0].neg, srcs[0].abs = bool(f("neg") & 1), bool(f("abs") & 1)
    else:
        srcs = [Src(f("ssrc0"), text, 0, d.lit)] + ([Src(f("ssrc1"), text, 1, d.lit)] if d.has("ssrc1") else [])

    def make():
        tr = Translator(text)
        lines = tr.run()
        o = [f"u32 SCC_ = w->s[253]; u64 EXEC = {'s64(w, 126)' if W == 64 else 'w->s[126]'};"]
        for i, s in enumerate(srcs):
            if s and uses(text, f"S{i}"):
                o.append(
                    f"{'u64' if s.wide else 'u32'} c{i} = {'sc64' if s.wide else 'sc32'}(w, e, {i}); "
                    + fetch("", i, i, s)
                )
        o += [f"u32 {n} = (u32)e->c[5];" for n in imm if uses(text, n)] + (
            ["u32 SIMM32 = e->c[3];"] if uses(text, "SIMM32") else []
        )
        D = "u64" if tr.dw == 64 else "u32"
        if tr.d0:
            o.append(f"{D} D0 = {'s64(w, e->a[0])' if tr.dw == 64 else 'w->s[e->a[0]]'};")
        o += lines
        if tr.d0:
            o.append("w->s[e->a[0]] = D0;" + (" w->s[e->a[0] + 1] = D0 >> 32;" if tr.dw == 64 else ""))
        if "SCC" in tr.wrote:
            o.append("w->s[253] = SCC_;")
        if "EXEC" in tr.wrote:
            o.append("w->s[126] = EXEC;" + (" w->s[127] = EXEC >> 32;" if W == 64 else ""))
        return " ".join(o)

    for s in srcs:
        if s:
            s.kind = "S"
    e = entry_for(emit((fam, name, c[:4], tuple(s and s.key() for s in srcs)), make), d.size)
    e.a[0] = f("sdst") if d.has("sdst") else f("vdst") if c.startswith("VOP") else 0
    for i, s in enumerate(srcs):
        if s:
            s.put(e, i)
    if imm:
        e.c[5] = k & M32
    if d.lit is not None:
        e.c[3] = d.lit
    return e
