"""Tensors of a replayed call, over which kernel maps are built again."""

from __future__ import annotations

import pytest

from sparse_bridge.adapters import protocol
from sparse_bridge.core.capture.calls.results import Results
from tests.adapters.spconv import apis
from tests.adapters.spconv.test_replayed_tensors import behind_a_layer, padded


@pytest.fixture(scope="module")
def sp():
    with apis.standin() as module:
        yield module


class Slotted:
    """A tensor of a framework whose classes have slots."""

    __slots__ = ("indices",)

    def __init__(self, coords):
        self.indices = coords


def test_which_tensors_of_a_call_maps_can_be_built_over(sp):
    x, y = behind_a_layer(sp), behind_a_layer(sp)
    inside, other = padded(x), padded(y)
    results = Results(protocol.of(x), inside, x, lambda _: None)
    assert results.at(inside.indices) is x and results.at(other.indices) is None
    results.add(other, y)
    results.add(other, Slotted(y.indices))
    assert results.at(other.indices) is y
    own = y.indices
    y.indices = own.flip(0)  # the program's own
    assert results.at(other.indices) is None
    y.indices = own
    assert results.at(other.indices) is y
    own.zero_()
    assert results.at(other.indices) is y and results.at(other.indices, unwritten=True) is None
    assert results.at(inside.indices, unwritten=True) is x
    assert results.recover(other) is None  # what the model computes once more
    x.indices.add_(0)
    with pytest.raises(RuntimeError, match="inplace"):
        results.recover(other)
    del y
    assert results.at(other.indices) is None
