"""Parts of programs that pass a class of their own around a sparse tensor: replayed where the
result cannot be told from the eager one, and left alone, with the reason, where it could."""

from __future__ import annotations

import copy
import functools
import re

import pytest
import torch
from torch import nn

import sparse_bridge
from sparse_bridge import settings
from sparse_bridge.core.capture import graph_regions

from . import apis, wrapped
from .test_replay_apis import TRAINS

pytestmark = pytest.mark.emulated


@pytest.fixture(autouse=True)
def with_graphs():
    with settings.override(optimize="graphs"):
        yield


def same(mine, theirs, given, own):
    """Two results of two inputs like each other, `given` and `own`."""
    assert type(mine) is type(theirs) and list(vars(mine)) == list(vars(theirs))
    assert type(mine.data) is type(theirs.data)
    assert torch.equal(mine.coords, theirs.coords)
    assert mine.layout == theirs.layout and mine._shape == theirs._shape
    assert mine._scale == theirs._scale
    for name in ("_layout", "_spatial_cache"):
        assert vars(theirs)[name] is vars(own)[name] and vars(mine)[name] is vars(given)[name]
    assert equal(mine._spatial_cache, theirs._spatial_cache)
    assert list(vars(given)) == list(vars(own))


def equal(one, other):
    if isinstance(one, dict):
        return list(one) == list(other) and all(equal(one[k], other[k]) for k in one)
    if isinstance(one, torch.Tensor):
        return one.shape == other.shape and torch.allclose(one, other, rtol=1e-3, atol=1e-4)
    return type(one) is type(other) and one == other


class Remembers(nn.Module):
    """Keeps something of this scale for later modules, and reads what another one has kept."""

    def forward(self, x):
        x.register("norms", x.feats.square().sum(1, keepdim=True))
        x.register("count", 3)
        return x.replace(x.feats * 2 if x.registered("earlier") is None else x.feats)


@pytest.mark.parametrize("name", apis.NAMES)
@TRAINS
def test_a_stack_of_blocks(device, name, trains):
    with apis.standin(name) as module:
        plain = wrapped.stack(module, name, device, Remembers()).train(trains)
        model = copy.deepcopy(plain)

        def given(seed):
            x = wrapped.grid(module, name, seed, device)
            if seed > 10:
                x.register("earlier", 1)
            return x

        for seed in range(12):
            found = apis.both(
                model, plain, functools.partial(given, seed), trains, lambda out: [out.feats], mode="graphs"
            )
            ((x,), mine), ((own,), theirs) = found
            same(mine, theirs, x, own)
        (part,) = graph_regions.summary()
        assert (part.name, part.graphs, part.reason) == ("Stack", 1, None) and part.hits >= 2
        assert "Stack: " in str(sparse_bridge.report())
    assert graph_regions.region_of(model) is None


class Program(nn.Module):
    """Makes its object of features and coordinates, and looks at the items afterwards."""

    def __init__(self, stack, make):
        super().__init__()
        self.embed, self.stack, self.make = wrapped.Linear(4, 4), stack, make

    def forward(self, values, coords):
        x = wrapped.Grid(self.make(coords, self.embed(values)))
        y = self.stack(x)
        return y, torch.stack([y.feats[rows].mean(0) for rows in y.layout])


class Decoder(nn.Module):
    """Makes its object of features and coordinates, and goes on with what comes of it."""

    def __init__(self, stack, make):
        super().__init__()
        self.embed, self.stack, self.make = wrapped.Linear(4, 4), stack, make
        self.head = wrapped.Linear(4, 3)

    def forward(self, values, coords):
        y = self.stack(wrapped.Grid(self.make(coords, self.embed(values))))
        return y, self.head(y.feats)


def made_of(kind, module, name, device):
    """A program around a stack."""
    stack = wrapped.stack(module, name, device)
    return kind(stack, lambda coords, values: apis.tensor(module, name, coords, values)).to(device)


@pytest.mark.parametrize("name", apis.NAMES)
@TRAINS
@pytest.mark.parametrize("kind", [Program, Decoder])
def test_a_program_that_makes_them(device, name, trains, kind):
    """What looks into the layout stays outside."""
    with apis.standin(name) as module:
        plain = made_of(kind, module, name, device).train(trains)
        model = copy.deepcopy(plain)

        def given(seed):
            x = wrapped.grid(module, name, seed, device)
            return x.feats, x.coords

        for seed in range(12):
            found = apis.both(
                model, plain, functools.partial(given, seed), trains, lambda out: [out[0].feats, out[1]], mode="graphs"
            )
            (mine, _), (theirs, _) = (out for _, out in found)
            same(mine, theirs, mine, theirs)
        replayed = {one.name for one in graph_regions.summary() if one.hits}
        assert replayed == {"Stack" if kind is Program else "Decoder"}
        if kind is Program:
            (whole,) = [one for one in graph_regions.summary() if one.name == "Program"]
            assert "_layout" in whole.reason


