"""Scenes with equal rows, or with rows outside of the grid or below 0: layers take them, graphs do not, and those
between are replayed."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from torch import nn

import sparse_bridge
from sparse_bridge.core.capture import graph_regions
from sparse_bridge.refusals import Why
from tests.adapters.spconv import apis as spconv_apis
from tests.clouds import cloud, features

from .graph_sizes import graphs_of

pytestmark = [pytest.mark.emulated, pytest.mark.filterwarnings("ignore:row . of a SparseConvTensor")]
SHAPE = (6, 6, 7)


def equal_rows(coords):
    coords[5] = coords[4]
    return coords


def outside(coords):
    coords[3, 1] = 9
    return coords


def below_zero(coords):
    coords[:, 1:] -= 3
    return coords


def spconv_layers(sp):
    down = sp.SparseConv3d(8, 8, 3, 2, 1, indice_key="down")
    return [sp.SubMConv3d(4, 8, 3), down, sp.SubMConv3d(8, 8, 3), sp.SparseInverseConv3d(8, 4, 3, indice_key="down")]


def torchsparse_layers(ts):
    conv = ts.nn.Conv3d
    return [conv(4, 8, 3), conv(8, 8, 2, stride=2), conv(8, 8, 3), conv(8, 4, 2, stride=2, transposed=True)]


@contextlib.contextmanager
def framework(name):
    """(the layers of a network, the function that makes a tensor of features and coordinates)."""
    if name == "spconv":
        with spconv_apis.standin() as sp:
            yield spconv_layers(sp), lambda f, c: sp.SparseConvTensor(f, c, list(SHAPE), 2)
    else:
        profile = name.split()[1]
        with sparse_bridge.enable("torchsparse", mode="standin", profile=profile):
            import torchsparse as ts

            columns = [0, 1, 2, 3] if profile == "2.1" else [1, 2, 3, 0]
            yield torchsparse_layers(ts), lambda f, c: ts.SparseTensor(f, c[:, columns].contiguous())


@pytest.mark.parametrize("trains", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("spconv", equal_rows),
        ("spconv", outside),
        ("torchsparse 2.1", equal_rows),
        ("torchsparse 2.0", equal_rows),
        ("torchsparse 2.0", below_zero),
    ],
    ids=lambda one: getattr(one, "__name__", one),
)
def test_scenes_between_irregular_ones(device, rules, name, spoil, trains):
    rules.hold(graphs_of(512, watched=True))
    with framework(name) as (layers, tensor), torch.set_grad_enabled(trains):
        plain = nn.Sequential(*layers).to(device).train(trains)
        model, replayed = sparse_bridge.optimize(copy.deepcopy(plain), graphs=True), []
        for seed in range(24):
            coords = cloud(SHAPE, 2, share=0.3, seed=seed, device=device)
            if irregular := seed % 4 == 3:
                coords = spoil(coords)
            values, made = features(len(coords), 4, device=device), []
            before = sum(part.hits for part in graph_regions.summary())
            for one in (model, plain):
                y = one(tensor(values, coords.clone()))
                y = y.features if name == "spconv" else y.feats
                made.append(y.detach())
                if trains:
                    y.square().sum().backward()
            torch.testing.assert_close(*made, rtol=1e-3, atol=1e-4)
            hits = sum(part.hits for part in graph_regions.summary()) - before
            assert not (irregular and hits)
            replayed.append(hits > 0)
        (part,) = graph_regions.summary()
        why = Why.GRAPH_NEGATIVE if spoil is below_zero else Why.GRAPH_DUPLICATES
        assert part.graphs == 1 and why.name in part.reason
        assert sum(replayed[8:]) == 12  # all of the others
