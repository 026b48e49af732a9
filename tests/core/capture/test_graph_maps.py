"""Which graph is queued before a call has been looked at, and what of it."""

from __future__ import annotations

import copy
import itertools
from types import SimpleNamespace

import pytest
import torch

import sparse_bridge
from sparse_bridge import policy
from sparse_bridge.core.capture import captured_maps, graph_regions
from sparse_bridge.core.capture.call_kind import CallKind
from sparse_bridge.core.capture.calls.foreign import ForeignReads
from sparse_bridge.core.capture.model_graphs import SpeculativeLaunch
from sparse_bridge.core.capture.replay import Replayer
from sparse_bridge.core.capture.replay_training import TrainingReplayer
from sparse_bridge.core.geometry.data_bounds import Root

from . import apis
from .test_replay_apis import TRAINS, optimized


class Graph:
    def __init__(self, serves=True, capacity=512):
        self.capacity = capacity
        self.maps = SimpleNamespace(serves=lambda box: serves, exact=False)


def kind_of(*graphs):
    """The kind of calls that these graphs serve."""
    kind = CallKind()
    kind.graphs = list(graphs)
    return kind


def test_wrong_guesses_become_rare_and_a_right_one_ends_that():
    root = Root(torch.zeros(500, 4), None)
    speculation, graph = SpeculativeLaunch(), Graph()
    kind = kind_of(graph)
    guessed = []
    for right in [False, False, True, *[False] * 40, *[True] * 40]:
        guessed.append(speculation.predict(kind, root) is graph)
        speculation.started = graph if guessed[-1] else None
        speculation.confirm(graph if right else None)
        speculation.started = None
    assert all(guessed[:6])  # a few odd inputs do no harm
    assert [place for place in range(6, 43) if guessed[place]] == [8, 13, 22, 39]
    again = guessed.index(True, 43)
    assert again <= 39 + policy.GUESSES.longest_wait and all(guessed[again:])


SMALL, LARGE = Graph(capacity=500), Graph(capacity=5000)


@pytest.mark.parametrize(
    ("latest", "guessed"),
    [
        pytest.param(None, None, id="no replay yet"),
        pytest.param(kind_of(), None, id="no graph"),
        pytest.param(kind_of(Graph(serves=False)), None, id="other bounds"),
        pytest.param(kind_of(Graph(capacity=499)), None, id="a row too many"),
        pytest.param(kind_of(SMALL), SMALL, id="just enough"),
        pytest.param(kind_of(SMALL, LARGE), SMALL, id="the smaller one"),
        pytest.param(kind_of(Graph(capacity=499), LARGE), LARGE, id="the larger one"),
    ],
)
def test_which_graph_is_guessed(latest, guessed):
    root = Root(torch.zeros(500, 4), None)
    assert SpeculativeLaunch().predict(latest, root) is guessed


@pytest.mark.emulated
@TRAINS
def test_a_graph_is_queued_before_the_modules_are_looked_at(device, monkeypatch, trains):
    """And a module that listens by then leaves the call as it is."""
    told, early = [], ["maps", "run"]
    with apis.standin("spconv") as module:
        model, plain = optimized(module, "spconv", device, trains)
        mode = TrainingReplayer if trains else Replayer
        own_start, own_possible = captured_maps.CapturedMaps.start, mode.possible
        own_allowed, own_launch = mode.allowed, mode.launch_speculatively

        def launch(*given):
            launched = own_launch(*given)
            told.extend(["run"] if launched else [])
            return launched

        monkeypatch.setattr(mode, "launch_speculatively", launch)
        monkeypatch.setattr(
            captured_maps.CapturedMaps, "start", lambda *given: told.append("maps") or own_start(*given)
        )
        monkeypatch.setattr(mode, "possible", lambda one: told.append("modules") or own_possible(one))
        for seed in range(10):
            told.clear()
            if seed == 5:  # another thread's step begins between two questions
                answers = itertools.chain([True], itertools.repeat(False))
                monkeypatch.setattr(mode, "allowed", lambda _, told=answers: next(told))
            if seed == 6:
                monkeypatch.setattr(mode, "allowed", own_allowed)
                model.deep.register_forward_hook(lambda *_: told.append("hook"))
            x = apis.scene(module, "spconv", seed, device, 0.3)
            apis.both(model, plain, lambda: x, trains, rtol=2e-3, atol=1e-3)  # noqa: B023
            assert seed != 4 or told == [*early, "modules"]
            assert seed != 5 or told == ["modules", "maps"]
            if seed in (6, 7, 8):
                order = [one for one in told if one != "hook"]  # without a GPU, runs listen, too
                assert order[: len(early) + 1] == [*early, "modules"] and told[-1] == "hook"
        # Three guesses in a row have been for nothing: the next calls wait.
        assert told[0] == "modules" and told[-1] == "hook"


