"""The functional API's own part: bounds of coordinate maps, offsets, output grids."""

from __future__ import annotations

import pytest
import torch

from sparse_bridge.core import functional
from sparse_bridge.core.geometry.offsets import Offsets
from tests import oracle, reference
from tests.clouds import cloud, features, weight

pytestmark = [pytest.mark.interpreted, pytest.mark.emulated]

SHAPE = (9, 10)


def shifted(shift, seed=0):
    """A cloud moved to coordinates of any sign."""
    return cloud(SHAPE, 2, 0.3, seed) + torch.tensor([0, *shift], dtype=torch.int32)


def test_the_module_text_runs():
    coords = cloud((6, 6, 6), 2, 0.3)
    x, bias = features(len(coords), 4), torch.randn(8)
    voxels = functional.coordinate_map(coords, spatial_shape=(6, 6, 6), batch_size=2)
    same = functional.submanifold(voxels, functional.kernel_offsets((3, 3, 3)))
    x = functional.conv(x, torch.randn(27, 4, 8), bias, same)
    coarse, down = functional.strided(voxels, functional.kernel_offsets((2, 2, 2), padding=0), stride=2)
    y = functional.conv(x, torch.randn(8, 8, 16), None, down)
    assert y.shape == (coarse.n_rows, 16)
    z = functional.conv(y, torch.randn(8, 16, 8), None, functional.inverse(down))
    assert z.shape == (len(coords), 8)
    assert set(functional.__all__) <= set(dir(functional))


def test_bounds_come_from_the_data_where_none_are_given():
    coords = shifted((-4, 1000))
    cmap = functional.coordinate_map(coords)
    low, high = coords.aminmax(dim=0)
    assert cmap.box.lo == (0, *low[1:].tolist())
    assert cmap.box.size == (2, *(high - low + 1)[1:].tolist())
    assert functional.coordinate_map(coords, batch_size=7).box.size[0] == 7
    assert functional.coordinate_map(cloud(SHAPE), SHAPE).box.size == (2, 9, 10)


def test_coordinates_of_any_sign_and_span(map_lane):
    """Where a map lies plays no part: maps of moved coordinates hold the same pairs."""
    offsets = functional.kernel_offsets((3, 3))
    for shift in ((0, 0), (-70000, 5), (2**31 - 20, -(2**31)), (-(2**31), 2**31 - 10)):
        coords = shifted(shift)
        cmap = functional.coordinate_map(coords.to(map_lane.device))
        want = reference.submanifold_pairs(coords, cmap.box, offsets.values)
        got = oracle.triples(functional.submanifold(cmap, offsets))
        assert got == oracle.pair_triples(want) and len(got) > len(coords)


@pytest.mark.parametrize("shift", [(0, 0), (-7, 4), (5, -100)])
def test_unbounded_strided_maps_keep_every_output(map_lane, shift):
    """Without out_shape no output is lost to a border, whatever its sign."""
    coords = shifted(shift)
    cmap = functional.coordinate_map(coords.to(map_lane.device))
    for offsets, stride in (
        (functional.kernel_offsets((3, 3)), 2),
        (functional.kernel_offsets((2, 4), padding=(3, -1)), (3, 1)),
    ):
        new, kmap = functional.strided(cmap, offsets, stride)
        steps = (stride, stride) if isinstance(stride, int) else stride
        reached = {
            (b, *((c - o) // s for c, o, s in zip(site, offset, steps, strict=True)))
            for b, *site in coords.tolist()
            for offset in offsets.values
            if all((c - o) % s == 0 for c, o, s in zip(site, offset, steps, strict=True))
        }
        assert {tuple(row) for row in new.coords.tolist()} == reached
        want = reference.find_pairs(coords, cmap.box, new.coords, new.box, offsets.values, steps)
        assert oracle.triples(kmap) == oracle.pair_triples(want)
        finer, up = functional.generative(cmap, offsets, stride)
        made = {
            (b, *(c * s + o for c, o, s in zip(site, offset, steps, strict=True)))
            for b, *site in coords.tolist()
            for offset in offsets.values
        }
        assert {tuple(row) for row in finer.coords.tolist()} == made
        assert sum(len(up.pair_list(v)[0]) for v in range(len(offsets))) == len(coords) * len(offsets)


def test_out_shape_cuts_as_a_dense_layer_does():
    coords = cloud(SHAPE)
    cmap = functional.coordinate_map(coords, SHAPE, 2)
    offsets = functional.kernel_offsets((3, 3), padding=0)
    outer = functional.conv_shape(SHAPE, (3, 3), stride=2)
    assert outer == (4, 4)
    new, _ = functional.strided(cmap, offsets, 2, outer)
    every, _ = functional.strided(cmap, offsets, 2)
    inside = {tuple(row) for row in every.coords.tolist() if all(0 <= c < 4 for c in row[1:])}
    assert {tuple(row) for row in new.coords.tolist()} == inside
    assert new.n_rows < every.n_rows
    finer, _ = functional.generative(cmap, offsets, 2, (8, 9))
    assert finer.coords[:, 1].max() < 8 and finer.coords[:, 2].max() < 9


def test_offsets():
    assert functional.kernel_offsets((3,)).values == ((-1,), (0,), (1,))
    assert functional.kernel_offsets((2, 3), dilation=(1, 2)).values == (
        (-1, -2),
        (-1, 0),
        (-1, 2),
        (0, -2),
        (0, 0),
        (0, 2),
    )
    assert functional.kernel_offsets((2,), padding=-3).values == ((3,), (4,))
    assert functional.kernel_offsets((3, 3)) is functional.kernel_offsets((3, 3), padding=1)
    assert Offsets.of([[0, 1], [1, 0]]).center == -1


@pytest.mark.parametrize("n", [0, 1])
def test_maps_of_hardly_any_coordinates(map_lane, n):
    device = map_lane.device
    coords = torch.zeros(n, 3, dtype=torch.int32, device=device)
    for cmap in (functional.coordinate_map(coords), functional.coordinate_map(coords, SHAPE, 3)):
        offsets = functional.kernel_offsets((3, 3))
        new, down = functional.strided(cmap, offsets, 2)
        for kmap in (functional.submanifold(cmap, offsets), down, functional.inverse(down)):
            x = torch.randn(kmap.n_in, 4, device=device, requires_grad=True)
            leaf_weight = weight(8, (9,), 4, device=device).permute(1, 2, 0).requires_grad_()
            bias = torch.randn(8, device=device, requires_grad=True)
            y = functional.conv(x, leaf_weight, bias, kmap)
            assert y.shape == (kmap.n_out, 8)
            y.sum().backward()
            assert leaf_weight.grad.any() == bool(n) and bias.grad.tolist() == [float(len(y))] * 8
        assert new.n_rows == n


def test_dead_rows_are_ignored_on_request(map_lane):
    coords = cloud(SHAPE)
    coords[3, 1] = 9
    cmap = functional.coordinate_map(coords.to(map_lane.device), SHAPE, 2, outside="ignore")
    kmap = functional.submanifold(cmap, functional.kernel_offsets((3, 3)))
    assert {t for t in oracle.triples(kmap) if 3 in t[1:]} == {(4, 3, 3)}


def test_one_dimension_and_six(map_lane):
    for dimension in (1, 6):
        coords = cloud((3,) * dimension, 2, 0.2)
        cmap = functional.coordinate_map(coords.to(map_lane.device))
        offsets = functional.kernel_offsets((2,) * dimension)
        want = reference.submanifold_pairs(coords, cmap.box, offsets.values)
        assert oracle.triples(functional.submanifold(cmap, offsets)) == oracle.pair_triples(want)
