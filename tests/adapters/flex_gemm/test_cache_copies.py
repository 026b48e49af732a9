"""Neighbour caches that were read, copied, saved or put together anew, and features of other rows."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch

from sparse_bridge.adapters.flex_gemm.errors import ArgumentShapeError

from .test_convolutions import voxels, weights

ROWS = 40


def _read(*names):
    def read(cache):
        for name in names:
            cache[name]
        return cache

    return read


def _saved(cache):
    file = io.BytesIO()
    torch.save(cache, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


def _changed(cache):
    cache["neighbor_map"].view(torch.int32)[0, 0] = 1
    return cache


def _joined(cache):
    new = type(cache)()
    vars(new).update(vars(cache))
    return new


PREPARED = {
    "untouched": lambda cache: cache,
    "read": _read("neighbor_map"),
    "read in full": _read("neighbor_map", "gray_code", "sorted_idx", "valid_signal_i"),
    "changed in place": _changed,
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "copy of a read one": lambda cache: copy.copy(_read("neighbor_map")(cache)),
    "pickle": lambda cache: pickle.loads(pickle.dumps(cache)),
    "pickle of a copy": lambda cache: pickle.loads(pickle.dumps(copy.deepcopy(cache))),
    "torch.save": _saved,
    "made of its attributes": lambda cache: type(cache)(**vars(cache)),
    "made of those of a read one": lambda cache: type(cache)(**vars(_read("neighbor_map")(cache))),
    "updated": _joined,
    "dict union": lambda cache: type(cache)(**({} | vars(cache))),
}
LAYERS = {
    "submanifold": ("sparse_submanifold_conv3d", {}),
    "strided": ("sparse_conv3d", {"stride": 2, "padding": 1}),
    "any dimension": ("sparse_submanifold_conv", {}),
}


@pytest.fixture(params=list(LAYERS))
def layer(flex_gemm, request):
    """layer(rows, cache) is what a layer returns for the first `rows` of some voxels."""
    name, options = LAYERS[request.param]
    feats, coords, shape = voxels(60, 3)
    weight = weights(3, 3, (3, 3, 3))

    def call(rows, cache=None):
        function = getattr(flex_gemm, name, None) or getattr(flex_gemm.ops.spconv, name)
        return function(feats[:rows], coords[:rows], shape, weight, neighbor_cache=cache, **options)

    return call


@pytest.mark.parametrize("prepare", PREPARED.values(), ids=list(PREPARED))
def test_a_cache_keeps_its_rows(layer, prepare):
    want, *_, cache = layer(ROWS)
    prepared = prepare(cache)
    for rows in (ROWS - 10, ROWS - 1, ROWS + 1, 60):
        with pytest.raises(ArgumentShapeError, match=f"features have {rows} rows, the neighbour cache is of {ROWS}"):
            layer(rows, prepared)
    out, *_, same = layer(ROWS, prepared)
    assert same is prepared
    if prepare is not _changed:
        torch.testing.assert_close(out, want)


def test_an_array_of_the_caller_is_checked_by_its_output(flex_gemm, layer):
    """It does not say of how many rows the features were."""
    *_, cache = layer(ROWS)
    hand = type(cache)(neighbor_map=cache["neighbor_map"])
    want = layer(ROWS)[0]
    torch.testing.assert_close(layer(ROWS, hand)[0], want)
    with pytest.raises(ArgumentShapeError, match="cache"):
        layer(ROWS - 10, hand)
    if want.shape[0] == ROWS:
        with pytest.raises(ArgumentShapeError, match=f"output has 60 rows, that of the neighbour cache {ROWS}"):
            layer(60, hand)
    cache["neighbor_map"] = cache["neighbor_map"][:7]  # the array counts from here on
    with pytest.raises(ArgumentShapeError, match="neighbour cache 7"):
        layer(ROWS, cache)


def test_parts_take_arrays_of_some_rows(flex_gemm):
    feats, coords, shape = voxels(ROWS, 3)
    weight = weights(3, 3, (3, 3, 3))
    spconv = flex_gemm.ops.spconv
    want, cache = spconv.sparse_submanifold_conv3d(feats, coords, shape, weight)
    chunk = type(cache)(**{**vars(cache), "neighbor_map": cache["neighbor_map"][5:12]})
    part = spconv.SubMConv3dFunction._sparse_submanifold_conv_forward(feats, chunk, weight, None)
    torch.testing.assert_close(part, want[5:12])
    with pytest.raises(ArgumentShapeError, match="39 rows"):
        spconv.SubMConv3dFunction._sparse_submanifold_conv_forward(feats[:39], copy.copy(cache), weight, None)
