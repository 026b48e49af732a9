"""Who waits for the device, where a network has seen scenes before."""

from __future__ import annotations

import contextlib
import copy
import sys

import pytest
import torch
from torch import nn

import sparse_bridge
from sparse_bridge.core.capture import prefetch
from sparse_bridge.core.maps import request
from sparse_bridge.kernels.runtime.fetched import Fetched
from tests.core.capture.graph_sizes import graphs_of

from .pretended import replays_on_the_cpu
from .test_new_shapes import voxels


@pytest.fixture(autouse=True)
def fresh():
    before = request.registered()
    prefetch.install()
    prefetch.forget()
    yield
    prefetch.forget()
    request.register(*before)


@contextlib.contextmanager
def waits(monkeypatch):
    """Who has the host wait for a tensor's values, by the function of the package that does."""
    found, reading = [], []

    def listened(owner, name):
        own = getattr(owner, name)

        def call(*args, **kwargs):
            frame = sys._getframe(1)
            file = frame.f_code.co_filename
            ours = "sparse_bridge" in file and "amd_emulator" not in file
            if ours and not reading:
                found.append(f"{file.rpartition('sparse_bridge/')[2]} {frame.f_code.co_name}")
            reading.append(name)
            try:
                return own(*args, **kwargs)
            finally:
                reading.pop()

        patch.setattr(owner, name, call)

    with monkeypatch.context() as patch:
        for name in ("item", "tolist", "cpu", "__bool__", "__int__"):
            listened(torch.Tensor, name)
        for name in ("nonzero", "unique", "bincount"):
            listened(torch.Tensor, name)
            listened(torch, name)
        listened(torch, "equal")
        listened(Fetched, "read")
        listened(Fetched, "now")
        yield found


class Whole(nn.Module):
    """The layers of an API's network as one model."""

    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def replayed(network, lane, fake_gpu, rules, rows):
    """The network with its layers replayed as one model, from graphs for so many rows; how many
    calls were."""
    if lane.device == "cpu":
        replays_on_the_cpu(fake_gpu)
    rules.hold(graphs_of(rows))
    model = sparse_bridge.optimize(Whole(copy.deepcopy(network.net)).eval(), graphs=True)
    clone = copy.copy(network)
    clone.net = [model]
    return clone, lambda: model.__dict__["forward"].hits


def alone(network, scene):
    """What a scene gives where maps are built one by one."""
    request.register(None)
    coords, x = network(scene[0], scene[1].clone(), scene[2])
    prefetch.install()
    return coords, x


def check(network, scene, plain=None):
    """Run a scene; its result must be that of maps built one by one, for the network `plain` where
    this one is replayed."""
    found, expected = network(*scene), alone(plain or network, scene)
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs)


def ready(api, lane):
    """A network of an API that has seen two scenes, which is a history."""
    network = api()
    network.net.to(lane.device).eval()
    for turn in range(2):
        network(*voxels(turn, lane.device))
    return network
