"""Every command and program of the README that needs no GPU, with the package as it is installed.

    python tools/wheel_check.py README.md

Run it with the Python of an environment that holds the wheel (`sparse-bridge[viz]`), from any
folder: everything happens in a new one. `nox -s wheel` builds, installs and runs it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TRAIN = """\
import sys
import torch
import spconv.pytorch as spconv

assert sys.argv[1:] == ["--cfg", "model.yaml"]
indices = torch.tensor([[0, 1, 1, 1], [0, 1, 1, 2]], dtype=torch.int32)
x = spconv.SparseConvTensor(torch.randn(2, 16), indices, [8, 8, 8], batch_size=1)
spconv.SubMConv3d(16, 32, 3)(x).features.sum().backward()
"""
# Exit status per command of the README: 2 where it needs a checkout, or arguments.
EXPECTED = {"run": 0, "doctor": 0, "demo": 0, "bench": 2, "prove": 0, "verify": 2}
# The README's own words, and what makes them short here.
SHORTER = {"prove": ["--only", "products", "--only", "pools"], "demo": ["--small", "--repeats", "1"]}


def commands(readme: str) -> list[list[str]]:
    """Words after `python -m sparse_bridge`, of blocks and of the running text, each once."""
    found = re.findall(r"python -m sparse_bridge ([^`\n&]+)", readme)
    return [line.split() for line in dict.fromkeys(line.strip() for line in found)]


def programs(readme: str) -> str:
    """The Python blocks, one after the other."""
    return "\n".join(re.findall(r"^```python\n(.*?)^```", readme, flags=re.M | re.S))


def check(words: list[str], folder: Path, expected: int) -> str | None:
    """Run one command in `folder`; what is wrong with it, or None."""
    start = time.perf_counter()
    done = subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, text=True, timeout=600)
    seconds = time.perf_counter() - start
    print(f"{done.returncode}  {seconds:6.1f} s  python {' '.join(words)}", flush=True)
    said = done.stdout + done.stderr
    if done.returncode != expected or "Traceback" in said:
        return f"python {' '.join(words)}: {done.returncode}, not {expected}\n{said}"
    return None


def main(readme: Path) -> int:
    text = readme.read_text(encoding="utf-8")
    os.environ.pop("PYTHONPATH", None)  # the checkout must not answer
    faults = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(TRAIN)
        (folder / "readme.py").write_text(programs(text))
        for words in commands(text):
            more = SHORTER.get(words[0], [])
            command = ["-m", "sparse_bridge", *words, *more]
            faults.append(check(command, folder, EXPECTED[words[0]]))
        faults.append(check(["readme.py"], folder, 0))
        if not (folder / "demo_out" / "birdseye.png").is_file():
            faults.append("the demo left no picture")
    for fault in filter(None, faults):
        print(fault, file=sys.stderr)
    return 1 if any(faults) else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve()))