class Around(nn.Module):
    """A program that does something with a part of it and what it is given."""

    def __init__(self, part, does):
        super().__init__()
        self.part, self.does = part, does

    def forward(self, *given):
        return self.does(self.part, *given)


def swallowed(x):
    try:
        first = x.layout[0].stop
    except Exception:
        first = 0
    return x.replace(x.feats * (1 + first * 0))


def with_more(x, **more):
    y = x.replace(x.feats)
    vars(y).update(more)
    return y


# What is done with the object, and why it is not replayed.
REFUSED = {
    "items": (lambda x: x.replace(torch.cat([x.feats[rows] * 1.5 for rows in x.layout])), r"looks into '_layout'"),
    "an attribute": (lambda x: setattr(x, "seen", True), r"writes to a Grid"),
    "caught": (swallowed, r"looks into '_layout'"),
    "a list": (lambda x: x.layout.append(slice(0, 0)), r"looks into '_layout'"),
    "the cache": (lambda x: x._spatial_cache.pop("none", None), r"looks at all of a dictionary"),
    "a tensor": (lambda x: x.replace(x.feats * float(x.extra.shape[0])), r"looks at 'extra'"),
    "a slice": (lambda x: with_more(x, where=[slice(0, 4)]), r"output holds a slice"),
    "rows": (lambda x: with_more(x, rows=len(x.feats)), r"rows is \d+, and \d+ over a padded input"),
    "the class": (lambda x: setattr(wrapped.Grid, "last", x.feats.shape[0]), r"writes to a Grid|last"),
    "another layout": (lambda x: wrapped.Grid(x.data, None, x._scale, x._spatial_cache), r"output holds a slice"),
}


@torch.no_grad()
@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(device, monkeypatch, case):
    """And computed as ever."""
    what, words = REFUSED[case]
    monkeypatch.setattr(wrapped.Grid, "last", 0, raising=False)
    with apis.standin("spconv") as module:
        place = 2 if case in ("a slice", "rows") else 0
        plain = wrapped.stack(module, "spconv", device, Around(None, lambda _, x: what(x) or x), place).eval()
        model = copy.deepcopy(plain)

        def given(seed):
            x = wrapped.grid(module, "spconv", seed, device)
            x.extra, x.seen = torch.zeros(3 + seed, device=device), False
            return x

        for seed in range(8):
            found = apis.both(
                model, plain, functools.partial(given, seed), values=lambda out: [out.feats], mode="graphs"
            )
            ((x,), mine), ((own,), theirs) = found
            assert mine.layout == theirs.layout and vars(x).keys() == vars(own).keys()
            assert x.seen == own.seen
            assert getattr(mine, "rows", None) == getattr(theirs, "rows", None)
        (part,) = [one for one in graph_regions.summary() if one.name == "Stack"]
        assert part.hits == 0
        assert re.search(words, part.reason), part.reason
        assert part.reason in str(sparse_bridge.report())


class Slots(wrapped.Grid):
    __slots__ = ("more",)


class Guarded(wrapped.Grid):
    def __setattr__(self, name, value):
        object.__setattr__(self, name, value)


class Holds(wrapped.Grid):
    """An object that nobody knows."""

    def __init__(self, *args):
        super().__init__(*args)
        self.lock = object()


@torch.no_grad()
@pytest.mark.parametrize("kind", [Slots, Guarded, Holds])
def test_objects_that_cannot_be_copied(device, kind):
    with apis.standin("spconv") as module:
        model = wrapped.stack(module, "spconv", device).eval()
        for seed in range(6):
            found = model(kind(wrapped.grid(module, "spconv", seed, device).data))
            with settings.override(optimize="off"):
                expected = model(kind(wrapped.grid(module, "spconv", seed, device).data))
            torch.testing.assert_close(found.feats, expected.feats, rtol=1e-3, atol=1e-4)
        assert not any(one.hits for one in graph_regions.summary())
        if kind is Holds:
            assert "'lock' of the " in graph_regions.summary()[0].reason


