"""Expressions of the pseudo-code."""

from __future__ import annotations

import re

from .values import PcodeError, Val, bits, cast, common, ctype, from_bits, mask, num, number, typ

_TOK = re.compile(
    r"\s+|//[^\n]*|(?P<num>\d+'(?:0x[0-9a-fA-F]+|\d+\.\d+|\d+)U?|0x[0-9a-fA-F]+(?:U?LL|U)?|\d+\.\d+F?|\d+(?![\d'])(?:U?LL|U)?)|(?P<ty>\d+'[A-Z]+)|(?P<id>[A-Za-z_]\w*)"
    r"|(?P<op>\+:|<<|>>|<>|<=|>=|==|!=|&&|\|\||\*\*|\+=|-=|[-+*/&|^~!<>=?:;,.(){}\[\]])"
)
_LEVELS = [
    ("||",),
    ("&&",),
    ("|",),
    ("^",),
    ("&",),
    ("==", "!=", "<>"),
    ("<", "<=", ">", ">="),
    ("<<", ">>"),
    ("+", "-"),
    ("*", "/"),
]


class Expressions:
    """Reads expressions; what functions do, and statements, subclasses know."""

    def __init__(self, text, pre="", consts=(), wide=None, rtz=False):
        """pre: prefix for local variables; consts: name -> integer; wide: integer arithmetic in 64 bits, saturated when stored (the clamp modifier)."""
        self.t, self.p, self.text = [], 0, text
        i = 0
        while i < len(text):
            m = _TOK.match(text, i)
            if not m:
                raise PcodeError(f"cannot read {text[i : i + 30]!r}")
            i = m.end()
            if m.lastgroup:
                self.t.append((m.lastgroup, m[0]))
        self.t.append(("end", ""))
        self.pre, self.consts, self.wide, self.rtz = pre, dict(consts), wide, rtz
        self.lines, self.vars, self.fns, self.bound = [], {}, {}, {}
        self.d16 = self.d0_old = self.heavy = self.cb = self.d0 = False
        self.dw = 64 if re.search(r"\bD0\.[uifb]64(?!\[laneId)|\bD0\[63|\bD0\.u32\[63", text) else 32
        self.wrote = set()
        self.ret = None
        self.ntmp = 0

    def peek(self, *v):
        return self.t[self.p][1] in v

    def take(self, v=None):
        x = self.t[self.p][1]
        if v is not None and x != v:
            raise PcodeError(f"expected {v!r}, found {x!r}")
        self.p += 1
        return x

    def opt(self, v):
        if self.peek(v):
            self.p += 1
            return True

    def expr(self):
        c = self.binary(0)
        if not self.opt("?"):
            return c
        a = self.expr()
        self.take(":")
        b = self.expr()
        k, n = common(a, b)
        return Val(f"({self.cond(c)} ? {num(a, k, n).c} : {num(b, k, n).c})", k, n)

    def cond(self, v):
        return v.c if v.k in "ui" else f"({v.c} != 0)"

    def binary(self, lv):
        if lv == len(_LEVELS):
            return self.power()
        a = self.binary(lv + 1)
        while self.t[self.p][0] == "op" and self.peek(*_LEVELS[lv]):
            op = self.take()
            a = self.arith(op, a, self.binary(lv + 1))
        return a

    def power(self):
        a = self.unary()
        if self.opt("**"):
            b = self.unary()
            return Val(f"ldexp(1.0, {b.c})", "f", a.n, 2.0**b.lit if b.lit is not None else None)
        return a

    def arith(self, op, a, b):
        if op in ("&&", "||"):
            return Val(f"({self.cond(a)} {op} {self.cond(b)})", "u", 1)
        if op in ("==", "!=", "<>", "<", "<=", ">", ">="):
            if a.inner and isinstance(b.lit, float):
                a, b = a.inner, Val(b.c, a.inner.k, a.inner.n)
            k, n = common(a, b)
            x, y = num(a, k, n).c, num(b, k, n).c
            return Val(
                f"({x} < {y} || {x} > {y})"
                if op == "<>" and k not in "ui"
                else f"({x} {'!=' if op == '<>' else op} {y})",
                "u",
                1,
            )
        if op in ("<<", ">>"):
            if a.k not in "ui":
                raise PcodeError("shift of a float")
            w = 32 if a.n <= 32 else 64 if a.n <= 64 else 128
            safe = (b.lit is not None and b.lit < w) or 2 ** min(b.n, b.inner.n if b.inner else 99) <= w
            r = (
                f"({a.c} {op} {b.c})"
                if safe
                else f"({b.c} >= {w} ? {f'({a.c} >> {w - 1})' if op == '>>' and a.k == 'i' else 0} : ({a.c} {op} ({b.c} & {w - 1})))"
            )
            return self.cut(r, a.k, a.n) if op == "<<" else Val(r, a.k, a.n)
        k, n = common(a, b)
        if k in "ui":
            if self.wide and op in ("+", "-", "*"):
                return Val(f"({num(a, 'i', 64).c} {op} {num(b, 'i', 64).c})", "i", 64)
            return (
                self.cut(f"({num(a, k, n).c} {op} {num(b, k, n).c})", k, n)
                if op in "+-*"
                else Val(f"({num(a, k, n).c} {op} {num(b, k, n).c})", k, n)
            )
        r = f"({num(a, k, n).c} {op} {num(b, k, n).c})"
        return Val({"f16": f"rh{r}", "bf16": f"rbf{r}"}.get(k + str(n), r), k, n)

    def cut(self, c, k, n):
        return Val(c, k, n) if n in (32, 64) or n > 64 else from_bits(c, 128, k, n)

    def unary(self):
        if self.opt("+"):
            return self.unary()
        if self.opt("-"):
            v = self.unary()
            lit = -v.lit if v.lit is not None else None
            return (
                Val(f"(-{v.c})", "i" if v.lit is not None and v.k in "ui" else v.k, v.n, lit)
                if v.k not in "ui" or v.n in (32, 64)
                else self.cut(f"(-{v.c})", v.k, v.n)
            )
        if self.opt("~"):
            v = self.unary()
            return Val(mask(f"(~{bits(v)})", v.n), "u", v.n)
        if self.opt("!"):
            return Val(f"(!{self.cond(self.unary())})", "u", 1)
        return self.postfix(self.primary())

    def postfix(self, v):
        while True:
            if self.peek(".") and self.t[self.p + 1][0] == "id":
                self.take()
                k, n = typ(self.take())
                u = v
                v = v if (k, n) == (v.k, v.n) else from_bits(bits(v), v.n, k, n)
                v.inner = v.inner or (u if k == u.k == "u" and u.n < n else None)
            elif self.peek("["):
                v = self.index(v)
            else:
                return v

    def index(self, v):
        self.take("[")
        a = self.binary(0)
        b = bits(v)
        if self.opt(":"):
            z = self.binary(0)
            self.take("]")
            if a.lit is None or z.lit is None:
                return Val(f"bitsel({b}, {a.c}, {z.c})", "u", 64)
            if a.lit < z.lit:
                return Val(f"brev{z.lit + 1}({b})", "u", z.lit + 1)
            n = a.lit - z.lit + 1
            c = f"({b} >> {z.lit})" if z.lit else b
            lit = v.lit >> z.lit & (1 << n) - 1 if v.lit is not None else None
            return Val(c if n == v.n else mask(f"((u32)({c}))" if n <= 32 and v.n > 32 else c, n), "u", n, lit)
        if self.opt("+:"):
            n = self.binary(0).lit
            self.take("]")
            return Val(mask(f"({b} >> {a.c})", n), "u", n)
        self.take("]")
        lit = v.lit >> a.lit & 1 if v.lit is not None and a.lit is not None else None
        return Val(f"((u32)({b} >> {a.c}) & 1)", "u", 1, lit)

    def primary(self):
        k, x = self.t[self.p]
        self.p += 1
        if k == "num":
            return number(x)
        if k == "ty":
            n, t = x.split("'")
            self.take("(")
            v = self.expr()
            self.take(")")
            k, n = {"B": "u", "BF": "bf"}.get(t, t.lower()), int(n)
            if k == "u" and v.k not in "ui":
                return from_bits(bits(v), v.n, k, n)
            return cast(v, k, n)
        if x == "(":
            v = self.expr()
            self.take(")")
            return v
        if x == "{":
            vs = [self.expr()]
            while self.opt(","):
                vs.append(self.expr())
            self.take("}")
            n = sum(v.n for v in vs)
            T = ctype("u", n)
            out, sh = [], n
            for v in vs:
                sh -= v.n
                out.append(f"(({T})({bits(v)}) << {sh})" if sh else f"({T})({bits(v)})")
            return Val("(" + " | ".join(out) + ")", "u", n)
        if k != "id":
            raise PcodeError(f"unexpected {x!r}")
        return self.name(x)

    def name(self, x):
        if self.peek("("):
            return self.call(x)
        if x in self.bound:
            return self.bound[x]
        if x in self.consts:
            return Val(f"{self.consts[x]}", "u", 32, self.consts[x])
        if x in ("INF", "NAN"):
            n = 64
            if self.peek("."):
                self.take()
                n = typ(self.take())[1]
            return Val({"INF": "INFINITY", "NAN": "NAN"}[x], "f", n, float("inf") if x == "INF" else None)
        if x == "WAVE_MODE":
            self.take(".")
            self.take("IEEE")
            return Val("w->ieee", "u", 1)
        if x == "MAX_FLOAT_F32":
            return Val("3.40282346638528860e+38f", "f", 32)
        if x == "PI":
            return Val("3.14159265358979323846", "f", 64)
        if x in ("VCC", "EXEC") and re.match(
            r"\.u(64|32) \[ laneId \]", " ".join(t[1] for t in self.t[self.p : self.p + 5]).replace(". u", ".u")
        ):
            self.p += 5
            return Val(f"((u32)({'vcc' if x == 'VCC' else 'EXEC'} >> l) & 1)", "u", 1)
        if x == "laneId":
            return Val("l", "u", 32)
        if x in ("lanes_lo", "lanes_hi"):
            return Val(
                {
                    "lanes_lo": "(l >= 32 ? ~0u : (1u << (l & 31)) - 1)",
                    "lanes_hi": "(l < 32 ? 0 : (1u << (l & 31)) - 1)",
                }[x],
                "u",
                32,
            )
        if x in ("S0", "S1", "S2", "SIMM32", "SIMM16"):
            wide = re.search(rf"\b{x}\.[uifb]64|\b{x}\[(3[2-9]|[456]\d)|\b{x}\.u32\[(3[2-9]|[456]\d)", self.text)
            return Val(self.pre + x, "u", 64 if wide else 32)
        if x == "D0":
            self.d0_old = self.d0_old or "D0" not in self.wrote
            return Val(self.pre + x, "u", self.dw)
        if x == "EXEC":
            return Val("EXEC", "u", 64)
        if x == "SCC":
            return Val("SCC_", "u", 1)
        if x == "VCC":
            return Val("vcc", "u", 64)
        if x in self.vars:
            k, n, arr = self.vars[x]
            if arr is not None:
                self.take("[")
                i = self.expr()
                self.take("]")
                return Val(f"{self.pre}{x}_[{i.c}]", k, n)
            return Val(f"{self.pre}{x}_", k, n)
        raise PcodeError(f"unknown name {x}")
