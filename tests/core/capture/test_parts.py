"""Parts of a model that is not replayed: each is given a sparse tensor that has kernel maps and levels already."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sparse_bridge import policy, settings
from sparse_bridge.core.capture import captured_maps, graph_regions
from sparse_bridge.core.capture.replay import Replayer
from sparse_bridge.refusals import Why

from . import apis
from .graph_sizes import graphs_of

pytestmark = pytest.mark.emulated
WIDTH = 8


class Part(nn.Module):
    """Layers one after the other, under a name of their own."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Stem(Part): ...


class First(Part): ...


class Second(Part): ...


class Third(Part): ...


class Back(Part): ...


class Program(nn.Module):
    """Counts its calls, which no graph would. way: what comes behind the parts."""

    def __init__(self, layers, way):
        super().__init__()
        torch.manual_seed(0)
        self.way, self.calls = way, 0

        def block(conv):
            return layers.sequence(conv, layers.norm(WIDTH), layers.relu())

        self.stem = Stem(block(layers.conv(4, WIDTH, "a")))
        self.second = Second(block(layers.down(WIDTH, WIDTH, "d")), block(layers.conv(WIDTH, WIDTH, "b")))
        self.third = Third(block(layers.conv(WIDTH, WIDTH, "b")), layers.conv(WIDTH, WIDTH, "e"))
        self.up = layers.up(WIDTH, WIDTH, "d")
        self.back = Back(block(layers.conv(WIDTH, WIDTH, "e")), layers.up(WIDTH, WIDTH, "d"))

    def forward(self, x):
        self.calls += 1
        deep = self.third(self.second(self.stem(x)))
        out = {"on": lambda y: y, "up": self.up, "back": self.back}[self.way](deep)
        return {"out": out, "deep": deep}


