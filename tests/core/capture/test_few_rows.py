"""Programs that choose by how many rows there are, in ways that their source does not show."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from torch import nn

from sparse_bridge.core.capture import graph_regions
from sparse_bridge.errors import KernelError
from tests.adapters.spconv import apis as spconv_apis
from tests.clouds import cloud, features

from .graph_sizes import graphs_of
from .test_bounds_of_scenes import Reads, pair

pytestmark = pytest.mark.emulated
LIMIT = 30
GRID = [6, 6, 7]


def by_limit(n):
    return 2.0 if n < LIMIT else 1.0


def closure(x):
    n = x.features.shape[0]

    def scale():
        return by_limit(n)

    return x.features * scale()


def by_partial(x):
    return x.features * functools.partial(by_limit, x.features.shape[0])()


def by_list(x):
    found = []
    found.append(x.features.shape[0])
    return x.features * (2.0 if found[0] < LIMIT else 1.0)


def by_numpy(x):
    return x.features * float(np.where(np.array(x.features.shape) < LIMIT, 2, 1)[0])


def by_tensor(x):
    return x.features * (torch.tensor(x.features.shape, device=x.features.device)[0] < LIMIT).float().add(1)


class Length:
    def __init__(self, x):
        self.x = x

    def __len__(self):
        return self.x.features.shape[0]


def by_object(x):
    return x.features * (2.0 if len(Length(x)) < LIMIT else 1.0)


def fails(x):
    counts = {"rows": 0}
    counts["rows"] = x.features.shape[0]
    if counts["rows"] < LIMIT:
        raise ValueError("so few rows")
    return x.features


def wants_many(x):
    """Fails as one does that takes turns with batch items, where some have no rows."""
    left = {"rows": x.indices.shape[0] - 100}
    if left["rows"] < 0:
        raise IndexError("an item has no rows")
    return x.features


class BehindStrided(nn.Module):
    """Asks for the rows of a level that its layers make."""

    def __init__(self, sp, read):
        super().__init__()
        self.first = nn.Sequential(sp.SubMConv3d(4, 8, 3), sp.SparseConv3d(8, 8, 2, 2), sp.SubMConv3d(8, 8, 3))
        self.read, self.last = read, nn.Sequential(sp.SubMConv3d(8, 8, 3), sp.SubMConv3d(8, 4, 3))

    def forward(self, x):
        x = self.first(x)
        return self.last(x.replace_feature(self.read(x)))


@pytest.fixture
def sp(rules):
    rules.hold(graphs_of(512, watched=True))
    with spconv_apis.standin() as module:
        yield module


def scene(sp, device, seed, share, grid=GRID, items=1):
    coords = cloud(tuple(grid), items, share=share, seed=seed, device=device)
    return sp.SparseConvTensor(features(len(coords), 4, device=device), coords, grid, items)


def same(model, plain, x):
    made = [one(x.replace_feature(x.features.clone())) for one in (model, plain)]
    torch.testing.assert_close(made[0].features, made[1].features, rtol=1e-3, atol=1e-4)
    if made[0].features.requires_grad:
        for one in made:
            one.features.square().mean().backward()
    return len(x.features)


@pytest.mark.parametrize("trains", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize(
    "read", [closure, by_partial, by_list, by_numpy, by_tensor, by_object], ids=lambda f: f.__name__
)
def test_a_limit_below_the_rows_of_the_capture(sp, device, read, trains):
    model, plain = pair([Reads(sp, read)], device, trains)
    with torch.set_grad_enabled(trains):
        rows = [same(model, plain, scene(sp, device, seed, share)) for seed, share in enumerate([0.5] * 12 + [0.05])]
    assert max(rows[-1:]) < LIMIT < min(rows[:-1])
    assert "GRAPH_FEW_ROWS" in graph_regions.summary()[0].reason


@pytest.mark.parametrize("divisor", [2, 8])
@pytest.mark.parametrize("rest", [0, 1])
def test_what_goes_by_a_remainder(sp, device, rest, divisor):
    """Captured at a scene whose rows leave `rest`, or not."""

    def read(x):
        n = x.features.shape[0]

        def scale():
            return 2.0 if n % divisor == 0 else 1.0

        return x.features * scale()

    model, plain = pair([Reads(sp, read)], device)
    with torch.no_grad():
        for seed in range(12):
            x = scene(sp, device, seed, 0.5)
            n = (len(x.features) - 16) // divisor * divisor + (rest if seed < 10 else 1 - rest)
            x = sp.SparseConvTensor(x.features[:n], x.indices[:n], x.spatial_shape, 1)
            same(model, plain, x)
    assert "GRAPH_FEW_ROWS" in (why := graph_regions.summary()[0].reason) or "over a padded input" in why


def test_a_limit_of_a_level_that_layers_make(sp, device):
    def read(x):
        limits = {"cells": 2 * LIMIT}
        return x.features * (lambda n: 2.0 if n < limits["cells"] else 1.0)(x.features.shape[0])

    model, plain = pair([BehindStrided(sp, read)], device)
    with torch.no_grad():
        for seed, share in enumerate([0.2] * 10 + [0.005]):
            same(model, plain, scene(sp, device, seed, share, [12, 12, 12]))
    assert "GRAPH_FEW_ROWS" in graph_regions.summary()[0].reason


def test_a_limit_between_two_captures(sp, device, monkeypatch):
    """A second graph, for more rows, is made without another trial."""
    monkeypatch.setattr("sparse_bridge.core.capture.padded.capacity_of", lambda rows: rows + 5)
    model, plain = pair([Reads(sp, closure)], device)
    with torch.no_grad():
        for seed, share in enumerate([0.01] * 10 + [0.1] * 6 + [0.012] * 2):
            rows = same(model, plain, scene(sp, device, seed, share, [12, 12, 12]))
            if seed == 9:
                assert rows < LIMIT and graph_regions.summary()[0].hits
    assert "GRAPH_FEW_ROWS" in graph_regions.summary()[0].reason


@pytest.mark.usefixtures("errors_survived")
def test_a_kernel_that_fails_with_few_rows(sp, device):
    """It is no program's: nothing is replayed, and the reason says so."""

    def read(x):
        left = {"rows": x.features.shape[0] - LIMIT}
        if left["rows"] < 0:
            raise KernelError("no tile for so few rows")
        return x.features

    model, plain = pair([Reads(sp, read)], device)
    with torch.no_grad():
        for seed in range(10):
            same(model, plain, scene(sp, device, seed, 0.5))
    found = graph_regions.summary()[0]
    assert not found.hits and "GRAPH_ERROR" in found.reason and "no tile for so few rows" in found.reason


