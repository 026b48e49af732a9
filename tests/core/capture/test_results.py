"""Levels of a replayed call, over which kernel maps are built again."""

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


def test_levels_of_a_call_that_maps_can_be_built_over(sp):
    x, y = behind_a_layer(sp), behind_a_layer(sp)
    inside, other = padded(x), padded(y)
    results = Results(protocol.of(x), inside, x, lambda *given: given)
    assert results.at(other.indices) is None
    own, shape, rows = y.indices, list(y.spatial_shape), len(x.features)
    results.add(other, y)
    y.indices, y.spatial_shape, y.features = own.flip(0), [1, 1, 1], y.features[:0]  # the program's own
    del y
    found = results.at(other.indices)
    assert found.indices is own and found.spatial_shape == shape and not found.indice_dict
    assert results.at(inside.indices).indices is x.indices and results.at(own) is None
    own.zero_()
    assert results.at(other.indices) is found and results.at(other.indices, unwritten=True) is None
    assert results.at(inside.indices, unwritten=True) is not None
    again, like = results.recover(other)  # what the model computes once more
    assert like is other and again is not x and again.indices is x.indices and len(again.features) == rows
    x.indices.add_(0)
    with pytest.raises(RuntimeError, match="inplace"):
        results.recover(other)
