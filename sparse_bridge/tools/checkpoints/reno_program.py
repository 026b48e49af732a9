"""RENO's own program, unmodified, on this engine: it writes a scan and reads it back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ...errors import SettingError
from .running import EvaluationError, run_bridged

_SCRIPTS = ("compress.py", "decompress.py", "network.py")
_TITLE = "RENO's own program"


def check_tree(tree: Path) -> Path:
    """The absolute path of a source tree. Raises SettingError where it is none of RENO."""
    lacks = [name for name in _SCRIPTS if not (tree / name).is_file()]
    if lacks:
        raise SettingError(f"--project {tree} is not RENO: it lacks {', '.join(lacks)}.")
    return tree.resolve()


def write_and_read(
    tree: Path,
    checkpoint: Path,
    points: npt.NDArray[np.floating],
    step: float,
    scratch: Path,
    say: Callable[[str], None],
) -> tuple[int, npt.NDArray[np.float64]]:
    """(bytes of the file, points [M, 3] that were read from it); both scripts want a GPU.

    step: of the grid, in millimetres.
    Raises: EvaluationError: a script failed, or left no file.
    """
    scan, written, read = scratch / "scan.ply", scratch / "written", scratch / "read"
    _write_ply(scan, points)
    common = ["--ckpt", str(checkpoint)]
    for script, arguments in (
        ("compress.py", [str(scan), "--output_folder", f"{written}/", "--posQ", f"{step:.0f}"]),
        ("decompress.py", [f"{written}/*.bin", "--output_folder", f"{read}/"]),
    ):
        command = [script, "--input_glob", *arguments, *common]
        run_bridged("torchsparse", command, tree, tree, _TITLE, False, say)
    file, decoded = written / "scan.ply.bin", read / "scan.ply.bin.ply"
    for path in (file, decoded):
        if not path.is_file():
            raise EvaluationError(f"{_TITLE} left no {path.name}.")
    return file.stat().st_size, _read_ply(decoded)


def _write_ply(path: Path, points: npt.NDArray[np.floating]) -> None:
    axes = "".join(f"property float {axis}\n" for axis in "xyz")
    head = f"ply\nformat ascii 1.0\nelement vertex {len(points)}\n{axes}end_header\n"
    with path.open("w", encoding="ascii") as file:
        file.write(head)
        np.savetxt(file, points, "%.9g")


def _read_ply(path: Path) -> npt.NDArray[np.float64]:
    """The vertices of a file in text."""
    _, separator, rows = path.read_text(encoding="ascii").partition("end_header\n")
    if not separator:
        raise EvaluationError(f"{_TITLE} wrote a {path.name} that is no .ply file.")
    values = np.array(rows.split(), np.float64)
    n_rows = rows.count("\n")
    return values.reshape(n_rows, -1)[:, :3] if n_rows else values.reshape(0, 3)
