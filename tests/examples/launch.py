"""Starting the examples as users do."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from tests.patience import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
# One thread: tests share their cores, and waiting threads would spin.
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1", "COLUMNS": "120"}
ENVIRONMENT["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])


def start(*arguments: object, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT,
        env={**ENVIRONMENT, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait(*processes: subprocess.Popen[str]) -> str:
    """Output of all; fails with it if one of them failed."""
    try:
        outputs = [process.communicate(timeout=PATIENCE)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    text = "\n".join(outputs)
    assert all(process.returncode == 0 for process in processes), text
    return text


def start_ranks(count: int, *arguments: object) -> list[subprocess.Popen[str]]:
    """What torchrun does on one machine, without its own process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count)}
    return [start(*arguments, **shared, RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(count)]
