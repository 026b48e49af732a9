"""Files of results: JSON of a stated schema, written so that a reader never sees half of it."""

from __future__ import annotations

import json
import os
import pathlib
import tempfile
from collections.abc import Mapping
from typing import Any

from ...errors import SettingError


def save(path: pathlib.Path, schema: int, values: Mapping[str, Any]) -> None:
    """Write `values` and their schema; what a failure left half written is removed.

    Raises:
        OSError: no space, no right to write.
    """
    text = json.dumps({"schema": schema, **values}, indent=1) + "\n"
    if path.exists() and not path.is_file():  # a pipe or a device, which must not be replaced
        path.write_text(text)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    try:
        part.write_text(text)
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def require_writable(path: pathlib.Path, option: str) -> None:
    """Say before minutes of work that the file `path` cannot be written; makes nothing.

    Raises:
        SettingError: a folder is in its place, or no file can be made there.
    """
    if path.is_dir():
        raise SettingError(f"{option} {path}: got a folder; expected the name of a file.")
    parent = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    if not _takes_files(parent) if parent != path else not os.access(path, os.W_OK):
        raise SettingError(
            f"{option} {path}: {parent} cannot be written; expected a place where this user may "
            "make files. Name another one."
        )


def _takes_files(folder: pathlib.Path) -> bool:
    """Found out by making a file that has no name, or loses it at once: rights say nothing of
    read-only disks and of /proc."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def read(path: pathlib.Path) -> tuple[int | None, dict[str, Any]]:
    """The schema of a file and its values; None where it states none.

    Raises:
        OSError, ValueError: there is no such file, or it holds no JSON object.
    """
    values = json.loads(path.read_text())
    if not isinstance(values, dict):
        raise ValueError(f"a {type(values).__name__}, expected an object")
    return values.pop("schema", None), values
