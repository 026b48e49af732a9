"""Random combinations of everything a layer depends on, against the fp64 truth and one another."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_bridge.core import functional
from tests import reference
from tests.checks import assert_close
from tests.clouds import cloud
from tests.core import test_pool
from tests.core.layers import check, leaves
from tests.robustness.geometries import CHANNELS, DTYPES, cases, make

pytestmark = pytest.mark.interpreted

channels = st.sampled_from(CHANNELS)
seeds = st.integers(0, 999)


@settings(max_examples=120)
@given(case=cases(), c_in=channels, c_out=channels, dtype=st.sampled_from(DTYPES), bias=st.booleans())
def test_layers(lane, case, c_in, c_out, dtype, bias):
    """Forward and the gradients of features, weight and bias."""
    check(make(case, lane.device), c_in, c_out, lane, dtype=dtype, bias=bias, seed=case["seed"])


@settings(max_examples=30)
@given(case=cases(), groups=st.integers(2, 4), c_in=st.integers(1, 3), c_out=st.integers(1, 3))
def test_groups(lane, case, groups, c_in, c_out):
    check(make(case, lane.device), groups * c_in, groups * c_out, lane, groups=groups)


@settings(max_examples=60)
@given(
    case=cases(),
    mode=st.sampled_from(test_pool.MODES),
    dtype=st.sampled_from(DTYPES[:2]),
    floor=st.sampled_from((-test_pool.INF, 0.0)),
)
def test_pools(map_lane, case, mode, dtype, floor):
    made = make(case, map_lane.device)
    test_pool.check(made, map_lane, mode, 5, dtype, floor)


@st.composite
def pair_lists(draw):
    """(pair lists per offset, n_in, n_out): any rows, in any order, some named twice."""
    n_in, n_out = draw(st.integers(0, 9)), draw(st.integers(0, 9))
    pair = st.tuples(st.integers(0, max(0, n_in - 1)), st.integers(0, max(0, n_out - 1)))
    most = 12 if n_in and n_out else 0
    lists = draw(st.lists(st.lists(pair, max_size=most), min_size=1, max_size=6))
    parts = [torch.tensor(one, dtype=torch.int64).reshape(-1, 2) for one in lists]
    return [(part[:, 0].contiguous(), part[:, 1].contiguous()) for part in parts], n_in, n_out


@settings(max_examples=60)
@given(lists=pair_lists(), transposed=st.booleans(), seed=seeds)
def test_pair_lists(lane, lists, transposed, seed):
    """Maps given as explicit lists, read either way."""
    pairs, n_in, n_out = lists
    there = [(x.to(lane.device), y.to(lane.device)) for x, y in pairs]
    kmap = functional.kernel_map(there, n_in, n_out)
    if transposed:
        kmap, pairs = functional.inverse(kmap), reference.swapped(pairs)
        n_in, n_out = n_out, n_in
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randn(shape, generator=generator) for shape in ((n_in, 5), (len(pairs), 5, 3))]
    dy = torch.randn(n_out, 3, generator=generator)
    x, weight = leaves(values, lane.device)
    y = functional.conv(x, weight, None, kmap)
    y.backward(dy.to(lane.device))
    x64, weight64 = leaves([value.double() for value in values], "cpu")
    want = reference.conv(x64, weight64, None, pairs, n_out)
    want.backward(dy.double())
    for got, truth in ((y, want), (x.grad, x64.grad), (weight.grad, weight64.grad)):
        assert_close(got, truth)


@settings(max_examples=40)
@given(case=cases(kinds=("submanifold", "strided", "inverse"), awkward=False), steps=st.data(), seed=seeds)
def test_a_network_is_the_sum_of_its_layers(lane, case, steps, seed):
    """Layers on one another's coordinates, down and back, with all maps alive at the same time."""
    down = make({**case, "kind": "strided"}, lane.device)
    coords = down.y_coords
    outer = functional.coordinate_map(coords.to(lane.device), None, case["batch_size"])
    dimension = coords.shape[1] - 1
    offsets = functional.kernel_offsets(
        steps.draw(st.tuples(*[st.sampled_from((1, 3))] * dimension), label="inner kernel")
    )
    inner = functional.submanifold(outer, offsets)
    inner_pairs = reference.submanifold_pairs(coords, outer.box, offsets.values)
    maps = [
        (down.kmap, down.pairs, len(coords)),
        (inner, inner_pairs, len(coords)),
        (functional.inverse(down.kmap), reference.swapped(down.pairs), len(down.x_coords)),
    ]
    generator = torch.Generator().manual_seed(seed)
    widths = [3, 8, 4, 5]
    weights = []
    for (a, b), (_, pairs, _) in zip(itertools.pairwise(widths), maps, strict=True):
        scale = (a * len(pairs)) ** -0.5
        weights.append(torch.randn(len(pairs), a, b, generator=generator) * scale)
    x = torch.randn(len(down.x_coords), widths[0], generator=generator)
    parameters = leaves([x, *weights], lane.device)
    exact = leaves([value.double() for value in (x, *weights)], "cpu")
    y, want = parameters[0], exact[0]
    for (kmap, pairs, n_out), weight, weight64 in zip(maps, parameters[1:], exact[1:], strict=True):
        y = functional.conv(y, weight, None, kmap)
        want = reference.conv(want, weight64, None, pairs, n_out)
    assert_close(y, want, what="y")
    dy = torch.randn(want.shape, generator=generator)
    y.backward(dy.to(lane.device))
    want.backward(dy.double())
    for number, (got, truth) in enumerate(zip(parameters, exact, strict=True)):
        gradient = torch.zeros_like(truth) if truth.grad is None else truth.grad
        assert_close(got.grad, gradient, what=f"gradient {number}")


