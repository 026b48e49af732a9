"""Each Python function with a twin in C names it and is named by it, and both do the same over random calls."""

from __future__ import annotations

import ast
import pathlib
import random
import re
from collections import defaultdict

import pytest
import torch
from torch import nn

pytest.importorskip("triton")

import sparse_bridge
from sparse_bridge.core.conv.convolution import convolve_layer
from sparse_bridge.core.conv.deferred.conv import DeferredConv
from sparse_bridge.core.conv.deferred.features import features_of
from sparse_bridge.core.conv.epilogue import Epilogue, Norm
from sparse_bridge.core.conv.plan import ConvForm
from sparse_bridge.kernels.ops.batch_norm import unread
from sparse_bridge.native import build
from sparse_bridge.native import calls as native_calls
from tests.adapters.spconv import apis as spconv_apis
from tests.host_time import pairs
from tests.native import test_training as training
from tests.native.recording import Recorder, anew, check_alike, helper, remembered, served, state_of, way
from tests.native.world import COORDS, World
from tests.walk_apis import pretended_gpu

PACKAGE = pathlib.Path(sparse_bridge.__file__).parent
FUNCTION = r"static [^;{}=#]*?\b(\w+)\([^;{}]*\)\s*\{"


def said_in_python():
    """By function, "file.function" or "Class.method": the twins that its docstring names; of all functions."""
    found = defaultdict(set)

    def visit(node, home):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                visit(child, child.name)
            elif isinstance(child, ast.FunctionDef):
                twins = re.search(r"Twin in C: ((?:`\w+`(?:, )?)+)\.$", ast.get_docstring(child) or "")
                found[f"{home}.{child.name}"] |= set(re.findall(r"\w+", twins[1])) if twins else set()

    for path in PACKAGE.rglob("*.py"):
        if "standin" not in path.parts:
            visit(ast.parse(path.read_text(encoding="utf-8")), path.stem)
    return found


def said_in_c(functions):
    """The same, of the comments before functions of C and in them."""
    found = defaultdict(set)
    for part in build.PARTS:
        text = part.read_text()
        starts = [(match.start(), match[1]) for match in re.finditer("^" + FUNCTION, text, re.MULTILINE)]
        for comment in re.finditer(r"/\*(?:[^*]|\*(?!/))*\*/", text):
            after = re.match(r"\s*" + FUNCTION, text[comment.end() :])
            for name in functions & set(re.findall(r"`([\w.]+)`", comment[0])):
                found[name].add(after[1] if after else [one for at, one in starts if at < comment.start()][-1])
    return found


def test_twins_name_each_other():
    python = said_in_python()
    c = said_in_c(python.keys())
    assert {name: twins for name, twins in python.items() if twins} == c
    assert set(native_calls.FUNCTIONS) <= set().union(*c.values())


class Calls:
    """Random calls of an owner's layers without a framework, over the map of a network that is known."""

    def __init__(self, world, draw):
        self.draw, self.recorder = draw, world.recorder
        self.kmap, self.features = world.x.indice_dict["a"]._map, world.features
        self.layers = nn.ModuleList(nn.Identity() for _ in range(3))  # whose results are told apart
        self.weights = [torch.randn(16, 3, 3, 3, 16) for _ in self.layers]
        self.norms = [Norm(*torch.rand(4, 16), 1e-3) for _ in range(2)]
        self.bias, self.other = torch.rand(16), torch.randn(len(COORDS), 16)

    def one(self):
        """A call of a layer as of late, or now and then another, and what follows it."""
        draw = self.draw
        at = draw.randrange(3)
        if draw.random() < 0.05:
            self.layers[at] = nn.Identity()  # of which nothing is known
        x = (
            self.features
            if draw.random() < 0.9
            else draw.choice([self.other.double(), self.other.t().contiguous().t()])
        )
        steps = ("nsa", "na", "ns")[at] if draw.random() < 0.92 else draw.choice(["", "n", "s", "a", "sa", "nn"])
        whole = draw.random() < 0.2
        norm, act = self.norms[at > 1], ("relu", 0.0)
        if draw.random() < 0.05:
            norm = draw.choice([self.norms[0]._replace(eps=0.1), Norm(*torch.rand(4, 16), 1e-3)])
        if draw.random() < 0.05:
            act = "leaky_relu", 0.1
        bias = None if at == 1 else self.bias
        epilogue = Epilogue(bias, *act, norm) if whole else Epilogue(bias)
        y = convolve_layer(self.layers[at], x, self.weights[at], self.kmap, epilogue, ConvForm("ovi"))
        for step in "" if whole else steps:
            if draw.random() < 0.03:
                draw.choice([self.weights[at], norm.mean, x]).add_(0)
            if type(y) is not DeferredConv:
                break
            if draw.random() < 0.3:
                self.recorder.tell(lambda y=y: features_of(y))
            self.recorder.lines.append(state_of(y))
            plain = lambda result: result + 1  # noqa: E731
            if step == "n":
                y = y.normed(norm, plain)
            elif step == "s":
                y = y.plus(self.other, plain)
            else:
                y = y.activated(*act, plain)
        self.recorder.lines.append(remembered(self.layers))
        return features_of(y)


class Training:
    """Random steps of training."""

    def __init__(self, world, draw):
        self.world, self.draw = training.World(world.sp, world.recorder, True), draw

    def one(self):
        draw, net = self.draw, self.world.net
        some = [one for one in net.parameters() if draw.random() < 0.1]
        net.norm.momentum = 0.1 if draw.random() < 0.9 else None
        features = self.world.x.features
        if draw.random() < 0.3:
            features = draw.choice([features.clone().requires_grad_(), torch.randn(len(COORDS), 8)[:, :4]])
        for one in some:
            one.requires_grad_(False)
        with torch.enable_grad():
            self.world.step(self.world.over(features))
        for one in some:
            one.requires_grad_(True)
        return None


# What makes the random calls that each function of the helper repeats, and how many.
TWINS = {
    "known_call": (Calls, 400),
    "features_of": (Calls, 400),
    "normalised": (Calls, 400),
    "activated": (Calls, 400),
    "plus": (Calls, 400),
    **dict.fromkeys(native_calls.TRAINING, (Training, 12)),
}


def told(kind, times, seed, chosen):
    """(what was recorded, what the helper did) of random calls."""
    recorder, draw = Recorder(), random.Random(seed)
    with anew(), way(chosen), recorder.recording(), spconv_apis.standin() as sp, torch.no_grad():
        world = World(sp, recorder, True)
        with pretended_gpu(), pairs(), served() as by_helper:
            calls = kind(world, draw)
            for _ in range(times):
                recorder.tell(calls.one)
    return recorder.lines, by_helper


@pytest.mark.parametrize("kind, times", sorted(set(TWINS.values()), key=str))
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
def test_twins_do_the_same_over_random_calls(kind, times, seed):
    helper()
    unread(torch.device("cpu"))  # made once per process
    functions = {name for name, (makes, _) in TWINS.items() if makes is kind}
    check_alike(lambda chosen: told(kind, times, seed, chosen), ["on", "refused 2.0%, 1"], times, functions, 3)


def test_every_function_of_the_helper_is_compared():
    assert TWINS.keys() == set(native_calls.FUNCTIONS)
