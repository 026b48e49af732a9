"""Streams of scenes that all have another shape: maps are prefetched as in streams of one shape, in
every framework, and are those that would have been built one by one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import sparse_bridge
from sparse_bridge import policy
from sparse_bridge.core import functional
from sparse_bridge.core.geometry.boxes import Box, laid_out
from sparse_bridge.core.maps import map_cache, request
from sparse_bridge.core.maps.coordinate_map import CoordinateMap
from sparse_bridge.core.maps.request import MapRequest
from sparse_bridge.core.prefetch import prefetch
from sparse_bridge.core.prefetch.recording import Recording, Step
from tests.clouds import cloud, features

from .waiting import SHAPES, Minkowski, Spconv, Torchsparse, alone, fresh, voxels  # noqa: F401 - a fixture

pytestmark = pytest.mark.emulated

THREE = functional.kernel_offsets((3, 3, 3))


@pytest.mark.parametrize("api", [Spconv, Torchsparse, Minkowski])
@torch.no_grad()
def test_a_stream_of_new_shapes(kernel_lane, built, api):
    network = api()
    network.net.to(kernel_lane.device).eval()
    for turn in range(len(SHAPES)):
        scene = voxels(turn, kernel_lane.device)
        built.clear()
        coords, x = network(*scene)
        assert len(built) == (network.maps if turn < 2 else 0), turn
        assert all(map(torch.equal, (coords, x), alone(network, scene)))


@pytest.mark.parametrize("trains", [False, True])
def test_a_level_without_rows(kernel_lane, built, trains):
    """All rows lie where no output reaches; the scenes before had outputs."""
    network = Spconv()
    layers = network.sp
    network.net[1] = layers.SparseConv3d(8, 8, 2, 2, indice_key="d")
    network.net[3] = layers.SparseInverseConv3d(8, 4, 2, indice_key="d")
    network.net.to(kernel_lane.device).train(trains)
    for turn in range(5):
        coords = cloud((9, 8, 6), share=0.2, seed=turn)
        if turn == 3:
            coords = coords[coords[:, 1] == 8]
        x = features(len(coords), 4, seed=turn).to(kernel_lane.device)
        found = []
        for provider in (prefetch.provide, None):
            request.register(provider)
            built.clear()
            with torch.set_grad_enabled(trains):
                there, y = network(x, coords.clone().to(kernel_lane.device), (9, 8, 6))
            assert provider is None or len(built) == (network.maps - 1 if turn < 2 else 0), turn
            gradients = [there, y]
            if trains:
                network.net.zero_grad()
                y.square().sum().backward()
                gradients += [one.grad.clone() for one in network.net.parameters()]
            found.append(gradients)
        for one, other in zip(*found, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("device", ["meta", "the lane's"])
@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("api", [Spconv, Torchsparse, Minkowski])
def test_whatever_the_default_device(kernel_lane, built, api, trains, device):
    """Programs may set it: what layers make has a device of its own, the host's memory too."""
    network = api()
    network.net.to(kernel_lane.device).train(trains)
    device = kernel_lane.device if device == "the lane's" else device
    for turn in range(4):
        scene = voxels(turn, kernel_lane.device)
        built.clear()
        with torch.device(device), torch.set_grad_enabled(trains):
            coords, x = network(*scene)
            if trains:
                x.square().sum().backward()
        assert len(built) == (network.maps if turn < 2 else 0), turn
        with torch.set_grad_enabled(trains):  # which dataflows look at
            expected = alone(network, scene)
        assert all(map(torch.equal, (coords, x), expected))


@pytest.mark.interpreted
@torch.no_grad()
def test_layers_that_share_a_level(kernel_lane, built):
    """Scenes of other rows and bounds: the third is built at once, and as one map after another."""
    with sparse_bridge.enable("minkowski", mode="standin"):
        import MinkowskiEngine as me
    torch.manual_seed(0)
    net = nn.Sequential(
        me.MinkowskiConvolution(4, 4, kernel_size=(1, 3, 1), dimension=3),
        me.MinkowskiConvolution(4, 4, kernel_size=2, stride=2, dimension=3),
    ).to(kernel_lane.device)
    for seed, rows in enumerate((30, 32, 31)):
        coords = cloud((6, 6, 6), 2, 0.3, seed)[:rows] + torch.tensor([0, seed - 3, -2, -3 - seed])
        given = features(rows, 4, seed=seed), coords.int().to(kernel_lane.device)
        built.clear()
        y = net(me.SparseTensor(given[0].to(kernel_lane.device), given[1]))
        assert built == ([] if seed == 2 else ["submanifold", "strided"])
    request.register(None)
    expected = net(me.SparseTensor(given[0].to(kernel_lane.device), given[1]))
    assert torch.equal(y.C, expected.C) and torch.equal(y.F, expected.F)