def outputs(lane, kind, coords, x, weight, kernel, stride):
    """(coordinates, rows) of a layer without bounds: those of the data are used."""
    cmap = functional.coordinate_map(coords.to(lane.device))
    offsets = functional.kernel_offsets(kernel)
    if kind == "submanifold":
        new, kmap = cmap, functional.submanifold(cmap, offsets)
    else:
        build = functional.strided if kind == "strided" else functional.generative
        new, kmap = build(cmap, offsets, stride)
    return new.coords.cpu(), functional.conv(x.to(lane.device), weight.to(lane.device), None, kmap)


@st.composite
def placed(draw):
    """(kind, kernel, stride, coordinates, shift): the same scene, moved by whole strides."""
    dimension = draw(st.integers(1, 4))
    kind = draw(st.sampled_from(("submanifold", "strided", "generative")))
    kernel = tuple(draw(st.integers(1, 3)) for _ in range(dimension))
    stride = 1 if kind == "submanifold" else draw(st.integers(1, 3))
    shape = tuple(draw(st.integers(1, {1: 24, 2: 8, 3: 5, 4: 4}[dimension])) for _ in kernel)
    coords = cloud(shape, draw(st.integers(1, 3)), 0.4, draw(seeds))
    reach = draw(st.sampled_from((5, 1 << 12, 1 << 20, 1 << 28)))
    shift = tuple(draw(st.integers(-reach, reach)) for _ in kernel)
    return kind, kernel, stride, coords, shift


def scene(coords, kernel, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(len(coords), 4, generator=generator)
    return x, torch.randn(torch.Size(kernel).numel(), 4, 8, generator=generator)


@settings(max_examples=60)
@given(placed=placed())
def test_where_a_scene_lies_does_not_matter(lane, placed):
    """Moved by whole strides, negative and far coordinates included, outputs move along and every
    bit of them stays."""
    kind, kernel, stride, coords, shift = placed
    x, weight = scene(coords, kernel)
    steps = torch.tensor([0, *shift], dtype=torch.int32)
    coarse = kind == "strided"
    moved = coords + (steps * stride if coarse else steps)
    here, y = outputs(lane, kind, coords, x, weight, kernel, stride)
    there, z = outputs(lane, kind, moved, x, weight, kernel, stride)
    assert torch.equal(there, here + (steps * stride if kind == "generative" else steps))
    assert torch.equal(z, y)
