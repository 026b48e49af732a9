"""Calls of several kinds: which are told apart by what, and how many kinds a model is replayed for."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import sparse_bridge
from sparse_bridge import settings
from sparse_bridge.adapters import protocol
from sparse_bridge.core.capture import graph_regions
from sparse_bridge.core.capture.graph_key import GraphKey, difference
from sparse_bridge.refusals import Why

from . import apis
from .graph_sizes import graphs_of

KEY = GraphKey(None, torch.device("cpu"), torch.float32, None, 4, (1, None), ((), ()), (True, 1, False))


def constants(*arguments, read=(), alive=None):
    """What tells calls apart, with these arguments."""
    own = arguments, read
    return KEY._replace(constants=(own if alive is None else (own, alive, ()), None))


@pytest.mark.parametrize(
    "before, now, said",
    [
        (
            constants((0, "x"), ("name", (str, "scene1"))),
            constants((0, "x"), ("name", (str, "scene2"))),
            "'name' was 'scene1', is 'scene2'",
        ),
        (constants((0, "x"), (1, (int, 3))), constants((0, "x"), (1, (int, 4))), "argument 2 was 3, is 4"),
        (
            constants(("sizes", (list, ((int, 3), (int, 4))))),
            constants(("sizes", (list, ((int, 3), (int, 5))))),
            "'sizes' was 4, is 5",
        ),
        (
            constants(("sizes", (list, ((int, 3),)))),
            constants(("sizes", (list, ()))),
            "'sizes' was ((<class 'int'>, 3),), is ()",
        ),
        (
            constants(read=(((0,), "frame", (int, 3)),)),
            constants(read=(((0,), "frame", (int, 4)),)),
            "'frame' was 3, is 4",
        ),
        (
            constants(alive=(("a", (int, 1)), ("scale", (float, 0.5)))),
            constants(alive=(("a", (int, 1)), ("scale", (float, 0.25)))),
            "'scale' was 0.5, is 0.25",
        ),
        (KEY, KEY._replace(dtype=torch.float16), "the dtype of its features was torch.float32, is torch.float16"),
        (KEY, KEY._replace(channels=5), "the number of its channels was 4, is 5"),
        (KEY, KEY._replace(label=(2, None)), "what its sparse tensor says of itself was 1, is 2"),
        (KEY, KEY._replace(switches=(True, 1, True)), "a setting, or a mode of a module was False, is True"),
        ("one", "other", "the call was 'one', is 'other'"),
    ],
)
def test_what_tells_two_calls_apart(before, now, said):
    assert difference(before, now) == said


class Categories(nn.Module):
    """A program that hands the category of an object over, and returns it."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, x, category):
        return self.network(x), category


def run(module, name, device, categories, trains=False, asked=False):
    """A model, whose calls have these categories, and give what its double gives."""
    plain = Categories(apis.network(module, name, device)).to(device).train(trains)
    model = copy.deepcopy(plain)
    if asked:
        sparse_bridge.optimize(model, graphs=True)
    for seed, category in enumerate(categories):
        given = lambda seed=seed, category=category: (  # noqa: E731
            apis.scene(module, name, seed % 13, device, 0.3 + 0.002 * (seed % 13)),
            category,
        )
        found = apis.both(model, plain, given, trains, lambda out: apis.values_of(out[0]), "auto")
        assert [out[1] for _, out in found] == [category, category]
    return model


@pytest.mark.emulated
@pytest.mark.parametrize(
    ("name", "kinds", "trains"),
    [("spconv", 4, False), ("spconv", 8, False), ("minkowski", 8, False), ("minkowski", 8, True)],
)
def test_many_kinds_of_calls(device, rules, name, kinds, trains):
    """The network alone is replayed, whose calls are of one kind; and the report says what differs."""
    rules.hold(graphs_of(512, watched=True))
    with apis.standin(name) as module:
        model = run(module, name, device, [f"category {n % kinds}" for n in range(44 if kinds == 4 else 34)], trains)
        assert graph_regions.region_of(model) is None
        assert graph_regions.region_of(model.network).replayer.summary().hits >= 3
        (whole,) = [one for one in graph_regions.summary() if one.name == "Categories"]
        assert Why.GRAPH_NEW_KINDS.name in whole.reason and "argument 2 was 'category " in whole.reason


@pytest.mark.emulated
@pytest.mark.parametrize("name", ["spconv", "torchsparse"])
@pytest.mark.parametrize("case", ["two and rare ones", "three", "warm-up", "asked"])
def test_few_kinds_of_calls(device, rules, name, case):
    rules.hold(graphs_of(512, watched=True))
    categories = {
        "two and rare ones": [("rare", n // 7 % 4) if n % 7 == 6 else n % 2 for n in range(63)],
        "three": [n % 3 for n in range(40)],
        "warm-up": [*range(8), *["same"] * 20],
        "asked": [n % 8 for n in range(64)],
    }[case]
    categories = [str(one) for one in categories]
    with apis.standin(name) as module, settings.override(optimize="auto"):
        model = run(module, name, device, categories, asked=case == "asked")
        replayer = graph_regions.region_of(model).replayer
        least = {"two and rare ones": 35, "three": 28, "warm-up": 17, "asked": 8}
        assert replayer.graphs and replayer.hits >= least[case]


@pytest.mark.emulated
@pytest.mark.parametrize("name", apis.NAMES)
def test_two_forward_passes_before_one_backward_pass(device, rules, name):
    """The second is eager, and it is said why."""
    rules.hold(graphs_of(512, watched=True))
    with apis.standin(name) as module, settings.override(optimize="auto"):
        model = apis.network(module, name, device)
        for seed in range(8):
            pair = [apis.scene(module, name, 2 * seed + n, device, 0.3) for n in (0, 1)]
            sum(apis.loss_of(apis.values_of(model(one))) for one in pair).backward()
        training = graph_regions.region_of(model).replayer.training
        assert training.hits >= 5 and training.declined == Why.GRAPH_STEP_OPEN.says()
        before = training.declined = None
        apis.loss_of(apis.values_of(model(pair[0]))).backward()
        assert training.declined is before, "one after the other"


class Loss(nn.Module):
    """A loss inside of the model, by labels that it is given."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, x, labels):
        logits = protocol.features_of(self.network(x)["out"])
        return nn.functional.cross_entropy(logits, labels)


@pytest.mark.emulated
@pytest.mark.parametrize("name", apis.NAMES)
def test_a_loss_inside_of_the_model(device, rules, name):
    """Its labels are tensors from outside: the network alone is replayed."""
    rules.hold(graphs_of(512, watched=True))
    with apis.standin(name) as module, settings.override(optimize="auto"):
        model = Loss(apis.network(module, name, device))
        for seed in range(10):
            x = apis.scene(module, name, seed, device, 0.3)
            rows = len(protocol.of(x).coordinates_of(x))
            model(x, torch.arange(rows, device=device) % 4).backward()
        said = {one.name: one for one in graph_regions.summary()}
        assert said["Network"].hits >= 2 and Why.GRAPH_FOREIGN_TENSOR.name in said["Loss"].reason
