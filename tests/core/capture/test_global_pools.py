"""Pools and norms over batch items, and what is spread from them, inside of replayed models."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import nn

import sparse_bridge
from sparse_bridge.adapters import protocol
from sparse_bridge.core.capture import graph_regions
from sparse_bridge.refusals import Why

from . import apis
from .graph_sizes import graphs_of

pytestmark = pytest.mark.emulated
TRAINS = pytest.mark.parametrize("trains", [False, True], ids=["inference", "training"])


class Squeeze(nn.Module):
    """Scales channels by what an item's mean says, as squeeze-and-excitation blocks do."""

    def __init__(self, me, width):
        super().__init__()
        self.pool, self.spread = me.MinkowskiGlobalAvgPooling(), me.MinkowskiBroadcastMultiplication()
        self.weights = nn.Sequential(me.MinkowskiLinear(width, width), me.MinkowskiSigmoid())

    def forward(self, x):
        return self.spread(x, self.weights(self.pool(x)))


class Attend(nn.Module):
    """The same by a convolution over channels, as efficient channel attention does."""

    def __init__(self, me, width):
        super().__init__()
        self.pool, self.spread = me.MinkowskiGlobalPooling(), me.MinkowskiBroadcastMultiplication()
        self.conv, self.tensor = nn.Conv1d(1, 1, 3, padding=1, bias=False), me.SparseTensor

    def forward(self, x):
        y = self.pool(x)
        f = self.conv(y.F.unsqueeze(-1).transpose(-1, -2)).transpose(-1, -2).squeeze(-1)
        where = {"coordinate_manager": y.coordinate_manager, "coordinate_map_key": y.coordinate_map_key}
        return self.spread(x, self.tensor(f.sigmoid(), **where))


class Context(nn.Module):
    """Puts an item's largest values beside those of each row."""

    def __init__(self, me, width):
        super().__init__()
        self.pool, self.join = me.MinkowskiGlobalMaxPooling(), me.MinkowskiBroadcastConcatenation()
        self.linear = me.MinkowskiLinear(2 * width, width)

    def forward(self, x):
        return self.linear(self.join(x, self.pool(x)))


class Blocks(nn.Module):
    """Layers on two levels with something over batch items between, and a pool behind.

    head: of what is pooled, which is returned with the sparse tensor."""

    def __init__(self, layers, between, pool, head=None):
        super().__init__()
        self.first = layers.sequence(layers.conv(4, 8, "a"), layers.norm(8), layers.relu())
        self.between = between
        self.down, self.last = layers.down(8, 8, "d"), layers.conv(8, 8, "b")
        self.pool, self.head = pool, head or nn.Linear(8, 5)

    def forward(self, x):
        y = self.last(self.down(self.between(self.first(x))))
        return y, self.head(self.pool(y))


class OfFeatures(nn.Linear):
    def forward(self, x):
        return super().forward(x.F)


def minkowski(between, pool, head=None):
    def make(me):
        return Blocks(apis.Layers(me, "minkowski"), between(me), getattr(me, pool)(), head or OfFeatures(8, 5))

    return make


def torchsparse(between, pool):
    return lambda ts: Blocks(apis.Layers(ts, "torchsparse"), between(ts.nn), getattr(ts.nn, pool)())


def spconv(pool):
    return lambda sp: Blocks(apis.Layers(sp, "spconv"), nn.Identity(), getattr(sp, pool)())


MAKERS = {
    "minkowski squeeze": minkowski(lambda me: Squeeze(me, 8), "MinkowskiGlobalSumPooling"),
    "minkowski attend": minkowski(lambda me: Attend(me, 8), "MinkowskiGlobalMaxPooling"),
    "minkowski context": minkowski(lambda me: Context(me, 8), "MinkowskiGlobalAvgPooling"),
    "minkowski norm": minkowski(lambda me: me.MinkowskiInstanceNorm(8), "MinkowskiGlobalAvgPooling"),
    "minkowski sparse": minkowski(lambda me: nn.Identity(), "MinkowskiGlobalMaxPooling", nn.Identity()),
    "torchsparse norm": torchsparse(lambda layers: layers.InstanceNorm(8), "GlobalAvgPool"),
    "torchsparse groups": torchsparse(lambda layers: layers.GroupNorm(2, 8), "GlobalMaxPool"),
    "spconv mean": spconv("SparseGlobalAvgPool"),
    "spconv largest": spconv("SparseGlobalMaxPool"),
}


