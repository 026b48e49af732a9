"""Layers that are launched at their call with what followed them, under autocast."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional as F

from tests.checks import assert_close
from tests.core.conv.test_fused_plan import UNITS, Unit, Whole, launches
from tests.core.conv.test_fused_plan import small as small  # a fixture


def by_hand(unit):
    """What it makes of operands that were cast in bf16 before, without autocast."""
    twin = copy.copy(unit)
    twin.x, twin.weight = unit.x.bfloat16(), unit.weight.bfloat16()
    with torch.autocast("cpu", enabled=False):
        return twin.known()()


@pytest.mark.parametrize("name", [*UNITS, "container"])
def test_casts_of_autocast(name):
    unit = Whole() if name == "container" else Unit(**UNITS[name])
    with torch.autocast("cpu", torch.bfloat16):
        if unit.other is not None:
            unit.other = unit.other.bfloat16()
        unit.known()
        with launches() as seen:
            y = unit()
        assert len(seen) == 1 and y.dtype is torch.bfloat16
        assert torch.equal(y, by_hand(unit))
        before = y.clone()
        unit.weight.data.neg_()  # no copy of a weight outlives its call
        unit.x.add_(1)
        with launches() as seen:
            y = unit()
        assert len(seen) == 1
        assert torch.equal(y, by_hand(unit)) and not torch.equal(y, before)


@pytest.mark.parametrize("kind", [Unit, Whole])
def test_autocast_comes_and_goes(kind):
    unit = kind()
    for dtype in (torch.bfloat16, None, torch.float16, torch.bfloat16, None, None):
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            for _ in range(3):
                y = unit()
                assert y.dtype is (dtype or torch.float32)
                assert_close(y, unit.want(), y.dtype)


def test_operands_of_autocast_that_change_before_the_launch():
    """Copies were made of them at the call."""
    unit = Unit(sums=True)
    with torch.autocast("cpu", torch.bfloat16):
        unit.other = unit.other.bfloat16()
        unit.known()
        with torch.no_grad(), launches() as seen:
            want, y = unit.want(), unit.conv()
            unit.weight.zero_()
            y = F.relu(unit.normed(y) + unit.other)
        assert seen == ["nsa"]
    assert_close(y, want, torch.bfloat16)
