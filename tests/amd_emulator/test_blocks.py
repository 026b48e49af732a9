"""Blocks: sorts, reductions, scans, shapes, loops."""

from __future__ import annotations

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
def sort2(x, y, R: tl.constexpr, N: tl.constexpr, DESC: tl.constexpr):
    o = tl.arange(0, R)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(y + o, tl.sort(tl.load(x + o), descending=DESC))


@triton.jit
def reduce_(x, s, mx, am, xr, R: tl.constexpr, N: tl.constexpr, AX: tl.constexpr):
    v = tl.load(x + tl.arange(0, R)[:, None] * N + tl.arange(0, N)[None, :])
    o = tl.arange(0, R if AX == 1 else N)
    tl.store(s + o, tl.sum(v, AX))
    tl.store(mx + o, tl.max(v, AX))
    tl.store(am + o, tl.argmax(v, AX))
    tl.store(xr + o, tl.xor_sum(v.to(tl.int32), AX))


@triton.jit
def _maxs(a, b):
    return tl.maximum(a, b)


@triton.jit
def scan_(x, y, z, R: tl.constexpr, N: tl.constexpr, REV: tl.constexpr):
    o = tl.arange(0, R)[:, None] * N + tl.arange(0, N)[None, :]
    v = tl.load(x + o)
    tl.store(y + o, tl.cumsum(v, 1, reverse=REV))
    tl.store(z + o, tl.associative_scan(v, 1, _maxs, reverse=REV))


@triton.jit
def misc(x, i, h, g, f, N: tl.constexpr, NB: tl.constexpr):
    r = tl.arange(0, N)
    v = tl.load(x + r)
    k = tl.load(i + r)
    tl.store(h + tl.arange(0, NB), tl.histogram(k % NB, NB))
    tl.store(g + r, tl.gather(v, k, 0))
    tl.store(f + r, tl.flip(v, 0))


