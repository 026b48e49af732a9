"""Starting workers and talking to them, with a limit on how long an answer may take."""

from __future__ import annotations

import os
import site
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparse_bridge.tools.harness.processes import Child

__all__ = ["Worker", "WorkerError", "empty_caches"]


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
        self.peer, self._patience = peer, 10.0
        self._child = Child("benchmarks.worker", [peer], environment)

    def ask(self, op: str, timeout: float, **arguments: Any) -> dict[str, Any]:
        """One request and its answer.

        Raises:
            WorkerError: the answer is an error, the process ended, or `timeout` seconds passed.
        """
        self._child.send(op=op, **arguments)
        try:
            answer = self._child.receive(timeout)
        except TimeoutError as error:
            self._patience = 0.0
            raise WorkerError(str(error)) from None
        if answer is None:
            raise WorkerError(f"the process {self._child.ending()}")
        if "error" in answer:
            raise WorkerError(answer["error"], usable=answer["usable"])
        return answer

    def close(self) -> None:
        """End the process; one that does not answer is killed."""
        self._child.end(self._patience)


def empty_caches(folder: Path) -> dict[str, str]:
    """The environment of a user who never compiled or tuned: every cache is in `folder`."""
    environment = {
        name: value for name, value in os.environ.items() if not (name.startswith("SPARSE_BRIDGE_") and "CACHE" in name)
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
