"""Releases that are known to compute wrongly, hang or compile for minutes, and the variable that
helps: what `doctor` says of a machine. What the package itself works around is said, too, because
other packages on the same machine do not."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

_BUILD = 100


class Machine(NamedTuple):
    """rocm: torch.version.hip, None elsewhere.  triton: its version.  archs: of the GPUs ("gfx942",
    "sm_90").  environment: its variables.  capture: the setting."""

    rocm: str | None
    triton: tuple[int, ...] | None
    archs: tuple[str, ...]
    environment: Mapping[str, str]
    capture: str

    def rocm_is(self, first: tuple[int, ...], last: tuple[int, ...]) -> bool:
        """Whether ROCm's release lies between two, both included. torch's builds often say the
        number of a build in place of a patch; then all patches of a release count."""
        release = tuple(int(part) for part in re.findall(r"\d+", self.rocm or "")[:3])
        if len(release) < 3 or release[2] >= _BUILD:
            first, last, release = first[:2], last[:2], release[:2]
        return bool(release) and first <= release <= last

    def has(self, *families: str) -> bool:
        """Whether an architecture begins with one of these."""
        return any(arch.startswith(families) for arch in self.archs)

    def off(self, variable: str) -> bool:
        """Whether a variable turns something off already."""
        return self.environment.get(variable, "").lower() in ("0", "false", "off")


class Fault(NamedTuple):
    """affects: whether a machine has the fault.  text: what happens, and what to do."""

    affects: Callable[[Machine], bool]
    text: str


FAULTS: tuple[Fault, ...] = (
    Fault(
        lambda m: m.rocm is not None and m.has("gfx12") and not m.off("TORCH_BLAS_PREFER_HIPBLASLT"),
        "gfx12: torch's fp32 and fp64 products of more than 2^19 rows come out wrong in rocBLAS "
        "and hipBLASLt (seen with ROCm 7.1 and 7.2). sparse_bridge takes its own in parts; for "
        "other code set TORCH_BLAS_PREFER_HIPBLASLT=0 and keep products below that.",
    ),
    Fault(
        lambda m: m.rocm_is((6, 4, 0), (6, 4, 0)) and not m.off("TORCH_BLAS_PREFER_HIPBLASLT"),
        "ROCm 6.4.0: hipBLASLt multiplies fp32 wrongly where both operands are transposed. Set "
        "TORCH_BLAS_PREFER_HIPBLASLT=0, or use a later ROCm.",
    ),
    Fault(
        lambda m: m.rocm_is((7, 2, 0), (7, 2, 3)),
        "ROCm 7.2.0 to 7.2.3: replayed graphs give wrong data in some processes (seen on MI300X), "
        "torch.cuda.graphs of any package included. sparse_bridge replays nothing there unless "
        "SPARSE_BRIDGE_CAPTURE=always.",
    ),
    Fault(
        lambda m: m.rocm is not None and m.has("gfx12"),
        "gfx12: replayed graphs of more than some 200 kernels read old addresses. sparse_bridge "
        "replays nothing there unless SPARSE_BRIDGE_CAPTURE=always.",
    ),
    Fault(
        lambda m: m.rocm is not None and m.capture == "always",
        "SPARSE_BRIDGE_CAPTURE=always replays graphs on ROCm. If a result looks wrong, unset it.",
    ),
    Fault(
        lambda m: (
            m.rocm is not None
            and m.triton is not None
            and (3, 7) <= m.triton[:2] <= (3, 8)
            and not m.off("AMDGCN_USE_BUFFER_OPS")
        ),
        "Triton's development between 3.7 and 3.8 miscompiled masked buffer loads in pipelined "
        "loops on AMD, without an error. The self-check looks for it; if a result looks wrong, set "
        "AMDGCN_USE_BUFFER_OPS=0.",
    ),
    Fault(
        lambda m: m.rocm is not None and m.has("gfx1151"),
        "gfx1151: Triton has compiled some kernels for minutes. Run `python -m sparse_bridge warm` "
        "once, and keep TRITON_CACHE_DIR.",
    ),
    Fault(
        lambda m: "HSA_OVERRIDE_GFX_VERSION" in m.environment and m.rocm is not None,
        "HSA_OVERRIDE_GFX_VERSION is set: kernels are compiled for that architecture, not for the "
        "GPU's own, and may be wrong or hang.",
    ),
    Fault(
        lambda m: m.has("sm_100", "sm_103") and m.triton is not None,
        "Blackwell data-centre GPUs: some releases of Triton miscompile products chained in one "
        "accumulator. The self-check tries fp32 as three TF32 products and takes IEEE "
        "multiply-adds if that fails; SPARSE_BRIDGE_FP32=ieee chooses them without a check.",
    ),
)


def of(machine: Machine) -> list[str]:
    """The known faults of a machine, a paragraph each."""
    return [fault.text for fault in FAULTS if fault.affects(machine)]
