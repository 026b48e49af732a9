"""Triton kernels on emulated AMD GPUs: compiled for the HIP target, executed on CPU tensors.

Triton compiles for HIP without a GPU and without ROCm; the code object is executed instruction by
instruction. ALU instructions are C functions generated from AMD's pseudo-code (`pcode`, `forms`);
everything else is in core.c. Needs torch, triton, tinygrad (its tables; nothing of it runs) and a C
compiler.
"""

import importlib.metadata

if tuple(map(int, importlib.metadata.version("triton").split(".")[:2])) < (3, 5):
    raise ModuleNotFoundError("amd_emulator needs Triton 3.5, which brings a linker for AMD's code")

from .code_object import wave_size
from .isa import ARCH
from .launch import Kernel, cfg
from .native import cache_dir
from .structures import EmulatorError, MemoryFault, Unsupported, stats
from .triton_driver import Driver, last, lds_size, patch_triton, run_jit

__all__ = [
    "ARCH",
    "Driver",
    "EmulatorError",
    "Kernel",
    "MemoryFault",
    "Unsupported",
    "cache_dir",
    "cfg",
    "last",
    "lds_size",
    "patch_triton",
    "run_jit",
    "stats",
    "wave_size",
]
