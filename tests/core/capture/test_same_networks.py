"""Networks of every framework give a row the same bits, whatever else there is: first and later
calls, rows in another order, alone or in a batch, however far `optimize` goes."""

from __future__ import annotations

import pytest
import torch

import sparse_bridge
from sparse_bridge import settings
from sparse_bridge.adapters import protocol
from sparse_bridge.core.capture import graph_regions
from tests.clouds import cloud
from tests.core.capture.graph_sizes import graphs_of

from . import apis
from .pretended import replays_on_the_cpu

pytestmark = pytest.mark.emulated  # Triton's interpreter multiplies by numpy: bits follow tiles

SHAPE = (7, 6, 8)
DTYPES = (torch.float32, torch.float16)
LEVELS = ("off", "fuse", "graphs")


@pytest.fixture
def device(map_lane, fake_gpu, rules, nothing_learnt):
    """On a CPU, replays of graphs are pretended."""
    if map_lane.device == "cpu":
        replays_on_the_cpu(fake_gpu)
    rules.hold(graphs_of(256))
    return map_lane.device


class Api:
    """A framework's network, and scenes for it."""

    def __init__(self, module, name, device, dtype, width=8):
        self.module, self.name, self.device, self.dtype = module, name, device, dtype
        self.model = apis.Network(apis.Layers(module, name), width)
        for one in self.model.modules():
            if isinstance(one, torch.nn.BatchNorm1d):
                torch.nn.init.normal_(one.running_mean, std=0.1)
                torch.nn.init.uniform_(one.running_var, 0.5, 2)
                torch.nn.init.uniform_(one.weight, 0.5, 2)
                torch.nn.init.normal_(one.bias, std=0.1)
        self.model = self.model.to(device).to(dtype).eval()

    def input(self, coords, grad=False):
        phase = (coords[:, 1:].double() * torch.tensor([0.37, 1.1, 1.9])).sum(1, keepdim=True)
        values = (phase + torch.arange(4) * 2.3).sin().to(self.dtype).to(self.device)
        values.requires_grad_(grad)
        made = apis.tensor(self.module, self.name, coords.to(self.device), values, SHAPE)
        return made, values

    def rows(self, out):
        """{(output, site): row} of all outputs."""
        found = {}
        for name, one in out.items():
            features = protocol.features_of(one)
            sites = map(tuple, protocol.of(one).coordinates_of(one).tolist())
            found |= {(name, *site): row for site, row in zip(sites, features.cpu(), strict=True)}
        return found

    def __call__(self, coords):
        with torch.no_grad():
            return self.rows(self.model(self.input(coords)[0]))

    def gradient(self, coords):
        """Of the features, by site."""
        x, values = self.input(coords, True)
        features = protocol.features_of(self.model(x)["out"])
        (dx,) = torch.autograd.grad(features, values, features.detach().cos())
        return dict(zip(map(tuple, coords.tolist()), dx.cpu(), strict=True))


def scene(seed):
    """Rows of one item, with the corners of the grid."""
    corners = torch.tensor([[0, 0, 0, 0], [0, *(extent - 1 for extent in SHAPE)]])
    coords = torch.cat([corners, cloud(SHAPE, 1, 0.1 + 0.02 * seed, seed)]).int().unique(dim=0)
    order = torch.randperm(len(coords), generator=torch.Generator().manual_seed(seed))
    return coords[order]


def batch(*scenes):
    return torch.cat([one + torch.tensor([item, 0, 0, 0], dtype=torch.int32) for item, one in enumerate(scenes)])


def shuffled(coords):
    return coords[torch.randperm(len(coords), generator=torch.Generator().manual_seed(99))]


def item(rows, number, at):
    """Those of an item of a batch, as if it were alone; at: of its number in the sites."""
    return {(*site[:at], 0, *site[at + 1 :]): row for site, row in rows.items() if site[at] == number}


def assert_same(found, expected):
    assert found.keys() == expected.keys() and len(found) > 0
    wrong = [site for site, row in expected.items() if not torch.equal(found[site], row)]
    assert not wrong, f"{len(wrong)} of {len(expected)} rows differ, {wrong[:3]}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", apis.NAMES)
def test_the_bits_of_a_row(device, map_lane, name, dtype):
    """In inference, at every level, and its input's gradient."""
    wanted = scene(0)
    with apis.standin(name) as module:
        with settings.override(optimize="off"):
            api = Api(module, name, device, dtype)
            plain = api(wanted)
            gradient = api.gradient(wanted)
            mixed = shuffled(batch(scene(4), wanted, scene(1)))
            assert_same(item(api.gradient(mixed), 1, 0), gradient)
        for level in LEVELS:
            with settings.override(optimize=level):
                api = Api(module, name, device, dtype)
                for _ in range(2):
                    assert_same(api(wanted), plain)
                assert_same(api(shuffled(wanted)), plain)
                for seed in range(3, 9):  # inputs from which graphs are learnt
                    api(scene(seed))
                for _ in range(2):
                    assert_same(api(wanted), plain)
                    assert_same(api(shuffled(wanted)), plain)
                    assert_same(item(api(mixed), 1, 1), plain)
                region = graph_regions.region_of(api.model)
                if map_lane.kernels:
                    replayed = region is not None and region.replayer.summary().hits > 0
                    assert replayed == (level == "graphs"), graph_regions.summary()
                graph_regions.remove()


@pytest.mark.parametrize("name", apis.NAMES)
def test_optimized_models(device, name):
    wanted = scene(0)
    with apis.standin(name) as module, settings.override(optimize="off"):
        api = Api(module, name, device, torch.float32)
        plain = api(wanted)
        sparse_bridge.optimize(api.model)
        for _ in range(2):
            assert_same(api(wanted), plain)
        assert_same(item(api(shuffled(batch(wanted, scene(5)))), 0, 1), plain)
