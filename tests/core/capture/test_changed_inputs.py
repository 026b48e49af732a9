"""Inputs that carry more than rows or are written to, and outputs that share: a stream gives what it gives without
replays."""

from __future__ import annotations

import re

import pytest
import torch

from sparse_bridge import policy, settings
from sparse_bridge.core.capture import graph_regions

from . import apis
from .closed_programs import Net, times
from .graph_sizes import graphs_of

pytestmark = pytest.mark.emulated


class Labelled(Net):
    """Scales by what a program has put into its sparse tensor."""

    def forward(self, x):
        return times(self.b(self.a(x)), getattr(x, "weight", 1.0))


class Labels(Net):
    """Puts something into its sparse tensor."""

    def forward(self, x):
        x.seen = True
        return self.b(self.a(x))


class Appends(Net):
    """Puts something into a list that it is given."""

    def forward(self, x, names):
        names.append("b")
        return self.b(self.a(x))


class Trained(Net):
    """Scales where somebody wants gradients of its input."""

    def forward(self, x):
        return times(self.b(self.a(x)), 2.0 if x.features.requires_grad else 1.0)


class Shares(Net):
    """Returns its features beside the sparse tensor."""

    def forward(self, x):
        x = self.b(self.a(x))
        return x, x.features


class Noisy(Net):
    """Draws a random number of the CPU."""

    def forward(self, x):
        return times(self.b(self.a(x)), torch.rand(()))


def labelled(model, x, seed):
    x.weight = 2.0 if seed > 6 else 1.0
    return model(x), []


def labels(model, x, seed):
    return model(x), [x.seen]


def appends(model, x, seed):
    names = ["a"]
    return model(x, names), names


def trained(model, x, seed):
    x.features.requires_grad_(seed > 6)
    out = model(x)
    out.features.square().sum().backward()
    gradients = [p.grad for p in model.parameters()]
    return out, gradients if seed <= 6 else [*gradients, x.features.grad]


def shares(model, x, seed):
    out, values = model(x)
    values.mul_(2)
    return out, []


def noisy(model, x, seed):
    return model(x), [torch.random.get_rng_state()]


CASES = [
    (Labelled, labelled, "'weight' of the .*SparseConvTensor that it is given"),
    (Labels, labels, "it changes the sparse tensor that it is given"),
    (Appends, appends, "it writes to a list that it is given"),
    (Trained, trained, None),
    (Shares, shares, None),
    (Noisy, noisy, "it computes something else over a padded input"),
]


@pytest.mark.parametrize(("kind", "call", "reason"), CASES, ids=[kind.__name__ for kind, _, _ in CASES])
def test_a_stream(device, rules, kind, call, reason):
    rules.hold(graphs_of(512, watched=True))
    rules.set(policy, LEAST_LAYERS=2)

    def stream(module, optimize):
        torch.manual_seed(0)
        model, found = kind(module).to(device).train(kind is Trained), []
        with settings.override(optimize=optimize), torch.set_grad_enabled(kind is Trained):
            for seed in range(11):
                model.zero_grad()
                x = apis.scene(module, "spconv", seed, device, 0.3 + 0.002 * seed)
                out, others = call(model, x, seed)
                found.append([out.features.detach(), *others])
        return found, model

    with apis.standin("spconv") as module:
        (expected, _), (found, _model) = stream(module, "off"), stream(module, "graphs")
        for one, other in zip(found, expected, strict=True):
            texts = [[value for value in values if not torch.is_tensor(value)] for values in (one, other)]
            assert texts[0] == texts[1]
            tensors = [[value for value in values if torch.is_tensor(value)] for values in (one, other)]
            torch.testing.assert_close(*tensors, rtol=1e-3, atol=1e-3)
        (part,) = [one for one in graph_regions.summary() if one.name == kind.__name__]
    assert part.hits >= 4 if reason is None else not part.hits
    assert reason is None or re.search(reason, part.reason)
