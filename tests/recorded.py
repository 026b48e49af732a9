"""The frameworks' recorded answers, which a source distribution leaves out: 34 of its 37 MB."""

from __future__ import annotations

import pathlib

import pytest

RECORDED = pytest.mark.skipif(
    not any((pathlib.Path(__file__).parent / "goldens").rglob("*.npz")),
    reason="the recorded answers are in a source checkout only",
)
