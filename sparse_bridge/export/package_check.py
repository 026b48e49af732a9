"""Building a package's example with CMake and running it on the recorded scenes."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
from typing import NamedTuple

import torch

from ..errors import UnsupportedError
from .plugin_checks import ExportError

_LINES = 20  # of an output that an error shows
_SCENE_LINE = re.compile(r"(\d+) rows, (\S+) ms, error (\S+) of the RMS: ok")


class Ran(NamedTuple):
    """A scene that gave the recorded results.  error: RMS, as a share of that of the results."""

    rows: int
    milliseconds: float
    error: float


def check(folder: pathlib.Path, repeat: int = 1) -> list[Ran]:
    """Build the example of `folder` in `folder/build` and run it on the recorded scenes.

    repeat: runs of each scene, of which the fastest counts.
    Raises: UnsupportedError without CMake; ExportError where it does not build, run or agree.
    """
    program = build(folder)
    done = _run([str(program), str(folder), "--repeat", str(repeat)])
    if done.returncode:
        failure = "gives other results than the model" if done.returncode == 1 else "does not run"
        raise ExportError(f"the package in {folder} {failure}:\n{_last(done.stdout + done.stderr)}")
    return [Ran(int(n), float(ms), float(error)) for n, ms, error in _SCENE_LINE.findall(done.stdout)]


def build(folder: pathlib.Path) -> pathlib.Path:
    """The example of `folder`, built in `folder/build`. Raises as `check` does."""
    cmake = shutil.which("cmake")
    if cmake is None:
        raise UnsupportedError("there is no CMake to build the example; pip install cmake.")
    build = folder / "build"
    root = f"-DTORCH_ROOT={torch.__path__[0]}"
    workers = f"-j{os.cpu_count() or 1}"
    for words in (["-S", str(folder), "-B", str(build), root], ["--build", str(build), workers]):
        done = _run([cmake, *words])
        if done.returncode:
            raise ExportError(f"the example in {folder} does not build:\n{_last(done.stdout + done.stderr)}")
    return build / "run_package"


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _last(output: str) -> str:
    return "\n".join(output.rstrip().splitlines()[-_LINES:])
