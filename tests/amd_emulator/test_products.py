"""Matrix products: every dtype, tile, number of warps and stages; spills; batches."""

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
def matmul(
    a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PREC: tl.constexpr, ACC: tl.constexpr
):
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    acc = tl.zeros((BM, BN), ACC)
    for k0 in range(0, K, BK):
        A = tl.load(a + m[:, None] * K + (k0 + k)[None, :], mask=(m < M)[:, None] & (k0 + k < K)[None, :], other=0.0)
        B = tl.load(b + (k0 + k)[:, None] * N + n[None, :], mask=(k0 + k < K)[:, None] & (n < N)[None, :], other=0.0)
        acc = tl.dot(A, B, acc, input_precision=PREC, out_dtype=ACC)
    tl.store(c + m[:, None] * N + n[None, :], acc, mask=(m < M)[:, None] & (n < N)[None, :])


@triton.jit
def bmm(a, b, c, B: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):  # 3-D dot, A stored transposed
    i = tl.arange(0, B)[:, None, None]
    m = tl.arange(0, M)
    n = tl.arange(0, N)
    k = tl.arange(0, K)
    A = tl.load(a + i * M * K + k[None, :, None] * M + m[None, None, :])
    Bv = tl.load(b + i * K * N + k[None, :, None] * N + n[None, None, :])
    tl.store(c + i * M * N + m[None, :, None] * N + n[None, None, :], tl.dot(tl.permute(A, (0, 2, 1)), Bv))


