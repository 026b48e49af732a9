"""Sparse tensors that have kernel maps already, as replays read and make them."""

from __future__ import annotations

import copy
import gc

import pytest
import torch

from sparse_bridge import settings
from sparse_bridge.adapters import protocol
from sparse_bridge.core import late_maps
from sparse_bridge.core.maps.coordinate_map import CoordinateMap
from sparse_bridge.refusals import Refusal
from tests.clouds import cloud, features

from . import apis

SHAPE = [8, 8, 8]


class Results:
    """Of a call of whose tensors somebody has the input alone.  every: a tensor that has all maps."""

    def __init__(self, captured, x, every):
        self.captured, self.x, self.every = captured.indices, x, every

    def at(self, coords, unwritten=False):
        same = (coords.data_ptr(), coords.shape) == (self.captured.data_ptr(), self.captured.shape)
        return self.x if same else None

    def recover(self, captured):
        return self.every


@pytest.fixture(scope="module")
def sp():
    with apis.standin() as module:
        yield module


def behind_a_layer(sp, size=3, key="a"):
    coords = cloud(SHAPE, 2, 0.1)
    x = sp.SparseConvTensor(features(len(coords), 4), coords, list(SHAPE), 2)
    return sp.SubMConv3d(4, 4, size, indice_key=key)(x)


def root_of(x):
    return protocol.of(x).capture_root(x)


def padded(x):
    root = root_of(x)
    return protocol.of(x).over(x, x.features[:5], CoordinateMap(root.coords[:5], root.box))


def test_maps_that_layers_would_build_are_no_obstacle(sp):
    x = behind_a_layer(sp)
    assert root_of(x).coords is x.indices
    x = sp.SubMConv3d(4, 4, 5, indice_key="b")(x)
    assert set(x.indice_dict) == {"a", "b"} and root_of(x) is not None


def moved(sp, x):
    x.indices[:, 1] = (x.indices[:, 1] + 1) % SHAPE[0]
    return x


def another_grid(sp, x):
    x.spatial_shape = [9, 8, 8]
    return x


def more_items(sp, x):
    x.batch_size = 3
    return x


def fewer_rows(sp, x):
    x.indices, x._features = x.indices[:-1], x.features[:-1]
    return x


def other_map(sp, x):
    x.indice_dict["a"] = behind_a_layer(sp).indice_dict["a"]
    return x


def copied(sp, x):
    x.indice_dict["a"] = copy.deepcopy(x.indice_dict["a"])
    x.indices = x.indices.clone()
    return x


def made_by_hand(sp, x):
    record = x.indice_dict["a"]
    by_hand = object.__new__(type(record).__bases__[1])
    by_hand.__dict__.update({name: value for name, value in vars(record).items() if not name.startswith("_")})
    x.indice_dict["a"] = by_hand
    return x


def strided(sp, x):
    return sp.SparseConv3d(4, 4, 2, 2, indice_key="down")(x)


def back_up(sp, x):
    return sp.SparseInverseConv3d(4, 4, 2, indice_key="down")(strided(sp, x))


CHANGES = [moved, another_grid, more_items, fewer_rows, other_map, copied, made_by_hand, strided, back_up]


@pytest.mark.parametrize("change", CHANGES)
def test_layers_that_look_for_other_maps_are_refused(sp, change):
    """They would be of another level, or of rows that are not these any more. Other layers are not."""
    x = change(sp, behind_a_layer(sp))
    key = "down" if change in (strided, back_up) else "a"
    layer = sp.SubMConv3d if change is not strided else sp.SparseInverseConv3d
    with pytest.raises(Refusal, match="GRAPH_HAS_MAPS"):
        layer(4, 4, 2 if key == "down" else 3, indice_key=key)(padded(x))
    inside = padded(x)
    y = sp.SubMConv3d(4, 4, 3, indice_key="b")(inside)
    made = protocol.of(x).result(x, y, x.features, None, None)
    protocol.of(x).keep_for(made, y, Results(inside, x, y), lambda rows: rows)
    assert {*late_maps.present(made.indice_dict)} == {*x.indice_dict} and {*made.indice_dict} == {*x.indice_dict, "b"}


