"""How many programs of a compiled kernel an NVIDIA compute unit holds at a time.

Limits: CUDA C++ Programming Guide, technical specifications per compute capability.
"""

from __future__ import annotations

from ...kernels.runtime.target import Target
from .compiling import Code

_REGISTERS = 64 << 10  # of a unit, from compute capability 7.0 to 12.1
_PER_WARP = 256  # registers are handed out in such portions
_RESERVED = 1 << 10  # bytes of shared memory that the system keeps per program, from 8.0 on
_MOST = 16  # programs; some units hold more


def resident(target: Target, code: Code, warps: int) -> int | None:
    """Programs of `warps` warps; None where the record does not say what a unit has."""
    chip = target.generation.chip(target.arch)
    if target.backend != "cuda" or not chip.unit_threads:
        return None
    per_warp = -(-code.registers * target.warp_size // _PER_WARP) * _PER_WARP
    reserved = _RESERVED if target.capability >= 80 else 0
    shared = max(code.shared + reserved, 1)
    return min(
        _REGISTERS // (per_warp * warps),
        (chip.unit_shared << 10) // shared,
        chip.unit_threads // (warps * target.warp_size),
        _MOST,
    )
