"""Neighbour caches of 2.0: turned, and given to layers that they do not fit."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch

import sparse_bridge
from sparse_bridge.adapters.flex_gemm.errors import ArgumentShapeError

COORDS = torch.tensor([[0, 1, 1, 1], [0, 2, 3, 3], [0, 5, 5, 6]]).int()
SHAPE = torch.Size([1, 8, 8, 8, 2])


@pytest.fixture(autouse=True)
def layers():
    """`flex_gemm.nn` of 2.0."""
    torch.manual_seed(0)
    sparse_bridge.disable()
    with sparse_bridge.enable("flex_gemm", mode="standin", profile="2.0"):
        import flex_gemm.nn

        yield flex_gemm.nn


def down(layers, **options):
    made = {"kernel_size": 3, "stride": 2, "padding": 1, **options}
    return layers.SparseConv3d(2, 2, **made)(torch.randn(3, 2), COORDS, SHAPE)


def test_a_cache_that_is_turned_twice_is_itself(layers):
    cache = down(layers)[3]
    turned = cache.T
    assert turned.T is cache and cache.T is turned and cache.T.T is cache
    up = layers.SparseConvTranspose3d(2, 2, kernel_size=3, stride=2, padding=1)
    coarse = torch.randn(2, 2), torch.tensor([[0, 1, 1, 1], [0, 2, 2, 2]]).int(), (1, 4, 4, 4, 2)
    own = up(*coarse)[3]
    assert own.T.T is own and type(own.T).__name__ == "NeighborCache"
    for one in (copy.copy(cache), copy.copy(turned)):
        assert one.T.T is one


def test_turning_makes_no_circle(layers):
    """Maps take memory of the device: nothing waits for the garbage collector."""
    gc.disable()
    try:
        cache = down(layers)[3]
        gone = weakref.ref(cache), weakref.ref(cache.T)
        turned = cache.T
        del cache, turned
        assert gone[0]() is None and gone[1]() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "options, text",
    [
        ({"stride": 1}, r"has stride \(1, 1, 1\).* of stride \(2, 2, 2\)"),
        ({"stride": (2, 2, 1)}, r"has stride \(2, 2, 1\)"),
        ({"padding": 0}, "padding"),
        ({"padding": (1, 1, 0)}, "padding"),
        ({"dilation": 2}, "dilation"),
        ({"kernel_size": (3, 3, 1)}, "kernel size"),
        ({"kernel_size": (1, 9, 3)}, "kernel size"),
    ],
)
@pytest.mark.parametrize("way", ("down", "up"))
def test_caches_of_other_layers(layers, way, options, text):
    x = down(layers)
    made = {"kernel_size": 3, "stride": 2, "padding": 1, **options}
    if way == "up":
        layer = layers.SparseConvTranspose3d(2, 2, **made)
        given = {"neighbor_cache": x[3].T}
    else:
        layer, x = layers.SparseConv3d(2, 2, **made), (torch.randn(3, 2), COORDS, SHAPE, x[3])
        given = {"neighbor_cache": x[3]}
    with pytest.raises(ArgumentShapeError, match=text) as refused:
        layer(*x[:3], **given)
    assert isinstance(refused.value, AssertionError)


def test_submanifold_layers_and_pools(layers):
    feats = torch.randn(3, 2)
    _, cache = layers.SubmanifoldConv3d(2, 2, 3)(feats, COORDS, SHAPE)
    layers.SubmanifoldConv3d(2, 5, 3)(feats, COORDS, SHAPE, cache)  # any channels
    layers.SubmanifoldPool3d(3)(feats, COORDS, SHAPE, cache)  # the same window
    for layer in (
        layers.SubmanifoldConv3d(2, 2, 3, dilation=2),
        layers.SubmanifoldConv3d(2, 2, (1, 9, 3)),
        layers.SubmanifoldPool3d(5),
    ):
        with pytest.raises(AssertionError, match="kernel size, dilation"):
            layer(feats, COORDS, SHAPE, cache)
    with pytest.raises(AssertionError, match="kernel size, dilation"):
        layers.SparseConv3d(2, 2, 3)(feats, COORDS, SHAPE, neighbor_cache=cache)


def test_layers_whose_windows_agree_share_a_cache(layers):
    feats, coords, shape, cache = layers.SparsePool3d(2)(torch.randn(3, 2), COORDS, SHAPE)
    whole = {"output_coords": COORDS, "output_shape": SHAPE, "neighbor_cache": cache}
    fine = layers.SparseUpsample3d(2)(feats, coords, shape, **whole)
    assert torch.equal(fine[1], COORDS)
    layers.SparsePixelUnshuffle3d(2)(torch.randn(3, 2), COORDS, SHAPE, neighbor_cache=cache)
    layers.SparseConv3d(2, 4, 2, 2)(torch.randn(3, 2), COORDS, SHAPE, neighbor_cache=cache)
    with pytest.raises(AssertionError, match="stride"):
        layers.SparseUpsample3d(3)(feats, coords, shape, **whole)


@pytest.mark.parametrize("prepare", (copy.copy, copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))))
@pytest.mark.parametrize("way", ("same", "down", "turned", "up", "given"))
def test_copies_and_pickles(layers, way, prepare):
    """Also of coordinates with equal rows; they know their rows and compute the same."""
    coords = torch.cat([COORDS, COORDS[:1], COORDS[1:2] - torch.tensor([0, 1, 1, 1])]).int()
    options = {"kernel_size": 3, "stride": 2, "padding": 1}
    layer = layers.SubmanifoldConv3d(2, 4, 3) if way == "same" else layers.SparseConv3d(2, 4, **options)
    if way in ("up", "turned"):
        layer = layers.SparseConvTranspose3d(2, 4, **options)
    given = {"output_coords": COORDS[:2].clone()} if way == "given" else {}
    if way == "turned":
        cache = layers.SparseConv3d(2, 2, **options)(torch.randn(5, 2), coords, SHAPE)[3].T
    else:
        cache = layer(torch.randn(5, 2), coords, SHAPE, **given)[-1]
    new = prepare(cache)
    assert type(new) is type(cache) and new is not cache and torch.equal(new.neighbor_map, cache.neighbor_map)
    feats = torch.randn(cache.input_coords.shape[0], 2)
    given = dict.fromkeys(given, new.output_coords)
    want = layer(feats, cache.input_coords, SHAPE, neighbor_cache=cache)[0]
    assert torch.equal(layer(feats, new.input_coords, SHAPE, neighbor_cache=new, **given)[0], want)
    turned = new.T
    assert torch.equal(turned.neighbor_map, cache.T.neighbor_map) and turned.T is new
    for rows in (len(feats) - 1, len(feats) + 1):
        with pytest.raises(ArgumentShapeError, match=f"expected .{len(feats)}, C"):
            layer(torch.randn(rows, 2), new.input_coords, SHAPE, neighbor_cache=new, **given)
