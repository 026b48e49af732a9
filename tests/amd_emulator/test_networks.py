"""Kernels like the package's: gathered products, hash tables, attention, softmax; launches."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from .cases import Cases, close, same, seeded

emu = pytest.importorskip("amd_emulator")
pytestmark = pytest.mark.emulated
case = CASES = Cases()
f16, bf16, f32, f64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


@triton.jit
def spconv(
    x,
    w,
    nb,
    valid,
    y,
    N,
    CI,
    CO,
    V: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PREC: tl.constexpr,
):
    # y[r] = sum over v of x[nb[r, v]] @ w[v]; a block of rows visits the offsets in `valid` only
    pm = tl.program_id(0)
    r = pm * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    bits = tl.load(valid + pm)
    acc = tl.zeros((BM, BN), tl.float32)
    for v in range(V):
        if (bits >> v) & 1:
            i = tl.load(nb + r.to(tl.int64) * V + v, mask=r < N, other=-1)
            for c0 in range(0, CI, BK):
                k = c0 + tl.arange(0, BK)
                a = tl.load(
                    x + i.to(tl.int64)[:, None] * CI + k[None, :], mask=(i >= 0)[:, None] & (k < CI)[None, :], other=0.0
                )
                b = tl.load(
                    w + (v * CI + k)[:, None] * CO + n[None, :], mask=(k < CI)[:, None] & (n < CO)[None, :], other=0.0
                )
                acc = tl.dot(a, b, acc, input_precision=PREC)
    tl.store(
        y + r.to(tl.int64)[:, None] * CO + n[None, :],
        acc.to(y.dtype.element_ty),
        mask=(r < N)[:, None] & (n < CO)[None, :],
    )


@triton.jit
def _hash(k, cap):
    h = k.to(tl.uint64)
    h = (h ^ (h >> 33)) * 0xFF51AFD7ED558CCD
    h = (h ^ (h >> 33)) * 0xC4CEB9FE1A85EC53
    h = h ^ (h >> 33)
    return (h & (cap - 1).to(tl.uint64)).to(tl.int64)


@triton.jit
def hash_insert(
    keys, tk, tv, n, cap, EMPTY: tl.constexpr, B: tl.constexpr
):  # linear probing; tv keeps the smallest row of each key
    r = tl.program_id(0) * B + tl.arange(0, B)
    act = r < n
    k = tl.load(keys + r, mask=act, other=0)
    s = _hash(k, cap + tl.zeros((B,), tl.int64))
    left = tl.max(act.to(tl.int32), 0)
    while left > 0:
        # inactive lanes compare against a value never stored, so they change nothing
        old = tl.atomic_cas(tk + s, tl.where(act, EMPTY, EMPTY - 1).to(k.dtype), k)
        hit = act & ((old == EMPTY) | (old == k))
        tl.atomic_min(tv + s, r, mask=hit)
        act = act & ~hit
        s = (s + 1) & (cap - 1)
        left = tl.max(act.to(tl.int32), 0)


@triton.jit
def hash_lookup(keys, tk, tv, out, n, cap, EMPTY: tl.constexpr, B: tl.constexpr):
    r = tl.program_id(0) * B + tl.arange(0, B)
    act = r < n
    k = tl.load(keys + r, mask=act, other=0)
    s = _hash(k, cap + tl.zeros((B,), tl.int64))
    res = tl.full((B,), -1, tl.int32)
    left = tl.max(act.to(tl.int32), 0)
    while left > 0:
        t = tl.load(tk + s, mask=act, other=EMPTY)
        hit = act & (t == k)
        res = tl.where(hit, tl.load(tv + s, mask=hit, other=0), res)
        act = act & (t != k) & (t != EMPTY)
        s = (s + 1) & (cap - 1)
        left = tl.max(act.to(tl.int32), 0)
    tl.store(out + r, res, mask=r < n)


@triton.jit
def attention(q, k, v, o, S, scale, BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr):
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    d = tl.arange(0, D)
    Q = tl.load(q + m[:, None] * D + d[None, :], mask=(m < S)[:, None], other=0)
    mi = tl.full((BM,), -1e30, tl.float32)
    li = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, D), tl.float32)
    for s in range(0, S, BN):
        n = s + tl.arange(0, BN)
        K = tl.load(k + n[None, :] * D + d[:, None], mask=(n < S)[None, :], other=0)
        qk = tl.where((n < S)[None, :], tl.dot(Q, K) * scale, -1e30)
        mj = tl.maximum(mi, tl.max(qk, 1))
        p = tl.exp(qk - mj[:, None])
        al = tl.exp(mi - mj)
        V = tl.load(v + n[:, None] * D + d[None, :], mask=(n < S)[:, None], other=0)
        acc = acc * al[:, None] + tl.dot(p.to(V.dtype), V)
        li = li * al + tl.sum(p, 1)
        mi = mj
    tl.store(o + m[:, None] * D + d[None, :], (acc / li[:, None]).to(o.dtype.element_ty), mask=(m < S)[:, None])


@triton.jit
def softmax(x, y, N, B: tl.constexpr):
    p = tl.program_id(0)
    r = tl.arange(0, B)
    v = tl.load(x + p * N + r, mask=r < N, other=-float("inf")).to(tl.float32)
    e = tl.exp(v - tl.max(v, 0))
    tl.store(y + p * N + r, e / tl.sum(e, 0), mask=r < N)


@triton.autotune(
    [
        triton.Config(dict(BM=16, BN=16, BK=16), num_warps=1, num_stages=1),
        triton.Config(dict(BM=32, BN=32, BK=32), num_warps=2, num_stages=2),
    ],
    key=["M", "N", "K"],
)
@triton.jit
def matmul_tuned(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    acc = tl.zeros((BM, BN), tl.float32)
    for k0 in range(0, K, BK):
        acc += tl.dot(tl.load(a + m[:, None] * K + (k0 + k)[None, :]), tl.load(b + (k0 + k)[:, None] * N + n[None, :]))
    tl.store(c + m[:, None] * N + n[None, :], acc)


@triton.jit
def oob(x, y, B: tl.constexpr):
    tl.store(y + tl.arange(0, B), tl.load(x + tl.arange(0, B) + 1))


@case("softmax rows of 200, 4 warps")
def _(arch):
    x = torch.randn(6, 200, generator=seeded())
    y = torch.zeros_like(x)
    emu.run_jit(softmax, (6,), x, y, 200, B=256, arch=arch, num_warps=4)
    close(y, x.double().softmax(1), 1e-6)


@case("flash attention fp16")
def _(arch):
    S, D = 70, 32
    q, k, v = (torch.randn(S, D, generator=seeded(i)).half() for i in range(3))
    o = torch.zeros(S, D, dtype=f16)
    emu.run_jit(attention, (3,), q, k, v, o, S, D**-0.5, BM=32, BN=32, D=D, arch=arch, num_warps=2)
    close(o, ((q.double() @ k.double().T) * D**-0.5).softmax(1) @ v.double(), 2e-3)


def _spconv(dt, ns=2, nw=4, prec="ieee", bo=None, seed=None):
    def f(arch):
        N, CI, CO, V, BM = 130, 40, 24, 27, 32
        x, w = (
            torch.randn(N, CI, generator=seeded()).to(dt),
            (torch.randn(V, CI, CO, generator=seeded(1)) * 0.1).to(dt),
        )
        nb = torch.randint(0, N, (N, V), generator=seeded(2), dtype=torch.int32)
        nb[torch.rand(N, V, generator=seeded(3)) < 0.7] = -1
        nb[:32, 5:15] = -1
        hit = torch.cat([nb >= 0, torch.zeros(-N % BM, V, dtype=torch.bool)]).view(-1, BM, V).any(1)
        valid = (hit.long() << torch.arange(V)).sum(1).int()
        y = torch.full((N, CO), float("nan"), dtype=dt)
        emu.cfg.seed = seed
        try:
            emu.run_jit(
                spconv,
                (triton.cdiv(N, BM), triton.cdiv(CO, 32)),
                x,
                w,
                nb,
                valid,
                y,
                N,
                CI,
                CO,
                V=V,
                BM=BM,
                BN=32,
                BK=32,
                PREC=prec,
                arch=arch,
                num_warps=nw,
                num_stages=ns,
                buffer_ops=bo,
            )
        finally:
            emu.cfg.seed = None
        ref = torch.zeros(N, CO, dtype=f64)
        for t in range(V):
            m = nb[:, t] >= 0
            ref[m] += x[nb[m, t].long()].double() @ w[t].double()
        close(y, ref, {f16: 2e-3, bf16: 1.5e-2, f32: 4e-3 if prec == "tf32" else 1e-5}[dt])

    return f


case("masked implicit GEMM fp16")(_spconv(f16))
case("masked implicit GEMM bf16")(_spconv(bf16, 3, 2))
case("masked implicit GEMM fp32, shuffled schedule")(_spconv(f32, 1, 2, seed=1))
case("masked implicit GEMM fp16, buffer ops off")(_spconv(f16, bo=False))


def _hashtab(dt, seed=None, bo=None):
    def f(arch):
        n, cap = 400, 1024
        keys = torch.randint(
            -(2**31) + 9 if dt == torch.int32 else -(2**62),
            2**31 - 1 if dt == torch.int32 else 2**62,
            (250,),
            generator=seeded(),
        ).to(dt)
        keys = keys[torch.randint(0, 250, (n,), generator=seeded(1))]
        tk = torch.full((cap,), -1, dtype=dt)
        tv = torch.full((cap,), 2**31 - 1, dtype=torch.int32)
        emu.cfg.seed = seed
        try:
            emu.run_jit(
                hash_insert,
                (triton.cdiv(n, 2 * emu.wave_size(arch)),),
                keys,
                tk,
                tv,
                n,
                cap,
                EMPTY=-1,
                B=2 * emu.wave_size(arch),
                arch=arch,
                num_warps=2,
                buffer_ops=bo,
            )
            q = torch.cat([keys, keys + 12345])
            out = torch.full((2 * n,), -9, dtype=torch.int32)
            emu.run_jit(
                hash_lookup, (7,), q, tk, tv, out, 2 * n, cap, EMPTY=-1, B=128, arch=arch, num_warps=2, buffer_ops=bo
            )
        finally:
            emu.cfg.seed = None
        first = {}
        for i, k in enumerate(keys.tolist()):
            first.setdefault(k, i)
        same(out, torch.tensor([first.get(k, -1) for k in q.tolist()]))
        assert int((tk != -1).sum()) == len(first)

    return f


case("hash insert+lookup int64")(_hashtab(torch.int64))
case("hash insert+lookup int32")(_hashtab(torch.int32))
case("hash int64, shuffled schedule")(_hashtab(torch.int64, 7))
case("hash int64, buffer ops off")(_hashtab(torch.int64, None, False))


@case("patch_triton: plain and autotuned launches")
def _(arch):
    a, b = (torch.randn(64, 64, generator=seeded()).half(), torch.randn(64, 64, generator=seeded(1)).half())
    ref = a.double() @ b.double()
    for cf in (0, 1, lambda cs: cs[-1], None):
        c = torch.zeros(64, 64)
        with emu.patch_triton(arch, config=cf):
            matmul_tuned[lambda m: (triton.cdiv(64, m["BM"]), triton.cdiv(64, m["BN"]))](a, b, c, 64, 64, 64)
        close(c, ref, 1e-5, f"config {cf}")
        matmul_tuned.cache.clear()
    with emu.patch_triton(arch, fake_cuda=True):
        x = torch.randn(6, 200)
        assert x.is_cuda and torch.cuda.is_available()
        y = torch.zeros_like(x)
        softmax[(6,)](x, y, 200, B=256)
        close(y, x.double().softmax(1), 1e-6)
    assert not x.is_cuda


@case("out-of-bounds access is reported")
def _(arch):
    for bo in (True, False):
        x, y = torch.zeros(64), torch.zeros(64)
        try:
            emu.run_jit(oob, (1,), x, y, B=64, arch=arch, num_warps=1, buffer_ops=bo)
        except emu.MemoryFault as e:
            assert "argument x +" in str(e), e
        else:
            raise AssertionError("no fault")


@CASES.everywhere
def test_case(arch, run):
    run(arch)
