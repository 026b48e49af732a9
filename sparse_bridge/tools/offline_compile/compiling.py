"""Compiling one form of a kernel for a GPU that is not there, and reading what came out."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import pathlib
import re
import subprocess
import tempfile
from typing import Any

from ...errors import UnsupportedError
from ...kernels.runtime.launch import OPTIONS
from ...kernels.runtime.target import Target
from .forms import Form

# Names in the machine code of matrix instructions, most specific first.
_MATRIX = {
    "hip": (("MFMA", r"\bv_s?mfmac?_\w+"), ("WMMA", r"\bv_s?wmmac?_\w+")),
    "cuda": (
        ("TCGEN05", r"\btcgen05\.mma\b[\w.:]*"),
        ("WGMMA", r"\bwgmma\.mma_async[\w.]*"),
        ("MMA", r"\bmma\.sync[\w.]*"),
    ),
}


@dataclasses.dataclass(frozen=True)
class Code:
    """What a compilation produced.

    matrix: kind of its matrix instructions, or "".  instruction: the first of them.  registers: per
    thread.  spilled: bytes of memory per thread that hold spilled registers.  parked: scalar
    registers that AMD's compiler keeps in lanes of vector registers instead, which costs no memory.
    shared: bytes per workgroup.  warp_size: lanes it was compiled for.  wide_loops: loops between
    64-bit bounds that carry integers.  serialized: the assembler runs asynchronous matrix
    instructions one after another.
    """

    matrix: str
    instruction: str
    registers: int
    spilled: int
    parked: int
    shared: int
    warp_size: int
    wide_loops: int = 0
    serialized: bool = False


def source(form: Form, target: Target) -> Any:
    """Triton's `ASTSource` of a form, as a launch on `target` would make it."""
    from triton.compiler import ASTSource

    kernel = form.jit
    names = kernel.fn.arg_names
    signature = dict.fromkeys(names, "constexpr")
    signature.update(zip(names, form.types, strict=False))
    constants: dict[str, Any] = dict(zip(kernel.constants, form.constants, strict=True))
    for name in form.ones:
        signature[name], constants[name] = "constexpr", 1
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for index, name in enumerate(names):
        marks: list[list[Any]] = []
        if name in form.divisible and name not in form.ones:
            marks.append(["tt.divisibility", 16])
        if target.generation.small_pointers and signature[name].startswith("*") and not form.large:
            marks.append(["tt.pointer_range", 32])
        if marks:
            attributes[(index,)] = marks
    return ASTSource(kernel.fn, signature, constants, attributes)


def compile_form(form: Form, target: Target) -> Code:
    """Compile for `target` and read assembly and metadata.

    Raises: whatever Triton raises when it cannot compile.
    """
    import triton
    from triton.backends.compiler import GPUTarget

    described = GPUTarget(target.backend, _arch(target), target.warp_size)
    compiled = triton.compile(source(form, target), target=described, options={**OPTIONS, **dict(form.options)})
    metadata, serialized = compiled.metadata, False
    if target.backend == "hip":
        text = compiled.asm["amdgcn"]
        registers, spilled, parked = _amd_registers(text)
        warp_size = int(_last(r"\.wavefront_size:\s*(\d+)", text))
    else:
        text, parked = compiled.asm["ptx"], 0
        registers, spilled, serialized = _nvidia_registers(compiled.asm["cubin"], text)
        warp_size = metadata.warp_size
    matrix, instruction = _matrix(target.backend, text)
    return Code(
        matrix,
        instruction,
        registers,
        spilled,
        parked,
        metadata.shared,
        warp_size,
        wide_loops(compiled.asm["ttir"]) + wide_loops(compiled.asm["ttgir"]),
        serialized,
    )


def _arch(target: Target) -> int | str:
    return target.capability if target.backend == "cuda" else target.arch


def _matrix(backend: str, text: str) -> tuple[str, str]:
    for instruction, pattern in _MATRIX[backend]:
        match = re.search(pattern, text)
        if match:
            return instruction, match[0]
    return "", ""


def wide_loops(ttir: str) -> int:
    """How many loops between 64-bit bounds, `scf.for ... -> (types) : i64`, carry integers."""
    carried = re.findall(r"\bscf\.for\b.*-> \((.*)\)\s*: i64\b", ttir)
    return sum(re.search(r"(\bi|xi)(8|16|32|64)\b", types) is not None for types in carried)


def _last(pattern: str, text: str) -> str:
    matches = re.findall(pattern, text)
    if not matches:
        raise UnsupportedError(f"Triton's AMD assembly no longer says {pattern!r}; the compile check cannot read it.")
    return matches[-1]


def _amd_registers(text: str) -> tuple[int, int, int]:
    """(vector registers, bytes of scratch or of spilled vector registers, spilled scalar ones)."""
    counts = [
        int(_last(rf"\.{name}:\s*(\d+)", text))
        for name in ("vgpr_count", "vgpr_spill_count", "private_segment_fixed_size", "sgpr_spill_count")
    ]
    return counts[0], max(4 * counts[1], counts[2]), counts[3]


def _nvidia_registers(cubin: bytes, ptx: str) -> tuple[int, int, bool]:
    """(registers, bytes of spilled ones, whether wgmma is serialized)."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (folder / "code.cubin").write_bytes(cubin)
        usage = _tool("cuobjdump", "--dump-resource-usage", str(folder / "code.cubin"))
        registers, stack = _numbers(r"REG:(\d+) STACK:(\d+)", usage)
        # A stack may hold something else than spilled registers; the assembler tells, in time that
        # most kernels save.
        if stack == 0 and "wgmma.mma_async" not in ptx:
            return registers, 0, False
        (folder / "code.ptx").write_text(ptx, encoding="utf-8")
        target = "--gpu-name=" + _groups(r"\.target (sm_\w+)", ptx)[0]
        usage = _assembled("-v", target, str(folder / "code.ptx"), "-o", str(folder / "again"))
        stores, loads = _numbers(r"(\d+) bytes spill stores, (\d+) bytes spill loads", usage)
    return registers, max(stores, loads), "wgmma.mma_async instructions are serialized" in usage


def _assembled(*arguments: str) -> str:
    """What the first of Triton's assemblers that knows this PTX prints."""
    names = [name for name in ("ptxas", "ptxas-blackwell") if (_tools() / name).exists()]
    for name in names[:-1]:
        with contextlib.suppress(subprocess.CalledProcessError):
            return _tool(name, *arguments)
    return _tool(names[-1], *arguments)


def _tools() -> pathlib.Path:
    import triton.backends.nvidia as backend

    return pathlib.Path(inspect.getfile(backend)).parent / "bin"


def _tool(name: str, *arguments: str) -> str:
    """What one of Triton's NVIDIA tools prints."""
    command = [str(_tools() / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def _groups(pattern: str, output: str) -> tuple[str, ...]:
    match = re.search(pattern, output)
    if match is None:
        raise UnsupportedError(f"NVIDIA's tools no longer say {pattern!r}: {output[:300]!r}.")
    return match.groups()


def _numbers(pattern: str, output: str) -> tuple[int, ...]:
    return tuple(map(int, _groups(pattern, output)))
