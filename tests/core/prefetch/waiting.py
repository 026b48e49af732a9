"""Who waits for the device, where a network has seen scenes before."""

from __future__ import annotations

import contextlib
import sys

import pytest
import torch

from sparse_bridge.core.maps import request
from sparse_bridge.core.prefetch import prefetch
from sparse_bridge.kernels.runtime.fetched import Fetched

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


def waited(monkeypatch, network, scene):
    """Who has the host wait in a scene, whose result is checked."""
    with waits(monkeypatch) as found:
        network(*scene)
    check(network, scene)
    return found


def ready(api, lane):
    """A network of an API that has seen two scenes, which is a history."""
    network = api()
    network.net.to(lane.device).eval()
    for turn in range(2):
        network(*voxels(turn, lane.device))
    return network
