"""Shared material of the demo's tests."""

from __future__ import annotations

import numpy as np
import pytest


@pytest.fixture(scope="session")
def cloud() -> np.ndarray:
    """[300, 4] float32: x, y, z within 10 m and an intensity in [0, 1]."""
    rng = np.random.default_rng(7)
    xyz = rng.uniform(-10, 10, (300, 3)) * [1, 1, 0.15]
    return np.column_stack([xyz, rng.uniform(0, 1, 300)]).astype(np.float32)
