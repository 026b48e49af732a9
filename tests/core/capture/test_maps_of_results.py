"""Kernel maps of what a replay returned: whoever looks for them finds those that the layers would have left."""

from __future__ import annotations

import gc
import pickle
import weakref

import pytest
import torch
from torch import nn

import sparse_bridge
from sparse_bridge import policy, settings
from sparse_bridge.core.capture import graph_regions
from sparse_bridge.refusals import Why

from . import apis
from .graph_sizes import graphs_of

pytestmark = pytest.mark.emulated

SCENES = 6  # the fifth is replayed


class Levels(nn.Module):
    """Returns every level: the first one has no strided map."""

    def __init__(self, sp, width=4, keys="adb"):
        super().__init__()
        a, d, b = keys

        def block(conv):
            return sp.SparseSequential(conv, nn.BatchNorm1d(8), nn.ReLU())

        torch.manual_seed(0)
        self.stem = block(sp.SubMConv3d(width, 8, 3, bias=False, indice_key=a))
        self.down = block(sp.SparseConv3d(8, 8, 2, 2, bias=False, indice_key=d))
        self.deep = block(sp.SubMConv3d(8, 8, 3, bias=False, indice_key=b))

    def forward(self, x):
        x = self.stem(x)
        return [x, self.deep(self.down(x))]


class Deepest(Levels):
    """Returns a level behind those."""

    def __init__(self, sp):
        super().__init__(sp)
        self.down_again = sp.SparseConv3d(8, 8, 2, 2, bias=False, indice_key="e")

    def forward(self, x):
        return self.down_again(super().forward(x)[1])


class Outside:
    """Layers of a program behind its model."""

    def __init__(self, sp, device):
        torch.manual_seed(1)
        self.sp = sp
        self.up = sp.SparseInverseConv3d(8, 8, 2, bias=False, indice_key="d").to(device)
        self.head = sp.SubMConv3d(8, 8, 3, bias=False, indice_key="b").to(device)
        self.other = sp.SparseConv3d(8, 8, 2, 2, bias=False, indice_key="d").to(device)

    def inverse(self, _, deep):
        return self.up(deep).features

    def inverse_behind_a_layer(self, _, deep):
        return self.up(self.head(deep)).features

    def inverse_behind_a_sum(self, _, deep):
        """Which sorts rows."""
        return self.up(self.sp.functional.sparse_add(deep, deep)).features

    def inverse_of_a_copy(self, _, deep):
        again = deep.replace_feature(deep.features * 2)
        again.indice_dict = {**deep.indice_dict}
        return self.up(again).features, self.up(pickle.loads(pickle.dumps(deep))).features

    def a_key_that_is_taken(self, _, deep):
        try:
            self.other(deep)
        except Exception as error:
            return str(error)
        return None

    def a_record(self, stem, deep):
        pairs = [deep.find_indice_pair(key) for key in ("a", "d", "b", "c")]
        assert stem.find_indice_pair("d") is None
        return [None if one is None else (type(one).__name__, one.ksize, one.is_subm) for one in pairs]

    def all_records(self, stem, deep):
        return list(stem.indice_dict), sorted(deep.indice_dict), len(deep.indice_dict), bool(stem.indice_dict)

    def a_submanifold_layer(self, stem, deep):
        return self.head(deep).features


LOOKS = [name for name in vars(Outside) if name[0] != "_"]


@pytest.fixture
def seen(device, rules):
    """The function that runs a program without replays and with them: [what it has seen] of each, and the reasons. The
    program is a generator, of a model, layers behind it, and a function that makes a scene."""
    rules.hold(graphs_of(512, watched=True))
    rules.set(policy, LEAST_LAYERS=2)

    def run(program):
        both = []
        for mode in ("fuse", "graphs"):
            with apis.standin("spconv") as module, settings.override(optimize=mode), torch.no_grad():
                model = Levels(module).to(device).eval()
                scene = lambda seed: apis.scene(module, "spconv", seed, device, 0.3 + 0.002 * seed)  # noqa: E731
                both.append(list(program(model, Outside(module, device), scene)))
                reasons = [one.reason for one in graph_regions.summary()]
        return *both, reasons

    return run


def same(mine, theirs):
    torch.testing.assert_close(mine, theirs) if isinstance(theirs, torch.Tensor) else None
    if isinstance(theirs, (list, tuple)):
        assert len(mine) == len(theirs)
        for one, other in zip(mine, theirs, strict=True):
            same(one, other)
    elif not isinstance(theirs, torch.Tensor):
        assert mine == theirs


@pytest.mark.parametrize("look", LOOKS)
def test_what_a_program_finds(seen, look):
    def program(model, outside, scene):
        for seed in range(SCENES):
            outputs = model(scene(seed))
            yield getattr(outside, look)(*outputs) if seed > 3 else None

    theirs, mine, reasons = seen(program)
    same(mine, theirs)
    assert theirs[-1] is not None and reasons == [None]


def test_results_that_the_program_replaces(seen):
    """By others with new features, as heads do; the input is of another shape since."""

    def program(model, outside, scene):
        for seed in range(2 * SCENES):
            x = scene(seed)
            stem, deep = model(x)
            x.spatial_shape = [1, 2, 3] if seed > SCENES else x.spatial_shape  # graphs are imitated over the first ones
            stem, deep = stem.replace_feature(stem.features + 1), deep.replace_feature(deep.features * 2)
            yield outside.up(deep).features, stem.features
        if settings.get().optimize == "graphs":
            assert graph_regions.region_of(model).replayer.hits > 6

    theirs, mine, _ = seen(program)
    same(mine, theirs)


