"""What a record of a GPU generation holds; the records are in `architectures`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

Shape = tuple[int, int, int, int, int]  # block_m, block_n, block_k, num_warps, num_stages
Options = tuple[tuple[str, int], ...]


class Chip(NamedTuple):
    """One architecture of a generation.

    shared_memory: KiB that one workgroup may take; a driver's answer is preferred.  gpus: products
    that have it; the compile check compiles for architectures that name some.  splits_fp32: an fp32
    product is faster as three of TF32 (an operand's leading bits and what is left of it) than by
    multiply-adds.  unit_shared, unit_threads: KiB of shared memory and threads of a compute unit,
    which workgroups share; 0: not tabulated.
    """

    shared_memory: int
    gpus: str = ""
    splits_fp32: bool = False
    unit_shared: int = 0
    unit_threads: int = 0


class Limit(NamedTuple):
    """What keeps a product in registers: block_k, results per thread, stages, and block_m and
    block_n, at most."""

    depth: int
    results: int
    stages: int
    side: int = 256


class RegisterLimits(NamedTuple):
    """By kind of product; None: the tiles as they are chosen stay in registers."""

    plain: Limit | None = None  # without matrix instructions
    gather: Limit | None = None  # of halves; None without matrix instructions: as `plain`
    wgrad: Limit | None = None
    tf32: Limit | None = None
    split: Limit | None = None  # of fp32 as three of TF32


@dataclasses.dataclass(frozen=True)
class Candidates:
    """Shapes that the tuner times.

    gather: rows x output channels x input channels, warps, stages.  wgrad: input channels x output
    channels x pairs, warps, stages.  half: fp16 and bf16; single: fp32.  options: compile options
    that are tried beside the plain ones, on the largest tile.
    """

    gather_half: tuple[Shape, ...]
    gather_single: tuple[Shape, ...]
    wgrad_half: tuple[Shape, ...]
    wgrad_single: tuple[Shape, ...]
    options_half: tuple[Options, ...] = ()
    options_single: tuple[Options, ...] = ()


# Fits every GPU: small tiles, two stages.
_SAFE_TILES = Candidates(
    gather_half=((64, 64, 32, 4, 2), (128, 64, 32, 4, 2), (64, 128, 32, 4, 2)),
    gather_single=((64, 64, 16, 4, 2), (128, 32, 16, 4, 2), (64, 32, 32, 4, 2)),
    wgrad_half=((64, 64, 32, 4, 2), (32, 64, 64, 4, 2)),
    wgrad_single=((64, 64, 16, 4, 2), (32, 32, 32, 4, 2)),
)
# Without matrix instructions a whole block_k of both operands lies in registers.
_SMALL = RegisterLimits(Limit(16, 32, 2))
_UNKNOWN_CHIP = Chip(48)


@dataclasses.dataclass(frozen=True, eq=False)
class Generation:
    """GPUs that the same tiles suit.

    family: name in reports and in the table of accepted spills.  names: regular expression
    of its architectures; the first record that matches counts.  chips: by architecture; `other` is
    one that nobody has listed.  warp_size: lanes of a warp (wave).

    bf16: kernels multiply bf16.  tf32: products of fp32 may round their inputs to TF32 (AMD: xf32).
    matrix: kinds of matrix instructions, none where Triton leaves them idle.  matrix_types: of
    which products.  warpgroup: the kind that halves in tiles of a whole warpgroup must use.

    least_rows, least_columns: of the smallest tiles whose products take the matrix instructions of
    larger ones, or others that were seen to give their bits.

    limits: what keeps tiles in registers.  candidates: tiles for the tuner.  wide, wide_turned: the
    first choice for wide channels, by where the weight's channels lie ("oi", "io").  queues_rows:
    gather-GEMMs of halves keep the rows of several steps under way.  deep_wgrad: wgrad takes deeper
    blocks where shared memory allows.

    small_pointers: tensors within 2 GiB are addressed through 32-bit byte offsets, which is part of
    a kernel's specialisation (HIP).  options: names of extra compile options.  tensor_memory:
    products add up in memory of which a thread reads whole rows (tcgen05).  direct_to_shared: loads
    go straight to shared memory, into two buffers (Triton 3.7 and newer), with padding.
    tf32_reads_rows: TF32's second operand is read only with its input channels side by side.
    norm_halves: a norm behind 64-bit offsets leaves half the registers.  norm_narrows_fp32: a norm
    behind IEEE fp32 leaves fewer.
    """

    family: str
    backend: str
    names: str
    chips: Mapping[str, Chip] = dataclasses.field(default_factory=dict)
    other: Chip = _UNKNOWN_CHIP
    warp_size: int = 32
    bf16: bool = True
    tf32: bool = True
    matrix: tuple[str, ...] = ()
    matrix_types: tuple[str, ...] = ("fp16", "bf16", "tf32", "tf32x3")
    warpgroup: str = ""
    limits: RegisterLimits = _SMALL
    candidates: Candidates = _SAFE_TILES
    least_rows: int = 64
    least_columns: int = 32
    wide: Shape = (128, 256, 128, 8, 2)
    wide_turned: Shape = (128, 256, 128, 8, 2)
    queues_rows: bool = False
    deep_wgrad: bool = False
    small_pointers: bool = False
    options: frozenset[str] = frozenset()
    tensor_memory: bool = False
    direct_to_shared: bool = False
    tf32_reads_rows: bool = False
    norm_halves: bool = False
    norm_narrows_fp32: bool = False

    def chip(self, arch: str) -> Chip:
        """What is known of one of its architectures."""
        return self.chips.get(arch, self.other)

    def matrix_kinds(self, product: str) -> tuple[str, ...]:
        """Kinds of matrix instructions that products of "fp16", "bf16", "fp32", "tf32" or "tf32x3"
        may use; () where plain multiply-adds are right."""
        return self.matrix if product in self.matrix_types else ()
