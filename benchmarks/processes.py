"""Starting workers and talking to them, with a limit on how long an answer may take."""

from __future__ import annotations

import json
import os
import queue
import site
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["Worker", "WorkerError", "empty_caches"]

_ROOT = Path(__file__).resolve().parents[1]


class WorkerError(RuntimeError):
    """A worker answered with an error, stopped, or took too long.

    `usable`: its process may still be asked. Otherwise a failed kernel may have spoilt its device
    context: close it and start another.
    """

    def __init__(self, message: str, usable: bool = False):
        super().__init__(message)
        self.usable = usable


class Worker:
    """A process that runs one peer."""

    def __init__(self, peer: str, environment: Mapping[str, str] | None = None):
        """`environment` replaces the variables of this process."""
        self.peer, self._stuck = peer, False
        variables = dict(os.environ if environment is None else environment)
        folders = [str(_ROOT), *filter(None, [variables.get("PYTHONPATH")])]
        variables["PYTHONPATH"] = os.pathsep.join(folders)
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the process
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.worker", peer],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=variables,
        )
        self._answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put(None)

    def ask(self, op: str, timeout: float, **arguments: Any) -> dict[str, Any]:
        """One request and its answer.

        Raises:
            WorkerError: the answer is an error, the process ended, or `timeout` seconds passed.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"op": op, **arguments}) + "\n")
            self._process.stdin.flush()
            line = self._answers.get(timeout=max(timeout, 0.1))
        except queue.Empty:
            self._stuck = True
            raise WorkerError(f"no answer within {timeout:.0f} s") from None
        except OSError:
            line = None
        if line is None:
            raise WorkerError(f"the process ended: {self._last_words()}")
        answer = json.loads(line)
        if "error" in answer:
            raise WorkerError(answer["error"], usable=answer["usable"])
        return answer

    def _last_words(self) -> str:
        self._process.wait()
        self._log.seek(0)
        lines = [line.strip() for line in self._log.read().splitlines() if line.strip()]
        return (lines[-1] if lines else f"exit status {self._process.returncode}")[:400]

    def close(self) -> None:
        """End the process; one that does not answer is killed."""
        assert self._process.stdin is not None
        if self._stuck:
            self._process.kill()
        try:
            self._process.stdin.close()
            self._process.wait(timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        self._log.close()


def empty_caches(folder: Path) -> dict[str, str]:
    """The environment of a user who never compiled or tuned: every cache is in `folder`."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not (name.startswith("SPARSE_BRIDGE_") and "CACHE" in name)
    }
    # Packages in the user's own site folder must still be found.
    environment["PYTHONUSERBASE"] = site.getuserbase()
    folders = {
        "HOME": "home",
        "XDG_CACHE_HOME": "cache",
        "TRITON_HOME": "home",
        "TRITON_CACHE_DIR": "triton",
        "CUDA_CACHE_PATH": "cuda",
        "TORCHINDUCTOR_CACHE_DIR": "inductor",
    }
    for variable, name in folders.items():
        place = folder / name
        place.mkdir(parents=True, exist_ok=True)
        environment[variable] = str(place)
    return environment