class OfDictionary(nn.Module):
    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, batch):
        return self.network(batch["x"])


@pytest.mark.parametrize("name", apis.NAMES)
@pytest.mark.parametrize(("trains", "in_dictionary"), [(False, False), (True, False), (True, True)])
def test_scenes_do_not_wait_for_the_garbage_collector(device, name, trains, in_dictionary):
    with apis.standin(name) as module:
        network = apis.network(module, name, device).train(trains)
        model = sparse_bridge.optimize(OfDictionary(network) if in_dictionary else network, graphs=True)
        tensors = {"spconv": "indices", "torchsparse": "coords", "minkowski": "C"}
        gc.collect()
        gc.disable()
        try:
            kept = []
            for seed in range(9):
                x = apis.scene(module, name, seed, device, share=0.3)
                with torch.set_grad_enabled(trains):
                    found = model({"x": x} if in_dictionary else x)
                    apis.loss_of(apis.values_of(found)).backward() if trains else None
                kept.append([weakref.ref(one) for one in (x, getattr(x, tensors[name]), *apis.values_of(found))])
                del x, found
            alive = [[one() is not None for one in refs] for refs in kept]
        finally:
            gc.enable()
        assert sum(one.hits for one in graph_regions.summary()) > 5
        assert not any(map(any, alive[4:]))


def test_a_map_of_a_level_that_is_not_returned(seen):
    """The layers compute once more, and from then on."""

    def program(model, outside, scene):
        encoder = Deepest(outside.sp).to(outside.up.weight.device).eval()
        up = outside.sp.SparseInverseConv3d(8, 8, 2, bias=False, indice_key="e").to(outside.up.weight.device)
        for seed in range(SCENES):
            deepest = encoder(scene(seed))
            yield outside.up(up(deepest)).features if seed > 3 else None
        if settings.get().optimize == "graphs":
            assert any(Why.GRAPH_MAPS_OUTSIDE.name in str(one.reason) for one in graph_regions.summary())

    theirs, mine, _ = seen(program)
    same(mine, theirs)


@pytest.mark.parametrize("more", [2, 5])
def test_a_model_whose_input_is_asked_for_more_maps_behind_it(seen, more):
    """As an encoder's, whose decoder follows: the graph makes its own maps alone."""
    hits = []

    def program(model, outside, scene):
        torch.manual_seed(2)
        layer = outside.sp.SubMConv3d
        sizes = [(3 + 2 * (key // 3), 1 + 2 * (key % 3), 1) for key in range(1, 1 + more)]
        layers = [layer(8, 8, size, bias=False, indice_key=f"more{size}") for size in sizes]
        behind = outside.sp.SparseSequential(*layers).to(outside.up.weight.device).eval()
        for seed in range(2 * SCENES):
            yield behind(model(scene(seed))[1]).features
        hits.append(sum(one.hits for one in graph_regions.summary()))

    theirs, mine, _ = seen(program)
    same(mine, theirs)
    assert hits[0] == 0 and hits[1] > 0


def test_what_a_second_model_makes_of_a_result(seen):
    """Both are replayed, as long as nobody asks for a map of the first."""

    def program(model, outside, scene):
        second = Levels(outside.sp, 8, "efg").to(outside.up.weight.device).eval()
        for seed in range(SCENES):
            model(scene(seed))
        for seed in range(2 * SCENES):
            _, deep = model(scene(seed))
            outputs = second(deep)
            yield [one.features for one in outputs]
        if settings.get().optimize == "graphs":
            assert all(graph_regions.region_of(one).replayer.hits > 2 for one in (model, second))
        up = outside.up
        up.indice_key = "f"
        back = up(outputs[1])
        up.indice_key = "d"
        yield back.features, up(back).features, sorted(back.indice_dict)

    theirs, mine, _ = seen(program)
    same(mine, theirs)


class All(Deepest):
    """Returns all of them."""

    def forward(self, x):
        levels = Levels.forward(self, x)
        return [*levels, self.down_again(levels[1])]


def test_coordinates_of_another_level_that_were_written_to(seen):
    """As by VoxelNeXt, for its head."""

    def program(model, outside, scene):
        encoder = All(outside.sp).to(outside.up.weight.device).eval()
        for seed in range(2 * SCENES):
            first, deep, deepest = encoder(scene(seed))
            deepest.indices[:, 1:] *= 4
            back = outside.up(deep)
            yield [first.features, deepest.features, deepest.indices.clone(), back.features, back.indices]
        if settings.get().optimize == "graphs":
            assert graph_regions.region_of(encoder).replayer.hits > 2

    theirs, mine, _ = seen(program)
    same(mine, theirs)


def test_coordinates_that_were_written_to_since(seen):
    def program(model, outside, scene):
        for seed in range(SCENES):
            x = scene(seed)
            _, deep = model(x)
            yield None
        x.indices.zero_()
        if settings.get().optimize == "graphs":
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                outside.up(deep)

    seen(program)
