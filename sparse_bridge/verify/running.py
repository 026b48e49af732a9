"""Running a project's own evaluation, bridged, and reading what it prints."""

from __future__ import annotations

import collections
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

from .projects import Paths, Project

_PACKAGE = Path(__file__).resolve().parents[2]
_TAIL = 20  # lines that a failure shows


class EvaluationError(Exception):
    """The project's evaluation failed; the message holds the end of what it printed."""


def command(project: Project, paths: Paths) -> list[str]:
    """The command line that evaluates."""
    config = os.path.relpath(paths.project / project.config, paths.project / project.folder)
    script = os.path.relpath(paths.project / project.script, paths.project / project.folder)
    return [
        sys.executable, "-m", "sparse_bridge", "run", "--framework", "spconv", "--report", script,
        *project.arguments(paths, config),
    ]  # fmt: skip


def evaluate(project: Project, paths: Paths, trusted: bool, show: Callable[[str], None]) -> str:
    """Run it to its end; all that it printed, both streams together.

    show: gets every line as it comes.
    Raises: EvaluationError: it failed.
    """
    installed = str(_PACKAGE) in map(sysconfig.get_path, ("purelib", "platlib"))
    folders = [str(paths.project), "" if installed else str(_PACKAGE)]
    folders.append(os.environ.get("PYTHONPATH", ""))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, folders))}
    environment["PYTHONUNBUFFERED"] = "1"
    if trusted:
        environment["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"
    lines: list[str] = []
    with subprocess.Popen(
        command(project, paths), cwd=paths.project / project.folder, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
        errors="replace",
    ) as process:  # fmt: skip
        assert process.stdout is not None
        try:
            for line in process.stdout:
                lines.append(line)
                show(line.rstrip("\n"))
        except BaseException:
            process.terminate()  # Ctrl-C reaches it, too, but it may not heed it
            raise
    if process.returncode:
        tail = "".join(collections.deque(lines, _TAIL)).rstrip()
        raise EvaluationError(
            f"the evaluation of {project.title} ended with exit status {process.returncode}:\n"
            f"{tail}"
        )
    return "".join(lines)