@triton.jit
def while_(lo, out, n, B: tl.constexpr):  # per-program data-dependent bounds, and a while loop over a block (collatz)
    p = tl.program_id(0)
    a = tl.load(lo + p)
    e = tl.load(lo + p + 1)
    s = tl.zeros((B,), tl.int32)
    for j in range(a, e):
        s += j
    v = tl.arange(0, B) + 1 + p
    c = tl.zeros((B,), tl.int32)
    while tl.max((v > 1).to(tl.int32), 0) > 0:
        c += (v > 1).to(tl.int32)
        v = tl.where(v > 1, tl.where(v % 2 == 0, v // 2, 3 * v + 1), v)
    x = e - a
    it = 0
    while x > 0:
        x = x // 2
        it += 1
    tl.store(out + p * B + tl.arange(0, B), s * 1000 + c * 10 + it)


@triton.jit
def shapes(
    x, y, z, w, m, N: tl.constexpr
):  # reshape, permute, join, split, broadcast, bool tensors, num_programs, cache modifiers
    r = tl.arange(0, N)
    v = tl.load(x + r, cache_modifier=".cg", eviction_policy="evict_last")
    u = tl.load(x + r + N, volatile=True)
    k = tl.load(m + r)
    j = tl.join(v, u)
    a, b = tl.split(j * 2)
    tl.store(y + r, tl.where(k, a, b))
    tl.store(z + tl.arange(0, 2 * N), tl.interleave(v, u), cache_modifier=".wt")
    t = tl.reshape(v, (N // 8, 8))
    p = tl.permute(t, (1, 0)) + tl.arange(0, 8)[:, None]
    tl.store(w + tl.arange(0, N), tl.reshape(p, (N,)) + tl.num_programs(0) * 1000 + tl.num_programs(1) * 10000)


@case("shape ops, bool tensors, num_programs")
def _(arch):
    N = 128
    x = torch.randn(2 * N, generator=seeded())
    m = torch.rand(N, generator=seeded(1)) < 0.5
    y, z, w = torch.zeros(N), torch.zeros(2 * N), torch.zeros(N)
    emu.run_jit(shapes, (3, 2), x, y, z, w, m, N=N, arch=arch, num_warps=2)
    same(y, torch.where(m, x[:N], x[N:]) * 2, "where/split")
    same(z, torch.stack([x[:N], x[N:]], 1).flatten(), "interleave")
    same(w, (x[:N].view(N // 8, 8).T + torch.arange(8)[:, None]).flatten() + 3000 + 20000, "permute")


def _sort(dt, N, nw):
    def f(arch):
        x = torch.randint(-(10**4), 10**4, (4, N), generator=seeded()).to(dt)
        y = torch.zeros_like(x)
        for d in (False, True):
            emu.run_jit(sort2, (1,), x, y, R=4, N=N, DESC=d, arch=arch, num_warps=nw)
            same(y, x.sort(1, descending=d).values)

    return f


case("sort int32 64")(_sort(torch.int32, 64, 1))
case("sort int64 128, 4 warps")(_sort(torch.int64, 128, 4))
case("sort fp32 64")(_sort(torch.float32, 64, 2))
case("sort fp16 32")(_sort(torch.float16, 32, 1))


def _reduce(dt, ax, nw, R=16, N=128):
    def f(arch):
        x = torch.randint(-99, 99, (R, N), generator=seeded()).to(dt)
        K = R if ax == 1 else N
        s = torch.zeros(K, dtype=dt)
        mx = torch.zeros(K, dtype=dt)
        am = torch.zeros(K, dtype=torch.int32)
        xr = torch.zeros(K, dtype=torch.int32)
        emu.run_jit(reduce_, (1,), x, s, mx, am, xr, R=R, N=N, AX=ax, arch=arch, num_warps=nw)
        same(s, x.sum(ax), "sum")
        same(mx, x.max(ax).values, "max")
        same(x.gather(ax, am.long().unsqueeze(ax)).squeeze(ax), x.max(ax).values, "argmax")
        t = x.int()
        z = torch.zeros(K, dtype=torch.int32)
        for i in range(x.shape[ax]):
            z ^= t.select(ax, i)
        same(xr, z, "xor_sum")

    return f


for ax in (0, 1):
    for n in ("float32", "int32", "int64"):
        case(f"reduce axis {ax} {n}")(_reduce(getattr(torch, n), ax, 4))


case("reduce axis 1 float16, 1 warp")(_reduce(torch.float16, 1, 1, 4, 64))
case("reduce axis 1 float64")(_reduce(torch.float64, 1, 2, 4, 64))


def _scan(dt, rev, nw):
    def f(arch):
        x = torch.randint(-99, 99, (4, 128), generator=seeded()).to(dt)
        y, z = torch.zeros_like(x), torch.zeros_like(x)
        emu.run_jit(scan_, (1,), x, y, z, R=4, N=128, REV=rev, arch=arch, num_warps=nw)
        q = x.flip(1) if rev else x
        c, m = q.cumsum(1).to(dt), q.cummax(1).values
        same(y, c.flip(1) if rev else c, "cumsum")
        same(z, m.flip(1) if rev else m, "scan")

    return f


case("cumsum/scan int32")(_scan(torch.int32, False, 2))
case("cumsum/scan fp32 reverse")(_scan(torch.float32, True, 4))
case("cumsum/scan int64")(_scan(torch.int64, False, 1))


@case("histogram, gather, flip")
def _(arch):
    N, NB = 128, 32
    x, i = (torch.randn(N, generator=seeded()), torch.randint(0, N, (N,), generator=seeded(1), dtype=torch.int32))
    h, g, f = torch.zeros(NB, dtype=torch.int32), torch.zeros(N), torch.zeros(N)
    emu.run_jit(misc, (1,), x, i, h, g, f, N=N, NB=NB, arch=arch, num_warps=2)
    same(h, torch.bincount(i % NB, minlength=NB), "histogram")
    same(g, x[i.long()], "gather")
    same(f, x.flip(0), "flip")


@case("while loops, data-dependent bounds")
def _(arch):
    lo = torch.tensor([0, 3, 3, 20, 21, 60], dtype=torch.int32)
    o = torch.zeros(5, 64, dtype=torch.int32)
    emu.run_jit(while_, (5,), lo, o, 5, B=64, arch=arch, num_warps=2)

    def col(v):
        c = 0
        while v > 1:
            v = v // 2 if v % 2 == 0 else 3 * v + 1
            c += 1
        return c

    L = lo.tolist()
    same(
        o,
        torch.tensor(
            [
                [
                    sum(range(L[p], L[p + 1])) * 1000 + col(j + 1 + p) * 10 + (L[p + 1] - L[p]).bit_length()
                    for j in range(64)
                ]
                for p in range(5)
            ]
        ),
    )


@CASES.everywhere
def test_case(arch, run):
    run(arch)
