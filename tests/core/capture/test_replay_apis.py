"""Models of all three frameworks, replayed from captured graphs."""

from __future__ import annotations

import copy
import functools

import pytest
import torch

import sparse_bridge
from sparse_bridge import hooks, settings
from sparse_bridge.adapters import protocol
from sparse_bridge.core.capture import graph_regions, replay
from sparse_bridge.core.conv.kernel_products import GatherProduct
from sparse_bridge.refusals import Why
from tests.clouds import cloud, features
from tests.core.capture.graph_sizes import graphs_of
from tests.rules import layers_deferred

from . import apis

pytestmark = pytest.mark.emulated
TRAINS = pytest.mark.parametrize("trains", [False, True], ids=["inference", "training"])


class Whole(torch.nn.Module):
    """A program's own: dense parts around sparse ones, which look at all rows."""

    def __init__(self, backbone, make):
        super().__init__()
        self.embed, self.backbone = torch.nn.Linear(4, 4), backbone
        self.head, self.make = torch.nn.Linear(4, 3), make

    def forward(self, values, coords):
        found = self.backbone(self.make(coords, self.embed(values)))
        rows = protocol.features_of(found["out"])
        return {**found, "scores": self.head(rows - rows.mean(0))}


class Made(torch.nn.Module):
    """A backbone that takes and returns a dictionary, and makes its sparse tensor itself."""

    def __init__(self, network, make):
        super().__init__()
        self.stem, self.body, self.make = network.stem, network, make

    def forward(self, batch):
        values, coords = batch["voxel_features"], batch["voxel_coords"]
        size = int(coords[:, 0].max()) + 1
        x = self.stem(self.make(coords, values))
        y = self.body.deep(self.body.down(x))
        out = self.body.head(self.body.cat(self.body.up(y), x))
        batch.update({"out": out, "deep": y, "size": size})
        batch["kind"] = batch["mode"] + "!"
        return batch


@pytest.mark.parametrize("name", apis.NAMES)
@TRAINS
@pytest.mark.parametrize("kind", [Whole, Made])
def test_a_program_that_is_not_changed(device, name, trains, kind):
    with apis.standin(name) as module, settings.override(optimize="graphs"):
        make = lambda coords, values: apis.tensor(module, name, coords, values)  # noqa: E731
        plain = kind(apis.network(module, name, device), make).to(device).train(trains)
        model = copy.deepcopy(plain)
        for seed in range(11):
            mode = "a" if seed < 10 else "b"

            def given(seed=seed, mode=mode):
                x = apis.scene(module, name, seed, device, 0.3 + 0.002 * seed)
                values, coords = protocol.features_of(x), protocol.of(x).coordinates_of(x)
                batch = {"voxel_features": values, "voxel_coords": coords, "names": [seed], "mode": mode}
                return (batch,) if kind is Made else (values, coords)

            found = apis.both(model, plain, given, trains, mode="graphs")
            apis.same_places(*(out for _, out in found))
            for x, out in found if kind is Made else ():
                assert out is x[0] and (out["size"], out["names"], out["kind"]) == (2, [seed], f"{mode}!")
        part = model.backbone if kind is Whole else model
        unit = graph_regions.region_of(part)
        assert [one.name for one in graph_regions.summary() if one.hits] == [type(part).__name__]
        assert not any(map(hooks.replaced, model.modules()))
        text = str(sparse_bridge.report())
        assert f"{type(part).__name__}: {unit.replayer.summary().hits} calls replayed from 1 graphs" in text
    assert graph_regions.region_of(part) is None


class Told(torch.nn.Module):
    """A network that is told by which function of its framework it joins two tensors."""

    def __init__(self, network):
        super().__init__()
        self.body = network

    def forward(self, x, cat, act=torch.relu):
        x = self.body.stem(x)
        y = self.body.up(self.body.deep(self.body.down(x)))
        out = self.body.head(cat([y, x]) if type(x).__module__.startswith("torchs") else cat(y, x))
        return {"out": out, "deep": act(protocol.features_of(y))}


