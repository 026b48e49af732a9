"""Cells as JSON, for the processes that run them."""

from __future__ import annotations

import dataclasses
from typing import Any

from .matrix import Cell, Expect, Model

__all__ = ["from_json", "to_json"]


def to_json(cell: Cell) -> dict[str, Any]:
    """The cell as JSON values."""
    return dataclasses.asdict(cell)


def from_json(values: dict[str, Any]) -> Cell:
    """The cell that `to_json` was given."""
    model = dict(values["model"])
    expect = tuple(Expect(**entry) for entry in model.pop("expect"))
    return Cell(**{**values, "model": Model(**model, expect=expect)})
