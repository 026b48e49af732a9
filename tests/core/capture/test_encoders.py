"""A module that is replayed although modules behind it, which are not, ask for more of its input's kernel maps,
or go back to its levels."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sparse_bridge import policy, settings
from sparse_bridge.core.capture import graph_regions
from sparse_bridge.refusals import Why

from . import apis
from .graph_sizes import graphs_of

pytestmark = pytest.mark.emulated
WIDTH = 8


class Encoder(nn.Module):
    def __init__(self, layers, all_levels):
        super().__init__()
        self.all_levels = all_levels

        def block(conv):
            return layers.sequence(conv, layers.norm(WIDTH), layers.relu())

        self.stem, self.down = block(layers.conv(4, WIDTH, "a")), block(layers.down(WIDTH, WIDTH, "d"))
        self.deep = layers.conv(WIDTH, WIDTH, "b")
        self.last = layers.sequence(layers.down(WIDTH, WIDTH, "e"), layers.conv(WIDTH, WIDTH, "c"))

    def forward(self, x):
        x = self.stem(x)
        y = self.deep(self.down(x))
        return [x, y, self.last(y)] if self.all_levels else self.last(y)


class Program(nn.Module):
    """Counts its calls, which no graph would."""

    def __init__(self, layers, way):
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.way, self.calls = Encoder(layers, way != "between"), way, 0
        self.up, self.here = layers.up(WIDTH, WIDTH, "d"), layers.conv(WIDTH, WIDTH, "f")
        self.back = layers.up(WIDTH, WIDTH, "e")

    def forward(self, x):
        self.calls += 1
        if self.way == "between":  # the encoder does not return the level that its last one came from
            z = self.encoder(x)
            return {"out": self.here(self.back(z)), "deep": z}
        _, y, z = self.encoder(x)
        return {"out": self.up(self.here(y)) if self.way == "up" else self.here(z), "deep": z}


@pytest.mark.parametrize("trains", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("way", ["up", "on", "between"])
@pytest.mark.parametrize("name", apis.NAMES)
def test_what_comes_behind_an_encoder(device, rules, name, way, trains):
    rules.hold(graphs_of(512, watched=True))
    rules.set(policy, LEAST_LAYERS=2)
    one = apis.same_with_replays(name, lambda layers: Program(layers, way), trains, device, 10)["Encoder"]
    assert one.hits > 0 or Why.GRAPH_MAPS_OUTSIDE.name in str(one.reason)  # after its first replay


class Children(nn.Module):
    """Makes two finer levels, of which the coarser one is returned first."""

    def __init__(self, module):
        super().__init__()
        layer = module.MinkowskiGenerativeConvolutionTranspose
        torch.manual_seed(0)
        self.first = nn.Sequential(layer(4, 4, kernel_size=2, stride=2, dimension=3), module.MinkowskiReLU())
        self.second = layer(4, 4, kernel_size=2, stride=2, dimension=3)
        self.last = module.MinkowskiConvolution(4, 4, kernel_size=3, dimension=3)

    def forward(self, x):
        coarse = self.first(x)
        return [coarse, self.last(self.second(coarse))]


def test_finer_levels_keep_their_keys(device, rules):
    rules.hold(graphs_of(512, watched=True))
    rules.set(policy, LEAST_LAYERS=2)
    found = {}
    for mode in ("off", "graphs"):
        with apis.standin("minkowski") as module, settings.override(optimize=mode), torch.no_grad():
            model, found[mode] = Children(module).to(device).eval(), []
            for seed in range(8):
                coords = apis.cloud((12, 12, 12), 2, share=0.02 + 0.001 * seed, seed=seed, device=device)
                coords[:, 1:] *= 4
                values = apis.features(len(coords), 4, seed, device=device)
                outputs = model(module.SparseTensor(values, coords, tensor_stride=4))
                found[mode] += [(y.coordinate_map_key.get_key(), y.C.clone(), y.F.clone()) for y in outputs]
            hits = [one.hits for one in graph_regions.summary()]
    assert max(hits) > 0
    for mine, theirs in zip(found["graphs"], found["off"], strict=True):
        assert mine[0] == theirs[0] and torch.equal(mine[1], theirs[1])
        torch.testing.assert_close(mine[2], theirs[2])
