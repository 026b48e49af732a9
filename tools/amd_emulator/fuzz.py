"""Random kernels on three witnesses: the emulator runs the machine code, Triton's interpreter the
source (with NumPy), and they share nothing behind the front end of the language. LLVM's assembly says
which instructions the machine code is made of.

    python tools/amd_emulator/fuzz.py --seed 1000 --count 1000

Kernel `seed` runs on one architecture, with 1, 2 or 4 warps and with buffer operations or without,
all by turns. Results must be the same bits, decoded instructions the same as LLVM's, one by one.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence

import torch

if __name__ == "__main__":
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import amd_emulator
from amd_emulator import entries
from amd_emulator.random_kernels import Kernel, run

TOOLS = pathlib.Path(__file__).resolve().parents[1]
BATCH = 50  # kernels that one process interprets
_MNEMONIC = re.compile(r"(v|s|ds|global|buffer|flat|scratch)_\w+$")
_CACHES = re.compile(r"buffer_(wbl2|inv|wbinvl1|wbinvl1_vol)$")


def interpreted(seeds: Sequence[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The interpreter's answers, from a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "answers.pt"
        subprocess.run(
            [sys.executable, "-m", "amd_emulator.random_kernels", str(file), *map(str, seeds)],
            cwd=TOOLS,
            env={**os.environ, "TRITON_INTERPRET": "1"},
            check=True,
        )
        return torch.load(file)


def _fused(found: re.Match[str]) -> str:
    return "v_fmac_f32" if found[1] == "c" else f"v_fma{found[2]}_f32"


def _plain(name: str) -> str:
    """Without the encoding, which both spell in ways of their own."""
    name = re.sub(r"_e(32|64)|_dpp|_sdwa", "", name)
    name = re.sub(r"^(v_mfma_f32_\d+x\d+x\d+)(f16|f32)$", r"\1_\2", name)
    # gfx90a has multiply-adds that round twice; they run fused, which no result here shows.
    name = re.sub(r"^v_ma(d|c)(|mk|ak)_f32$", _fused, name)
    return "buffer cache control" if _CACHES.match(name) else name


def assembled_names(text: str) -> list[str]:
    """The instructions of LLVM's assembly, padding left out; both of a dual one."""
    names = []
    for line in text.splitlines():
        words = line.split()
        if words and _MNEMONIC.match(words[0]):
            second = [words[i + 1] for i, word in enumerate(words) if word == "::"]
            names.append(_plain("_".join([words[0], *second])))
    return [name for name in names if name not in ("s_nop", "s_code_end")]


def decoded_names(arch: str) -> list[str]:
    """The instructions that the emulator found in the code object launched last."""
    code = amd_emulator.last.kernel.code
    raw = ctypes.string_at(code.code, 4 * code.words) + bytes(16)
    word, names = (code.entry - code.code) // 4, []
    while word < code.words:
        try:
            entry, found = entries.entry(raw[4 * word : 4 * word + 16], arch)
        except amd_emulator.Unsupported:  # padding behind the code
            break
        text = found if isinstance(found, str) else found.name.lower()
        names.append(_plain(text.removeprefix("dpp ").partition("(")[0]))
        word += entry.size // 4
    return [name for name in names if name not in ("s_nop", "s_code_end")]


def difference(seed: int, values: torch.Tensor, counts: torch.Tensor, archs: Sequence[str]) -> str | None:
    """What the emulator finds else than `values` and `counts`, and LLVM than the emulator."""
    arch, warps = archs[seed % len(archs)], (1, 2, 4)[seed // len(archs) % 3]
    with amd_emulator.patch_triton(arch, buffer_ops=bool(seed % 2)):
        got, counted, compiled = run(seed, num_warps=warps, enable_fp_fusion=False)
        assembly = assembled_names(compiled.asm["amdgcn"])
        del compiled
        gc.collect()  # Triton's kernels ask for the driver when they go
    if decoded_names(arch)[: len(assembly)] != assembly:
        return f"seed {seed} on {arch}: decoded instructions are not LLVM's"
    wrong = [i for i in range(len(values)) if not torch.equal(values[i], got[i])]
    if wrong:
        return f"seed {seed} on {arch}: v{wrong[0]} differs first in\n{Kernel(seed).source}"
    if not torch.equal(counts, counted):
        return f"seed {seed} on {arch}: atomics differ in\n{Kernel(seed).source}"
    return None


def differences(first: int, count: int, archs: Sequence[str]) -> Iterator[tuple[int, str | None]]:
    """(seed, what differs) of so many kernels."""
    for start in range(first, first + count, BATCH):
        seeds = range(start, min(start + BATCH, first + count))
        for seed, (values, counts) in zip(seeds, interpreted(seeds), strict=True):
            yield seed, difference(seed, values, counts, archs)


def main() -> int:
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, default=1000, help="of the first kernel")
    parser.add_argument("--count", type=int, default=100, help="kernels")
    parser.add_argument("--arch", nargs="+", default=tuple(amd_emulator.ARCH))
    args = parser.parse_args()
    done = failed = 0
    for _, found in differences(args.seed, args.count, args.arch):
        done, failed = done + 1, failed + bool(found)
        if found:
            print(found)
        if done % BATCH == 0:
            print(f"{done} kernels, {failed} differ", file=sys.stderr, flush=True)
    print(f"{done} kernels from seed {args.seed} on {', '.join(args.arch)}: {failed} differ")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
