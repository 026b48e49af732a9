"""Functions of the pseudo-code."""

from __future__ import annotations

import re

from .expressions import Expressions
from .values import PcodeError, Val, bits, cast, from_bits, num, typ

_LIBM = {
    "log2": "log2",
    "sqrt": "sqrt",
    "floor": "floor",
    "ceil": "ceil",
    "trunc": "trunc",
    "rint": "rint",
    "abs": "fabs",
}


class Functions(Expressions):
    """Calls of the functions that the pseudo-code takes for granted."""

    def call(self, x):
        self.take("(")
        a = []
        while not self.peek(")"):
            a.append(self.expr())
            if not self.opt(","):
                break
        self.take(")")
        if x in self.fns:
            return self.inline(x, a)
        v = a[0]
        v = v.inner if x in ("isNAN", "isSignalNAN", "isQuietNAN", "cvtToQuietNAN", "sign", "isEven") and v.inner else v
        n = v.n
        q = "f" if n != 64 else ""
        w = 64 if n == 64 else 32
        if x in _LIBM:
            self.heavy = self.heavy or x == "log2"
            r = f"{_LIBM[x]}{q}({v.c})"
            return Val(f"rh({r})" if n == 16 and x in ("log2", "sqrt") else r, v.k, n)
        if x == "pow":
            self.heavy = True
            r = f"exp2{'f' if a[1].n != 64 else ''}({a[1].c})"
            return Val(f"rh({r})" if a[1].n == 16 else r, "f", a[1].n)
        if x == "fma":
            return Val(
                f"fma16({a[0].c}, {a[1].c}, {a[2].c})" if n == 16 else f"fma{q}({a[0].c}, {a[1].c}, {a[2].c})", "f", n
            )
        if x in ("sin2pi", "cos2pi"):
            self.heavy = True
            return Val(f"rh({x}({v.c}))" if n == 16 else f"{x}({v.c})", "f", n)
        if x == "fract":
            return Val(f"fract{w}({v.c})", "f", n)
        if x == "ldexp":
            self.heavy = self.heavy or n == 64
            return Val(f"ldexp{n}({v.c}, {a[1].c})", "f", n)
        if x == "frexp_exp":
            self.heavy = True
            return Val(f"frexp_exp{w}({v.c})", "i", 32)
        if x == "frexp_mant":
            self.heavy = True
            return Val(f"frexp_mant{w}({v.c})", "f", n)
        if x == "exponent":
            return Val({64: f"XP64({v.c})", 32: f"(XP32({v.c}))", 16: f"((i32)(f2h({v.c}) >> 10) & 31)"}[n], "i", 32)
        if x == "sign":
            return Val(f"({bits(v)} >> {n - 1})", "u", 1)
        if x in ("isNAN", "isSignalNAN", "isQuietNAN"):
            s = f"SNAN{w}({v.c})"
            return Val(
                {"isNAN": f"({v.c} != {v.c})", "isSignalNAN": f"({s})", "isQuietNAN": f"({v.c} != {v.c} && !{s})"}[x],
                "u",
                1,
            )
        if x == "cvtToQuietNAN":
            return Val(f"QUIET{w}({v.c})", "f", n)
        if x == "trig_preop":
            self.heavy = True
            return Val(f"trig_preop64({v.c}, {a[1].c})", "f", 64)
        if x == "fclass":
            return Val(f"fclass16({bits(v)}, {a[1].c})" if n == 16 else f"fclass{n}({v.c}, {a[1].c})", "u", 1)
        if x in ("clz", "ctz", "cls"):
            return Val(f"{x}32({v.c})", "i", 32)
        if x in ("popc", "bitCount"):
            return Val(f"popc32({v.c})" if n <= 32 else f"(popc32((u32)({v.c})) + popc32((u32)({v.c} >> 32)))", "u", 32)
        if x == "vperm":
            return Val(f"vperm({a[0].c}, {a[1].c}, {a[2].c})", "u", 32)
        if x == "signext":
            return Val(f"((i64)({v.c}))", "i", 64)
        if x == "signext_from_bit":
            return cast(Val(f"sext_from({v.c}, {a[1].c})", "i", 64), v.k, v.n)
        if x in ("div_fixup", "div_scale", "div_fmas"):
            self.heavy = True
            ex = ", &cb" if x == "div_scale" else f", {a[3].c}" if x == "div_fmas" else ""
            self.cb = self.cb or x == "div_scale"
            return Val(f"{x}{n}({a[0].c}, {a[1].c}, {a[2].c}{ex})", "f", n)
        if m := re.fullmatch(r"v_(min|max|minimum|maximum)(3?)(?:_num)?_([fiu])(\d+)", x):

            def two(p, q):
                if m[3] == "f":
                    return Val(
                        f"v{m[1]}{64 if m[4] == '64' else 32}({p.c}, {q.c}, {'0' if 'num' in x else 'w->ieee'})",
                        "f",
                        int(m[4]),
                    )
                return Val(f"({p.c} {'<' if m[1] == 'min' else '>'} {q.c} ? {p.c} : {q.c})", m[3], int(m[4]))

            r = two(a[0], a[1])
            return two(r, a[2]) if m[2] else r
        if m := re.fullmatch(r"v_cvt_([iu])16_f32", x):
            return Val(
                f"f_int({v.c}, {'-32768' if m[1] == 'i' else '0'}.f, {'32767' if m[1] == 'i' else '65535'}.f)", "i", 32
            )
        if m := re.fullmatch(r"f(16|32)_to_([su])norm", x):
            return cast(
                Val(
                    f"f_int(rintf({v.c} * {'32767' if m[2] == 's' else '65535'}.f), {'-32767' if m[2] == 's' else '0'}.f, {'32767' if m[2] == 's' else '65535'}.f)",
                    "i",
                    32,
                ),
                "i" if m[2] == "s" else "u",
                16,
            )
        if m := re.fullmatch(r"([a-z]+\d+)_to_([a-z]+\d+)", x):
            return self.convert(v, *typ(m[1]), *typ(m[2]))
        raise PcodeError(f"unknown function {x}")

    def convert(self, v, k0, n0, k, n):
        """x_to_y functions: integers saturate, floats round."""
        v = (
            v
            if v.k == k0 and v.n == n0
            else from_bits(bits(v), v.n, k0, n0)
            if v.k in "ui" and k0 not in "ui"
            else cast(v, k0, n0)
        )
        if k0 in "ui" and k in "ui":
            if n >= n0:
                return cast(v, k, n)
            lo, hi = (-(1 << n - 1), (1 << n - 1) - 1) if k == "i" else (0, (1 << n) - 1)
            return cast(Val(f"satint({v.c}, {lo}, {hi})", "i", 32), k, n)
        if k in "ui":
            if n == 32:
                return Val(f"f{max(n0, 32)}_{k}32({v.c})", k, 32)
            lo, hi = (-(1 << n - 1), (1 << n - 1) - 1) if k == "i" else (0, (1 << n) - 1)
            return cast(Val(f"f_int({v.c}, {lo}.f, {hi}.f)", "i", 32), k, n)
        if k0 in "ui":
            r = num(v, "f", 64 if n == 64 else 32)
            return r if n != 16 else cast(r, k, n)
        if k == "f" and n == 16 and self.rtz:
            return Val(f"h2f(f2h_rtz({v.c}))", "f", 16)
        if k in ("fp8", "bf8"):
            self.heavy = True
            return from_bits(f"enc8({v.c}, {3 if k == 'fp8' else 2}, 0)", 32, "u", 8)
        return Val(cast(v, k, n).c, k, n)
