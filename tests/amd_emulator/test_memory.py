"""Memory: transposes through LDS, atomics, compare-and-swap, masked accesses."""

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
def transpose(x, y, M, N, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    j = tl.program_id(1) * B + tl.arange(0, B)
    v = tl.load(x + i[:, None].to(tl.int64) * N + j[None, :], mask=(i < M)[:, None] & (j < N)[None, :], other=0)
    tl.store(y + j[:, None].to(tl.int64) * M + i[None, :], tl.trans(v), mask=(j < N)[:, None] & (i < M)[None, :])


@triton.jit
def atomics(idx, val, oadd, omax, omin, oxor, oand, oor, oret, n, B: tl.constexpr):
    r = tl.program_id(0) * B + tl.arange(0, B)
    m = r < n
    i = tl.load(idx + r, mask=m, other=0)
    v = tl.load(val + r, mask=m, other=0)
    tl.atomic_add(oadd + i, v, mask=m)
    tl.atomic_max(omax + i, v, mask=m)
    tl.atomic_min(omin + i, v, mask=m)
    tl.atomic_xor(oxor + i, v, mask=m)
    tl.atomic_and(oand + i, v, mask=m)
    tl.atomic_or(oor + i, v, mask=m)
    old = tl.atomic_add(oret + i * 0, v * 0 + 1, mask=m)
    tl.store(oret + 1 + r, old, mask=m)


@triton.jit
def atomic_max_xchg(idx, val, o, n, X: tl.constexpr, B: tl.constexpr):
    r = tl.program_id(0) * B + tl.arange(0, B)
    m = r < n
    i = tl.load(idx + r, mask=m, other=0)
    v = tl.load(val + r, mask=m, other=0)
    if X:
        tl.atomic_xchg(o + i, v, mask=m)
    else:
        tl.atomic_max(o + i, v, mask=m)


@triton.jit
def cas_tensor(o, w, B: tl.constexpr):
    r = tl.arange(0, B)
    tl.store(w + r, tl.atomic_cas(o + r, r.to(w.dtype.element_ty) % 2, r.to(w.dtype.element_ty) + 10))


@triton.jit
def atomic_f(idx, val, out, mx, n, B: tl.constexpr):
    r = tl.program_id(0) * B + tl.arange(0, B)
    m = r < n
    i = tl.load(idx + r, mask=m, other=0)
    v = tl.load(val + r, mask=m, other=0)
    tl.atomic_add(out + i, v, mask=m)
    if mx is not None:
        tl.atomic_max(mx + i, v, mask=m)


@triton.jit
def atomic_scalar(cnt, lst, n):
    p = tl.program_id(0)
    if p % 3 != 0:
        k = tl.atomic_add(cnt, 1)
        tl.store(lst + k, p)


@triton.jit
def casloop(out, tries, n, B: tl.constexpr):  # scalar compare-and-swap increments
    for i in range(B):
        old = tl.load(out, volatile=True)
        done = tl.atomic_cas(out, old, old + 1)
        while done != old:
            old = done
            done = tl.atomic_cas(out, old, old + 1)


@triton.jit
def copy64(x, o, y, n, off, B: tl.constexpr):
    r = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    m = r < n
    k = tl.load(o + r, mask=m, other=0)
    v = tl.load(x + k + off, mask=m & (k >= 0), other=3)
    tl.store(y + r, v, mask=m & (r % 5 != 2))


def _transpose(dt, nw):
    def f(arch):
        x = (torch.randn(70, 45, generator=seeded()) * 50).to(dt)
        y = torch.zeros(45, 70, dtype=dt)
        emu.run_jit(transpose, (3, 2), x, y, 70, 45, B=32, arch=arch, num_warps=nw)
        same(y, x.T)

    return f


for n in ("float16", "float32", "int8", "int64"):
    case(f"transpose through LDS {n}")(_transpose(getattr(torch, n), 4))


def _atomics(dt, bo=None):
    def f(arch):
        n, k = 300, 37
        idx = torch.randint(0, k, (n,), generator=seeded())
        lim = 1 << (31 if dt == torch.int32 else 62)
        val = torch.randint(0, lim, (n,), generator=seeded(1)).to(dt)  # negative values: see the Triton bug below
        o = dict(
            oadd=torch.zeros(k, dtype=dt),
            omax=torch.full((k,), -lim, dtype=dt),
            omin=torch.full((k,), lim - 1, dtype=dt),
            oxor=torch.zeros(k, dtype=dt),
            oand=torch.full((k,), -1, dtype=dt),
            oor=torch.zeros(k, dtype=dt),
            oret=torch.zeros(n + 1, dtype=dt),
        )
        emu.run_jit(atomics, (3,), idx, val, *o.values(), n, B=128, arch=arch, num_warps=2, buffer_ops=bo)
        R = {q: o[q].clone() for q in o}
        R["oadd"] = torch.zeros(k, dtype=dt).index_add_(0, idx, val)
        R["omax"] = torch.full((k,), -lim, dtype=dt).scatter_reduce_(0, idx, val, "amax")
        R["omin"] = torch.full((k,), lim - 1, dtype=dt).scatter_reduce_(0, idx, val, "amin")
        for i in range(k):
            v = val[idx == i].tolist()
            x, a, b = 0, -1, 0
            for q in v:
                x ^= q
                a &= q
                b |= q
            R["oxor"][i], R["oand"][i], R["oor"][i] = x, a, b
        for q in o:
            same(o[q], R[q], q)
        assert o["oret"][0] == n
        same(o["oret"][1:].sort().values, torch.arange(n), "returned values")

    return f


case("atomics int32")(_atomics(torch.int32))
case("atomics int64")(_atomics(torch.int64))
case("atomics int32, buffer ops off")(_atomics(torch.int32, False))
case("atomics int64, buffer ops off")(_atomics(torch.int64, False))


def _maxneg(dt, bo):
    def f(arch):
        n, k = 300, 37
        idx = torch.randint(0, k, (n,), generator=seeded())
        val = torch.randint(-1000, 1000, (n,), generator=seeded(1)).to(dt)
        o = torch.full((k,), -5000, dtype=dt)
        emu.run_jit(atomic_max_xchg, (3,), idx, val, o, n, X=False, B=128, arch=arch, num_warps=2, buffer_ops=bo)
        try:
            same(o, torch.full((k,), -5000, dtype=dt).scatter_reduce_(0, idx, val, "amax"))
        except AssertionError as e:
            if emu.ARCH[arch] == "cdna":
                pytest.xfail(f"signed atomic_max reduced in the wave with an unsigned max: {e}")
            raise

    return f


case("atomic_max of negative int32, buffer ops off")(_maxneg(torch.int32, False))
case("atomic_max of negative int32, buffer ops on")(_maxneg(torch.int32, True))
case("atomic_max of negative int64")(_maxneg(torch.int64, None))


def _xchg(bo):
    def f(arch):
        n, k = 300, 37
        idx = torch.randint(0, k, (n,), generator=seeded())
        val = torch.arange(1, n + 1, dtype=torch.int32)
        o = torch.zeros(k, dtype=torch.int32)
        try:
            emu.run_jit(atomic_max_xchg, (3,), idx, val, o, n, X=True, B=128, arch=arch, num_warps=2, buffer_ops=bo)
        except RuntimeError as e:
            if bo and "translate" in str(e):
                pytest.xfail("atomic_xchg does not compile as a buffer operation")
            raise
        for i in range(k):
            v = val[idx == i].tolist()
            assert o[i].item() in (v or [0]), i

    return f


case("atomic_xchg, buffer ops off")(_xchg(False))
case("atomic_xchg, buffer ops on")(_xchg(True))


def _cas(dt, bo, per):
    def f(arch):
        B = emu.wave_size(arch) * 2 * per
        o = torch.arange(B).to(dt) % 3
        p = o.clone()
        w = torch.zeros(B, dtype=dt)
        try:
            emu.run_jit(cas_tensor, (1,), o, w, B=B, arch=arch, num_warps=2, buffer_ops=bo)
        except RuntimeError as e:
            if per > 1 and not bo and "PassManager" in str(e):
                pytest.xfail("tensor atomic_cas with more than one element per thread does not compile")
            raise
        r = torch.arange(B)
        same(w, p, "returned")
        same(o, torch.where(p == r % 2, r.to(dt) + 10, p), "memory")

    return f


for n, dt in (("int32", torch.int32), ("int64", torch.int64)):
    case(f"atomic_cas tensor {n}, buffer ops on")(_cas(dt, True, 2))
    case(f"atomic_cas tensor {n}, buffer ops off")(_cas(dt, False, 1))
    case(f"atomic_cas tensor {n}, off, 2/thread")(_cas(dt, False, 2))


def _atomic_f(dt, mx, bo=None):
    def f(arch):
        n, k = 300, 37
        idx = torch.randint(0, k, (n,), generator=seeded())
        val = torch.randint(-8, 8, (n,), generator=seeded(1)).to(dt)
        out = torch.zeros(k, dtype=dt)
        m = torch.full((k,), -100.0, dtype=dt) if mx else None
        emu.run_jit(atomic_f, (3,), idx, val, out, m, n, B=128, arch=arch, num_warps=2, buffer_ops=bo)
        same(out, torch.zeros(k).double().index_add_(0, idx, val.double()))
        if mx:
            same(m, torch.full((k,), -100.0, dtype=dt).scatter_reduce_(0, idx, val, "amax"), "max")

    return f


case("atomic_add/max fp32")(_atomic_f(torch.float32, True))
case("atomic_add fp32, buffer ops off")(_atomic_f(torch.float32, False, False))
case("atomic_add fp16")(_atomic_f(torch.float16, False))
case("atomic_add fp64")(_atomic_f(torch.float64, False))
case("atomic_add bf16")(_atomic_f(torch.bfloat16, False))


@case("atomic_add scalar counter")
def _(arch):
    c, rows = torch.zeros(1, dtype=torch.int32), torch.full((20,), -1, dtype=torch.int32)
    emu.run_jit(atomic_scalar, (20,), c, rows, 20, arch=arch)
    w = [i for i in range(20) if i % 3]
    assert c.item() == len(w)
    same(rows[: len(w)].sort().values, torch.tensor(w))


@case("atomic_cas scalar loop int32/int64")
def _(arch):
    for dt in (torch.int32, torch.int64):
        o = torch.zeros(1, dtype=dt)
        emu.run_jit(casloop, (6,), o, o, 1, B=7, arch=arch, num_warps=2)
        assert o.item() == 42, o


def _copy(dt):
    def f(arch):
        n = 500
        x = (torch.randn(600, generator=seeded()) * 60).to(dt)
        o = torch.randint(-50, 400, (n,), generator=seeded(2))
        y = torch.zeros(n, dtype=dt)
        emu.run_jit(copy64, (4,), x, o, y, n, 200, B=128, arch=arch, num_warps=2)
        r = torch.arange(n)
        same(
            y,
            torch.where(
                r % 5 != 2,
                torch.where(o >= 0, x[(o + 200).clamp(0, 599)], torch.tensor(3, dtype=dt)),
                torch.tensor(0, dtype=dt),
            ),
        )

    return f


for n in ("int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"):
    case(f"masked load/store int64 offsets {n}")(_copy(getattr(torch, n)))


@CASES.everywhere
def test_case(arch, run):
    run(arch)
