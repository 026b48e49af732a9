"""What must hold of a compiled kernel on its target."""

from __future__ import annotations

from ...kernels.runtime.target import Target
from .compiling import Code
from .forms import Form

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
    ("hopper", "grouped_gemm", "fp32", 128, 128, 16, 4): 8,
}


def product_of(form: Form) -> str | None:
    """fp16, bf16, fp32, tf32 or tf32x3 for a kernel that multiplies matrices, else None."""
    precision = form.named.get("PRECISION")
    if precision is None:
        return None
    return form.types[0].lstrip("*") if precision in ("ieee", "half") else str(precision)


def expected_matrix(form: Form, target: Target) -> tuple[str, ...]:
    """Of which kinds of matrix instructions a form must use one: halves in tiles that fill a
    warpgroup are held to its own instructions."""
    product = product_of(form)
    if product is None:
        return ()
    of_warpgroup = target.generation.warpgroup
    kinds = target.generation.matrix_kinds(product)
    if product not in ("fp16", "bf16") or not of_warpgroup or not _fills_a_warpgroup(form):
        return kinds
    return (of_warpgroup,)


def _fills_a_warpgroup(form: Form) -> bool:
    named, options = form.named, dict(form.options)
    return named["BLOCK_M"] >= _LEAST_ROWS and options["num_warps"] % 4 == 0


def tolerated(form: Form, target: Target, code: Code) -> int:
    """Bytes per thread that a form may spill.

    Below its limit ptxas puts a few registers on the stack by its own choice, outside loops, to run
    more warps. `ACCEPTED` names tiles that were measured on hardware with their spill.
    """
    named, warps = form.named, dict(form.options).get("num_warps")
    blocks = tuple(named.get(f"BLOCK_{side}") for side in "MNK")
    kinds = ("", product_of(form))
    keys = [(target.family, form.kernel, product, *blocks, warps) for product in kinds]
    accepted = max(ACCEPTED.get(key, 0) for key in keys)
    by_choice = target.backend == "cuda" and code.registers < _NVIDIA_REGISTERS
    return max(accepted, _BY_CHOICE if by_choice else 0)


def problems(form: Form, target: Target, code: Code) -> list[str]:
    """What is wrong with the code, one clause each; [] if it may ship."""
    failures = []
    expected = expected_matrix(form, target)
    if expected and code.matrix not in expected:
        got = code.instruction or "none"
        failures.append(f"matrix instructions: {got}, expected {' or '.join(expected)}")
    if code.spilled > tolerated(form, target, code):
        failures.append(f"spills {code.spilled} bytes per thread")
    if code.shared > target.shared_memory:
        failures.append(f"shared memory {code.shared} of {target.shared_memory} bytes")
    if code.warp_size != target.warp_size:
        failures.append(f"compiled for {code.warp_size} lanes, the target has {target.warp_size}")
    if code.serialized:
        failures.append("wgmma runs one after another (ptxas C75..)")
    if target.backend == "hip" and code.wide_loops:
        failures.append("a loop between 64-bit bounds carries integers; Triton 3.8 and 3.9 fold their values")
    return failures
