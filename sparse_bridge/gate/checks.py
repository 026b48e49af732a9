"""What must hold of a compiled kernel on its target."""

from __future__ import annotations

from ..kernels.runtime.target import Target
from .compiling import Code
from .forms import Variant

__all__ = ["ACCEPTED", "expected_kinds", "expected_matrix", "problems", "product_of", "tolerated"]

_PRODUCTS = ("gather_gemm", "wgrad_gemm")
_CDNA = ("cdna2", "cdna3", "cdna4")
_LEAST_ROWS = 64  # rows of one warpgroup's product
_NVIDIA_REGISTERS = 255  # of a thread, at most
_BY_CHOICE = 64  # bytes
# (family, kernel, product or "" for all, BLOCK_M, BLOCK_N, BLOCK_K, warps): bytes. Tuned on an H200
# as they are; they spill where channels are ragged or offsets many.
ACCEPTED: dict[tuple[object, ...], int] = {
    ("hopper", "wgrad_gemm", "", 128, 128, 64, 4): 400,
    ("hopper", "wgrad_gemm", "", 32, 64, 64, 4): 160,
    ("hopper", "wgrad_gemm", "", 64, 64, 128, 4): 160,
    ("hopper", "wgrad_gemm", "", 128, 64, 64, 4): 64,
    ("hopper", "gather_gemm", "tf32x3", 64, 128, 64, 4): 64,
    ("hopper", "gather_gemm", "tf32x3", 128, 128, 16, 8): 16,
}


def product_of(variant: Variant) -> str | None:
    """fp16, bf16, fp32, tf32 or tf32x3 for a kernel that multiplies matrices, else None."""
    if variant.kernel not in _PRODUCTS:
        return None
    precision = variant.named["PRECISION"]
    return variant.types[0].lstrip("*") if precision == "ieee" else str(precision)


def expected_kinds(target: Target, product: str) -> tuple[str, ...]:
    """Kinds of matrix instructions that products of a dtype may use; () where the target has none,
    so that plain multiply-adds are right."""
    if target.backend == "hip":
        if target.family in _CDNA:
            return ("MFMA",)  # TF32 products are shipped only where xf32 exists
        return ("WMMA",) if product in ("fp16", "bf16") else ()
    if product == "fp32" or not target.has_matrix_units:
        return ()
    return ("MMA", "WGMMA", "TCGEN05")


def expected_matrix(variant: Variant, target: Target) -> tuple[str, ...]:
    """Of which kinds of matrix instructions a form must use one: halves in tiles that fill a
    warpgroup are held to its own instructions."""
    product = product_of(variant)
    kinds = () if product is None else expected_kinds(target, product)
    if "WGMMA" not in kinds or product in ("tf32", "tf32x3") or not _fills_a_warpgroup(variant):
        return kinds
    if target.family == "hopper":
        return ("WGMMA",)
    return ("TCGEN05",) if target.has_tensor_memory else ("MMA",)


def _fills_a_warpgroup(variant: Variant) -> bool:
    named, options = variant.named, dict(variant.options)
    return named["BLOCK_M"] >= _LEAST_ROWS and options["num_warps"] % 4 == 0


def tolerated(variant: Variant, target: Target, code: Code) -> int:
    """Bytes per thread that a form may spill.

    Below its limit ptxas puts a few registers on the stack by its own choice, outside loops, to run
    more warps. `ACCEPTED` names tiles that were measured on hardware with their spill.
    """
    named, warps = variant.named, dict(variant.options).get("num_warps")
    blocks = tuple(named.get(f"BLOCK_{side}") for side in "MNK")
    kinds = ("", product_of(variant))
    keys = [(target.family, variant.kernel, kind, *blocks, warps) for kind in kinds]
    accepted = max(ACCEPTED.get(key, 0) for key in keys)
    by_choice = target.backend == "cuda" and code.registers < _NVIDIA_REGISTERS
    return max(accepted, _BY_CHOICE if by_choice else 0)


def problems(variant: Variant, target: Target, code: Code) -> list[str]:
    """What is wrong with the code, one clause each; [] if it may ship."""
    found = []
    expected = expected_matrix(variant, target)
    if expected and code.matrix not in expected:
        got = code.instruction or "none"
        found.append(f"matrix instructions: {got}, expected {' or '.join(expected)}")
    if code.spilled > tolerated(variant, target, code):
        found.append(f"spills {code.spilled} bytes per thread")
    if code.shared > target.shared_memory:
        found.append(f"shared memory {code.shared} of {target.shared_memory} bytes")
    if code.warp_size != target.warp_size:
        found.append(f"compiled for {code.warp_size} lanes, the target has {target.warp_size}")
    return found
