"""The results of a run by target and by kernel: numbers for the terminal, Markdown and JSON."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

from ...kernels.runtime.target import Target, described, triton_version
from .checks import ACCEPTED, product_of
from .running import Result

PRODUCTS = ("fp16", "bf16", "fp32", "tf32", "tf32x3")
_NO_BF16 = "per-offset dataflow"
_NO_TF32 = "IEEE fp32 instead"
_NO_SPLIT = "-"


@dataclasses.dataclass(frozen=True)
class TargetSummary:
    """One row of the table. products: what computes each dtype; registers, shared: the most of any
    form; parked: forms whose compiler moved a few registers elsewhere by choice."""

    target: Target
    forms: int
    products: dict[str, str]
    registers: int
    shared: int
    parked: int
    failed: int


def summaries(results: Sequence[Result]) -> list[TargetSummary]:
    """One summary per architecture, in the order of the results."""
    by_arch: dict[str, list[Result]] = {}
    for result in results:
        by_arch.setdefault(result.arch, []).append(result)
    return [_summary(described(arch), of_arch) for arch, of_arch in by_arch.items()]


def _summary(target: Target, results: Sequence[Result]) -> TargetSummary:
    codes = [result.code for result in results if result.code is not None]
    passed = [result.code for result in results if not result.problems]
    return TargetSummary(
        target,
        len(results),
        {product: _computed_by(target, product, results) for product in PRODUCTS},
        max((code.registers for code in codes), default=0),
        max((code.shared for code in codes), default=0),
        sum(code.parked > 0 or code.spilled > 0 for code in passed if code),
        sum(bool(result.problems) for result in results),
    )


def _computed_by(target: Target, product: str, results: Sequence[Result]) -> str:
    """The instructions seen in products of a dtype, or why there are none."""
    if product == "bf16" and not target.has_bf16:
        return _NO_BF16
    if product == "tf32" and not target.has_tf32:
        return _NO_TF32
    if product == "tf32x3" and not target.splits_fp32:
        return _NO_SPLIT
    of_kind = [r for r in results if r.code is not None and product_of(r.form) == product]
    if not of_kind:
        return "not in this run"
    kinds = {r.code.matrix for r in of_kind if r.code is not None and r.code.matrix}
    if not kinds:
        return "none, expected" if target.generation.matrix_kinds(product) else "multiply-add"
    return ", ".join(sorted(kinds))


def kernel_rows(results: Sequence[Result]) -> list[tuple[str, int, str, str, int]]:
    """(kernel, forms, most registers and where, most shared bytes and where, failed) by name."""
    by_kernel = collections.defaultdict(list)
    for result in results:
        by_kernel[result.form.kernel].append(result)
    rows = []
    for name, of_kernel in sorted(by_kernel.items()):
        codes = [(r.code, r.arch) for r in of_kernel if r.code is not None]
        registers = max(((c.registers, arch) for c, arch in codes), default=(0, ""))
        shared = max(((c.shared, arch) for c, arch in codes), default=(0, ""))
        words = [f"{value} ({arch})" if value else "0" for value, arch in (registers, shared)]
        rows.append((name, len(of_kernel), *words, sum(bool(r.problems) for r in of_kernel)))
    return rows  # type: ignore[return-value]


def _described_result(result: Result) -> dict[str, Any]:
    form = result.form
    return {
        "arch": result.arch,
        "kernel": form.kernel,
        "types": list(form.types),
        "constants": {name: str(value) for name, value in form.named.items()},
        "options": dict(form.options),
        "divisible_by_16": sorted(form.divisible),
        "ones": sorted(form.ones),
        "code": result.code and dataclasses.asdict(result.code),
        "problems": list(result.problems),
        "seconds": round(result.seconds, 3),
    }


def as_json(results: Sequence[Result]) -> dict[str, Any]:
    """Everything, as JSON values."""
    return {
        "triton": ".".join(map(str, triton_version() or ())),
        "forms": len(results),
        "failed": sum(bool(result.problems) for result in results),
        "slowest_seconds": round(max((result.seconds for result in results), default=0.0), 3),
        "results": [_described_result(result) for result in results],
    }


_PAGE = """\
# Kernels compiled for each GPU

For those whose GPU was not run by us: whether every kernel compiles for it, with which
instructions, registers and shared memory.

Every kernel is compiled, without a GPU, for the architectures below, and the machine code is
checked: matrix instructions where the dtype has them, no register spilled to memory, shared memory
within the limit of a workgroup, the target's number of lanes. This page is written by

    python -m sparse_bridge doctor --targets --full --write docs/targets.md

{scope} Triton {triton}, {forms} compilations, {failed} failed. A variant is a kernel with one tile,
dtype and set of flags.

## Targets

{targets}

Shared memory: the most that a variant takes, of what a workgroup may have. Parked: variants in
which the compiler moves a few registers elsewhere by its own choice: AMD's keeps scalar ones in
lanes of a vector register, which costs no memory; NVIDIA's puts at most 64 bytes of a thread on
the stack below its limit of 255 registers, to run more warps. Any other spill is a failure, but
for tiles that were tuned on hardware as they are: {accepted}.

"multiply-add": the dtype has no matrix instruction there, or Triton makes none (Turing). fp32 is
IEEE; TF32 takes part only where the framework's or torch's switch allows it. "3 x TF32": fp32
products as three of TF32 that add up to fp32's accuracy, where those are faster and
SPARSE_BRIDGE_FP32 is not "ieee". fp64 and what a target lacks run in the per-offset dataflow of
torch.

## Kernels

{kernels}
"""
_FULL = (
    "All tiles that ship (the default choice and the tuner's candidates over every class of "
    "channels and rows), every dtype, every flag."
)
_PART = "A representative part of it (`--full` compiles all): the largest default tile per dtype."


def markdown(results: Sequence[Result], full: bool) -> str:
    """The page `docs/targets.md`."""
    targets = _table(
        (
            "target",
            "GPUs",
            "family",
            "lanes",
            "fp16",
            "bf16",
            "fp32",
            "TF32",
            "3 x TF32",
            "variants",
            "most registers",
            "shared memory",
            "parked",
            "failed",
        ),
        [
            (
                s.target.arch,
                s.target.generation.chip(s.target.arch).gpus,
                s.target.family,
                s.target.warp_size,
                *s.products.values(),
                s.forms,
                s.registers,
                f"{s.shared / 1024:.0f} of {s.target.shared_memory >> 10} KiB",
                s.parked,
                s.failed,
            )
            for s in summaries(results)
        ],
    )
    kernels = _table(("kernel", "variants", "most registers", "most shared bytes", "failed"), kernel_rows(results))
    facts = as_json([])
    return _PAGE.format(
        scope=_FULL if full else _PART,
        triton=facts["triton"],
        forms=len(results),
        failed=sum(bool(result.problems) for result in results),
        targets=targets,
        kernels=kernels,
        accepted="; ".join(_accepted(*item) for item in ACCEPTED.items()),
    )


def _accepted(tile: tuple[object, ...], most: int) -> str:
    family, kernel, product, m, n, k, warps = tile
    of = f" in {product}" if product else ""
    return f"{kernel}{of} {m} x {n} x {k} of {warps} warps on {family} (at most {most} bytes)"


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [" | ".join(head), " | ".join("---" for _ in head)]
    lines += [" | ".join(str(cell) for cell in row) for row in rows]
    return "\n".join(f"| {line} |" for line in lines)
