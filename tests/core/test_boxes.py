"""Boxes are interned by value, and kept as long as somebody has them."""

from __future__ import annotations

import gc
import weakref

import pytest

from sparse_bridge.core.geometry.boxes import Box


@pytest.mark.parametrize("make", [Box.of, Box.spanning])
def test_equal_boxes_are_one_while_somebody_has_it(make):
    lo, size = (0, 0, 0, 0), (1, 7, 11, 13)
    box = make(lo, size)
    others = [make(lo, (1, 7, 11, 100 + i)) for i in range(500)]
    assert make(lo, size) is box
    assert [make(one.lo, one.size) for one in others] == others


@pytest.mark.parametrize("make", [Box.of, Box.spanning])
def test_boxes_of_earlier_scenes_are_let_go(make):
    lo, held = (0, 0, 0), []
    for i in range(500):
        held.append(weakref.ref(make(lo, (1, 3, 200 + i))))
    gc.collect()
    assert sum(one() is not None for one in held) <= 64