@pytest.mark.parametrize("trains", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("way", ["on", "up", "back"])
@pytest.mark.parametrize("name", apis.NAMES)
def test_parts_of_a_program(device, rules, name, way, trains):
    """A part that goes back to a level in front of it is not replayed."""
    rules.hold(graphs_of(512, watched=True))
    rules.set(policy, LEAST_LAYERS=2)
    said = apis.same_with_replays(name, lambda layers: Program(layers, way), trains, device, 16)
    assert said["Second"].hits > 2 and said["Third"].hits > 2, said
    if way == "back":
        assert said["Back"].hits == 0 and said["Back"].reason is not None, said


@pytest.mark.parametrize("name", apis.NAMES)
def test_replays_leave_calls_of_other_parts_as_they_are(device, rules, name):
    """A part is of one kind of calls, whether the one in front of it is replayed or not, with one graph."""
    rules.hold(graphs_of(512, watched=True))
    rules.set(policy, LEAST_LAYERS=2)
    way = settings.override(optimize="graphs", compare_every=2)  # the layers of a part run at every second call
    with apis.standin(name) as module, way, torch.no_grad():
        model = Program(apis.Layers(module, name), "on").to(device).eval()
        scenes = (apis.scene(module, name, seed, device, 0.3 + 0.002 * seed) for seed in range(32))
        apis.results_of(model, scenes, False)
        found = {type(part).__name__: one.mode() for part, one in graph_regions.tried() if not isinstance(one, str)}
        assert found["Second"].hits > 2 and found["Third"].hits > 2
        assert [len(found[part].kinds) for part in ("Second", "Third")] == [1, 1]


@pytest.mark.parametrize("slower", [False, True])
def test_a_part_whose_replays_take_longer_than_its_layers(device, rules, monkeypatch, uncompared, slower):
    """It is left to its layers in inference; training goes on."""
    rules.hold(graphs_of(512, watched=True))
    rules.set(policy, LEAST_LAYERS=2)
    own, seconds = Replayer._time, {False: 2.0, True: 3.0 if slower else 1.0}
    monkeypatch.setattr(Replayer, "_time", lambda self, _, replayed: own(self, seconds[replayed], replayed))
    with apis.standin("spconv") as module, settings.override(optimize="auto"):
        model = AtOneLevel(apis.Layers(module, "spconv")).to(device)
        for trains in (False, True):
            scenes = (apis.scene(module, "spconv", seed, device, 0.3 + 0.002 * seed) for seed in range(28))
            with torch.set_grad_enabled(trains):
                apis.results_of(model.train(trains), scenes, trains)
        (found,) = (one for part, one in graph_regions.tried() if part is model.part)
    assert found.slower == slower and (Why.GRAPH_SLOWER.name in str(found.reason)) == slower
    assert found.hits == policy.REPLAYS_SETTLED if slower else found.hits > policy.REPLAYS_SETTLED
    assert found.training.hits > 2 and bool(found.graphs) != slower


class AtOneLevel(nn.Module):
    """Layers at a coarser level, behind a layer that makes it."""

    def __init__(self, layers):
        super().__init__()
        torch.manual_seed(0)
        self.down, self.calls = layers.down(4, WIDTH, "d"), 0
        self.part = Third(layers.conv(WIDTH, WIDTH, "b"), layers.conv(WIDTH, WIDTH, "e"))

    def forward(self, x):
        self.calls += 1
        return {"out": self.part(self.down(x)), "deep": x}


@pytest.mark.parametrize("name", apis.NAMES)
def test_who_waits_for_rows(device, rules, monkeypatch, uncompared, name):
    """A replay at one level does not, but for its capture: its rows are known to the layer that made them."""
    rules.hold(graphs_of(512, watched=True))
    rules.set(policy, LEAST_LAYERS=2)
    waited, own = [], captured_maps.CapturedMaps.rows
    count = lambda maps, *given: waited.append(maps.makes_levels) or own(maps, *given)  # noqa: E731
    monkeypatch.setattr(captured_maps.CapturedMaps, "rows", count)
    with apis.standin(name) as module, settings.override(optimize="graphs"), torch.no_grad():
        model = AtOneLevel(apis.Layers(module, name)).to(device).eval()
        scenes = (apis.scene(module, name, seed, device, 0.3 + 0.002 * seed) for seed in range(16))
        apis.results_of(model, scenes, False)
        said = {one.name: one for one in graph_regions.summary()}["Third"]
    assert said.graphs == 1 and said.hits > 2 and waited == [False]


class OfPoints(nn.Module):
    """Takes points, and makes their sparse tensor."""

    def __init__(self, module):
        super().__init__()
        torch.manual_seed(0)
        layers = apis.Layers(module, "torchsparse")
        self.module, self.part = module, Third(layers.conv(4, WIDTH, "a"), layers.conv(WIDTH, WIDTH, "a"))

    def forward(self, points):
        return self.part(self.module.SparseTensor(points.F, points.C.int())).feats


def test_a_model_of_points(device, rules):
    """After a few calls its parts are tried."""
    rules.hold(graphs_of(512, watched=True))
    rules.set(policy, LEAST_LAYERS=2)
    found = {}
    for mode in ("off", "graphs"):
        with apis.standin("torchsparse") as module, settings.override(optimize=mode), torch.no_grad():
            model, found[mode] = OfPoints(module).to(device).eval(), []
            for seed in range(32):
                x = apis.scene(module, "torchsparse", seed, device, 0.3 + 0.002 * seed)
                found[mode].append(model(module.PointTensor(x.F, x.C.float())))
            said = {one.name: one for one in graph_regions.summary()}
    assert Why.GRAPH_COORDINATES.name in said["OfPoints"].reason and said["Third"].hits > 2, said
    assert all(map(torch.equal, found["graphs"], found["off"]))


class Pyramid(Part):
    """Returns what each layer makes; upside_down: the last one first."""

    upside_down = False

    def forward(self, x):
        made = []
        for layer in self.layers:
            x = layer(x)
            made.append(x)
        return made[::-1] if self.upside_down else made


class UNet(nn.Module):
    """An encoder, and layers outside of it that go back by its strided maps."""

    def __init__(self, layers, upside_down):
        super().__init__()
        torch.manual_seed(0)
        self.stem = Stem(layers.conv(4, WIDTH, "a"))
        self.encoder = Pyramid(
            layers.down(WIDTH, WIDTH, "d"),
            layers.conv(WIDTH, WIDTH, "b"),
            layers.down(WIDTH, WIDTH, "e"),
            layers.conv(WIDTH, WIDTH, "c"),
        )
        self.encoder.upside_down = upside_down
        self.up, self.last, self.calls = layers.up(WIDTH, WIDTH, "e"), layers.up(WIDTH, WIDTH, "d"), 0

    def forward(self, x):
        self.calls += 1
        levels = self.encoder(self.stem(x))
        up = self.up(levels[0 if self.encoder.upside_down else -1])
        return {"out": self.last(up), "deep": up, "levels": levels}


@pytest.mark.parametrize("upside_down", [False, True])
@pytest.mark.parametrize("trains", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", apis.NAMES)
def test_maps_between_levels_that_a_replay_returns(device, rules, name, trains, upside_down):
    """They are built again where layers outside ask for them, with the same rows; replays go on."""
    rules.hold(graphs_of(512, watched=True))
    rules.set(policy, LEAST_LAYERS=2)
    said = apis.same_with_replays(name, lambda layers: UNet(layers, upside_down), trains, device, 16)
    assert said["Pyramid"].hits > 2 and said["Pyramid"].reason is None, said


class Pair(nn.Module):
    """Two branches from one level, each of which makes the next one by another kernel."""

    def __init__(self, module):
        super().__init__()
        torch.manual_seed(0)

        def down(size):
            conv = module.MinkowskiConvolution(WIDTH, WIDTH, kernel_size=size, stride=2, dimension=3)
            return conv, module.MinkowskiConvolution(WIDTH, WIDTH, kernel_size=3, dimension=3)

        self.stem = Stem(module.MinkowskiConvolution(4, WIDTH, kernel_size=3, dimension=3))
        self.first, self.second, self.calls = First(*down(2)), Second(*down(3)), 0

    def forward(self, x):
        self.calls += 1
        x = self.stem(x)
        return self.first(x), self.second(x)


def test_a_level_that_there_is_already(device, rules):
    """The second branch would have to take the first one's level, so it is not replayed."""
    rules.hold(graphs_of(512, watched=True))
    rules.set(policy, LEAST_LAYERS=2)
    found = {}
    for mode in ("off", "graphs"):
        with apis.standin("minkowski") as module, settings.override(optimize=mode), torch.no_grad():
            model, found[mode] = Pair(module).to(device).eval(), []
            for seed in range(12):
                for y in model(apis.scene(module, "minkowski", seed, device, 0.3 + 0.002 * seed)):
                    found[mode] += [(y.coordinate_map_key.get_key(), y.C.clone(), y.F.clone())]
            said = {one.name: one for one in graph_regions.summary()}
    assert said["First"].hits > 2 and said["Second"].hits == 0 and "GRAPH_HAS_MAPS" in said["Second"].reason
    for mine, theirs in zip(found["graphs"], found["off"], strict=True):
        assert mine[0] == theirs[0] and torch.equal(mine[1], theirs[1])
        torch.testing.assert_close(mine[2], theirs[2])


class Squeeze(nn.Module):
    """A layer, and a factor for each batch item, by a global pooling."""

    def __init__(self, module):
        super().__init__()
        self.conv = module.MinkowskiConvolution(WIDTH, WIDTH, kernel_size=3, dimension=3)
        self.last = module.MinkowskiConvolution(WIDTH, WIDTH, kernel_size=3, dimension=3)
        self.pool, self.scale = module.MinkowskiGlobalPooling(), module.MinkowskiBroadcastMultiplication()

    def forward(self, x):
        y = self.conv(x)
        return self.last(self.scale(y, self.pool(y)))


class Squeezed(nn.Module):
    def __init__(self, module):
        super().__init__()
        torch.manual_seed(0)
        self.stem = Stem(module.MinkowskiConvolution(4, WIDTH, kernel_size=2, stride=2, dimension=3))
        self.part, self.calls = Squeeze(module), 0

    def forward(self, x):
        self.calls += 1
        return self.part(self.stem(x))


def test_a_part_that_looks_at_batch_items(device, rules):
    """They are those of the input, also on the level that the part is given."""
    rules.hold(graphs_of(512, watched=True))
    rules.set(policy, LEAST_LAYERS=2)
    found = {}
    for mode in ("off", "graphs"):
        with apis.standin("minkowski") as module, settings.override(optimize=mode), torch.no_grad():
            model = Squeezed(module).to(device).eval()
            scenes = [apis.scene(module, "minkowski", seed, device, 0.3 + 0.002 * seed) for seed in range(18)]
            found[mode] = [model(scene).F for scene in scenes]
            said = {one.name: one for one in graph_regions.summary()}
    assert said["Squeeze"].hits >= 5 and said["Squeeze"].reason is None
    assert all(map(torch.equal, found["graphs"], found["off"]))