@pytest.mark.parametrize("name", ["torchsparse", "minkowski"])
def test_functions_among_the_arguments(device, name):
    """They hold no state, and tell calls apart."""
    with apis.standin(name) as module, settings.override(optimize="graphs"):
        model = Told(apis.network(module, name, device)).to(device).eval()
        plain = copy.deepcopy(model)
        for seed in range(14):
            act = torch.sigmoid if seed > 9 else torch.relu
            given = lambda seed=seed, act=act: (  # noqa: E731
                apis.scene(module, name, seed, device, 0.3 + 0.002 * seed),
                module.cat,
                act,
            )
            values = lambda out: [protocol.features_of(out["out"]), out["deep"]]  # noqa: E731
            apis.both(model, plain, given, values=values, mode="graphs", rtol=2e-3, atol=1e-3)
        (part,) = [one for one in graph_regions.summary() if one.hits]
        assert part.name == "Told" and part.graphs == 2 and part.hits >= 6


class Returns(torch.nn.Module):
    """A network that returns more than a replay makes anew. more: of the input and the output's features."""

    def __init__(self, network, more):
        super().__init__()
        self.network, self.more = network, more

    def forward(self, x):
        found = self.network(x)
        return {**found, "more": self.more(x, protocol.features_of(found["out"]))}


@pytest.mark.parametrize("name", apis.NAMES)
@pytest.mark.parametrize(
    ("more", "replayed"),
    [
        pytest.param(lambda x, out: out[:, :2], False, id="a view of an output"),
        pytest.param(lambda x, out: protocol.features_of(x)[:, :2], False, id="a view of the input"),
        pytest.param(lambda x, out: (out + 1).split(2, 1), True, id="parts"),
        pytest.param(lambda x, out: (x, protocol.features_of(x), out), True, id="the same"),
    ],
)
def test_outputs_that_a_program_writes_to(device, name, more, replayed):
    with apis.standin(name) as module:
        model, plain = optimized(module, name, device, False, lambda network: Returns(network, more))
        for seed in range(6):
            x = apis.scene(module, name, seed, device, 0.3 + 0.002 * seed)
            seen = []
            for one in (model, plain):
                given = apis.tensor(module, name, protocol.of(x).coordinates_of(x), protocol.features_of(x).clone())
                with torch.no_grad():
                    found = one(given)
                for written in (protocol.features_of(found["out"]), protocol.features_of(given)):
                    written.add_(1)
                parts = found["more"] if isinstance(found["more"], tuple) else [found["more"]]
                assert not any(part is given for part in parts[1:])
                seen.append([part for part in parts if isinstance(part, torch.Tensor)])
            for mine, theirs in zip(*seen, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)
        hits = {one.hits for one in graph_regions.summary()}
        shared = [Why.GRAPH_OUTPUT_MEMORY.name in str(one.reason) for one in graph_regions.summary()]
        assert (hits, any(shared)) == ({3 if replayed else 0}, not replayed)


class Pooled(torch.nn.Module):
    def __init__(self, network, pool):
        super().__init__()
        self.network, self.pool = network, pool

    def forward(self, x):
        found = self.network(x)
        return {**found, "pooled": self.pool(found["out"])}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", ["Avg", "Max", "Sum"])
def test_pools_over_cells(device, kind, size):
    """Cells of an even size are windows. Those of others are looked up, which nothing has prefetched."""
    with apis.standin("minkowski") as module:
        pool = getattr(module, f"Minkowski{kind}Pooling")(kernel_size=size, stride=size, dimension=3)
        model, plain = optimized(module, "minkowski", device, False, lambda network: Pooled(network, pool))
        values = lambda found: [found[key].F for key in ("out", "deep", "pooled")]  # noqa: E731
        for seed in range(7):
            coords = cloud(apis.SHAPE, 2, share=0.3, seed=seed, device=device)
            coords = coords[coords[:, 1:].amax(1) > 1]  # no row is where padding lies, which a trial would see
            given = lambda coords=coords, seed=seed: module.SparseTensor(  # noqa: E731
                features(len(coords), 4, seed=seed, device=device), coords
            )
            apis.both(model, plain, given, values=values)
        (one,) = graph_regions.summary()
        if size == 2:
            assert one.hits >= 2
        else:
            assert not one.hits and "GRAPH_NOT_PREFETCHED" in one.reason


