"""What the quick suite leaves to the slow one."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def quick(wanted: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """Parameters of a test, of which `wanted` run in the quick suite; the others are `slow`."""
    values = list(values)
    assert all(one in values for one in wanted), "a parameter that is not there"
    rest = [one for one in values if one not in wanted]
    return [*wanted, *(pytest.param(one, marks=pytest.mark.slow) for one in rest)]
