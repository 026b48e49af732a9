"""`python tools/amd_emulator gfx942 script.py ...` or `... gfx942 -m module ...`: a script whose
Triton kernels run on an emulated GPU, on CPU tensors."""

from __future__ import annotations

import argparse
import pathlib
import runpy
import sys

if __name__ == "__main__":
    tools = str(pathlib.Path(__file__).resolve().parents[1])
    if tools not in sys.path:
        sys.path.insert(0, tools)
    from amd_emulator import ARCH, patch_triton

    parser = argparse.ArgumentParser(prog="amd_emulator", description=__doc__)
    parser.add_argument("arch", choices=tuple(ARCH))
    parser.add_argument("-m", dest="module", action="store_true", help="target names a module")
    parser.add_argument("target", help="a script, or with -m a module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    sys.argv[:] = [given.target, *given.arguments]
    sys.path.insert(0, "." if given.module else str(pathlib.Path(given.target).resolve().parent))
    with patch_triton(given.arch):
        run = runpy.run_module if given.module else runpy.run_path
        run(given.target, run_name="__main__")