class Joined(torch.nn.Module):
    """Adds coordinates that it makes to those that it is given."""

    def __init__(self, network, module):
        super().__init__()
        self.network = network
        self.children_of = module.MinkowskiGenerativeConvolutionTranspose(8, 4, kernel_size=2, stride=2, dimension=3)

    def forward(self, x):
        found = self.network(x)
        return {**found, "out": found["out"] + self.children_of(found["deep"])}


def test_unions_of_coordinates_are_eager(device):
    """Over rows that do not exist they would write out of bounds: a trial ends before."""
    with apis.standin("minkowski") as module:
        make = lambda network: Joined(network, module).to(device)  # noqa: E731
        model, plain = optimized(module, "minkowski", device, False, make)
        for seed in range(7):
            apis.both(model, plain, lambda seed=seed: apis.scene(module, "minkowski", seed, device, 0.3))
        (one,) = graph_regions.summary()
        assert not one.hits and "GRAPH_NOT_PREFETCHED" in one.reason


def test_norms_over_the_second_of_two_batch_items(device):
    """What lies behind the last row is of the same item, and takes no part."""
    with apis.standin("torchsparse") as module:
        make = lambda network: Pooled(network, module.nn.GroupNorm(2, 4))  # noqa: E731
        model, plain = optimized(module, "torchsparse", device, False, make)
        for seed in range(7):
            coords = cloud(apis.SHAPE, 2, share=0.3, seed=seed, device=device)
            coords = coords[coords[:, 0] == 1]
            given = lambda coords=coords, seed=seed: module.SparseTensor(  # noqa: E731
                features(len(coords), 4, seed=seed, device=device), coords
            )
            apis.both(model, plain, given, values=lambda found: [found["pooled"].F])
        (one,) = graph_regions.summary()
        assert one.hits and one.reason is None


class Smoothed(torch.nn.Module):
    """Its rows are averaged with the next ones, before a strided layer."""

    def __init__(self, network):
        super().__init__()
        self.stem, self.down, self.deep = network.stem, network.down, network.deep

    def forward(self, x):
        x = self.stem(x)
        x = x.replace_feature(torch.nn.functional.avg_pool1d(x.features.t()[None], 3, 1, 1)[0].t())
        return self.deep(self.down(x))


def test_rows_that_are_mixed_where_outputs_do_not_show_it(device):
    """The last row alone has a neighbour that does not exist, and the strided layer leaves its cell out."""
    with apis.standin("spconv") as module:
        model, plain = optimized(module, "spconv", device, False, Smoothed)
        for seed in range(9):
            coords = cloud((6, 5, 7), 1, share=0.5, seed=seed, device=device)
            row = int((coords[:, 2] == 4).nonzero()[-1])
            coords = torch.cat([coords[:row], coords[row + 1 :], coords[row : row + 1]])
            values = features(len(coords), 4, seed=seed, device=device)
            given = lambda coords=coords, values=values: module.SparseConvTensor(values, coords, [6, 5, 7], 1)  # noqa: E731
            apis.both(model, plain, given, values=lambda y: [y.features])
        (one,) = graph_regions.summary()
        assert not one.hits and Why.GRAPH_MIXED_ROWS.name in one.reason


