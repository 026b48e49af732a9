"""Arithmetic of floats: division, functions, conversions, random numbers."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from .cases import Cases, close, same, seeded

emu = pytest.importorskip("amd_emulator")
pytestmark = pytest.mark.emulated
case = CASES = Cases()
f16, bf16, f32, f64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


@triton.jit
def maths(x, o, n, B: tl.constexpr):
    r = tl.program_id(0) * B + tl.arange(0, B)
    m = r < n
    v = tl.load(x + r, mask=m, other=1.0).to(tl.float32)
    p = tl.abs(v) + 1e-3
    tl.store(o + r, tl.exp(v), mask=m)
    tl.store(o + n + r, tl.log(p), mask=m)
    tl.store(o + 2 * n + r, tl.sqrt(p), mask=m)
    tl.store(o + 3 * n + r, tl.rsqrt(p), mask=m)
    tl.store(o + 4 * n + r, tl.sin(v), mask=m)
    tl.store(o + 5 * n + r, tl.cos(v), mask=m)
    tl.store(o + 6 * n + r, 1 / p, mask=m)
    tl.store(o + 7 * n + r, v / p, mask=m)
    tl.store(o + 8 * n + r, tl.erf(v), mask=m)
    tl.store(o + 9 * n + r, tl.sigmoid(v), mask=m)
    tl.store(o + 10 * n + r, tl.floor(v) + tl.ceil(v) * 2, mask=m)
    tl.store(o + 11 * n + r, tl.exp2(v) + tl.log2(p), mask=m)
    tl.store(o + 12 * n + r, tl.div_rn(v, p), mask=m)
    tl.store(o + 13 * n + r, tl.fma(v, p, v), mask=m)
    tl.store(o + 14 * n + r, tl.sqrt_rn(p), mask=m)
    tl.store(o + 15 * n + r, tl.clamp(v, -0.5, 0.5) + tl.maximum(v, 0.0), mask=m)


@triton.jit
def divide(x, y, o, B: tl.constexpr):
    r = tl.program_id(0) * B + tl.arange(0, B)
    a = tl.load(x + r)
    b = tl.load(y + r)
    tl.store(o + r, tl.div_rn(a, b) if x.dtype.element_ty == tl.float32 else a / b)


@triton.jit
def cast(x, y, n, B: tl.constexpr):
    r = tl.program_id(0) * B + tl.arange(0, B)
    m = r < n
    tl.store(y + r, tl.load(x + r, mask=m).to(y.dtype.element_ty), mask=m)


@triton.jit
def axpy(x, y, o, a, n, B: tl.constexpr):  # arithmetic in the storage type
    r = tl.program_id(0) * B + tl.arange(0, B)
    m = r < n
    v = tl.load(x + r, mask=m, other=0)
    w = tl.load(y + r, mask=m, other=0)
    tl.store(o + r, (v * a + w).to(o.dtype.element_ty), mask=m)
    tl.store(o + n + r, (v - w) * v, mask=m)
    tl.store(o + 2 * n + r, tl.maximum(v, w), mask=m)
    tl.store(o + 3 * n + r, -v, mask=m)


@triton.jit
def philox(o, seed, n, B: tl.constexpr):
    r = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(o + r, tl.rand(seed, r), mask=r < n)
    tl.store(o + n + r, tl.randn(seed, r), mask=r < n)


@triton.jit
def libdev(x, o, n, B: tl.constexpr):
    r = tl.arange(0, B)
    m = r < n
    v = tl.load(x + r, mask=m, other=0.0)
    tl.store(o + r, libdevice.tanh(v), mask=m)
    tl.store(o + n + r, libdevice.pow(tl.abs(v), 1.7), mask=m)
    tl.store(o + 2 * n + r, libdevice.nearbyint(v) + libdevice.trunc(v), mask=m)
    tl.store(o + 3 * n + r, libdevice.log1p(tl.abs(v)), mask=m)


f16, bf16, f32, f64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


@case("division fp32, random bit patterns")
def _(arch):
    N = 1024
    x, y = (torch.randint(-(2**31), 2**31, (N,), generator=seeded(i)).int().view(f32) for i in (0, 1))
    sp = torch.tensor(
        [0.0, -0.0, 1.0, float("inf"), -float("inf"), float("nan"), 1e-45, -1e-40, 3e38, 1.17549435e-38, 1.17e-38]
    )
    x[:121], y[:121] = sp.repeat(11), sp.repeat_interleave(11)
    o = torch.zeros(N)
    emu.run_jit(divide, (N // 256,), x, y, o, B=256, arch=arch)
    r = (x.double() / y.double()).float()
    same(o.nan_to_num(12345.0), r.nan_to_num(12345.0))


@case("division fp64")
def _(arch):
    N = 512
    x, y = (
        torch.randn(N, generator=seeded(i), dtype=f64)
        * 10.0 ** torch.randint(-150, 150, (N,), generator=seeded(i + 2)).double()
        for i in (0, 1)
    )
    o = torch.zeros(N, dtype=f64)
    emu.run_jit(divide, (N // 256,), x, y, o, B=256, arch=arch)
    same(o, x / y)


@case("libdevice functions")
def _(arch):
    n = 100
    x = torch.randn(n, generator=seeded()) * 3
    o = torch.zeros(4, n)
    emu.run_jit(libdev, (1,), x, o, n, B=128, arch=arch, num_warps=2)
    v = x.double()
    for i, (nm, r) in enumerate(
        [("tanh", v.tanh()), ("pow", v.abs() ** 1.7), ("rint/trunc", v.round() + v.trunc()), ("log1p", v.abs().log1p())]
    ):
        close(o[i], r, 2e-6, nm)


@case("fp32 math functions")
def _(arch):
    n = 300
    x = torch.cat(
        [
            torch.randn(n - 12, generator=seeded()) * 3,
            torch.tensor([0.0, -0.0, 1e-30, -1e-20, 20.0, -20.0, 60.0, -60.0, 0.5, 1.0, -1.0, 100.0]),
        ]
    )
    o = torch.zeros(16, n)
    emu.run_jit(maths, (3,), x, o, n, B=128, arch=arch, num_warps=2)
    v = x.double()
    p = (x.abs() + 1e-3).double()
    for i, (nm, r) in enumerate(
        [
            ("exp", v.exp().float()),
            ("log", p.log()),
            ("sqrt", p.sqrt()),
            ("rsqrt", p.rsqrt()),
            ("sin", v.sin()),
            ("cos", v.cos()),
            ("rcp", 1 / p),
            ("div", v / p),
            ("erf", v.erf()),
            ("sigmoid", v.sigmoid()),
            ("floor/ceil", v.floor() + 2 * v.ceil()),
            ("exp2/log2", v.exp2() + p.log2()),
            ("div_rn", (x / p.float())),
            ("fma", v * p + v),
            ("sqrt_rn", p.float().double().sqrt().float()),
            ("clamp/max", v.clamp(-0.5, 0.5) + v.clamp(min=0)),
        ]
    ):
        close(o[i], r, 0 if nm in ("div_rn", "sqrt_rn", "floor/ceil") else 1e-5, nm)


def _cast(a, b):
    def f(arch):
        x = torch.cat(
            [torch.randn(180, generator=seeded()) * 30, torch.tensor([0.0, 1.5, 2.5, -2.5, 1e-6, 6e-8, 3e-5, 100.7])]
        )
        x = x.to(a)
        y = torch.zeros(len(x), dtype=b)
        emu.run_jit(cast, (2,), x, y, len(x), B=128, arch=arch, num_warps=1)
        r = x.to(torch.float32).to(b) if b.is_floating_point and a != torch.float64 else x.to(b)
        same(
            y.float() if b.itemsize == 1 and b.is_floating_point else y,
            r.float() if b.itemsize == 1 and b.is_floating_point else r,
        )

    return f


for a, b in (
    (f32, f16),
    (f16, f32),
    (f32, bf16),
    (bf16, f32),
    (f16, bf16),
    (f32, torch.int32),
    (torch.int32, f32),
    (f32, torch.int64),
    (torch.int64, f32),
    (torch.int64, f64),
    (f64, torch.int64),
    (f16, torch.int8),
    (torch.uint8, f16),
    (f32, f64),
    (f64, f32),
    (torch.int8, bf16),
    (torch.float8_e5m2, f16),
    (f16, torch.float8_e5m2),
    (torch.float8_e4m3fn, f32),
    (f32, torch.float8_e4m3fn),
):
    case(f"cast {str(a)[6:]} -> {str(b)[6:]}")(_cast(a, b))


case("cast float8_e4m3fnuz -> float32", ["gfx942"])(_cast(torch.float8_e4m3fnuz, f32))
case("cast float32 -> float8_e4m3fnuz", ["gfx942"])(_cast(f32, torch.float8_e4m3fnuz))


def _axpy(dt):
    def f(arch):
        n = 200
        x, y = torch.randn(n, generator=seeded()).to(dt), torch.randn(n, generator=seeded(1)).to(dt)
        o = torch.zeros(4, n, dtype=dt)
        emu.run_jit(axpy, (2,), x, y, o, 1.5, n, B=128, arch=arch, num_warps=1)
        X, Y = x.double(), y.double()
        e = {f16: 2e-3, bf16: 2e-2, f32: 1e-6, f64: 1e-7}[dt]
        close(o[0], X * 1.5 + Y, e, "fma")
        close(o[1], (X - Y) * X, 3 * e, "sub/mul")
        same(o[2], torch.maximum(x, y), "max")
        same(o[3], -x, "neg")

    return f


for n, dt in (("fp16", f16), ("bf16", bf16), ("fp32", f32), ("fp64", f64)):
    case(f"arithmetic in {n}")(_axpy(dt))


@case("philox rand/randn")
def _(arch):
    n = 256
    o = torch.zeros(2, n)
    emu.run_jit(philox, (2,), o, 1234567, n, B=128, arch=arch, num_warps=2)
    M = 0xFFFFFFFF

    def ph(i, k0, k1=0, c=None):
        c = [i, 0, 0, 0]
        for _ in range(10):
            a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
            c = [(b >> 32) ^ c[1] ^ k0, b & M, (a >> 32) ^ c[3] ^ k1, a & M]
            k0, k1 = (k0 + 0x9E3779B9) & M, (k1 + 0xBB67AE85) & M
        return c

    def u(x):
        x = x - (1 << 32) if x >> 31 else x
        return (-x - 1 if x < 0 else x) * 4.6566127342e-10

    P = [ph(i, 1234567) for i in range(n)]
    U = torch.tensor([[u(c[0]), u(c[1])] for c in P]).double()
    close(o[0], U[:, 0], 1e-6, "rand")
    close(o[1], (-2 * U[:, 0].clamp(min=1e-7).log()).sqrt() * (U[:, 1] * 6.283185307179586).cos(), 1e-4, "randn")


@CASES.everywhere
def test_case(arch, run):
    run(arch)