@triton.jit
def blockptr(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    pa = tl.make_block_ptr(a, (M, K), (K, 1), (tl.program_id(0) * BM, 0), (BM, BK), (1, 0))
    pb = tl.make_block_ptr(b, (K, N), (N, 1), (0, tl.program_id(1) * BN), (BK, BN), (1, 0))
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        acc = tl.dot(tl.load(pa, boundary_check=(0, 1)), tl.load(pb, boundary_check=(0, 1)), acc)
        pa = tl.advance(pa, (0, BK))
        pb = tl.advance(pb, (BK, 0))
    tl.store(
        tl.make_block_ptr(c, (M, N), (N, 1), (tl.program_id(0) * BM, tl.program_id(1) * BN), (BM, BN), (1, 0)),
        acc,
        boundary_check=(0, 1),
    )


def _mm(dt, prec="ieee", M=50, N=40, K=72, BM=32, BN=32, BK=32, nw=2, ns=2, acc=tl.float32, **kw):
    def f(arch):
        if dt == torch.int8:
            a, b = (torch.randint(-128, 128, s, generator=seeded(), dtype=torch.int8) for s in ((M, K), (K, N)))
            ref = a.int() @ b.int()
            out = torch.full((M, N), -7, dtype=torch.int32)
        else:
            a, b = torch.randn(M, K, generator=seeded(1)), torch.randn(K, N, generator=seeded(2))
            if dt in (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz):
                a, b = a / 4, b / 4
            a, b = a.to(dt), b.to(dt)
            ref = a.double() @ b.double()
            out = torch.full(
                (M, N),
                float("nan"),
                dtype={tl.float16: torch.float16, tl.float64: torch.float64}.get(acc, torch.float32),
            )
        c = emu.run_jit(
            matmul,
            (triton.cdiv(M, BM), triton.cdiv(N, BN)),
            a,
            b,
            out,
            M,
            N,
            K,
            BM=BM,
            BN=BN,
            BK=BK,
            PREC=prec,
            ACC=acc,
            arch=arch,
            num_warps=nw,
            num_stages=ns,
            **kw,
        )
        if dt == torch.int8:
            same(out, ref)
        else:
            close(
                out,
                ref,
                1e-2
                if prec == "tf32" or acc == tl.float16
                else 3e-4
                if "bf16" in prec
                else 1e-5
                if acc == tl.float64
                else 2e-5,
            )
        if BN >= 16 and dt in (f16, bf16):
            assert "v_mfma" in c.asm["amdgcn"] or "v_wmma" in c.asm["amdgcn"]

    return f


for n, dt in (("fp16", torch.float16), ("bf16", torch.bfloat16), ("fp32", torch.float32)):
    case(f"dot {n}")(_mm(dt))
    case(f"dot {n} 64x64x64 4 warps")(_mm(dt, M=64, N=64, K=128, BM=64, BN=64, BK=64, nw=4))


for ns in (1, 2, 3):
    case(f"dot fp16 num_stages={ns}")(_mm(torch.float16, K=150, ns=ns, nw=4))
    case(f"dot fp32 num_stages={ns}")(_mm(torch.float32, K=100, ns=ns, nw=1))


case("dot fp16 1 warp 16x16x16")(_mm(torch.float16, BM=16, BN=16, BK=16, nw=1))
case("dot bf16 8 warps")(_mm(torch.bfloat16, M=128, N=64, BM=128, BN=64, nw=8))
case("dot fp16 nonkdim 32", ["gfx90a", "gfx942", "gfx950"])(
    _mm(torch.float16, BM=64, BN=64, nw=2, matrix_instr_nonkdim=32)
)
case("dot fp16 nonkdim 16", ["gfx90a", "gfx942", "gfx950"])(
    _mm(torch.float16, BM=64, BN=64, nw=2, matrix_instr_nonkdim=16)
)
case("dot bf16 nonkdim 32", ["gfx90a", "gfx942", "gfx950"])(
    _mm(torch.bfloat16, BM=64, BN=64, nw=4, matrix_instr_nonkdim=32)
)
case("dot bf16 nonkdim 16", ["gfx90a", "gfx942", "gfx950"])(
    _mm(torch.bfloat16, BM=64, BN=64, nw=4, matrix_instr_nonkdim=16)
)
case("dot fp32 nonkdim 32", ["gfx90a", "gfx942", "gfx950"])(
    _mm(torch.float32, BM=64, BN=64, nw=2, matrix_instr_nonkdim=32)
)
case("dot fp16 kpack 2", ["gfx90a", "gfx942"])(_mm(torch.float16, BM=64, BN=64, nw=2, kpack=2))
case("dot fp32 tf32 (xf32)", ["gfx942"])(_mm(torch.float32, "tf32"))
case("dot fp32 tf32 (xf32) nonkdim 16", ["gfx942"])(_mm(torch.float32, "tf32", matrix_instr_nonkdim=16))
case("dot fp32 nonkdim 16", ["gfx90a", "gfx942", "gfx950"])(_mm(torch.float32, matrix_instr_nonkdim=16))
case("dot fp32 bf16x3")(_mm(torch.float32, "bf16x3"))
case("dot fp16 small (16x8x16)")(_mm(torch.float16, BM=16, BN=8, BK=16, nw=1))
case("dot int8")(_mm(torch.int8, acc=tl.int32))
case("dot fp64")(_mm(torch.float64, acc=tl.float64, M=20, N=20, K=20, BM=16, BN=16, BK=16))
case("dot fp16 acc fp16")(_mm(torch.float16, acc=tl.float16, K=32))
case("dot fp8 e4m3", ["gfx950", "gfx1200", "gfx1201"])(_mm(torch.float8_e4m3fn))
case("dot fp8 e5m2", ["gfx950", "gfx1200", "gfx1201"])(_mm(torch.float8_e5m2))
case("dot fp8 e4m3fnuz", ["gfx942"])(_mm(torch.float8_e4m3fnuz))
case("dot fp16 buffer ops off")(_mm(torch.float16, buffer_ops=False))
case("dot fp16 buffer ops on")(_mm(torch.float16, buffer_ops=True))
case("dot fp16 async copy", ["gfx950"])(lambda arch: _async(arch))


def _async(arch):
    triton.knobs.amd.use_async_copy = True
    try:
        return _mm(torch.float16, M=64, N=64, K=128, BM=64, BN=64, BK=64, nw=4, matrix_instr_nonkdim=16)(arch)
    finally:
        triton.knobs.amd.use_async_copy = False


case("dot fp16 128x128x32, 8 warps, 3 stages")(
    _mm(torch.float16, M=128, N=128, K=128, BM=128, BN=128, BK=32, nw=8, ns=3)
)
case("dot fp16 128x128, 1 warp (spills)")(_mm(torch.float16, M=128, N=128, K=64, BM=128, BN=128, BK=32, nw=1))
case("dot fp32 128x128, 1 warp (spills)")(_mm(torch.float32, M=128, N=128, K=32, BM=128, BN=128, BK=16, nw=1))


@case("dot batched 3-D, transposed A")
def _(arch):
    B, M, N, K = 4, 32, 32, 32
    a, b = (torch.randn(B, K, M, generator=seeded()).half(), torch.randn(B, K, N, generator=seeded(1)).half())
    c = torch.zeros(B, M, N)
    emu.run_jit(bmm, (1,), a, b, c, B=B, M=M, N=N, K=K, arch=arch, num_warps=4)
    close(c, a.double().transpose(1, 2) @ b.double(), 2e-5)


@case(
    "dot with block pointers", None if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9) else ["none"]
)  # removed in Triton 3.9
def _(arch):
    M, N, K = 50, 40, 72
    a, b = (torch.randn(M, K, generator=seeded()).half(), torch.randn(K, N, generator=seeded(1)).half())
    c = torch.zeros(M, N)
    emu.run_jit(blockptr, (2, 2), a, b, c, M, N, K, BM=32, BN=32, BK=32, arch=arch)
    close(c, a.double() @ b.double(), 2e-5)


@CASES.everywhere
def test_case(arch, run):
    run(arch)