# Of rows f [N, C] and their coordinates: NaN in rows that do not exist changes none of these.
BLIND = {
    "how many are positive": lambda f, _: f * (f > 0).sum(0) * 0.01,
    "the sum of positive ones": lambda f, _: f + torch.where(f > 0, f, torch.zeros_like(f)).sum(0) * 0.01,
    "the sum but for NaN": lambda f, _: f + f.nansum(0) * 0.01,
    "the smallest": lambda f, _: f - f.topk(2, 0, largest=False).values[1],
    "in order": lambda f, _: f.sort(0).values,
}
EXTENTS = {
    "the last batch item": lambda f, coords: f * (1 + coords[:, 0].max()),
    "the largest coordinate": lambda f, coords: f * coords[:, 1:].max(0).values.sum(),
    "the extent": lambda f, coords: f * (coords[:, 1:].amax() - coords[:, 1:].amin()),
}


class Reduced(torch.nn.Module):
    """It reduces over its rows, in front of sparse layers."""

    def __init__(self, network, reduce):
        super().__init__()
        self.network, self.reduce = network, reduce

    def forward(self, x):
        return self.network(x.replace_feature(self.reduce(x.features, x.indices)))


@pytest.mark.parametrize("how", [*BLIND, *EXTENTS])
@pytest.mark.usefixtures("uncompared")
def test_reductions_that_leave_nan_out(device, how):
    """Over features they are found by a trial with finite rows behind the last. Over coordinates they are right: those
    behind the last are one of the scene's."""
    reduce = {**BLIND, **EXTENTS}[how]
    with apis.standin("spconv") as module:
        model, plain = optimized(module, "spconv", device, False, lambda network: Reduced(network, reduce))
        for seed in range(10):
            coords = cloud(apis.SHAPE, 2, share=0.3, seed=seed, device=device)
            if seed > 5:  # smaller ones, after larger ones
                coords = coords[(coords[:, 0] == 0) & (coords[:, 1:] < 4).all(1)]
            values = features(len(coords), 4, seed=seed, device=device)
            given = lambda coords=coords, values=values: module.SparseConvTensor(values, coords, list(apis.SHAPE), 2)  # noqa: E731
            apis.both(model, plain, given)
        hits = [one.hits for one in graph_regions.summary() if one.name == "Reduced"]
        assert (sum(hits) > 2) == (how in EXTENTS)


class ReducedBehind(torch.nn.Module):
    """It reduces over the rows of its deepest level."""

    def __init__(self, network, reduce):
        super().__init__()
        self.network, self.reduce = network, reduce

    def forward(self, x):
        found = self.network(x)
        deep = found["deep"]
        return {**found, "deep": deep.replace_feature(self.reduce(deep.features, deep.indices))}


@pytest.mark.parametrize("how", EXTENTS)
@pytest.mark.usefixtures("uncompared")
def test_extents_of_a_deeper_level(device, how):
    with apis.standin("spconv") as module:
        model, plain = optimized(module, "spconv", device, False, lambda network: ReducedBehind(network, EXTENTS[how]))
        for seed in range(10):
            coords = cloud(apis.SHAPE, 2, share=0.3, seed=seed, device=device)
            if seed > 5:  # far from the origin, after those that begin there
                coords = coords[(coords[:, 0] == 0) & (coords[:, 1:] > 1).all(1)]
            values = features(len(coords), 4, seed=seed, device=device)
            given = lambda coords=coords, values=values: module.SparseConvTensor(values, coords, list(apis.SHAPE), 2)  # noqa: E731
            apis.both(model, plain, given)
        assert sum(one.hits for one in graph_regions.summary() if one.name == "ReducedBehind") > 2


class Flat(torch.nn.Module):
    """A sparse network whose result becomes a grid for dense layers."""

    def __init__(self, network):
        super().__init__()
        self.network = network
        self.head = torch.nn.Conv3d(4, 3, 1, bias=False)

    def forward(self, x):
        found = self.network(x)
        grid = self.head(found["out"].dense())
        return {**found, "grid": grid, "scores": grid.square().mean((2, 3, 4))}