def scene(module, name, device, seed, items=(0, 1, 2)):
    """Of 20 to 60 rows in each of these batch items, in any order."""
    torch.manual_seed(seed)
    rows = 20 + 7 * seed % 40
    coords = (torch.rand(len(items) * rows, 4) * torch.tensor([1, 6, 5, 7])).int()
    coords[:, 0] = torch.tensor(items).repeat_interleave(rows)
    coords = torch.cat([coords, torch.tensor([[i, *place] for i in items for place in ([0, 0, 0], [5, 4, 6])]).int()])
    coords = coords.unique(dim=0)
    coords = coords[torch.randperm(len(coords))].to(device)
    values = torch.randn(len(coords), 4, device=device)
    if name == "spconv":
        return lambda: module.SparseConvTensor(values, coords.clone(), [6, 5, 7], 1 + max(items))
    return lambda: module.SparseTensor(values, coords.clone())


def values_of(out):
    y, pooled = out
    made = [protocol.features_of(y), protocol.of(y).coordinates_of(y).float()]
    return [*made, *([pooled] if isinstance(pooled, torch.Tensor) else [pooled.F, pooled.C.float()])]


def served(model, plain, make, trains):
    """Whether a replay served a call, which gives what the model's double gives."""
    before = sum(part.hits for part in graph_regions.summary())
    found, expected = values_of(model(make())), values_of(plain(make()))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4, equal_nan=True)
    if trains and not expected[2].isnan().any():  # torchsparse's mean of no rows
        for one, made in ((model, found), (plain, expected)):
            one.zero_grad()
            (made[0].square().mean() + made[2].square().mean()).backward()
        apis.same_gradients(model, plain)
        plain.load_state_dict(model.state_dict())
    return sum(part.hits for part in graph_regions.summary()) > before


def pair(make, module, device, trains):
    torch.manual_seed(0)
    plain = make(module).to(device).train(trains)
    return sparse_bridge.optimize(copy.deepcopy(plain), graphs=True), plain


@TRAINS
@pytest.mark.parametrize("name", MAKERS)
def test_programs(device, rules, name, trains):
    """Other numbers of batch items are calls of another kind, and scenes with an item without rows are eager."""
    rules.hold(graphs_of(512, watched=True))
    framework = name.split()[0]
    with apis.standin(framework) as module, torch.set_grad_enabled(trains):
        model, plain = pair(MAKERS[name], module, device, trains)
        of = functools.partial(scene, module, framework, device)
        assert sum(served(model, plain, of(seed), trains) for seed in range(10)) >= 4
        hits = {items: [] for items in [(0, 1, 2), (0, 2), (0, 1), (0, 1, 2, 3)]}
        if name == "torchsparse groups":  # an item without rows has no maximum
            del hits[0, 2]
        for seed in range(10, 31):
            items = [*hits][seed % len(hits)]
            hits[items].append(served(model, plain, of(seed, items=items), trains))
        assert all(hits[0, 1, 2]) and not any(hits.get((0, 2), ()))
        assert all(hits[0, 1][-2:]) and all(hits[0, 1, 2, 3][-2:])
        (part,) = graph_regions.summary()
        assert name == "torchsparse groups" or Why.GRAPH_BATCH_ITEMS.name in str(part.reason)


def test_batch_indices_from_two_on(device, rules):
    rules.hold(graphs_of(512, watched=True))
    with apis.standin("minkowski") as me, torch.no_grad():
        model, plain = pair(MAKERS["minkowski squeeze"], me, device, False)
        hits = [
            served(model, plain, scene(me, "minkowski", device, seed, items=(2, 3, 4)), False) for seed in range(10)
        ]
        assert sum(hits) >= 4


