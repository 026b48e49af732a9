"""Models with another stride along each axis are replayed."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import sparse_bridge
from sparse_bridge.core.capture import graph_regions
from tests.adapters.standins import standin
from tests.clouds import cloud, features

from .apis import tensor

pytestmark = pytest.mark.emulated
SHAPE = (9, 8, 11)


def layers_of(module, name):
    """Down by an axis, and further down by another."""
    sizes = [((3, 1, 3), (2, 1, 2)), ((2, 2, 1), (2, 2, 1))]
    if name == "spconv":
        return [module.SubMConv3d(4, 8, 3), *(module.SparseConv3d(8, 8, size, step) for size, step in sizes)]
    if name == "torchsparse":
        conv = module.nn.Conv3d
        return [conv(4, 8, 3), *(conv(8, 8, size, stride=step) for size, step in sizes)]
    conv = module.MinkowskiConvolution
    downs = [conv(8, 8, kernel_size=size, stride=step, dimension=3) for size, step in sizes]
    return [conv(4, 8, kernel_size=3, dimension=3), *downs]


@pytest.mark.parametrize("trains", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", ["spconv", "torchsparse", "minkowski"])
def test_strides_per_axis(device, name, trains):
    with standin(name) as module, torch.set_grad_enabled(trains):
        plain = nn.Sequential(*layers_of(module, name)).to(device).train(trains)
        model = sparse_bridge.optimize(copy.deepcopy(plain), graphs=True)
        for seed in range(7):
            coords = cloud(SHAPE, 2, share=0.2, seed=seed, device=device)
            values, results = features(len(coords), 4, seed=seed, device=device), []
            for one in (model, plain):
                y = one(tensor(module, name, coords.clone(), values, SHAPE))
                results.append((y.indices, y.features) if name == "spconv" else (y.C, y.F))
                if trains:
                    results[-1][1].square().sum().backward()
            (mine, found), (theirs, expected) = results
            assert torch.equal(mine, theirs)
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
        (one,) = graph_regions.summary()
        assert one.hits >= 4 and one.reason is None