@torch.no_grad()
def test_what_is_passed_on_is_the_call_s_own(device):
    def passes(stack, x, times):
        y = stack(x)
        return {"x": x, "y": [y, y], "times": times, "data": x.data, "layout": x.layout}

    with apis.standin("spconv") as module:
        model = Around(wrapped.stack(module, "spconv", device), passes).eval()
        for seed in range(7):
            x = wrapped.grid(module, "spconv", seed, device)
            times = torch.full((2, 3), float(seed), device=device)
            out = model(x, times)
            assert out["x"] is x and out["times"] is times and out["data"] is x.data
            assert out["layout"] is x.layout and out["y"][0] is out["y"][1]
        (part,) = graph_regions.summary()
        assert (part.name, part.reason) == ("Around", None) and part.hits >= 2


@torch.no_grad()
def test_tensors_beside_a_dense_grid(device):
    """They have a row for every item, as it has."""
    with apis.standin("spconv") as module:
        does = lambda network, x, times: {"times": times, "grid": network(x)["out"].dense()}  # noqa: E731
        model = Around(apis.network(module, "spconv", device), does).eval()
        for seed in range(9):
            times = torch.full((2, 3), float(seed), device=device)
            x = apis.scene(module, "spconv", seed, device, 0.25 + 0.002 * seed)
            assert model(x, times)["times"] is times
        (part,) = graph_regions.summary()
        assert part.name == "Around" and part.hits >= 1


@torch.no_grad()
def test_inner_parts_where_two_are_given(device):
    with apis.standin("spconv") as module:
        plain = Around(wrapped.stack(module, "spconv", device), lambda stack, x, other: stack(x) + other).eval()
        model = copy.deepcopy(plain)
        for seed in range(11):
            given = lambda seed=seed: tuple(wrapped.grid(module, "spconv", seed, device) for _ in range(2))  # noqa: E731
            apis.both(model, plain, given, values=lambda out: [out.feats], mode="graphs")
        parts = {one.name: one for one in graph_regions.summary()}
        assert "2 sparse tensors" in parts["Around"].reason and parts["Stack"].hits >= 2


@torch.no_grad()
def test_numbers_that_follow_from_one_axis(device):
    """The first other boxes have the same, so that they prove nothing of it."""

    def measured(stack, x):
        y = stack(x)
        y.height = x.data.spatial_shape[0]
        return y

    with apis.standin("spconv") as module:
        model = Around(wrapped.stack(module, "spconv", device), measured).eval()
        for seed in range(14):
            shape = (6 if seed < 9 else seed, 5, 7 if seed < 5 else 8 + seed % 2)
            x = apis.scene(module, "spconv", seed, device, 0.3, shape=shape)
            assert model(wrapped.Grid(x)).height == shape[0]
        (part,) = graph_regions.summary()
        assert part.hits >= 2 and graph_regions._regions[model].replayer.box_columns


class Optional(Decoder):
    """Something beside the sparse layers depends on what else is given."""

    def forward(self, values, coords, labels=None):
        y = self.stack(wrapped.Grid(self.make(coords, self.embed(values))))
        return y, "none" if labels is None else "some"


@torch.no_grad()
def test_whether_something_else_is_given(device):
    with apis.standin("spconv") as module:
        model = made_of(Optional, module, "spconv", device).eval()
        for seed in range(8):
            x = wrapped.grid(module, "spconv", seed, device)
            labels = None if seed < 6 else torch.ones(3, device=device)
            assert model(x.feats, x.coords, labels)[1] == ("none" if seed < 6 else "some")
        (part,) = [one for one in graph_regions.summary() if one.hits]
        assert part.name == "Optional"


class Counted(Decoder):
    """Says how many rows it was given, which its graph would not."""

    def forward(self, values, coords):
        y = self.stack(wrapped.Grid(self.make(coords, self.embed(values))))
        return y, coords.shape[0]


@torch.no_grad()
def test_numbers_of_rows(device):
    with apis.standin("spconv") as module:
        model = made_of(Counted, module, "spconv", device).eval()
        for seed in range(20):
            x = wrapped.grid(module, "spconv", seed, device, 0.2 + 0.02 * seed)
            _, rows = model(x.feats, x.coords)
            assert rows == len(x.coords)
        parts = {one.name: one for one in graph_regions.summary()}
        assert parts["Counted"].hits == 0 and "over a padded input" in parts["Counted"].reason
        assert parts["Stack"].hits >= 1