def test_other_maps_tell_calls_apart(sp):
    plain, other = behind_a_layer(sp), copied(sp, behind_a_layer(sp))
    assert protocol.of(plain).label(plain) != protocol.of(plain).label(other)


def test_keys_that_several_kernels_share_are_one(sp):
    with settings.override(shared_keys=True):
        assert root_of(behind_a_layer(sp)) is None


def test_maps_that_layers_put_into_a_shared_dictionary(sp):
    """Of the same call: a capture comes behind its layers."""
    with settings.override(shared_keys=True):
        coords = cloud(SHAPE, 2, 0.1)
        x = sp.SparseConvTensor(features(len(coords), 4), coords, list(SHAPE), 2)
        root = root_of(x)
        sp.SparseConv3d(4, 4, 2, 2, indice_key="down")(x)
        assert "down" in x.indice_dict
        inside = protocol.of(x).over(x, x.features[:5], CoordinateMap(root.coords[:5], root.box))
        assert "down" in sp.SparseConv3d(4, 4, 2, 2, indice_key="down")(inside).indice_dict


def test_which_layers_may_share_a_map_tells_calls_apart(sp):
    tensors = [behind_a_layer(sp), behind_a_layer(sp, 5), behind_a_layer(sp, 3, "b")]
    labels = [protocol.of(x).label(x) for x in tensors]
    assert len(set(labels)) == 3 and labels[0] == protocol.of(tensors[0]).label(behind_a_layer(sp))


def test_a_result_carries_the_maps_of_its_input_on(sp):
    x = behind_a_layer(sp)
    y = sp.SubMConv3d(4, 4, 3, indice_key="b")(padded(x))
    assert "a" not in y.indice_dict
    made = protocol.of(x).result(x, y, x.features * 2, None, None)
    assert list(made.indice_dict.items()) == list(x.indice_dict.items()) and made.indice_dict is not x.indice_dict
    again = sp.SubMConv3d(4, 4, 3, indice_key="a")(made)
    assert again.indice_dict["a"] is x.indice_dict["a"]


def test_a_tensor_that_was_made_anew_does_not(sp):
    x = behind_a_layer(sp)
    inside = padded(x)
    y = sp.SparseConvTensor(inside.features, inside.indices, list(SHAPE), 2)
    assert not protocol.of(x).result(x, y, x.features, None, None).indice_dict


@pytest.mark.parametrize("kept", [True, False])
def test_maps_of_a_result_that_are_made_when_wanted(sp, kept):
    """By their layer, over the input of the call; where that is gone, by whoever has all."""
    x, layer = behind_a_layer(sp), sp.SparseConv3d(4, 4, 2, 2, indice_key="down")
    theirs, over = layer(x).indice_dict["down"], padded(x)
    inside = sp.SparseInverseConv3d(4, 4, 2, indice_key="down")(layer(over))
    if not kept:
        del layer
        gc.collect()
    made = protocol.of(x).result(x, inside, x.features, None, None)
    protocol.of(x).keep_for(made, inside, Results(over, x, inside), lambda rows: rows)
    assert list(late_maps.present(made.indice_dict)) == ["a"]
    found = made.indice_dict["down"]
    assert found is made.indice_dict["down"] and set(made.indice_dict) == {"a", "down"}
    if kept:
        assert found.indices is x.indices and torch.equal(found.indice_pairs, theirs.indice_pairs)
        assert torch.equal(found.out_indices, theirs.out_indices)
    else:
        assert found is inside.indice_dict["down"]


def test_rows_in_another_order_are_refused(sp):
    """The maps that the input carries would not be those of such a result."""
    x = padded(behind_a_layer(sp))
    with pytest.raises(Refusal, match="GRAPH_HAS_MAPS"):
        sp.functional.sparse_add(x, x.replace_feature(x.features * 2))
