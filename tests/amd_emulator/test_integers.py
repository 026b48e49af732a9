"""Arithmetic of integers, wide products and calls."""

from __future__ import annotations

import random

import pytest
import torch
import triton
import triton.language as tl

from .cases import Cases, same, seeded

emu = pytest.importorskip("amd_emulator")
pytestmark = pytest.mark.emulated
case = CASES = Cases()
f16, bf16, f32, f64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


@triton.jit
def uints(a, b, o, n, B: tl.constexpr):
    r = tl.program_id(0) * B + tl.arange(0, B)
    m = r < n
    x = tl.load(a + r, mask=m, other=1)
    y = tl.load(b + r, mask=m, other=1)
    tl.store(o + r, x * y, mask=m)
    tl.store(o + n + r, tl.umulhi(x, y), mask=m)
    tl.store(o + 2 * n + r, x ^ (y >> 7) ^ (x << 5), mask=m)
    tl.store(o + 3 * n + r, x // y, mask=m)
    tl.store(o + 4 * n + r, x % y, mask=m)
    tl.store(o + 5 * n + r, x + y, mask=m)
    tl.store(o + 6 * n + r, x - y, mask=m)
    tl.store(o + 7 * n + r, x >> (y & 31), mask=m)
    tl.store(o + 8 * n + r, x << (y & 31), mask=m)
    tl.store(o + 9 * n + r, tl.where(x > y, x | y, x & y), mask=m)


@triton.jit
def ints(a, b, o, n, B: tl.constexpr):
    r = tl.program_id(0) * B + tl.arange(0, B)
    m = r < n
    x = tl.load(a + r, mask=m, other=1)
    y = tl.load(b + r, mask=m, other=1)
    tl.store(o + r, x * y, mask=m)
    tl.store(o + n + r, x // y, mask=m)
    tl.store(o + 2 * n + r, x % y, mask=m)
    tl.store(o + 3 * n + r, x >> (y & 7), mask=m)
    tl.store(o + 4 * n + r, tl.minimum(x, y), mask=m)
    tl.store(o + 5 * n + r, tl.abs(x) - tl.maximum(x, y), mask=m)
    tl.store(o + 6 * n + r, (x < y).to(x.dtype), mask=m)


@triton.jit(noinline=True)
def _far(x, y):
    return x * y + 3


@triton.jit
def wide(a, b, o, n, B: tl.constexpr):  # 32x32->64 products, a device function call, libdevice
    r = tl.arange(0, B)
    m = r < n
    x = tl.load(a + r, mask=m, other=0)
    y = tl.load(b + r, mask=m, other=0)
    tl.store(o + r, x.to(tl.int64) * y, mask=m)
    tl.store(o + n + r, x.to(tl.uint32).to(tl.int64) * y.to(tl.uint32) + x, mask=m)
    tl.store(o + 2 * n + r, (x * _far(tl.program_id(0) + 5, n)).to(tl.int64), mask=m)


@case("wide products, noinline call")
def _(arch):
    n = 100
    a, b = (torch.randint(-(2**31), 2**31 - 1, (n,), generator=seeded(i)).int() for i in (0, 1))
    o = torch.zeros(3, n, dtype=torch.int64)
    emu.run_jit(wide, (1,), a, b, o, n, B=128, arch=arch, num_warps=2)
    A, Bv = a.long(), b.long()

    def u(v):
        return v & 0xFFFFFFFF

    same(o[0], A * Bv, "i32*i32")
    same(o[1], u(A) * u(Bv) + A, "u32*u32")
    same(o[2], (a * (5 * n + 3)).long(), "call")


def _uint(bits):
    def f(arch):
        n, M = 200, (1 << bits) - 1
        rnd = random.Random(0)
        a = [rnd.getrandbits(bits) for _ in range(n)]
        b = [rnd.getrandbits(rnd.randint(1, bits)) | 1 for _ in range(n)]
        dt = getattr(torch, f"uint{bits}")
        st = getattr(torch, f"int{bits}")

        def T(v):
            signed = [x - (1 << bits) if x >> bits - 1 else x for x in v]
            return torch.tensor(signed, dtype=st)

        o = torch.zeros(10 * n, dtype=st)
        emu.run_jit(uints, (2,), T(a).view(dt), T(b).view(dt), o.view(dt), n, B=128, arch=arch, num_warps=2)
        fs = [
            lambda x, y: x * y & M,
            lambda x, y: x * y >> bits,
            lambda x, y: x ^ y >> 7 ^ (x << 5 & M),
            lambda x, y: x // y,
            lambda x, y: x % y,
            lambda x, y: x + y & M,
            lambda x, y: x - y & M,
            lambda x, y: x >> (y & 31),
            lambda x, y: x << (y & 31) & M,
            lambda x, y: x | y if x > y else x & y,
        ]
        names = ["mul", "umulhi", "xorshift", "div", "mod", "add", "sub", "shr", "shl", "select"]
        for i, (nm, fn) in enumerate(zip(names, fs, strict=True)):
            want = [fn(x, y) for x, y in zip(a, b, strict=True)]
            same(o[i * n : (i + 1) * n], T(want), nm)

    return f


case("uint32 arithmetic")(_uint(32))
case("uint64 arithmetic")(_uint(64))


def _int(dt):
    def f(arch):
        n = 200
        lim = 1 << (torch.iinfo(dt).bits - 2)
        a = torch.randint(-lim, lim, (n,), generator=seeded()).to(dt)
        b = torch.randint(-lim, lim, (n,), generator=seeded(1)).to(dt)
        b = torch.where(torch.arange(n) % 2 == 0, b % 100 + 1, b) | 1
        o = torch.zeros(7, n, dtype=dt)
        emu.run_jit(ints, (2,), a, b, o, n, B=128, arch=arch, num_warps=2)
        A, Bv = a.tolist(), b.tolist()
        q = torch.tensor(
            [int(abs(x) // abs(y)) * (1 if (x < 0) == (y < 0) else -1) for x, y in zip(A, Bv, strict=True)]
        ).to(dt)
        for i, (nm, r) in enumerate(
            [
                ("mul", a * b),
                ("div", q),
                ("mod", a - q * b),
                ("shr", a >> (b & 7)),
                ("min", torch.minimum(a, b)),
                ("abs/max", a.abs() - torch.maximum(a, b)),
                ("lt", (a < b).to(dt)),
            ]
        ):
            same(o[i], r, nm)

    return f


for n in ("int8", "int16", "int32", "int64"):
    case(f"{n} arithmetic")(_int(getattr(torch, n)))


@CASES.everywhere
def test_case(arch, run):
    run(arch)
