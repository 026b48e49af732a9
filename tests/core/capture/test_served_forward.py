"""What is called in place of the forward of one module: graphs, and the first calls of a model that is tuned."""

from __future__ import annotations

import contextlib
import copy
import functools
import pickle
import subprocess
import sys
from unittest import mock

import pytest
import torch
from torch import nn

import sparse_bridge
from sparse_bridge import hooks, settings, state
from sparse_bridge.core import served_forward
from sparse_bridge.core.capture import graph_regions
from sparse_bridge.errors import UnsupportedError
from sparse_bridge.tools import group_race


class Serves(served_forward.Server):
    def __init__(self, model, asked):
        self.asked = asked
        super().__init__(model)

    def __call__(self, x):
        return "served"


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("first", ["served", "enabled"])
def test_frameworks_that_come_and_go(first, asked):
    """Their patches are of the class's own function, which is back afterwards. Who asked is served again."""
    own, model, x = vars(nn.Sequential)["forward"], nn.Sequential(nn.ReLU()), torch.ones(1)
    server = None
    try:
        if first == "served":
            server = Serves(model, asked)
            assert model(x) == "served" and torch.equal(nn.Sequential(nn.ReLU())(x), x)
        sparse_bridge.enable("torchsparse", mode="standin")
        if first == "enabled":
            server = Serves(model, asked)
        assert (model(x) == "served") is (asked or first == "enabled")
    finally:
        sparse_bridge.disable("torchsparse")
        assert (model(x) == "served") is asked
        server.uninstall()
    graph_regions.remove()
    assert vars(nn.Sequential)["forward"] is own and torch.equal(model(x), x)


def test_a_model_that_is_asked_for_keeps_its_graphs():
    """When another framework comes, and when the process forgets what it has learnt."""
    model = sparse_bridge.optimize(nn.Sequential(nn.ReLU()), graphs=True)
    region = graph_regions.region_of(model)
    with sparse_bridge.enable("torchsparse", mode="standin"):
        state.reset()
        assert graph_regions.region_of(model) is region and served_forward.asked(model)
    assert graph_regions.region_of(model) is region and served_forward.asked(model)
    sparse_bridge.restore(model)
    assert graph_regions.region_of(model) is None and not served_forward.asked(model)


def test_what_cannot_be_served():
    """Where torch's call would not be the one that asks for the forward, or that is no function."""

    class Asks(nn.Identity):
        def __getattribute__(self, name):
            return super().__getattribute__(name)

    class Object(nn.Module):
        forward = functools.partial(torch.relu)

    assert served_forward.possible(nn.Identity())
    assert not any(map(served_forward.possible, (Asks(), Object(), nn.Module())))


@pytest.mark.parametrize("graphs", [False, True])
def test_a_model_that_is_tuned_first(graphs):
    """In the first call of a training and in the first inference; then its graphs serve it, or its own forward."""
    model, tuned = nn.Sequential(nn.Linear(2, 2)), []

    @contextlib.contextmanager
    def tuner():
        tuned.append(torch.is_grad_enabled())
        yield

    with settings.override(tune="full"), mock.patch.object(group_race, "tuned", tuner):
        sparse_bridge.optimize(model, graphs=graphs)
        for grad in (True, True, False, False, True):
            with torch.set_grad_enabled(grad):
                model.train(grad)(torch.ones(1, 2))
        assert tuned == [True, False] and served_forward.asked(model) == graphs
        twin = copy.copy(model)
        assert not served_forward.asked(twin)
        sparse_bridge.restore(model)
        sparse_bridge.optimize(model, graphs=graphs)
        sparse_bridge.restore(model)
        model.eval()(torch.ones(1, 2))
    assert len(tuned) == 2 and not served_forward.asked(model)


@pytest.mark.parametrize("restored", [False, True])
def test_what_served_before_the_first_calls(restored):
    """Serves again, once, and only if nobody has ended it meanwhile."""
    model = nn.Sequential(nn.Linear(2, 2)).eval()
    with settings.override(tune="full"), mock.patch.object(group_race, "tuned", contextlib.nullcontext):
        sparse_bridge.optimize(model, graphs=True)
        if restored:
            with torch.no_grad():
                model(torch.ones(1, 2))
            assert served_forward.asked(model)
            sparse_bridge.restore(model)
        else:  # as when no call of a training could be replayed
            graph_regions.end(model)
            with torch.no_grad():
                model(torch.ones(1, 2))
    assert not served_forward.asked(model)


def test_a_forward_that_cannot_be_served():
    class Called(nn.Module):
        forward = functools.partial(torch.relu)

    with pytest.raises(UnsupportedError, match="Called cannot be replayed or tuned"):
        sparse_bridge.optimize(Called(), graphs=True)


def test_a_class_that_is_pickled_whole():
    """As cloudpickle does: with the dictionary of the class, of whose function it takes all that functions have."""
    model = sparse_bridge.optimize(nn.Flatten(), graphs=True)
    try:
        own, member = nn.Flatten.forward, vars(nn.Flatten)["forward"]
        assert type(member) is served_forward.ServedForward and member.__dict__ is own.__dict__
        assert copy.copy(member) is own and copy.deepcopy(vars(nn.Flatten)["forward"]) is own
        text = pickle.dumps(member)
        assert pickle.loads(text) is own and b"sparse_bridge" not in text
    finally:
        sparse_bridge.restore(model)


_KEPT_TO_THE_END = """
import copyreg, sparse_bridge
from torch import nn
copyreg.kept = sparse_bridge.optimize(nn.Identity(), graphs=True)
"""


def test_a_model_that_lives_until_python_exits():
    """In a module that goes after this package."""
    ended = subprocess.run([sys.executable, "-c", _KEPT_TO_THE_END], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_models_that_are_equal():
    """One is optimised, restored and forbidden to be replayed, not all."""

    class Equal(nn.Identity):
        def __eq__(self, other):
            return True

        def __hash__(self):
            return 1

    one, other = Equal(), Equal()
    sparse_bridge.optimize(one, graphs=True)
    sparse_bridge.optimize(other, graphs=True)
    sparse_bridge.restore(one)
    assert served_forward.asked(other) and not served_forward.asked(one)
    sparse_bridge.optimize(one, graphs=False)
    assert hooks.may_be_replayed(other) and not hooks.may_be_replayed(one)
    sparse_bridge.restore(one)
    assert hooks.may_be_replayed(one)
