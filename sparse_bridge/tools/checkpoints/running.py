"""Running a project's own evaluation, bridged, and reading what it prints."""

from __future__ import annotations

import collections
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path

from .projects import Paths, Project

_PACKAGE = Path(__file__).resolve().parents[3]
_TAIL = 20  # lines that a failure shows


class EvaluationError(Exception):
    """The project's evaluation failed; the message holds the end of what it printed."""


def evaluate(project: Project, paths: Paths, trusted: bool, show: Callable[[str], None]) -> str:
    """Run the evaluation of a project, see `run_bridged`."""
    folder = paths.project / project.folder
    config, script = (os.path.relpath(paths.project / name, folder) for name in (project.config, project.script))
    command = [script, *project.arguments(paths, config)]
    return run_bridged("spconv", command, folder, paths.project, project.title, trusted, show)


def run_bridged(
    framework: str,
    command: Sequence[str],
    folder: Path,
    tree: Path,
    title: str,
    trusted: bool,
    show: Callable[[str], None],
) -> str:
    """Run a script of a project's tree in `folder` to its end; all that it printed, both streams
    together.

    command: script and arguments.  show: gets every line as it comes.
    Raises: EvaluationError: it failed.
    """
    installed = str(_PACKAGE) in map(sysconfig.get_path, ("purelib", "platlib"))
    folders = [str(tree), "" if installed else str(_PACKAGE)]
    folders.append(os.environ.get("PYTHONPATH", ""))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, folders))}
    environment["PYTHONUNBUFFERED"] = "1"
    if trusted:
        environment["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"
    lines: list[str] = []
    start = [sys.executable, "-m", "sparse_bridge", "run", "--framework", framework, "--report"]
    with subprocess.Popen(
        [*start, *command],
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        errors="replace",
    ) as process:
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
        raise EvaluationError(f"the evaluation of {title} ended with exit status {process.returncode}:\n{tail}")
    return "".join(lines)