class Counting(torch.nn.Module):
    """Counts its calls in a buffer."""

    def __init__(self, net):
        super().__init__()
        self.net = net
        self.register_buffer("calls", torch.zeros(1, dtype=torch.int64))

    def forward(self, x):
        self.calls.add_(1)
        return self.net(x)


@pytest.mark.gpu
@pytest.mark.usefixtures("nothing_learnt", "uncompared")
def test_a_model_that_writes_to_its_buffers_is_run_once():
    """Where the guess is wrong, too: only its maps are queued early."""
    with apis.standin("spconv") as module, torch.no_grad():
        net = apis.network(module, "spconv", "cuda").eval()
        model = Counting(net).cuda().eval()
        sparse_bridge.optimize(model, graphs=True)
        for seed in range(8):
            if seed == 6:
                assert graph_regions.region_of(model).replayer.hits  # replays count as well
                net.deep.register_forward_hook(lambda *_: None)
            model(apis.scene(module, "spconv", seed, "cuda", 0.3))
            assert model.calls.item() == seed + 1


def altered(work, *known):
    with ForeignReads(list(known)) as reads:
        work(*known)
    return reads.alters


def test_what_alters_more_than_its_own_memory():
    x, buffer = torch.ones(4, 4), torch.zeros(4)
    assert not altered(lambda x, b: torch.relu_(x + b).mul_(2), x, buffer)
    assert altered(lambda x, b: b.add_(x.sum()), x, buffer)
    assert altered(lambda x, b: torch.add(x[0], 1, out=b), x, buffer)
    assert altered(lambda x, b: b[:2].view(2).fill_(0), x, buffer)
    assert altered(lambda x: torch.nn.functional.dropout(x, 0.5), x)
    norm = torch.nn.BatchNorm1d(4)
    known = (x, *norm.parameters(), *norm.buffers())
    assert altered(lambda x, *_: norm(x), *known)
    norm.eval()
    assert not altered(lambda x, *_: norm(x), *known)


class Deep(torch.nn.Module):
    """Down to a level of a few rows, over whose map eager layers make no tiles, and padded ones do."""

    def __init__(self, layers):
        super().__init__()
        torch.manual_seed(0)
        self.stem = layers.conv(4, 8, "a")
        self.levels = torch.nn.ModuleList([layers.down(8, 8, f"d{n}") for n in range(4)])

    def forward(self, x):
        x, every = self.stem(x), []
        for layer in self.levels:
            x = layer(x)
            every.append(x.feats)
        return every


@pytest.mark.emulated
def test_masks_are_those_of_every_input(device):
    """A replay makes them again where layers make them over its maps."""
    with apis.standin("torchsparse") as module:
        plain = Deep(apis.Layers(module, "torchsparse")).to(device).eval()
        model = sparse_bridge.optimize(copy.deepcopy(plain), graphs=True)
        for seed in range(8):
            shape, share = ((6, 5, 7), 0.3) if seed < 4 else ((24, 23, 22), 0.006)
            given = lambda seed=seed, shape=shape, share=share: apis.scene(  # noqa: E731
                module, "torchsparse", seed, device, share, shape=shape
            )
            apis.both(model, plain, given, values=list, rtol=1e-4, atol=1e-6)
        assert graph_regions.region_of(model).replayer.hits == 4
