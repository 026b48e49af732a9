"""Files of results: JSON of a stated schema, written so that a reader never sees half of it."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any


def save(path: pathlib.Path, schema: int, values: Mapping[str, Any]) -> None:
    """Write `values` and their schema."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps({"schema": schema, **values}, indent=1) + "\n")
    os.replace(part, path)


def read(path: pathlib.Path) -> tuple[int | None, dict[str, Any]]:
    """The schema of a file and its values; None where it states none.

    Raises:
        OSError, ValueError: there is no such file, or it holds no JSON object.
    """
    values = json.loads(path.read_text())
    if not isinstance(values, dict):
        raise ValueError(f"a {type(values).__name__}, expected an object")
    return values.pop("schema", None), values
