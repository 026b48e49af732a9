"""C expressions with a type, and conversions between types."""

from __future__ import annotations

import re


class PcodeError(Exception):
    """Pseudo-code that the translator does not cover."""


class Val:
    """A C expression and its type.

    k: kind, one of u, i, f, bf, fp8, bf8.  n: width in bits.  lit: its value when constant.
    inner: the narrower value it was widened from.  raw: its bits, for a float just read.
    """

    __slots__ = ("c", "inner", "k", "lit", "n", "raw")

    def __init__(self, c, k, n, lit=None, inner=None, raw=None):
        self.c, self.k, self.n, self.lit, self.inner, self.raw = c, k, n, lit, inner, raw


def ctype(k, n):
    if k == "f" and n == 64:
        return "double"
    if k not in "ui":
        return "float"
    return k + ("32" if n <= 32 else "64" if n <= 64 else "128")


def mask(c, n):
    return c if n in (32, 64) or n > 64 else f"({c} & {(1 << n) - 1:#x}{'u' if n < 32 else 'ull'})"


def typ(s):
    """Type suffix (u32, f16, b64, bf16, fp8, ...) -> kind, width."""
    if s in ("fp8", "bf8"):
        return s, 8
    if s == "bf16":
        return "bf", 16
    m = re.fullmatch(r"([uifb])(\d+)", s)
    if not m:
        raise PcodeError(f"type {s}")
    return ("u" if m[1] == "b" else m[1]), int(m[2])


def bits(v):
    """The raw bits of a value as an unsigned C expression of v.n bits."""
    if v.k == "u":
        return v.c
    if v.k == "i":
        return mask(f"(({ctype('u', v.n)})({v.c}))", v.n)
    if v.raw:
        return v.raw
    return (
        {"f16": "f2h", "f32": "fb", "f64": "db", "bf16": "f2bf"}[v.k + str(v.n)] + f"({v.c})"
        if v.k in ("f", "bf")
        else f"enc8({v.c}, {3 if v.k == 'fp8' else 2}, 0)"
    )


def from_bits(c, m, k, n):
    """m raw bits reinterpreted as type (k, n)."""
    if k == "u":
        return Val(
            mask(f"(({ctype('u', n)})({c}))", n)
            if n < m
            else f"(({ctype('u', n)})({c}))"
            if (n > 32) != (m > 32)
            else c,
            "u",
            n,
        )
    if k == "i":
        if n in (32, 64) or n > 64:
            return Val(f"(({ctype('i', n)})({ctype('u', n)})({c}))", "i", n)
        w = 32 if n < 32 else 64
        return Val(f"((i{w})((u{w})({c}) << {w - n}) >> {w - n})", "i", n)
    if n == 64:
        return Val(f"bd({c})", "f", 64, raw=c)
    if n == 32:
        return Val(f"bf((u32)({c}))", "f", 32, raw=f"((u32)({c}))")
    q = f"((u32)({c}) & {'0xffff' if n == 16 else '255'})"
    return Val(
        f"{'h2f' if k == 'f' else 'b2f'}({q})" if n == 16 else f"((float)f8_({q}, {3 if k == 'fp8' else 2}, 0))",
        k,
        n,
        raw=q,
    )


def cast(v, k, n):
    """Numeric conversion; between an integer and a float of a cast like 32'F(...) the bits are kept (the pseudo-code's convention)."""
    if (v.k, v.n) == (k, n):
        return v
    if v.k in "ui" and k in "ui":
        c = f"(({ctype(k, n)})({v.c}))"
        if n in (32, 64) or n > 64 or (n > v.n and v.k == "u"):
            return Val(c, k, n, v.lit)
        return from_bits(c, 128, k, n)
    if v.k in "ui":
        return from_bits(v.c, v.n, k, n)
    if k in "ui":
        raise PcodeError(f"float to integer cast {v.c}")
    return Val(
        {
            "f64": f"((double)({v.c}))",
            "f32": f"((float)({v.c}))",
            "f16": f"rh({'oddf' if v.n == 64 else ''}({v.c}))",
            "bf16": f"rbf({v.c})",
        }[k + str(n)],
        k,
        n,
        v.lit,
        v if n == 64 else None,
    )


def num(v, k, n):
    """Arithmetic conversion to type (k, n): integers become floats by value."""
    return Val(f"(({ctype(k, n)})({v.c}))", k, n, v.lit) if v.k in "ui" and k not in "ui" else cast(v, k, n)


def common(a, b):
    if a.k in "ui" and b.k in "ui":
        n = max(a.n, b.n)
        return ("u" if any(x.k == "u" and x.n == n for x in (a, b)) else "i"), n
    fs = [x for x in (a, b) if x.k not in "ui"]
    m = max(fs, key=lambda x: (x.n, x.k == "f"))
    return m.k, m.n


def number(x):
    if "'" in x:
        n, v = x.split("'")
        n = int(n)
        u = v.endswith("U") or v.startswith("0x")
        v = v.rstrip("U")
        if "." in v:
            return Val(f"{v}{'f' if n < 64 else ''}", "f", n, float(v))
        i = int(v, 0)
        return Val(hex(i) if i > 9 else str(i), "u" if u else "i", n, i)
    if "." in x and not x.startswith("0x"):
        f = x.rstrip("F")
        return Val(f + ("f" if x.endswith("F") else ""), "f", 32 if x.endswith("F") else 64, float(f))
    m = re.fullmatch(r"(0x[0-9a-fA-F]+|\d+)(U?)(LL)?", x)
    i = int(m[1], 0)
    n = 64 if m[3] or i >> 32 else 32
    k = "u" if m[2] or i >> (n - 1) else "i"
    return Val(f"{m[1]}{'u' if k == 'u' else ''}{'ll' if n == 64 else ''}", k, n, i)
