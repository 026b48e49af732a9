"""Random programs of parts in a row: each part a few layers, replayed or not, over scenes of random boxes, rows and
batch items, give what their layers give. `SPARSE_BRIDGE_TEST_PROGRAMS=200` makes so many of each framework."""

from __future__ import annotations

import contextlib
import copy
import os
import random

import pytest
import torch
from torch import nn

import sparse_bridge
from sparse_bridge import policy
from sparse_bridge.adapters import protocol
from sparse_bridge.core.capture import graph_regions
from tests.rules import ruled

from . import apis
from .graph_sizes import graphs_of

pytestmark = pytest.mark.emulated
PROGRAMS = int(os.environ.get("SPARSE_BRIDGE_TEST_PROGRAMS", "3"))
CALLS, WIDTH = 14, 6


class OnFeatures(nn.Module):
    """A layer of torch over features, or what stands beside the layers of a network."""

    def __init__(self, layer, way):
        super().__init__()
        self.layer, self.way = layer, way

    def forward(self, x):
        framework = protocol.of(x)
        f, coords = framework.features_of(x), framework.coordinates_of(x)
        made = self.layer(f)
        if self.way == "gate":
            made = f * torch.sigmoid(made)
        if self.way == "places":
            made = made + 0.01 * coords[:, 1:].float().sum(1, keepdim=True)
        return framework.with_features(x, made)


class Part(nn.Module):
    """Layers in a row. skips: by a layer's number, that of an earlier result of the same rows, which is added to its
    own.  also: an earlier result that is returned with the last."""

    def __init__(self, layers, skips, also):
        super().__init__()
        self.layers, self.skips, self.also = nn.ModuleList(layers), skips, also

    def forward(self, x):
        made = [x]
        for number, layer in enumerate(self.layers):
            x = layer(made[-1])
            if number in self.skips:
                framework, other = protocol.of(x), made[self.skips[number]]
                x = framework.with_features(x, framework.features_of(x) + framework.features_of(other))
            made.append(x)
        return [x] if self.also is None else [x, made[self.also]]


def random_parts(layers, choose):
    """Parts in a row, which go back to their first level by the maps of the way down."""
    parts, downs, keys, width = [], [], iter(range(99)), 4
    for _ in range(choose.randint(1, 4)):
        made, levels, skips = [], [len(downs)], {}
        for number in range(choose.randint(2, 6)):
            kind = choose.choice(
                ["conv"] * 5 + ["down"] * 3 + ["up"] * 3 + ["norm", "norm", "relu", "linear", "gate", "places"]
            )
            if width == 4 or (kind == "up" and not downs) or (kind == "down" and len(downs) == 2):
                kind = "conv"
            if kind == "down":
                downs.append(f"down{next(keys)}")
                made.append(layers.down(width, WIDTH, downs[-1]))
            elif kind == "up":
                made.append(layers.up(width, WIDTH, downs.pop()))
            elif kind == "conv":
                made.append(layers.conv(width, WIDTH, f"conv{next(keys)}"))
            elif kind in ("norm", "relu"):
                made.append(layers.sequence(layers.norm(WIDTH) if kind == "norm" else layers.relu()))
            else:
                made.append(OnFeatures(nn.Linear(WIDTH, WIDTH), kind))
            width, same = WIDTH, [n for n, level in enumerate(levels) if level == len(downs)]
            same = same[1:] if not parts and same[:1] == [0] else same  # the input has another width
            if same and choose.random() < 0.25:
                skips[number] = choose.choice(same)
            levels.append(len(downs))
        parts.append(Part(made, skips, choose.choice([None, None, choose.randrange(len(levels))])))
    return parts


