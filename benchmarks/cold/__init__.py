"""First training steps on GPUs that are not there: which forms of kernels are compiled, and how
long that takes on this CPU. `python -m benchmarks.cold`."""

import pathlib
import sys

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "tools"))  # amd_emulator
