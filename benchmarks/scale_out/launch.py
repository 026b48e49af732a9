"""Starting the ranks as users do, with torchrun, and reading what each has written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["LaunchError", "launch"]

ROOT = Path(__file__).resolve().parents[2]
_PATIENCE = 45.0  # seconds: torchrun gives its ranks 30 before it kills them
START = "SCALE_OUT_START"  # time.time() at which the launcher was started


class LaunchError(RuntimeError):
    """The ranks failed or took too long."""


def launch(
    part: str,
    ranks: int,
    options: Mapping[str, Any],
    environment: Mapping[str, str] | None = None,
    timeout: float = 300.0,
) -> list[dict[str, Any]]:
    """Run a part of `rank.PARTS` in so many processes; what each has measured, by rank.

    Raises:
        LaunchError: with the last lines that they printed.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(ranks),
            "-m",
            "benchmarks.scale_out.rank",
            part,
            json.dumps(dict(options)),
            folder,
        ]
        variables = {**(os.environ if environment is None else environment)}
        variables["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tools"), variables.get("PYTHONPATH", "")])
        variables[START] = repr(time.time())
        process = subprocess.Popen(
            command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        try:
            output = process.communicate(timeout=timeout)[0]
        except subprocess.TimeoutExpired as error:
            last = _last_lines(_end(process))
            raise LaunchError(f"{part} on {ranks} ranks: no end after {timeout:.0f} s\n{last}") from error
        except BaseException:
            _end(process)
            raise
        if process.returncode:
            last = _last_lines(output)
            raise LaunchError(f"{part} on {ranks} ranks: exit status {process.returncode}\n{last}")
        files = [Path(folder, f"rank{rank}.json") for rank in range(ranks)]
        return [json.loads(file.read_text()) for file in files]


def _end(process: subprocess.Popen[str]) -> str:
    """End torchrun as Ctrl-C does: killed at once, it would leave its ranks on the GPUs. What it
    has printed."""
    process.terminate()
    try:
        return process.communicate(timeout=_PATIENCE)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        return ""


def _last_lines(output: str) -> str:
    """Of the ranks; torchrun's own traceback, which follows, says nothing of the reason."""
    of_ranks = output.partition(" failed (exitcode: ")[0]
    return "\n".join(of_ranks.strip().splitlines()[-25:])
