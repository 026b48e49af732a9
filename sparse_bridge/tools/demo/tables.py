"""What the readers share: named columns, of which position and brightness are taken; errors."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ...errors import SettingError, ShapeError

BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # of editors that save text as UTF-8
_INTENSITY = ("intensity", "scalar_intensity", "reflectance", "reflectivity", "i", "remission")
_COLOUR = (("red", "green", "blue"), ("r", "g", "b"), ("diffuse_red", "diffuse_green", "diffuse_blue"))

# Not-a-number and infinity as C libraries write them: nan(ind), 1.#QNAN0, -1.#INF. Microsoft's
# rounds its words where few digits are asked for: 1.#R is 1.#QNAN in two.
_ROUNDED = rb"\$|#(?:J|R|T|[IQS]O|[QS]NB)"
_NOT_A_NUMBER = re.compile(
    rb"[-+]?(?:nan\([^()\s]*\)|1\.(?:#(?:IND|[QS]NAN)\d*|(?:" + _ROUNDED + rb")(?!\S)))", re.IGNORECASE
)
_INFINITY = re.compile(rb"([-+]?)1\.#INF\d*", re.IGNORECASE)

Floats = npt.NDArray[np.floating]


def pick_columns(path: Path, table: Mapping[str, npt.NDArray]) -> tuple[Floats, Floats | None]:
    """x, y, z as [N, 3] and an intensity [N] or colour [N, 3], if there is one, in its own type."""
    lower = {name.lower(): name for name in table}
    missing = [axis for axis in "xyz" if axis not in lower]
    if missing:
        raise ShapeError(
            f"{path}: field {', '.join(missing)} is missing; got {', '.join(table) or 'none'}, expected x, y and z."
        )
    xyz = np.column_stack([table[lower[axis]] for axis in "xyz"]).astype(np.float64)
    for name in _INTENSITY:
        if name in lower:
            return xyz, np.asarray(table[lower[name]])
    for names in _COLOUR:
        if all(name in lower for name in names):
            return xyz, np.column_stack([table[lower[n]] for n in names])
    return xyz, None


def plain_numbers(text: bytes) -> bytes:
    """Text with not-a-number and infinity as Python and NumPy read them."""
    if not any(sign in text for sign in (b"#", b"(", b"$")):
        return text
    return _INFINITY.sub(rb"\1inf", _NOT_A_NUMBER.sub(b"nan", text))


def read_ascii(path: Path, text: bytes, columns: int, rows: int) -> npt.NDArray[np.float64]:
    """The first `rows` lines of numbers as [rows, columns]."""
    values = np.array(plain_numbers(text).split()[: rows * columns], dtype=np.float64)
    if values.size < rows * columns:
        raise truncated(path, values.size // max(columns, 1), rows)
    return values.reshape(rows, columns)


def truncated(path: Path, got: int, expected: int) -> ShapeError:
    """The error for a file that ends before its header says."""
    return ShapeError(
        f"{path}: the file holds {got} points; its header says {expected}. "
        "It is truncated: download or export it again."
    )


def unreadable(path: Path, error: Exception) -> ShapeError:
    """The error for a file that its reader gives up on; `error` says why."""
    why = " ".join(str(error).split()) or type(error).__name__
    return ShapeError(
        f"{path}: not a readable {path.suffix} file ({why}); expected a complete file. Download or export it again."
    )


def require(module: str, what: str) -> Any:
    """The module that reads `what`.

    Raises:
        SettingError: it is not installed; says how to install it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:
        raise SettingError(
            f"reading {what} needs the package {module}, which is not installed; "
            'run pip install "sparse-bridge[scans]".'
        ) from None


def unique_names(names: Sequence[str]) -> list[str]:
    """Names for a structured dtype: repeated ones (padding, often `_`) get a number."""
    return [f"{name}_{i}" if names.index(name) != i else name for i, name in enumerate(names)]
