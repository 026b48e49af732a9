"""What trials show of programs in front of their sparse layers, and what tells their calls apart."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from sparse_bridge import policy, settings
from sparse_bridge.adapters import protocol
from sparse_bridge.core.capture import graph_regions
from sparse_bridge.refusals import Why

from . import apis
from .graph_sizes import graphs_of

pytestmark = pytest.mark.emulated

SCENES = 12


class Program(nn.Module):
    """Does something with the features in front of its sparse layers."""

    def __init__(self, network, do):
        super().__init__()
        self.network, self.do = network, do
        self.embedding = nn.Embedding(8, 4)
        self.register_buffer("kept", torch.zeros(4))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        framework = protocol.of(x)
        features = self.do(self, x, framework.features_of(x), framework.coordinates_of(x))
        return self.network(framework.with_features(x, features))


def largest(self, x, f, coords):
    self.kept.copy_(torch.maximum(self.kept, f.amax(0)))
    return f


def mean(self, x, f, coords):
    self.kept.mul_(0.9).add_(f.mean(0), alpha=0.1)
    return f


def rows(self, x, f, coords):
    self.calls.fill_(f.shape[0])
    return f


def counted(self, x, f, coords):
    self.calls.add_(1)
    return f + 0 * self.calls


def looked_up(self, x, f, coords):
    return f + self.embedding(f[:, 0].abs().clamp(0, 7).long())


def picked(self, x, f, coords):
    return f + self.kept[f[:, 0].abs().clamp(0, 3).long()].unsqueeze(1)


def gathered(self, x, f, coords):
    return f + torch.gather(f, 1, f[:, :1].abs().clamp(0, 3).long())


def picked_or_not(self, x, f, coords):
    try:
        return picked(self, x, f, coords)
    except Exception:  # of the program's own
        return f


def shares(self, x, f, coords):
    return f + nn.functional.binary_cross_entropy(f.abs().clamp(0, 1), torch.ones_like(f), reduction="none")


def by_coordinates(self, x, f, coords):
    return f + self.embedding(coords[:, 1].long().clamp(max=7))


def by_clamped(self, x, f, coords):
    return f + self.embedding(f[:, 0].nan_to_num().clamp(0, 7).long())


def first_rows(self, x, f, coords):
    return f + f[:5].shape[0]


def one_row(self, x, f, coords):
    try:
        return f + f[110]
    except IndexError:
        return f


def pairs_of_rows(self, x, f, coords):
    try:
        return f + f.unflatten(0, (-1, 2)).flatten(0, 1)
    except RuntimeError:  # of an odd number, which a trial does not see
        return 2 * f


def parts_of_rows(self, x, f, coords):
    return f + len(f.split(1000))


def rows_of_places(self, x, f, coords):
    return f + coords.t()[1:, :100].shape[1]


def large_ones(self, x, f, coords):
    return f * (1 + (f.abs() > 100).float().sum(0))


def any_large(self, x, f, coords):
    return f + (f > -100).any(0)


def all_large(self, x, f, coords):
    return f + (f > 100).all(0, keepdim=True)


def number_of_small(self, x, f, coords):
    return f / 1000 + (f < -1000).sum(0)


def whole(self, x, f, coords):
    """All rows, and parts of each."""
    f = torch.cat(f[: len(f)].split(len(f)))[:].view(-1).view(-1, 2, 2).flatten(1)
    wide = torch.cat([*f.chunk(2, 1), f[..., :1]], 1)[None].squeeze(0).view(-1, 5)
    return wide[:, 1:].t().t().reshape(2 * len(f), 2).reshape(-1, 4) + f[:, 2].unsqueeze(1)


REFUSED = {
    largest: Why.GRAPH_BUFFER,
    mean: Why.GRAPH_BUFFER,
    rows: Why.GRAPH_BUFFER,
    looked_up: Why.GRAPH_INDEX,
    picked: Why.GRAPH_INDEX,
    picked_or_not: Why.GRAPH_INDEX,
    gathered: Why.GRAPH_INDEX,
    shares: Why.GRAPH_INDEX,
    large_ones: Why.GRAPH_OTHER_BITS,
    first_rows: Why.GRAPH_SLICE,
    one_row: Why.GRAPH_SLICE,
    pairs_of_rows: Why.GRAPH_SLICE,
    parts_of_rows: Why.GRAPH_SLICE,
    rows_of_places: Why.GRAPH_SLICE,
    any_large: Why.GRAPH_SLICE,
    all_large: Why.GRAPH_SLICE,
    number_of_small: Why.GRAPH_SLICE,
}
REPLAYED = [counted, by_coordinates, by_clamped, whole]


@pytest.fixture
def stream(device, rules):
    """The function that runs scenes through a program without replays and with them, and compares what comes of it:
    the program's part in the summary. changed: makes of scene and its number what the program is given.  trains: with
    a backward pass."""
    rules.hold(graphs_of(512, watched=True))
    rules.set(policy, LEAST_LAYERS=2)

    def run(name, do, changed=lambda x, number, module: x, buffers=True, trains=False):
        found = []
        for mode in ("off", "graphs"):
            grad = torch.set_grad_enabled(trains)
            with apis.standin(name) as module, settings.override(optimize=mode), grad:
                torch.manual_seed(0)
                model = Program(apis.network(module, name, device), do).to(device).train(trains)
                for number in range(SCENES):
                    x = changed(apis.scene(module, name, number, device, 0.3 + 0.002 * number), number, module)
                    values = apis.values_of(model(x))
                    if trains:
                        apis.loss_of(values).backward()
                    found.append([*values, *(one.clone() for one in model.buffers() if buffers)])
                parts = graph_regions.summary()
        for mine, theirs in zip(found[:SCENES], found[SCENES:], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)
        return next(one for one in parts if one.name == "Program")

    return run


@pytest.mark.parametrize("do", REFUSED, ids=lambda do: do.__name__)
def test_programs_that_trials_refuse(stream, do):
    part = stream("spconv", do)
    assert part.hits == 0 and REFUSED[do].name in part.reason


@pytest.mark.parametrize("do", [first_rows, pairs_of_rows, any_large, number_of_small], ids=lambda do: do.__name__)
def test_programs_that_trials_of_steps_refuse(stream, do):
    part = stream("spconv", do, trains=True)
    assert part.hits == 0 and REFUSED[do].name in part.reason


@pytest.mark.parametrize("do", REPLAYED, ids=lambda do: do.__name__)
def test_programs_that_are_replayed(stream, do):
    assert stream("spconv", do, buffers=do is not counted).hits > 3  # an imitated replay puts buffers back


ANY = ["attribute of features", "columns"]
TRAITS = {"spconv": [*ANY, "attribute", "subclass"], "torchsparse": [*ANY, "attribute", "subclass"], "minkowski": ANY}


@pytest.mark.parametrize(("name", "trait"), [(name, trait) for name, traits in TRAITS.items() for trait in traits])
def test_what_tells_inputs_apart(stream, name, trait):
    """From the eighth scene on: those before it are replayed."""

    def asks(self, x, f, coords):
        gain = getattr(x, "gain", 1.0) * getattr(f, "gain", 1.0)
        return f * gain * (1.0 if f.is_contiguous() else 3.0) * (5.0 if type(x).__name__ == "Own" else 1.0)

    def changed(x, number, module):
        if number < 8:
            return x
        framework = protocol.of(x)
        f = framework.features_of(x)
        if trait == "columns":
            return framework.with_features(x, f.t().contiguous().t())
        if trait == "subclass":
            x.__class__ = type("Own", (type(x),), {})
        else:
            (x if trait == "attribute" else f).gain = 2.0
        return x

    assert stream(name, asks, changed).hits > 0


class Columns(nn.Module):
    """Returns a view of the coordinates that it is given, if it is told to, and knows the sign of a zero."""

    def __init__(self, network, view):
        super().__init__()
        self.network, self.view = network, view

    def forward(self, x, zero):
        framework = protocol.of(x)
        coords = framework.coordinates_of(x)
        x = framework.with_features(x, framework.features_of(x) * math.copysign(1.0, zero))
        return {**self.network(x), **({"items": coords[:, 0]} if self.view else {})}


@pytest.mark.parametrize("name", apis.NAMES)
@pytest.mark.parametrize("view", [True, False])
def test_views_of_coordinates_and_the_sign_of_zero(device, rules, name, view):
    rules.hold(graphs_of(512, watched=True))
    found = []
    for mode in ("off", "graphs"):
        with apis.standin(name) as module, settings.override(optimize=mode), torch.no_grad():
            model = Columns(apis.network(module, name, device), view).to(device).eval()
            for number in range(SCENES):
                x = apis.scene(module, name, number, device, 0.3)
                y = model(x, -0.0 if number > 9 else 0.0)
                if view:
                    y["items"].add_(1)
                found.append([protocol.of(x).coordinates_of(x).clone(), *apis.values_of(y)])
            hits = {one.name: one.hits for one in graph_regions.summary()}
    assert (hits["Columns"] > 0) != view
    for mine, theirs in zip(found[:SCENES], found[SCENES:], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.filterwarnings("ignore:.*nested", "ignore:Sparse CSR")
@pytest.mark.parametrize("kind", ["sparse", "nested", "meta"])
def test_tensors_of_any_kind_beside_the_sparse_one(device, rules, kind):
    rules.hold(graphs_of(512, watched=True))
    other = {
        "sparse": lambda: torch.eye(3, device=device).to_sparse_csr(),  # which does not say whether it is contiguous
        "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], device=device),
        "meta": lambda: torch.ones(3, device="meta"),
    }[kind]()

    class Takes(nn.Module):
        def __init__(self, network):
            super().__init__()
            self.network = network

        def forward(self, x, other):
            return self.network(x)

    with apis.standin("spconv") as module, settings.override(optimize="graphs"), torch.no_grad():
        model = Takes(apis.network(module, "spconv", device)).to(device).eval()
        for number in range(SCENES):
            model(apis.scene(module, "spconv", number, device, 0.3), other)