def ask(cmap, *questions):
    """Ask for maps one after another, from level to level: what they hold."""
    store, held = map_cache.MapStore(cmap), []
    for kind in questions:
        if kind == "same":
            made = request.request(store, cmap, MapRequest("submanifold", THREE))
        else:
            asked = MapRequest(kind, THREE, (2, 2, 2), Wide(kind), "first_seen")
            made = request.request(store, cmap, asked)
            cmap, store = made.coords, made.store
            held.append(cmap.coords)
        held.append(made.kmap.rulebook.table(0)[0].nbr)
    return held


class Wide:
    """A rule whose outputs may lie anywhere near."""

    def __init__(self, kind):
        self.kind = kind

    def __eq__(self, other):
        return self.kind == other.kind

    def __hash__(self):
        return hash(self.kind)

    def output_box(self, box):
        lo = tuple(2 * c - 3 for c in box.lo[1:])
        return Box.spanning((0, *lo), (2, *(2 * n + 6 for n in box.size[1:])))


def test_networks_that_begin_alike_take_turns(kernel_lane, built):
    """A backbone and a second network over what it proposes, as in instance segmentation."""
    large, small = ("same", "strided", "same"), ("same", "same", "generative")
    count = []
    for turn in range(8):
        _, coords, shape = voxels(turn, kernel_lane.device)
        built.clear()
        ask(CoordinateMap(coords, Box.grid(2, shape)), *(large, small)[turn % 2])
        count.append(len(built))
    assert count[:4] == [3, 2, 3, 2] and count[-3:] == [0, 0, 0]


def test_keys_of_any_width(kernel_lane, built):
    """Keys of 32 bits, of 64, and coordinates that leave 32 bits on the way."""
    scales = [(1, 1, 1)] * 3 + [(512, 512, 512), (1 << 24, 1, 1), (1, 1, 1)]
    for turn, scale in enumerate(scales):
        _, coords, _ = voxels(turn, kernel_lane.device)
        coords[:, 1:] *= coords.new_tensor(scale)
        box = Box.grid(2, [30 * axis for axis in scale])
        assert box.key64 == (max(scale) > 1)
        built.clear()
        held = ask(CoordinateMap(coords, box), "same", "strided", "same")
        assert len(built) == (0 if turn > 1 else 3), turn
        request.register(None)
        expected = ask(CoordinateMap(coords, box), "same", "strided", "same")
        prefetch.install()
        assert all(torch.equal(*pair) for pair in zip(held, expected, strict=True))


def test_a_network_that_is_asked_something_else_every_time():
    last = None
    for turn in range(300):
        new = Recording(10)
        assert new.link_previous(last) is None
        new.steps += [Step(0, MapRequest(f"{turn}", THREE))]
        last = new
        assert len(last.lists) <= policy.REQUEST_LISTS


def test_growth_is_the_largest_of_late():
    last, step = None, Step(0, MapRequest("strided", THREE, (2, 2, 2)))
    for rows in (50, 90, 10, 10):
        new = Recording(100)
        new.link_previous(last)
        new.steps.append(step)
        new.rows[0] = rows
        last = new
    assert 0.8 < last.growth(0) < 0.9 and last.growth(1) is None


def test_bounds_travel_together():
    boxes = [Box.grid(3, (5, 6, 7)), Box.spanning((0, -4, -(1 << 31)), (1, 9, 1 << 30))]
    device = torch.device("cpu")
    for box, layout in zip(boxes, laid_out(boxes, device), strict=True):
        pairs = list(zip(box.lo, box.size, strict=True))
        bounds, steps = layout.bounds.view(), layout.steps.view()
        assert bounds.tolist() == [list(pair) for pair in pairs]
        assert tuple(steps.tolist()) == box.steps and layout is box.layout(device)
        assert bounds.dtype == torch.int32 and bounds.is_contiguous()
        assert layout.bounds.data_ptr() == bounds.data_ptr() and bounds.data_ptr() % 16 == 0
