"""What the quick suite leaves to the slow one."""

from __future__ import annotations

import collections
from collections.abc import Collection, Iterable
from typing import Any

import pytest


def quick(wanted: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """Parameters of a test, of which `wanted` run in the quick suite; the others are `slow`."""
    values = list(values)
    assert all(one in values for one in wanted), "a parameter that is not there"
    rest = [one for one in values if one not in wanted]
    return [*wanted, *(pytest.param(one, marks=pytest.mark.slow) for one in rest)]


def mark_beyond_samples(items: Iterable[pytest.Item]) -> None:
    """Of a test with the mark `sample(n)` the first n cases are quick, and the others `slow`. A case that is
    named alone is the first. Cases on a GPU are left as they are: of `sample(0)` they alone are quick."""
    seen: collections.Counter[tuple[Any, str]] = collections.Counter()
    for item in items:
        mark = item.get_closest_marker("sample")
        if mark is None or "gpu" in item.keywords or "slow" in item.keywords:
            continue
        test = item.parent, getattr(item, "originalname", item.name)
        seen[test] += 1
        if seen[test] > mark.args[0]:
            item.add_marker(pytest.mark.slow)
