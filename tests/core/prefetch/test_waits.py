"""Waits for the device: one a scene in every API once inputs are known, whatever their bounds, and
nothing lost where they are not what was expected."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sparse_bridge
from sparse_bridge.adapters.torchsparse.geometry import Sites, box_bounds, core_box, output_rule, reach_bounds
from sparse_bridge.core import functional
from sparse_bridge.core.device.device_support import kernel_target
from sparse_bridge.core.geometry.boxes import Box, record_of
from sparse_bridge.core.geometry.data_bounds import DataBounds
from sparse_bridge.core.geometry.reach import AxisReach, BoxReach
from sparse_bridge.core.maps import request
from sparse_bridge.core.maps.coordinate_map import CoordinateMap
from sparse_bridge.core.maps.request import MapRequest
from sparse_bridge.core.prefetch import prefetch
from sparse_bridge.core.prefetch.level_layouts import LevelLayouts, chains_of
from sparse_bridge.core.prefetch.recording import Step, boxes_of, levels_with_unknown_bounds
from sparse_bridge.errors import CoordinateError
from sparse_bridge.kernels.maps import pair_batch
from tests.clouds import features

from .waiting import Minkowski, Spconv, Torchsparse, alone, check, fresh, ready, voxels, waited, waits  # noqa: F401 - `fresh` is a fixture

APIS = [Spconv, Torchsparse, Minkowski]
THREE = functional.kernel_offsets((3, 3, 3))


@pytest.mark.emulated
@pytest.mark.parametrize("api", APIS)
@torch.no_grad()
def test_one_wait_a_scene(kernel_lane, monkeypatch, api):
    network = ready(api, kernel_lane)
    for turn in (2, 3, 4):
        found = waited(monkeypatch, network, voxels(turn, kernel_lane.device))
        assert len(found) == 1 and found[0].startswith("core/prefetch"), found


class InRange(Torchsparse):
    """torchsparse where the grid is given."""

    def input(self, x, coords, shape):
        return self.ts.SparseTensor(x, coords, spatial_range=(2, *shape))


@pytest.mark.emulated
@torch.no_grad()
def test_one_wait_where_the_grid_is_given(kernel_lane, monkeypatch):
    """Whether rows lie in it is read with the sizes of the levels; rows that do not are refused as
    ever."""
    network = ready(InRange, kernel_lane)
    for turn in (2, 3, 4):
        scene = voxels(turn, kernel_lane.device)
        found = waited(monkeypatch, network, scene)
        assert len(found) == 1, found
    x, coords, shape = scene
    outside = coords.clone()
    outside[3, 2] = shape[1]
    with pytest.raises(CoordinateError, match="spatial_range"):
        network(x, outside, shape)
    check(network, scene)


class Points(Minkowski):
    """MinkowskiEngine where points come first."""

    def field(self, x, coords):
        points = coords + 0.25 * torch.arange(4, device=coords.device)
        return self.me.TensorField(x, points)

    def input(self, x, coords, shape):
        return self.field(x, coords).sparse()


@pytest.mark.emulated
@torch.no_grad()
def test_one_wait_for_points(kernel_lane, monkeypatch):
    """Whether points fit into integers is seen from the bounds of their voxels, which are read with
    the sizes of the levels."""
    network = ready(Points, kernel_lane)
    for turn in (2, 3):
        found = waited(monkeypatch, network, voxels(turn, kernel_lane.device))
        assert len(found) == 1, found


@pytest.mark.emulated
@torch.no_grad()
def test_two_waits_for_voxels_alone(kernel_lane, monkeypatch):
    """Their bounds, and how many are distinct; nothing to add features up."""
    network = Points()
    modes = network.me.SparseTensorQuantizationMode
    x, coords, _ = voxels(0, kernel_lane.device)
    forms = (1, modes.UNWEIGHTED_SUM), (2, modes.UNWEIGHTED_AVERAGE), (3, modes.MAX_POOL)
    for step, mode in forms:  # the first use of a device checks its kernels
        network.field(x, coords).sparse(step, quantization_mode=mode)
    for step, mode in forms:
        field = network.field(x, coords)
        with waits(monkeypatch) as found:
            field.sparse(step, quantization_mode=mode)
        assert len(found) == 2, found
    with waits(monkeypatch) as found:
        network.field(x, coords).splat()
    assert len(found) == 2, found


@pytest.mark.emulated
@pytest.mark.parametrize("api", [Torchsparse, Minkowski])
@torch.no_grad()
def test_bounds_that_grow(kernel_lane, api):
    """To keys of 64 bits and back, beyond what launches are laid out for, and beyond any key."""
    network = ready(api, kernel_lane)
    wide, far, huge = (2000, 2000, 2000), (1 << 25, 0, 0), (1 << 30, 1 << 30, -(1 << 20))
    none, requeued = (0, 0, 0), []
    for turn, moved in enumerate((none, wide, wide, none, far, none, huge, none, none)):
        x, coords, shape = voxels(turn + 2, kernel_lane.device)
        coords[-1] += coords.new_tensor([0, *moved])
        before = prefetch.counts()["requeued"]
        check(network, (x, coords, shape))
        requeued.append(prefetch.counts()["requeued"] - before)
    # Once a level has needed 64 bits it is laid out for them.
    assert requeued == [0, 1, 0, 0, 1, 0, 1, 0, 0]
    text = str(sparse_bridge.report())
    assert "queued again, as bounds had grown" in text


@pytest.mark.emulated
@pytest.mark.parametrize("api", [Torchsparse, Minkowski])
@torch.no_grad()
def test_scenes_that_are_like_no_other(kernel_lane, api):
    """Equal rows, no rows, one row, items without rows, far more rows a level than before."""
    network = ready(api, kernel_lane)
    x, coords, shape = voxels(2, kernel_lane.device)
    spread = coords[:200] * coords.new_tensor([1, 7, 7, 7])
    twice = torch.cat([coords, coords[:5]])
    scenes = [coords, spread, twice, coords[:0], coords[:1], coords[coords[:, 0] == 1], coords]
    for rows in scenes:
        values = features(len(rows), x.shape[1], seed=len(rows)).to(kernel_lane.device)
        if api is Torchsparse and len(rows) == 0:
            continue  # its tensors have rows
        check(network, (values, rows.contiguous(), shape))


@pytest.mark.emulated
@torch.no_grad()
def test_a_strided_layer_first(kernel_lane, monkeypatch):
    """Its outputs end where the coordinates do, which the host does not know yet."""
    network = Torchsparse()
    network.net = network.net[1:3]
    network.net[0] = type(network.net[0])(4, 8, 2, 2)
    network.net.to(kernel_lane.device).eval()
    for turn in range(5):
        found = waited(monkeypatch, network, voxels(turn, kernel_lane.device))
        assert turn < 2 or len(found) == 1, found


@pytest.mark.emulated
def test_equal_rows_are_folded_without_a_look(kernel_lane, monkeypatch):
    """How many are distinct is known by then."""
    _, coords, shape = voxels(0, kernel_lane.device)
    coords = torch.cat([coords[:7], coords, coords[5:9], coords.new_tensor([[0, 99, 0, 0]])])
    cmap = CoordinateMap(coords, Box.grid(2, shape))
    assert not cmap.unique
    with waits(monkeypatch) as found:
        fold, distinct = cmap.duplicates(), cmap.distinct_map()
    assert found == []
    inside = coords[:-1].tolist()
    expected = [row for row, one in enumerate(inside) if inside.index(one) == row]
    assert fold.first.tolist() == expected and distinct.n_rows == len(expected)
    assert torch.equal(distinct.coords, coords[fold.first])
    rows = fold.inverse.tolist()
    assert rows == [expected.index(inside.index(one)) for one in inside] + [len(expected)]


@pytest.mark.emulated
def test_a_herald_that_hears_of_other_tensors(kernel_lane, monkeypatch):
    """Tensors that no layer asks maps of, between those that are."""
    network = Minkowski()
    network.net.to(kernel_lane.device).eval()
    with torch.no_grad():
        for turn in range(6):
            x, coords, shape = voxels(turn, kernel_lane.device)
            network.me.SparseTensor(x, coords)
            found = waited(monkeypatch, network, (x, coords, shape))
    assert len(found) <= 3, found


def _axis():
    numbers = st.integers(-9, 9)
    return st.builds(AxisReach, st.integers(1, 4), st.integers(1, 5), numbers, numbers, st.booleans())


def _rule():
    return st.builds(BoxReach, st.tuples(_axis(), _axis(), _axis()), st.booleans())


_LOW = st.tuples(*[st.integers(-200, 200)] * 3)
_SIZE = st.tuples(*[st.integers(1, 300)] * 3)


@pytest.mark.emulated
@pytest.mark.interpreted
@given(st.lists(_rule(), max_size=4), _LOW, _SIZE)
@settings(max_examples=15)
def test_bounds_of_levels_on_the_device(kernel_lane, rules, low, size):
    """Those that the host works out, level over level and beside each other."""
    device = torch.device(kernel_lane.device)
    steps = [
        Step(place if place % 3 else 0, MapRequest("strided", THREE, (2, 2, 2), rule))
        for place, rule in enumerate(rules)
    ]
    box = Box.spanning((1, *low), (3, *size))
    ends = torch.tensor([[1, *low], [3, *(lo + n - 1 for lo, n in zip(low, size, strict=True))]])
    ends = ends.to(device, torch.int32)
    assert DataBounds(ends).box is box
    loose, chains = levels_with_unknown_bounds(tuple(steps)), chains_of(tuple(steps))
    assert set(chains) == {0, *loose} and sum(map(len, chains.values())) == 1 + len(rules)
    # Loose levels may end anywhere in their boxes: here at the first row and the last but one.
    found, boxes = {}, boxes_of(box, steps)
    for level in loose:
        whole = boxes_of(box, steps, found)[level]
        found[level] = Box.spanning(whole.lo, tuple(max(1, n - 1) for n in whole.size))
    boxes = boxes_of(box, steps, found)
    layouts, target = LevelLayouts(boxes, (), device), kernel_target(device)
    layouts.derive(ends, steps, target)
    for level, one in found.items():
        last = [lo + n - 1 for lo, n in zip(one.lo, one.size, strict=True)]
        inner = torch.tensor([one.lo, last], dtype=torch.int32, device=device)
        layouts.derive(inner, steps, target, level)
    expected = [number for one in boxes.values() for number in record_of(one)]
    assert layouts.records.tolist() == expected


_SIDE = st.tuples(*[st.integers(1, 4)] * 3)
_PAD = st.tuples(*[st.integers(0, 3)] * 3)


@given(
    st.sampled_from(["dense", "floor", "cells", "reached"]),
    _SIDE,
    _SIDE,
    _PAD,
    st.booleans(),
    _LOW,
    _SIZE,
    st.lists(_PAD, min_size=1, max_size=3),
)
def test_rules_of_torchsparse(kind, kernel, stride, padding, keep_tail, low, size, shifts):
    sites = Sites(kind, kernel, stride, padding, stride, tuple(shifts), keep_tail=keep_tail)
    box = Box.spanning((0, *low), (2, *size))
    expected = core_box(reach_bounds(sites, box_bounds(box), None)[0])
    assert output_rule(sites).output_box(box) is expected


def _step(network, scene):
    """Gradients of a training step."""
    x = scene[0].clone().requires_grad_()
    network.net.zero_grad(set_to_none=True)
    network(x, *scene[1:])[1].square().sum().backward()
    return [x.grad, *(p.grad for p in network.net.parameters() if p.grad is not None)]


@pytest.mark.emulated
@pytest.mark.parametrize("api", APIS)
def test_backward_passes_do_not_wait(kernel_lane, monkeypatch, api):
    """Pairs are counted as soon as there are tiles, where those of the last scene were asked for;
    how many there are is on the host by then."""
    network = api()
    network.net.to(kernel_lane.device).train()
    for turn in range(3):
        _step(network, voxels(turn, kernel_lane.device))
    for turn in (3, 4, 0):
        scene = voxels(turn, kernel_lane.device)
        with waits(monkeypatch) as found:
            got = _step(network, scene)
        counted = [one for one in found if one.startswith("kernels/maps/pair_batch.py")]
        assert len(counted) == 1 and len(found) == 2 and found[0].startswith("core/prefetch"), found
        request.register(None)
        want = _step(network, (scene[0], scene[1].clone(), scene[2]))
        prefetch.install()
        for mine, theirs in zip(got, want, strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.emulated
@torch.no_grad()
def test_inference_counts_no_pairs(kernel_lane, monkeypatch):
    counted = []
    ready(Spconv, kernel_lane)  # the first use of a device checks its kernels, this one, too
    monkeypatch.setattr(pair_batch.ends_kernel, "launch", lambda *args: counted.append(args))
    network = ready(Spconv, kernel_lane)
    for turn in (2, 3):
        network(*voxels(turn, kernel_lane.device))
    assert not counted
