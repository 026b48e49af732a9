"""Statements of the pseudo-code."""

from __future__ import annotations

import re

from .functions import Functions
from .values import PcodeError, Val, bits, ctype, from_bits, mask, num, typ

_SKIP = ("TRAPSTS", "ROUND_MODE", "prev_mode")


class Translator(Functions):
    """Statements, assignments and local functions; `run` translates a whole text."""

    def run(self):
        self.stmts(("",))
        decl = [
            f"{ctype(k, n)} {self.pre}{x}_{f'[{arr}]' if arr is not None else ' = 0'};"
            for x, (k, n, arr) in self.vars.items()
        ]
        return decl + self.lines

    def inline(self, x, args):
        """A lambda call: its statements are placed before the statement being translated."""
        params, body = self.fns[x]
        save, ret, at = self.bound, self.ret, self.p
        self.bound = dict(save)
        for p, v in zip(params, args, strict=True):
            t = self.temp(v.k, v.n)
            self.lines.append(f"{t} = {v.c};")
            self.bound[p] = Val(t, v.k, v.n)
        self.p = body
        if self.peek("if", "declare", "for"):
            self.ret = [None]
            self.stmts((")",))
            r = self.ret[0]
        else:
            r = self.expr()
        self.p, self.bound, self.ret = at, save, ret
        return r

    def temp(self, k, n):
        self.ntmp += 1
        t = f"t{self.ntmp}"
        self.vars[t] = (k, n, None)
        return f"{self.pre}{t}_"

    def stmts(self, until):
        while not self.peek(*until) and self.t[self.p][0] != "end":
            if not self.opt(";"):
                self.stmt()

    def stmt(self):
        if self.opt("if"):
            depth = 1
            c = self.expr()
            self.take("then")
            self.lines.append(f"if ({self.cond(c)}) {{")
            while True:
                self.stmts(("elsif", "else", "endif"))
                if self.opt("elsif"):
                    self.lines.append("} else {")
                    c = self.expr()
                    self.take("then")
                    self.lines.append(f"if ({self.cond(c)}) {{")
                    depth += 1
                elif self.opt("else"):
                    self.lines.append("} else {")
                else:
                    self.take("endif")
                    self.lines.append("}" * depth)
                    return
        if self.opt("for"):
            x = self.take()
            self.take("in")
            a = self.expr()
            self.take(":")
            b = self.expr()
            self.take("do")
            self.bound[x] = Val(f"{self.pre}{x}_", "i", 32)
            self.heavy = True
            self.lines.append(f"for (int {self.pre}{x}_ = {a.c}; {self.pre}{x}_ <= (int){b.c}; {self.pre}{x}_++) {{")
            self.stmts(("endfor",))
            self.take("endfor")
            self.lines.append("}")
            return
        if self.opt("break"):
            self.lines.append("break;")
            return
        if self.opt("return"):
            v = self.expr()
            if self.ret[0] is None:
                self.ret[0] = Val(self.temp(v.k, v.n), v.k, v.n)
            self.lines.append(f"{self.ret[0].c} = {num(v, self.ret[0].k, self.ret[0].n).c};")
            return
        if self.opt("declare"):
            x = self.take()
            self.take(":")
            n, t = self.take().split("'")
            arr = None
            if self.opt("["):
                arr = self.take()
                self.take("]")
            if x not in ("S", "OFFSET0", "OFFSET1"):
                self.vars[x] = ({"B": "u"}.get(t, t.lower()), int(n), arr)
            return
        if self.opt("{"):  # { D1.u1, D0.u64 } = value
            tg = [self.lhs()]
            while self.opt(","):
                tg.append(self.lhs())
            self.take("}")
            self.take("=")
            v = self.expr()
            sh = 0
            t = self.temp("u", v.n)
            self.lines.append(f"{t} = {bits(v)};")
            for x in reversed(tg):
                n = x[1][-1][1][1]
                self.store(x, from_bits(f"({t} >> {sh})", 128, "u", n))
                sh += n
            return
        x = self.t[self.p][1]
        if x in _SKIP:
            while not self.peek("="):
                self.p += 1
            self.take("=")
            if x == "ROUND_MODE" and self.peek("ROUND_TOWARD_ZERO"):
                self.rtz = True
            self.p += 1
            return
        if self.t[self.p + 1][1] == "=" and self.t[self.p + 2][1] == "lambda":
            self.p += 3
            self.take("(")
            ps = [self.take()]
            while self.opt(","):
                ps.append(self.take())
            self.take(")")
            self.take("(")
            self.fns[x] = (ps, self.p)
            d = 1
            while d:
                d += {"(": 1, ")": -1}.get(self.take(), 0)
            return
        tg = self.lhs()
        op = self.take()
        if op not in ("=", "+=", "-="):
            raise PcodeError(f"statement {x} {op}")
        v = self.expr()
        if op != "=":
            at = self.p
            self.p = tg[2]
            cur = self.postfix(self.primary())
            self.p = at
            v = self.arith(op[0], cur, v)
        self.store(tg, v)

    def lhs(self):
        at, x, post = self.p, self.take(), []
        while self.peek(".", "["):
            if self.opt("."):
                post.append(("t", typ(self.take())))
            else:
                self.take("[")
                a = self.binary(0)
                z = None
                if self.opt(":"):
                    z = self.binary(0)
                self.take("]")
                post.append(("i", a, z))
        return x, post, at

    def store(self, tg, v):
        x, post, _ = tg
        ty = [p[1] for p in post if p[0] == "t"]
        ix = [p for p in post if p[0] == "i"]
        L = self.lines.append
        if ix and ix[-1][1].c == "l" and ix[-1][2] is None:
            self.cb = True
            L(f"cb = ({self.cond(v)}) != 0;")
            return  # VCC/D0/EXEC.u64[laneId]
        if x == "D1":
            self.cb = True
            L(f"cb = {v.c} & 1;")
            return
        if x == "SCC":
            self.wrote.add(x)
            L(f"SCC_ = ({self.cond(v)}) != 0;")
            return
        if x in self.vars and self.vars[x][2] is not None:
            k, n, _ = self.vars[x]
            L(f"{self.pre}{x}_[{ix[0][1].c}] = {num(v, k, n).c if v.k not in 'ui' or k in 'ui' else bits(v)};")
            return
        if x not in ("D0", "EXEC", "S0", "VCC") and x not in self.vars:
            cont = re.search(rf"(?:^|[;\n]|then|else|do)\s*{x}(\[|\.[a-z]+\d+\s*=)", self.text)
            wide = re.search(rf"\b{x}(\.\w+)?\[(3[2-9]|[456]\d)|\b{x}\.[uifb]64", self.text)
            self.vars[x] = (
                ("u", 64 if wide else 32, None)
                if cont
                else (v.k, max(v.n, 32) if v.k == "u" and v.n < 16 else v.n, None)
            )
        k, n = (
            ("u", self.dw if x == "D0" else 64 if x in ("EXEC", "VCC") or (x == "S0" and "S0.b64" in self.text) else 32)
            if x in ("D0", "EXEC", "S0", "VCC")
            else self.vars[x][:2]
        )
        c = {"EXEC": "EXEC", "VCC": "vcc"}.get(x, self.pre + x + ("" if x in ("D0", "S0") else "_"))
        T = ctype("u", n)
        if x == "D0":
            self.d0 = True
        if not ix and not (ty and ty[-1][1] < n):
            if ty:
                k, n2 = ty[-1]
                v = self.saturate(v, k, n2)
                L(
                    f"{c} = {self.coerce(v, k, n2, T)};"
                    if x in ("D0", "EXEC", "S0", "VCC") or self.vars[x][0] == "u"
                    else f"{c} = {num(v, *self.vars[x][:2]).c};"
                )
            elif x in ("D0", "EXEC", "S0", "VCC"):
                L(f"{c} = ({T})({bits(v)});")
            else:
                L(f"{c} = {num(v, k, n).c if v.k in 'ui' or k not in 'ui' else bits(v)};")
            self.wrote.add(x)
            return
        if not ix:
            k, n2 = ty[-1]
            v = self.saturate(v, k, n2)
            b = self.coerce(v, k, n2, T)
            if x == "D0" and n2 == 16:
                self.d16 = True
                L(f"{c} = {b};")
                return
            L(f"{c} = ({c} & ~({T}){(1 << n2) - 1:#x}ull) | {b};" if x not in ("EXEC",) else f"{c} = {b};")
            self.wrote.add(x)
            return
        a, z = ix[-1][1:]
        if x == "D0":
            self.d0_old = self.d0_old or "D0" not in self.wrote
        if z is None:
            L(f"{c} = ({c} & ~(({T})1 << {a.c})) | ({T})({self.cond(v)}) << {a.c};")
            return
        if a.lit is not None:
            m = a.lit - z.lit + 1
            if (ty and ty[-1][0] not in "ui") or (ty and ty[-1][1] == m):
                v = self.saturate(v, *ty[-1])
                b = self.coerce(v, *ty[-1], T)
            else:
                b = f"({T})({bits(v)} & {(1 << m) - 1:#x}ull)"
            if m >= n:
                L(f"{c} = {b};")
                self.wrote.add(x)
                return
            L(f"{c} = ({c} & ~({T}){((1 << m) - 1) << z.lit:#x}ull) | {b} << {z.lit};")
            return
        L(
            f"{{ u64 m_ = bitsel(~0ull, {a.c}, {z.c}); {c} = ({c} & ~({T})(m_ << {z.c})) | ({T})(({bits(v)} & m_) << {z.c}); }}"
        )

    def coerce(self, v, k, n, T):
        """v as the raw bits of type (k, n) in C type T."""
        if k in "ui" and v.k in "ui":
            return f"({T})" + mask(f"(({ctype('u', n)})({v.c}))", n) if n != 1 else f"({T})(({v.c}) & 1)"
        if k in "ui":
            return f"({T})({bits(v)})"
        if v.k in "ui":
            return f"({T})(({v.c}))"
        return f"({T})({bits(num(v, k, n))})"

    def saturate(self, v, k, n):
        if not self.wide or k not in "ui" or v.k != "i" or v.n != 64 or n > 32:
            return v
        lo, hi = (-(1 << n - 1), (1 << n - 1) - 1) if k == "i" else (0, (1 << n) - 1)
        return Val(f"({v.c} < {lo}ll ? {lo}ll : {v.c} > {hi}ll ? {hi}ll : {v.c})", "i", 64)
