"""Two witnesses for random kernels: the emulator runs the machine code, Triton's interpreter the
source, and they share nothing behind the front end of the language. A third one, LLVM, says which
instructions the machine code is made of."""

from __future__ import annotations

import ctypes
import os
import pathlib
import re
import subprocess
import sys

import pytest
import torch

from .cases import ARCHS
from .random_kernels import Kernel, run

emu = pytest.importorskip("amd_emulator")
entries = pytest.importorskip("amd_emulator.entries")
pytestmark = pytest.mark.emulated
ROOT = pathlib.Path(__file__).resolve().parents[2]
BATCH = 100


def interpreted(seeds, folder):
    """The interpreter's answers, from a process of its own."""
    file = folder / "answers.pt"
    subprocess.run(
        [sys.executable, "-m", "tests.amd_emulator.random_kernels", str(file), *map(str, seeds)],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        check=True,
    )
    return torch.load(file)


_MNEMONIC = re.compile(r"(v|s|ds|global|buffer|flat|scratch)_\w+$")
_CACHES = re.compile(r"buffer_(wbl2|inv|wbinvl1|wbinvl1_vol)$")


def _fused(found):
    return "v_fmac_f32" if found[1] == "c" else f"v_fma{found[2]}_f32"


def plain(name):
    """Without the encoding, which both spell in ways of their own."""
    name = re.sub(r"_e(32|64)|_dpp|_sdwa", "", name)
    name = re.sub(r"^(v_mfma_f32_\d+x\d+x\d+)(f16|f32)$", r"\1_\2", name)
    # gfx90a has multiply-adds that round twice; they run fused, which no result here shows.
    name = re.sub(r"^v_ma(d|c)(|mk|ak)_f32$", _fused, name)
    return "buffer cache control" if _CACHES.match(name) else name


def assembled_names(compiled):
    """The instructions of LLVM's assembly, padding left out; both of a dual one."""
    names = []
    for line in compiled.asm["amdgcn"].splitlines():
        words = line.split()
        if words and _MNEMONIC.match(words[0]):
            second = [words[i + 1] for i, word in enumerate(words) if word == "::"]
            names.append(plain("_".join([words[0], *second])))
    return [name for name in names if name not in ("s_nop", "s_code_end")]


def decoded_names(arch):
    """The instructions that the emulator found in the code object launched last."""
    code = emu.last.kernel.code
    raw = ctypes.string_at(code.code, 4 * code.words) + bytes(16)
    word, names = (code.entry - code.code) // 4, []
    while word < code.words:
        try:
            entry, found = entries.entry(raw[4 * word : 4 * word + 16], arch)
        except emu.Unsupported:  # padding behind the code
            break
        text = found if isinstance(found, str) else found.name.lower()
        names.append(plain(text.removeprefix("dpp ").partition("(")[0]))
        word += entry.size // 4
    return [name for name in names if name not in ("s_nop", "s_code_end")]


def compare(seeds, folder, archs):
    """Every kernel on one of the architectures, by turns, with 1 to 4 warps."""
    for seed, (values, counts) in zip(seeds, interpreted(seeds, folder), strict=True):
        arch, warps = archs[seed % len(archs)], (1, 2, 4)[seed // len(archs) % 3]
        with emu.patch_triton(arch, buffer_ops=bool(seed % 2)):
            got, counted, compiled = run(seed, num_warps=warps, enable_fp_fusion=False)
        decoded, assembly = decoded_names(arch), assembled_names(compiled)
        assert decoded[: len(assembly)] == assembly, f"seed {seed} on {arch}"
        lines = Kernel(seed).source
        wrong = [i for i in range(len(values)) if not torch.equal(values[i], got[i])]
        assert not wrong, f"seed {seed} on {arch}: v{wrong[0]} differs first in\n{lines}"
        assert torch.equal(counts, counted), f"seed {seed} on {arch}: atomics differ in\n{lines}"


def test_a_few(tmp_path):
    compare(range(6), tmp_path, ("gfx942", "gfx1100"))


@pytest.mark.slow
@pytest.mark.parametrize("batch", range(10))
def test_a_thousand(batch, tmp_path):
    first = 1000 + batch * BATCH
    compare(range(first, first + BATCH), tmp_path, ARCHS)
