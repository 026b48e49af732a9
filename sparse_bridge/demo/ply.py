"""Reader for `.ply` scans: the vertices of any file that the package plyfile reads."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..errors import ShapeError
from .tables import pick_columns, require, unreadable


def read_ply(
    path: Path,
) -> tuple[npt.NDArray[np.floating], npt.NDArray[np.floating] | None]:
    """Positions [N, 3] and intensity [N] or colour [N, 3] of the vertices.

    Raises:
        SettingError: plyfile is not installed.
        ShapeError: no vertices, x, y or z missing or a list, a broken or truncated file.
    """
    plyfile = require("plyfile", ".ply files")
    try:
        with path.open("rb") as file, warnings.catch_warnings():
            # Empty lists, and numbers out of their type's range; a wrong one is an error.
            warnings.simplefilter("ignore")
            content = plyfile.PlyData.read(file)
    except (plyfile.PlyParseError, MemoryError) as error:
        raise unreadable(path, error) from error
    if "vertex" not in content:
        names = ", ".join(element.name for element in content.elements) or "none"
        raise ShapeError(f"{path}: elements {names}; expected 'vertex'.")
    rows = content["vertex"].data
    numbers = [name for name in rows.dtype.names or () if rows.dtype[name].kind in "fiu"]
    return pick_columns(path, {name: rows[name] for name in numbers})
