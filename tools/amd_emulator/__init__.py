"""Triton kernels on emulated AMD GPUs: compiled for the HIP target, executed on CPU tensors.

Triton compiles for HIP without a GPU and without ROCm; the code object is executed instruction by
instruction. ALU instructions are C functions generated from AMD's pseudo-code (`pcode`, `forms`);
everything else is in core.c. Needs torch, triton, tinygrad (its tables; nothing of it runs) and a C
compiler.
"""

from .code_object import wave_size
from .isa import ARCH
from .launch import Kernel, cfg
from .native import cache_dir
from .structures import EmulatorError, MemoryFault, Unsupported, stats
from .triton_driver import Driver, last, lds_size, patch_triton, run_jit

__all__ = [
    "ARCH", "Driver", "EmulatorError", "Kernel", "MemoryFault", "Unsupported", "cache_dir", "cfg",
    "last", "lds_size", "patch_triton", "run_jit", "stats", "wave_size",
]  # fmt: skip
