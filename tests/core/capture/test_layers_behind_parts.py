"""What layers behind a replayed part find of it: levels that are no result, ranges of maps, shared coordinates."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import sparse_bridge
from sparse_bridge import settings
from sparse_bridge.adapters import protocol
from sparse_bridge.core.capture import graph_regions
from tests.adapters.standins import standin
from tests.clouds import cloud, features

pytestmark = pytest.mark.emulated


def compare(model, part, given, found, calls=6):
    """A program with a replayed part gives what its layers give: `found` runs it over what `given` makes of a seed."""
    plain = copy.deepcopy(model)
    sparse_bridge.optimize(part(model), graphs=True)
    with settings.override(compare_every=0), torch.no_grad():
        for seed in range(calls):
            mine = found(model, given(seed))
            with settings.override(optimize="off"):
                theirs = found(plain, given(seed))
            for one, other in zip(mine, theirs, strict=True):
                if not isinstance(other, torch.Tensor):
                    assert one == other
                elif one.shape != other.shape or not other.is_floating_point():
                    assert torch.equal(one, other)
                else:
                    torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
    assert sum(one.hits for one in graph_regions.summary())


def scene(seed, device, extents=(8, 8, 8)):
    """Coordinates from corner to corner, and features."""
    coords = cloud(extents, 2, share=0.15, seed=seed, device=device)
    corners = coords.new_tensor([[0, 0, 0, 0], [1, *(extent - 1 for extent in extents)]])
    coords = torch.cat([coords, corners]).unique(dim=0)
    return coords, features(len(coords), 4, seed=seed, device=device)


def block(module, n_in, n_out, kernel_size=3, stride=1, **others):
    conv = module.MinkowskiConvolution(n_in, n_out, kernel_size=kernel_size, stride=stride, dimension=3, **others)
    return nn.Sequential(conv, module.MinkowskiBatchNorm(n_out), module.MinkowskiReLU())


@pytest.mark.parametrize("behind", ["conv", "pool"])
def test_a_level_that_a_generative_layer_makes(device, behind):
    with standin("minkowski") as module:
        sizes = {"kernel_size": 2, "stride": 2, "dimension": 3}
        first = module.MinkowskiGenerativeConvolutionTranspose(4, 8, kernel_size=3, stride=2, dimension=3)
        part = nn.Sequential(first, module.MinkowskiBatchNorm(8), block(module, 8, 8), block(module, 8, 4, 2, 2))
        pool = module.MinkowskiPoolingTranspose(**sizes)
        back = pool if behind == "pool" else module.MinkowskiConvolutionTranspose(4, 4, **sizes)

        def given(seed):
            coords, values = scene(seed, device)
            coords[:, 1:] *= 2
            return module.SparseTensor(values, coords, tensor_stride=2)

        def found(model, x):
            y = model[1](model[0](x))
            return y.C, y.F

        compare(nn.ModuleList([part, back]).to(device).eval(), lambda model: model[0], given, found)


@pytest.mark.parametrize("outputs", [1, 2])
def test_a_level_of_expanded_coordinates(device, outputs):
    """Which a strided layer behind the part takes, also where it is a result that comes later."""

    class Part(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.down = nn.Sequential(block(module, 4, 8), block(module, 8, 8, 3, 2, expand_coordinates=True))
            self.up = module.MinkowskiConvolutionTranspose(8, 4, kernel_size=2, stride=2, dimension=3)

        def forward(self, x):
            y = self.down(x)
            return (self.up(y), y)[:outputs]

    with standin("minkowski") as module:
        last = module.MinkowskiConvolution(4, 4, kernel_size=2, stride=2, dimension=3)

        def given(seed):
            coords, values = scene(seed, device)
            return module.SparseTensor(values, coords)

        def found(model, x):
            made = model[0](x)
            return [value for y in (*made, model[1](made[0])) for value in (y.C, y.F, y.coordinate_map_key.key)]

        compare(nn.ModuleList([Part(module), last]).to(device).eval(), lambda model: model[0], given, found)


@pytest.mark.parametrize("written", [True, False])
@pytest.mark.parametrize("name", ["spconv", "torchsparse"])
def test_outputs_of_one_level_share_its_coordinates(device, name, written):
    class Two(nn.Module):
        def __init__(self, *layers):
            super().__init__()
            self.layers = nn.ModuleList(layers)

        def forward(self, x):
            y = self.layers[1](self.layers[0](x))
            return y, self.layers[2](y)

    with standin(name) as module:
        if name == "spconv":
            part = Two(module.SubMConv3d(4, 8, 3), module.SparseConv3d(8, 8, 2, 2), module.SubMConv3d(8, 8, 3))
        else:
            part = Two(module.nn.Conv3d(4, 8, 3), module.nn.Conv3d(8, 8, 2, stride=2), module.nn.Conv3d(8, 8, 3))

        def given(seed):
            coords, values = scene(seed, device)
            if name == "spconv":
                return module.SparseConvTensor(values, coords, [8, 8, 8], 2)
            return module.SparseTensor(values, coords)

        def found(model, x):
            rows = [protocol.of(y).coordinates_of(y) for y in model[0](x)]
            if written:
                rows[0][:, 1:] *= 2
            return [*rows, rows[0] is rows[1]]

        compare(nn.ModuleList([part]).to(device).eval(), lambda model: model[0], given, found)


class Decoder(nn.Module):
    """Of torchsparse 2.1: `cat` drops the range, and the layer behind it takes that of the map that the stem has
    made."""

    def __init__(self, module):
        super().__init__()
        conv, self.cat = module.nn.Conv3d, module.cat
        self.stem = nn.Sequential(conv(4, 8, 3), module.nn.BatchNorm(8), conv(8, 8, 3))
        self.down, self.up = conv(8, 8, 2, stride=2), conv(8, 8, 2, stride=2, transposed=True)
        self.head, self.last = nn.Sequential(conv(16, 8, 3), conv(8, 8, 3)), conv(8, 4, 3, stride=3)

    def forward(self, x):
        x = self.stem(x)
        y = self.head(self.cat([self.up(self.down(x)), x]))
        z = self.last(y)
        return y.spatial_range, y.C, y.F, z.C, z.F


@pytest.mark.parametrize("replayed", ["stem", "head"])
def test_the_range_of_a_map_in_front(device, replayed):
    """head: ranges come after some scenes without."""
    with sparse_bridge.enable("torchsparse", mode="standin", profile="2.1"):
        import torchsparse as module

        def given(seed):
            coords, values = scene(seed, device)
            later = None if seed < 5 else (2, 8, 8, 8)
            return module.SparseTensor(values, coords, 1, (2, 12, 12, 12) if replayed == "stem" else later)

        compare(Decoder(module).to(device).eval(), lambda model: getattr(model, replayed), given, Decoder.__call__, 10)


def test_the_range_of_a_level_behind_a_sum(device):
    """Of torchsparse 2.1: `cat` drops the range of a result; a layer that goes back to its level has that of the layer
    that made the level."""

    class Part(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.down, self.conv = module.nn.Conv3d(4, 8, 2, stride=2), module.nn.Conv3d(8, 8, 3)
            self.cat = module.cat

        def forward(self, x):
            x = self.down(x)
            return self.cat([self.conv(x), x])

    with sparse_bridge.enable("torchsparse", mode="standin", profile="2.1"):
        import torchsparse as module

        down, up = (module.nn.Conv3d(16, 16, 2, stride=2, transposed=back) for back in (False, True))

        def given(seed):
            coords, values = scene(seed, device)
            return module.SparseTensor(values, coords, 1, (2, 12, 12, 12))

        def found(model, x):
            y = model[0](x)
            z = model[2](model[1](y))
            return y.spatial_range, z.spatial_range, z.C, z.F

        compare(nn.ModuleList([Part(module), down, up]).to(device).eval(), lambda model: model[0], given, found)