class Grid(nn.Module):
    """Layers, and the dense grid of their rows."""

    def __init__(self, sp):
        super().__init__()
        layers = apis.Layers(sp, "spconv")
        self.layers = layers.sequence(layers.conv(4, 8, "a"), layers.down(8, 8, "d"), layers.conv(8, 8, "b"))

    def forward(self, x):
        y = self.layers(x)
        return y, y.dense()


@TRAINS
def test_a_grid_of_items_without_rows(device, rules, trains):
    """It has cells of all items, whether they have rows or not."""
    rules.hold(graphs_of(512, watched=True))
    with apis.standin("spconv") as sp, torch.set_grad_enabled(trains):
        model, plain = pair(Grid, sp, device, trains)
        items = [(0, 1, 2), (0, 2)]
        hits = [served(model, plain, scene(sp, "spconv", device, seed, items[seed % 2]), trains) for seed in range(12)]
        assert all(hits[6:])


def test_the_voxels_of_a_field(device, rules):
    """They have rows of the items that the field has."""
    rules.hold(graphs_of(512, watched=True))
    with apis.standin("minkowski") as me, torch.no_grad():
        model, plain = pair(MAKERS["minkowski squeeze"], me, device, False)

        def given(seed):
            x = scene(me, "minkowski", device, seed)()
            points = x.C.float() + torch.tensor([0, 0.3, 0.3, 0.3], device=device)
            return lambda: me.TensorField(x.F, points).sparse()

        assert sum(served(model, plain, given(seed), False) for seed in range(10)) >= 4


class OneLevel(nn.Module):
    """Layers that make no level, so that nothing else stands against a part behind others."""

    def __init__(self, me):
        super().__init__()
        layers = apis.Layers(me, "minkowski")
        self.layers = nn.Sequential(*(layers.conv(n_in, 8, "a") for n_in in (4, 8, 8, 8)), Squeeze(me, 8))
        self.pool = me.MinkowskiGlobalMaxPooling()

    def forward(self, x):
        y = self.layers(x)
        return y, self.pool(y).F


class Behind(nn.Module):
    """Layers in front, which change the coordinates or leave out an item, or other tensors of the same manager."""

    def __init__(self, me, behind, way, down):
        super().__init__()
        self.me, self.way, self.behind, self.down = me, way, behind, down

    def forward(self, x):
        me, items = self.me, x.C[:, 0]
        if self.way == "pruning":
            x = self.down(me.MinkowskiPruning()(x, items != items.max()))
        elif self.way == "down":
            x = self.down(x)
        else:
            far = x.C[:1].clone()
            far[:, 0] = 7
            kind = me.SparseTensor if self.way == "another tensor" else me.TensorField
            kind(x.F[:1], far, coordinate_manager=x.coordinate_manager)
        return self.behind(x)


@TRAINS
def test_a_part_behind_layers_that_change_the_coordinates(device, rules, trains):
    rules.hold(graphs_of(512, watched=True))
    with apis.standin("minkowski") as me, torch.set_grad_enabled(trains):
        model, plain = pair(OneLevel, me, device, trains)
        down = apis.Layers(me, "minkowski").down(4, 4, "d").to(device).requires_grad_(False)
        programs = [Behind(me, one, "down", down) for one in (model, plain)]
        of = functools.partial(scene, me, "minkowski", device)
        hits = [served(*programs, of(seed), trains) for seed in range(10)]
        assert all(hits[7:])
        assert not served(*programs, of(10, items=(0, 2)), trains)


@pytest.mark.parametrize("way", ["pruning", "another tensor", "a field"])
def test_a_manager_that_has_more_items(device, rules, way):
    """The origin has a row for each batch index that its manager was given: such a part is left to its layers."""
    rules.hold(graphs_of(512, watched=True))
    with apis.standin("minkowski") as me, torch.no_grad():
        model, plain = pair(OneLevel, me, device, False)
        down = apis.Layers(me, "minkowski").down(4, 4, "d").to(device)
        programs = [Behind(me, one, way, down) for one in (model, plain)]
        of = functools.partial(scene, me, "minkowski", device)
        assert not any(served(*programs, of(seed), False) for seed in range(10))
        (part,) = graph_regions.summary()
        assert part.graphs == 0 and Why.GRAPH_BATCH_ITEMS.name in part.reason