def random_scene(module, name, choose, device):
    """Of 2 to 300 rows in a box of its own, some batch items empty; below 0, too, where a framework has no grid."""
    extents, items = [choose.choice([8, 12, 17, 24]) for _ in range(3)], choose.choice([1, 2, 3])
    torch.manual_seed(choose.randrange(1 << 30))
    coords = (torch.rand(choose.choice([2, 9, 40, 120, 300]), 4) * torch.tensor([items, *extents])).int()
    if choose.random() < 0.3:
        coords[:, 1:] //= 3
    if name != "spconv" and choose.random() < 0.3:
        coords[:, 1:] -= 5
    coords = coords.unique(dim=0)
    coords = coords[torch.randperm(len(coords))].to(device)
    values = torch.randn(len(coords), 4, device=device)
    if name == "spconv":
        return lambda: module.SparseConvTensor(values, coords.clone(), extents, items)
    return lambda: module.SparseTensor(values, coords.clone())


def run(parts, x, eager):
    """What the parts return. eager: numbers of those that the program runs without replays."""
    made = []
    for number, part in enumerate(parts):
        with sparse_bridge.eager() if number in eager else contextlib.nullcontext():
            made.append(part(x))
        x = made[-1][0]
    return [result for results in made for result in results]


def same(found, expected):
    framework = protocol.of(found)
    assert torch.equal(framework.coordinates_of(found), framework.coordinates_of(expected))
    mine, theirs = framework.features_of(found).detach(), framework.features_of(expected).detach()
    scale = 1 + float(theirs.abs().max()) if theirs.numel() else 1
    torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4 * scale)


def attempt(function, *given):
    """What a function returns, or what it raises."""
    try:
        return function(*given)
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"


def go_backward(model, results):
    model.zero_grad()
    sum(protocol.features_of(y).square().mean() for y in results).backward()


def compare_calls(model, plain, scenes, trains):
    """A program and its double over scenes, each with the parts that run without replays."""
    for make, eager in scenes:
        found, expected = attempt(run, model, make(), eager), attempt(run, plain, make(), eager)
        if isinstance(expected, str) or isinstance(found, str):  # norms of torch refuse to train on a single row
            assert found == expected
            plain.load_state_dict(model.state_dict())
            continue
        for pair in zip(found, expected, strict=True):
            same(*pair)
        if trains:
            if isinstance(attempt(go_backward, plain, expected), str):  # an activation in place, behind a skip
                plain.load_state_dict(model.state_dict())
                continue
            go_backward(model, found)
            apis.same_gradients(model, plain)
            for mine, theirs in zip(model.buffers(), plain.buffers(), strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)
            plain.load_state_dict(model.state_dict())  # rounding does not add up


@pytest.mark.parametrize("trains", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", apis.NAMES)
def test_random_programs(device, errors_survived, name, trains):
    hits = 0
    for seed in range(PROGRAMS):
        choose = random.Random(f"{name}, {trains}, {seed}")
        with contextlib.ExitStack() as stack:
            stack.enter_context(graphs_of(512, watched=choose.random() < 0.5))
            stack.enter_context(ruled(policy, LEAST_LAYERS=1, CAPTURE=policy.CAPTURE._replace(skip_first=1)))
            module = stack.enter_context(apis.standin(name))
            stack.enter_context(torch.set_grad_enabled(trains))
            torch.manual_seed(seed)
            plain = nn.ModuleList(random_parts(apis.Layers(module, name), choose)).to(device).train(trains)
            model = copy.deepcopy(plain)
            replayed = [part for part in model if choose.random() < 0.8 or len(model) == 1]
            for part in replayed:
                sparse_bridge.optimize(part, graphs=True)
            scenes = [
                (
                    random_scene(module, name, choose, device),
                    {choose.randrange(len(plain))} if n > 4 and n % 5 == 0 else set(),
                )
                for n in range(CALLS)
            ]
            compare_calls(model, plain, scenes, trains)
            hits += sum(part.hits for part in graph_regions.summary())
            for part in replayed:
                sparse_bridge.restore(part)
    assert hits > 2 * PROGRAMS