def test_a_program_that_fails_with_few_rows(sp, device, caplog):
    """It does so as ever. A scene of fewer rows than were tried is compared, and then such scenes are replayed."""
    caplog.set_level("INFO", "sparse_bridge")
    model, plain = pair([Reads(sp, fails)], device)
    grid = [12, 12, 12]
    with torch.no_grad():
        for seed in range(12):
            same(model, plain, scene(sp, device, seed, 0.1, grid))
        before = graph_regions.summary()[0].hits
        (graph,) = graph_regions.region_of(model).replayer.graphs
        least = graph.least
        assert before > 4 and least > 60 and "rows raised ValueError: so few rows" in caplog.text
        with pytest.raises(ValueError, match="so few rows"):
            model(scene(sp, device, 0, 0.01, grid))
        rows = [same(model, plain, scene(sp, device, 1, share, grid)) for share in (0.025, 0.026)]
        assert LIMIT < rows[0] <= rows[1] < least
        assert graph.least == rows[0] and graph_regions.summary()[0].hits == before + 1
        assert graph_regions.region_of(model).replayer.graphs == [graph]


def test_a_limit_below_what_was_tried(sp, device):
    """A comparison shows it."""
    model, plain = pair([Reads(sp, closure)], device)
    with torch.no_grad():
        for seed in range(12):
            same(model, plain, scene(sp, device, seed, 0.4, [12, 12, 12]))
        same(model, plain, scene(sp, device, 0, 0.01, [12, 12, 12]))
    assert "GRAPH_DIFFERS" in graph_regions.summary()[0].reason


@pytest.mark.parametrize("turns", [False, True], ids=["all at once", "item by item"])
def test_the_rows_that_are_tried(sp, device, turns):
    """Few of a scene of many items; some of each where the program fails without."""
    model, plain = pair([Reads(sp, wants_many if turns else lambda x: x.features)], device)
    with torch.no_grad():
        for seed in range(10):
            same(model, plain, scene(sp, device, seed, 0.5, items=12))
    graph = graph_regions.region_of(model).replayer.graphs[0]
    rows = len(scene(sp, device, 0, 0.5, items=12).features)
    assert (12 * 3 < graph.least < rows // 4) if turns else 58 < graph.least <= 64
