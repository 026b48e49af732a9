"""One record per GPU generation: what its chips offer, and which tiles suit them.

A new generation is a new record in `GENERATIONS`, nothing else: device queries, the default tiles,
the tuner's candidates and the compile check all read it. Nothing here asks a device.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from ...errors import DeviceError
from ...names import meant
from .generation import Candidates, Chip, Generation, Limit, RegisterLimits

_CDNA_TILES = Candidates(
    gather_half=(
        (64, 64, 32, 4, 2),
        (64, 64, 64, 4, 2),
        (128, 64, 32, 4, 2),
        (128, 64, 64, 4, 2),
        (64, 128, 32, 4, 2),
        (128, 128, 32, 4, 2),
        (128, 128, 64, 8, 2),
    ),
    gather_single=(
        (64, 64, 16, 4, 2),
        (64, 64, 32, 4, 2),
        (128, 64, 16, 4, 2),
        (128, 64, 32, 4, 2),
        (128, 128, 16, 8, 2),
    ),
    wgrad_half=((64, 64, 32, 4, 2), (64, 64, 64, 4, 2), (128, 64, 32, 4, 2), (128, 128, 32, 8, 2)),
    wgrad_single=((64, 64, 16, 4, 2), (64, 64, 32, 4, 2), (32, 64, 32, 4, 2)),
    options_half=((("matrix_instr_nonkdim", 16), ("kpack", 2)), (("waves_per_eu", 2),)),
    options_single=((("matrix_instr_nonkdim", 16),), (("waves_per_eu", 2),)),
)
_CDNA4_TILES = dataclasses.replace(
    _CDNA_TILES,
    gather_half=(*_CDNA_TILES.gather_half, (128, 128, 128, 8, 2)),
    # Its matrix instructions are twice as deep, and it packs operands by itself.
    options_half=((("matrix_instr_nonkdim", 16),), (("waves_per_eu", 2),)),
)
_RDNA_TILES = Candidates(
    gather_half=(
        (64, 64, 32, 4, 2),
        (64, 64, 64, 4, 2),
        (128, 64, 32, 8, 2),
        (64, 128, 32, 8, 2),
        (128, 128, 32, 8, 2),
    ),
    gather_single=((64, 64, 16, 4, 2), (64, 64, 32, 8, 2), (128, 64, 16, 8, 2)),
    wgrad_half=((64, 64, 32, 4, 2), (64, 64, 64, 8, 2), (128, 64, 32, 8, 2)),
    wgrad_single=((64, 64, 16, 4, 2), (64, 64, 16, 8, 2), (32, 64, 32, 4, 2)),
    options_half=((("waves_per_eu", 2),),),
    options_single=((("waves_per_eu", 2),),),
)
_AMPERE_TILES = Candidates(
    gather_half=(
        (64, 64, 32, 4, 3),
        (64, 64, 64, 4, 3),
        (128, 64, 32, 4, 3),
        (128, 64, 64, 4, 2),
        (64, 128, 32, 4, 3),
        (128, 128, 32, 8, 3),
        (128, 128, 64, 8, 2),
    ),
    gather_single=((64, 64, 16, 4, 3), (64, 64, 32, 4, 2), (128, 64, 16, 4, 3), (128, 128, 16, 8, 2)),
    wgrad_half=((64, 64, 32, 4, 3), (64, 64, 64, 4, 2), (128, 64, 32, 4, 3), (128, 128, 32, 8, 2)),
    wgrad_single=((64, 64, 16, 4, 2), (32, 64, 32, 4, 2), (64, 64, 32, 8, 2)),
)
_HOPPER_TILES = Candidates(
    gather_half=(
        (64, 64, 64, 4, 3),
        (64, 128, 64, 4, 3),
        (128, 64, 64, 4, 3),
        (64, 128, 128, 4, 2),
        (128, 128, 64, 4, 4),
        (128, 128, 64, 8, 3),
        (128, 128, 128, 8, 2),
        (128, 256, 64, 8, 3),
        (64, 64, 64, 4, 7),
        (128, 64, 64, 4, 7),
        (64, 128, 128, 4, 7),
        (128, 128, 64, 4, 7),
    ),
    gather_single=(
        (64, 64, 16, 4, 3),
        (64, 64, 32, 4, 3),
        (64, 128, 32, 4, 2),
        (128, 64, 32, 4, 2),
        (128, 128, 16, 8, 2),
        (64, 64, 64, 4, 2),
        (64, 128, 64, 4, 3),
    ),
    wgrad_half=(
        (64, 64, 64, 4, 3),
        (64, 64, 32, 4, 4),
        (64, 64, 128, 4, 2),
        (64, 128, 64, 4, 3),
        (128, 128, 64, 8, 2),
        (128, 64, 64, 4, 2),
    ),
    wgrad_single=((64, 64, 16, 4, 3), (32, 64, 64, 4, 2), (64, 64, 32, 4, 2), (32, 128, 32, 4, 2)),
)

# RDNA's matrix instructions take their operands from registers, too.
_RDNA_LIMITS = RegisterLimits(Limit(16, 16, 2), Limit(64, 32, 3), Limit(32, 32, 2))
# Results such that a compute unit of 64 Ki registers holds two programs at least, by the registers
# of the compiled code. wgrad of 128 x 128 in 8 warps took 221 a thread (Triton 3.9, sm_89).
_AMPERE_LIMITS = RegisterLimits(
    Limit(32, 32, 2), Limit(64, 128, 3), Limit(32, 32, 3), Limit(32, 32, 2), Limit(32, 16, 2)
)
# Multiply-adds of halves take 206 to 241 registers a thread for 32 results (Triton 3.9, sm_75).
_TURING_LIMITS = RegisterLimits(Limit(16, 32, 2), Limit(16, 16, 2), Limit(16, 32, 2, side=64))

_AMD = Generation(
    "generic",
    "hip",
    ".*",
    other=Chip(64),
    tf32=False,
    small_pointers=True,
    options=frozenset({"matrix_instr_nonkdim", "kpack", "waves_per_eu"}),
)
_CDNA = dataclasses.replace(
    _AMD,
    warp_size=64,
    matrix=("MFMA",),
    matrix_types=("fp16", "bf16", "fp32", "tf32", "tf32x3"),
    limits=RegisterLimits(),
    candidates=_CDNA_TILES,
)
_RDNA = dataclasses.replace(
    _AMD, matrix=("WMMA",), matrix_types=("fp16", "bf16"), limits=_RDNA_LIMITS, candidates=_RDNA_TILES
)
_NVIDIA = Generation("generic", "cuda", r"sm_\d+", matrix=("MMA", "WGMMA", "TCGEN05"), deep_wgrad=True)
_AMPERE = dataclasses.replace(
    _NVIDIA,
    matrix=("MMA",),
    warpgroup="MMA",
    limits=_AMPERE_LIMITS,
    candidates=_AMPERE_TILES,
    least_rows=16,
    least_columns=16,
)
# WGMMA and MMA gave the same bits on an H100: fp16, bf16, TF32, all tiles.
_HOPPER = dataclasses.replace(_AMPERE, limits=RegisterLimits(), candidates=_HOPPER_TILES)

# Through Triton's XPU backend; not run by us.
_INTEL = Generation("generic", "xpu", ".*", other=Chip(64), tf32=False)

# Triton's interpreter keeps bf16 as bits, and `tl.dot` multiplies those bits as integers.
_INTERPRETER = Generation("generic", "interpreter", ".*", other=Chip(1024), bf16=False)

# In the order in which the compile check takes them; what nobody has listed comes last.
GENERATIONS: tuple[Generation, ...] = (
    dataclasses.replace(_CDNA, family="cdna2", names="gfx90a", chips={"gfx90a": Chip(64, "MI210, MI250")}),
    dataclasses.replace(_CDNA, family="cdna3", names="gfx94.", tf32=True, chips={"gfx942": Chip(64, "MI300X, MI325X")}),
    dataclasses.replace(
        _CDNA,
        family="cdna4",
        names="gfx95.",
        candidates=_CDNA4_TILES,
        direct_to_shared=True,
        chips={"gfx950": Chip(160, "MI350X, MI355X")},
    ),
    dataclasses.replace(
        _RDNA,
        family="rdna3",
        names="gfx11..",
        chips={"gfx1100": Chip(64, "RX 7900"), "gfx1151": Chip(64, "Ryzen AI Max (Strix Halo)")},
    ),
    dataclasses.replace(
        _RDNA,
        family="rdna4",
        names="gfx12..",
        chips={"gfx1201": Chip(64, "RX 9070")},
        limits=_RDNA_LIMITS._replace(gather=Limit(64, 32, 2)),  # three stages have hung there
    ),
    dataclasses.replace(
        _NVIDIA,
        family="turing",
        names="sm_7[5-9]",
        bf16=False,
        tf32=False,
        matrix=(),
        chips={"sm_75": Chip(64, "T4, RTX 20", unit_shared=64, unit_threads=1024)},
        limits=_TURING_LIMITS,
    ),
    dataclasses.replace(
        _AMPERE,
        family="ampere",
        names="sm_8[0-8]",
        norm_halves=True,
        chips={
            "sm_80": Chip(163, "A100", True, unit_shared=164, unit_threads=2048),
            "sm_86": Chip(99, "A10, RTX 30", unit_shared=100, unit_threads=1536),
            "sm_87": Chip(163, "Jetson Orin", unit_shared=164, unit_threads=1536),
        },
    ),
    dataclasses.replace(
        _AMPERE,
        family="ada",
        names="sm_89",
        chips={"sm_89": Chip(99, "L4, RTX 40", unit_shared=100, unit_threads=1536)},
    ),
    dataclasses.replace(
        _HOPPER,
        family="hopper",
        names=r"sm_9\d",
        matrix=("MMA", "WGMMA"),
        warpgroup="WGMMA",
        wide_turned=(128, 128, 64, 4, 7),
        queues_rows=True,
        tf32_reads_rows=True,
        norm_narrows_fp32=True,
        chips={"sm_90": Chip(227, "H100, H200", True, unit_shared=228, unit_threads=2048)},
    ),
    dataclasses.replace(  # data-centre parts
        _HOPPER,
        family="blackwell",
        names=r"sm_10\d",
        matrix=("MMA", "TCGEN05"),
        warpgroup="TCGEN05",
        tensor_memory=True,
        least_rows=64,
        least_columns=32,
        limits=_AMPERE_LIMITS._replace(gather=Limit(64, 32, 3), wgrad=Limit(32, 64, 3)),
        chips={
            "sm_100": Chip(227, "B200", True, unit_shared=228, unit_threads=2048),
            "sm_103": Chip(227, "B300", True, unit_shared=228, unit_threads=2048),
        },
    ),
    dataclasses.replace(
        _HOPPER,
        family="blackwell",
        names=r"sm_1[12]\d",
        limits=_AMPERE_LIMITS._replace(
            gather=Limit(64, 64, 3),
            wgrad=Limit(32, 32, 3, side=64),  # 64 x 128: 137 registers
        ),
        chips={
            "sm_120": Chip(99, "RTX 50", unit_shared=100, unit_threads=1536),
            "sm_121": Chip(99, "GB10 (DGX Spark)", unit_shared=100, unit_threads=1536),
            "sm_110": Chip(227),
        },
    ),
    dataclasses.replace(_NVIDIA, names=r"sm_\d\d", bf16=False, tf32=False, matrix=()),  # older
    _NVIDIA,
    dataclasses.replace(_AMD, names="gfx9..", warp_size=64),  # the gfx9 line alone has wide waves
    _AMD,
    _INTEL,
    _INTERPRETER,
)


def generation_of(backend: str, arch: str) -> Generation:
    """The record of an architecture: "sm_90", "gfx942"."""
    name = arch.partition(":")[0]  # AMD's may say which features are on
    matching = (
        generation
        for generation in GENERATIONS
        if generation.backend == backend and re.fullmatch(generation.names, name)
    )
    return next(matching, _INTERPRETER)


def compiled() -> dict[str, str]:
    """The architectures that the compile check compiles for, and GPUs that have them."""
    listed = (item for generation in GENERATIONS for item in generation.chips.items())
    return {arch: chip.gpus for arch, chip in listed if chip.gpus}


_SM = "70 72 75 80 86 87 88 89 90 100 101 103 110 120 121"
_GFX = (
    "900 902 904 906 908 909 90a 90c 940 941 942 950 1010 1011 1012 1013 1030 1031 1032 1033 1034 1035 1036 "
    "1100 1101 1102 1103 1150 1151 1152 1153 1200 1201 1250"
)
MADE = (*(f"sm_{name}" for name in _SM.split()), *(f"gfx{name}" for name in _GFX.split()))


def require_made(archs: Sequence[str]) -> None:
    """Raises DeviceError for architectures that no GPU has: compilers take minutes to say so, kernel by kernel."""
    for arch in archs:
        if arch not in MADE:
            names = ", ".join(compiled())
            raise DeviceError(f"architecture {arch!r} is that of no GPU; expected one like {names}.{meant(arch, MADE)}")
