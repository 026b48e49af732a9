"""What programs do with a model whose inference is replayed by default goes as it does without replays."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import inspect
import io
import logging
import os
import random
import sys
import warnings
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sparse_bridge
from sparse_bridge import settings
from sparse_bridge.adapters import protocol
from sparse_bridge.core.capture import graph_regions

from . import apis
from . import unnoticed_programs as programs
from .graph_sizes import graphs_of

pytestmark = pytest.mark.emulated

_KEPT, _LATER = 8, 20  # calls before a program goes on, the first scene after them


class Maker(apis.Network):
    """Makes its sparse tensor itself: a part of it is the resume point."""

    def __init__(self, layers):
        super().__init__(layers)
        self.make = functools.partial(apis.tensor, layers.module, layers.name)

    def __deepcopy__(self, memo):
        make = memo[id(self.make)] = self.make
        memo[id(make.args[0])] = make.args[0]  # a framework has no copies
        return copy._reconstruct(self, memo, *self.__reduce_ex__(4))

    def forward(self, x: dict, /, scale: float = 1.0):
        """Of features and coordinates."""
        return super().forward(self.make(x["coords"], x["values"] * scale))


class Calls:
    """Calls of models with scenes that are new each time."""

    def __init__(self, module, name, device, makes):
        self.module, self.name, self.device, self.makes, self.seed = module, name, device, makes, 0

    def scene(self, seed=None):
        seed, self.seed = (self.seed, self.seed + 1) if seed is None else (seed, self.seed)
        x = apis.scene(self.module, self.name, seed, self.device, 0.3 + 0.002 * seed)
        framework = protocol.of(x)
        return {"values": framework.features_of(x), "coords": framework.coordinates_of(x)} if self.makes else x

    @torch.no_grad()
    def __call__(self, function, seed=None):
        return [value.detach().clone() for value in apis.values_of(function(self.scene(seed)))]

    def times(self, function, count=6):
        return [self(function) for _ in range(count)]


COPIES = [programs.a_shallow_copy, programs.replicas, programs.deep_copies, programs.an_average, programs.a_pickle]
ALL = [
    value
    for name, value in vars(programs).items()
    if getattr(value, "__module__", "") == programs.__name__
    and list(inspect.signature(value).parameters) == ["model", "calls"]
]


def case(name, kind, program):
    return pytest.param(name, kind, program, id=f"{name}-{kind}-{program.__name__}")


CASES = [case("spconv", kind, program) for kind in ("takes", "makes") for program in ALL]
CASES += [case(name, "makes", one) for name in apis.NAMES[1:] for one in [*COPIES, programs.compilers]]
CASES += [
    case(name, "takes", one)
    for name in apis.NAMES[1:]
    for one in (programs.inference_mode, programs.functions_of_torch)
]
CASES += [case("spconv", "asked", one) for one in COPIES]


@pytest.fixture
def replayed(device, rules):
    """(a model that is replayed or, with "off", none; calls of it)."""
    rules.hold(graphs_of(512, watched=True))

    @contextlib.contextmanager
    def start(name, kind, optimize):
        asked = kind == "asked" and optimize != "off"
        with apis.standin(name) as module, settings.override(optimize="fuse" if asked else optimize):
            layers = apis.Layers(module, name)
            torch.manual_seed(0)
            model = (Maker if kind == "makes" else apis.Network)(layers).to(device).eval()
            if asked:
                sparse_bridge.optimize(model, graphs=True)
            calls = Calls(module, name, device, kind == "makes")
            calls.times(model, _KEPT)
            assert (sum(one.hits for one in graph_regions.summary()) >= 2) == (optimize != "off")
            calls.seed = _LATER
            yield model, calls
        graph_regions.remove()

    return start


def same(mine, theirs):
    if isinstance(mine, (list, tuple)):
        assert len(mine) == len(theirs)
        for one, other in zip(mine, theirs, strict=True):
            same(one, other)
    elif isinstance(mine, (torch.Tensor, float)):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)
    else:
        assert mine == theirs


@pytest.mark.parametrize(("name", "kind", "program"), CASES)
def test_a_program(replayed, name, kind, program):
    found = []
    for optimize in ("off", "auto"):
        with replayed(name, kind, optimize) as (model, calls):
            found.append(program(model, calls))
    same(found[1], found[0])


def test_functions_of_torch_that_come_back(replayed):
    """Graphs serve again what they served before. A function that is not asked for beforehand is guarded."""
    with replayed("spconv", "takes", "auto") as (model, calls):
        replayer = graph_regions.region_of(model).replayer
        graphs, hits = replayer.graphs, replayer.hits
        with mock.patch.object(F, "relu", functools.partial(F.relu)):
            calls.times(model)
            assert replayer.hits == hits and "a function of torch" in replayer.declined
        calls.times(model)
        assert replayer.graphs == graphs and replayer.hits > hits
        hits = replayer.hits
        own = nn.Module.__getattr__
        with mock.patch.object(nn.Module, "__getattr__", lambda self, name: own(self, name)):
            calls(model)
            assert replayer.hits == hits and "Module.__getattr__" in replayer.declined


def surroundings():
    """What a program has set for its process and thread."""
    generators = random.getstate(), repr(np.random.get_state()), torch.get_rng_state().tolist()
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_anomaly_enabled()
    types_ = torch.get_default_dtype(), *(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda"))
    flags = torch.are_deterministic_algorithms_enabled(), torch.backends.cuda.matmul.allow_tf32, torch.get_num_threads()
    python = gc.isenabled(), gc.get_threshold(), sys.getprofile(), sys.gettrace(), sys.getrecursionlimit()
    return generators, modes, types_, flags, python, dict(os.environ), list(logging.root.handlers)


@pytest.mark.parametrize("kind", ["takes", "makes"])
def test_what_calls_leave(replayed, caplog, kind):
    """Those that are watched, captured, compared and replayed: neither a word nor a setting."""
    said, caplog.handler.level = io.StringIO(), logging.WARNING
    with replayed("spconv", kind, "auto") as (model, calls):
        model.half().float()
        before = surroundings()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(8):
                calls(model)
                assert surroundings() == before
        assert graph_regions.region_of(model).replayer.graphs
    assert said.getvalue() == "" and not [one for one in caplog.records if one.levelno >= logging.WARNING]
