"""Little networks of every API over scenes of ever new shapes, and who waits for the device in them."""

from __future__ import annotations

import contextlib
import sys

import pytest
import torch
from torch import nn

import sparse_bridge
from sparse_bridge.adapters import protocol
from sparse_bridge.core.maps import request
from sparse_bridge.core.prefetch import prefetch
from sparse_bridge.kernels.runtime.fetched import Fetched
from tests.adapters.spconv import apis
from tests.clouds import cloud, features

SHAPES = [(12, 10, 14), (9, 17, 11), (16, 8, 9), (7, 13, 20), (15, 15, 6)]


@pytest.fixture(autouse=True)
def fresh():
    before = request.registered()
    prefetch.install()
    prefetch.forget()
    yield
    prefetch.forget()
    request.register(*before)


def voxels(turn, device, channels=4):
    """(features, coordinates, shape) of a scene that is like no other; one item is empty at
    times."""
    shape = SHAPES[turn % len(SHAPES)]
    coords = cloud(shape, share=0.2, seed=turn, empty_items=(1,) if turn == 3 else ())
    return features(len(coords), channels, seed=turn).to(device), coords.to(device), shape


class Api:
    """A little network, down and up and with a layer that makes coordinates, by an API.

    net: its layers.  maps: how many it asks for.
    """

    def __call__(self, x, coords, shape):
        out = self.input(x, coords, shape)
        for layer in self.net:
            out = layer(out)
        return protocol.of(out).coordinates_of(out), protocol.features_of(out)


def moved(coords, shape):
    return coords - coords.new_tensor([0, shape[0] // 2, 3, -5])


class Spconv(Api):
    maps = 4

    def __init__(self):
        with apis.standin() as module:
            self.sp = sp = module
        self.net = nn.ModuleList(
            [
                sp.SubMConv3d(4, 8, 3, indice_key="a"),
                sp.SparseConv3d(8, 8, 3, 2, padding=1, indice_key="d"),
                sp.SubMConv3d(8, 8, 3, indice_key="b"),
                sp.SparseConvTranspose3d(8, 4, 3, 2, padding=1),
            ]
        )

    def input(self, x, coords, shape):
        return self.sp.SparseConvTensor(x, coords, list(shape), 2)


class Torchsparse(Api):
    maps = 3

    def __init__(self):
        with sparse_bridge.enable("torchsparse", mode="standin"):
            import torchsparse
            from torchsparse.nn import Conv3d
        self.ts = torchsparse
        up = Conv3d(8, 4, 2, 2, transposed=True)
        self.net = nn.ModuleList([Conv3d(4, 8, 3), Conv3d(8, 8, 2, 2), Conv3d(8, 8, 3), up])

    def input(self, x, coords, shape):
        return self.ts.SparseTensor(x, moved(coords, shape))


class Minkowski(Api):
    maps = 6

    def __init__(self):
        with sparse_bridge.enable("minkowski", mode="standin"):
            import MinkowskiEngine
        self.me = me = MinkowskiEngine
        conv, up = me.MinkowskiConvolution, me.MinkowskiGenerativeConvolutionTranspose
        self.net = nn.ModuleList(
            [
                conv(4, 8, 3, dimension=3),
                conv(8, 8, 2, 2, dimension=3),
                conv(8, 8, 3, dimension=3),
                conv(8, 8, 3, 2, dimension=3, expand_coordinates=True),
                up(8, 4, 2, 2, dimension=3),
            ]
        )

    def input(self, x, coords, shape):
        return self.me.SparseTensor(x, moved(coords, shape))


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