def optimized(module, name, device, trains, around=lambda network: network):
    """(a model that is replayed, its double)."""
    plain = around(apis.network(module, name, device)).to(device).train(trains)
    return sparse_bridge.optimize(copy.deepcopy(plain), graphs=True), plain


def replayer_of(model):
    held = graph_regions.region_of(model).replayer
    return held.training if model.training else held


@pytest.mark.parametrize("name", apis.NAMES)
@pytest.mark.parametrize("kind", ["inference", "fused", "training"])
def test_a_replayed_model(device, rules, name, kind):
    """Where kernels are emulated a replay runs what was captured once more.  fused: layers of this
    size wait for what follows them, too."""
    trains = kind == "training"
    if kind == "fused":
        rules.hold(layers_deferred())
    with apis.standin(name) as module:
        model, plain = optimized(module, name, device, trains)
        for seed in range(7):
            shape = apis.SHAPE if seed < 4 else (7, 5, 8 + seed)
            given = functools.partial(apis.scene, module, name, seed, device, 0.25 + 0.002 * seed, shape=shape)
            apis.same_places(*(out for _, out in apis.both(model, plain, given, trains)))
        replayer = replayer_of(model)
        # The fourth scene, and of those of other shapes all but the first, which proves it.
        assert replayer.reason is None and len(replayer.graphs) == 1
        assert replayer.hits == 3


@TRAINS
def test_a_dense_grid_inside(device, trains):
    """Its size follows from the input's, so that graphs are for one shape each."""
    with apis.standin("spconv") as module:
        model, plain = optimized(module, "spconv", device, trains, Flat)
        for seed in range(10):
            shape = apis.SHAPE if seed < 8 else (7, 5, 8)
            given = functools.partial(apis.scene, module, "spconv", seed, device, 0.25 + 0.002 * seed, shape=shape)
            apis.both(model, plain, given, trains, lambda out: [out["scores"], out["grid"], out["out"].features])
        replayer = replayer_of(model)
        assert replayer.reason is None and len(replayer.graphs) == 1 and replayer.box_columns
        assert replayer.hits >= 1


def test_a_parameter_that_is_frozen_later(device):
    """Its graph stands beside the first, and both leave gradients in the same places."""
    with apis.standin("spconv") as module:
        model, plain = optimized(module, "spconv", device, True)
        for seed in range(9):
            for one in (model, plain):
                next(one.parameters()).requires_grad_(seed not in (4, 5, 6, 7))
            given = functools.partial(apis.scene, module, "spconv", seed, device, 0.25 + 0.002 * seed)
            apis.both(model, plain, given, True)
            assert (next(model.parameters()).grad is None) == (seed in (4, 5, 6, 7))
        training = replayer_of(model)
        assert training.reason is None and len(training.graphs) == 2 and training.hits == 3


@pytest.mark.parametrize("name", apis.NAMES)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_layers_are_launched_once_in_a_graph(device, rules, monkeypatch, name, mode):
    """Whatever was seen to follow them before, and in trials, where nothing is seen."""
    if device == "cpu" and mode is torch.inference_mode:
        pytest.skip("pretended replays compute with gradients")
    rules.hold(layers_deferred(), graphs_of(64))
    launches, captured, last = [], [], []
    launch, capture = GatherProduct.over, replay.captured_from

    def one_capture(*given):
        launches.clear()
        made = capture(*given)
        captured.append(len(launches))
        return made

    monkeypatch.setattr(GatherProduct, "over", lambda *given: launches.append(given) or launch(*given))
    monkeypatch.setattr(replay, "captured_from", one_capture)
    with apis.standin(name) as module, settings.override(optimize="graphs"):
        model = apis.network(module, name, device).eval()
        for seed in range(10):  # the larger ones make another graph
            x = apis.scene(module, name, seed, device, 0.3 if seed < 6 else 0.7)
            with mode():
                model(x)
            last += captured[-1:]
            captured.clear()
        assert len(graph_regions.region_of(model).replayer.graphs) == 1
    assert last == [5, 5]
