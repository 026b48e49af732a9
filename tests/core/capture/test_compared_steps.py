"""Steps that layers and graph compute both: what differs shows, and the program's own step is that of the layers."""

from __future__ import annotations

import functools

import pytest
import torch

from sparse_bridge import settings
from sparse_bridge.core.capture import graph_regions, replay_training
from sparse_bridge.core.capture.replay_trial import PaddedModel

from . import apis
from .graph_sizes import graphs_of
from .test_replay_apis import optimized, replayer_of

pytestmark = pytest.mark.emulated


@pytest.fixture
def steps(device):
    """(a model all of whose replays are compared, its double that is not replayed, a function that takes a step of
    both)."""
    with apis.standin("spconv") as module, settings.override(compare_every=1):
        model, plain = optimized(module, "spconv", device, True)

        def step(seed, saliency=False):
            given = []

            def scene():
                x = apis.scene(module, "spconv", seed, device, 0.25)
                x.features.requires_grad_(saliency)
                given.append(x.features)
                return x

            apis.both(model, plain, scene, True)
            return given

        for seed in range(5):
            step(seed)
        assert replayer_of(model).graphs
        yield model, plain, step


def one_off(values, change):
    """The same values but for one entry of the first tensor."""
    values = list(values)
    place = next(n for n, value in enumerate(values) if value is not None)
    values[place] = values[place].clone()
    entry = values[place].view(-1)[:1]
    entry.copy_(change(entry))
    return values


def next_bits(entry):
    return torch.nextafter(entry, entry + 1)


def forward(change):
    """A forward pass by a graph, and a change of what it wrote."""
    own = replay_training._Run.forward

    def changed(self, features):
        leaves = own(self, features)
        return change(self.owner.model, leaves) or leaves

    return {"forward": changed}


def backward(change):
    own = replay_training._Run.backward
    return {"backward": lambda self, *given: change(own(self, *given))}


def moved(name):
    """A change of a buffer."""

    def change(model, leaves):
        with torch.no_grad():
            next(buffer for own, buffer in model.named_buffers() if own.endswith(name)).add_(1)

    return change


DAMAGES = {
    "output": (lambda: forward(lambda model, leaves: tuple(one_off(leaves, next_bits))), "output 0"),
    "gradient": (lambda: backward(lambda gradients: one_off(gradients, lambda entry: entry + 10)), "the gradient of "),
    "statistics": (lambda: forward(moved("running_mean")), "running_mean"),
    "counter": (lambda: forward(moved("num_batches_tracked")), "num_batches_tracked"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_differs_ends_the_replays(steps, monkeypatch, damage):
    model, _, step = steps
    replayer, (change, words) = replayer_of(model), DAMAGES[damage]
    for name, function in change().items():
        monkeypatch.setattr(replay_training._Run, name, function)
    step(5)
    assert not replayer.graphs and "GRAPH_DIFFERS" in replayer.why() and words in replayer.why()


@pytest.mark.parametrize("saliency", [False, True])
def test_the_step_of_the_program_is_that_of_the_layers(steps, monkeypatch, saliency):
    """To the bit, as autograd goes through it twice. The layers compute once more only where gradients go on to
    what made the features."""
    model, plain, step = steps
    again, own = [], PaddedModel.run_alone
    monkeypatch.setattr(PaddedModel, "run_alone", lambda self, *noise: again.append(self) or own(self, *noise))
    for seed in range(5, 13):
        mine, theirs = step(seed, saliency)
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad), name
        for a, b in zip(model.buffers(), plain.buffers(), strict=True):
            assert torch.equal(a, b)
        assert not saliency or torch.equal(mine.grad, theirs.grad)
    assert replayer_of(model).graphs and bool(again) == saliency


class Once(torch.autograd.Function):
    """A square whose backward pass may be called once."""

    @staticmethod
    def forward(ctx, x):
        ctx.kept = 2 * x
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        kept = ctx.kept
        del ctx.kept
        return gradient * kept


class Squared(torch.nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, x):
        out = self.body(x)["out"]
        return out.replace_feature(Once.apply(out.features))


def test_a_backward_pass_of_the_programs_own_is_left_to_it(device):
    with apis.standin("spconv") as module, settings.override(compare_every=1):
        model, plain = optimized(module, "spconv", device, True, Squared)
        for seed in range(7):
            scene = functools.partial(apis.scene, module, "spconv", seed, device, 0.25)
            apis.both(model, plain, scene, True, values=lambda out: [out.features])
        assert replayer_of(model).graphs


class Encoded(torch.nn.Module):
    """A program that makes features with a norm, and its sparse tensor of them."""

    def __init__(self, body, make):
        super().__init__()
        torch.manual_seed(1)
        self.points = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
        self.body, self.make = body, make

    def forward(self, values, coords):
        return self.body(self.make(coords, self.points(values)))


@pytest.mark.parametrize("frozen", [False, True])
def test_what_runs_before_the_sparse_tensor_counts_its_calls(device, rules, frozen):
    """It is no part of the graph. frozen: the features require no gradient."""
    rules.hold(graphs_of(512, watched=True))
    with apis.standin("spconv") as module, settings.override(compare_every=2):
        make = functools.partial(apis.tensor, module, "spconv")
        model, plain = (Encoded(apis.network(module, "spconv", device), make).to(device) for _ in range(2))
        model.load_state_dict(plain.state_dict())
        for one in (model, plain):
            one.points.requires_grad_(not frozen)
        for seed in range(14):
            x = apis.scene(module, "spconv", seed, device, 0.25)
            apis.both(model, plain, lambda: (x.features, x.indices), True, mode="graphs")  # noqa: B023
        for (name, a), b in zip(model.named_buffers(), plain.buffers(), strict=True):
            torch.testing.assert_close(a, b, msg=lambda text, name=name: f"{name}: {text}")
        hits, graphs, reasons = zip(*[one[1:] for one in graph_regions.summary()], strict=True)
        assert sum(hits) >= 3 and sum(graphs) == 1 and set(reasons) == {None}
