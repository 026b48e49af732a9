"""What layers decide by where the coordinates of a scene lie, a replay decides anew or is not made."""

from __future__ import annotations

import contextlib
import copy
import dataclasses

import pytest
import torch
from torch import nn

import sparse_bridge
from sparse_bridge.core.capture import graph_regions, padded
from sparse_bridge.core.geometry.data_bounds import DataBounds
from tests.adapters.spconv import apis as spconv_apis
from tests.clouds import cloud, features

from . import apis
from .graph_sizes import graphs_of

pytestmark = pytest.mark.emulated


def pair(layers, device, trains=False):
    """A model that is replayed, and its double."""
    plain = nn.Sequential(*layers).to(device).train(trains)
    return sparse_bridge.optimize(copy.deepcopy(plain), graphs=True), plain


def sparse_rows(seed, device, low=0, high=20):
    """So few of one item that levels end inside their boxes; boxes differ from scene to scene."""
    rows = torch.randint(low, high, (30, 4), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
    rows[:, 0] = 0
    return rows.unique(dim=0).to(device)


def same(mine, theirs):
    assert torch.equal(mine.C, theirs.C)
    torch.testing.assert_close(mine.F, theirs.F, rtol=1e-3, atol=1e-4)


@pytest.mark.usefixtures("errors_survived")
@pytest.mark.parametrize("place", ["replayed", "in front", "both replayed"])
def test_even_kernels_in_a_spatial_range(device, rules, place):
    """torchsparse 2.1 shrinks the range behind an even kernel at stride 1 and keeps the coordinates; a strided layer
    behind drops those outside."""
    rules.hold(graphs_of(512))
    with sparse_bridge.enable("torchsparse", mode="standin", profile="2.1"), torch.no_grad():
        import torchsparse as ts

        conv = ts.nn.Conv3d
        even, down = [conv(4, 4, 2), conv(4, 4, 3)], [conv(4, 4, 2, stride=2), conv(4, 4, 3)]
        parts = {"replayed": (even, down), "in front": (down, even), "both replayed": ([*even, *down], [])}
        model, plain = pair(parts[place][0], device)
        other = nn.Sequential(*parts[place][1]).to(device)
        for seed in range(8):
            coords = cloud((6, 5, 4), 2, share=0.4, seed=seed, device=device)
            far = [1, 8, 7, 6] if seed > 3 else [1, 5, 4, 3]
            coords, made = torch.cat([coords, coords.new_tensor([[0, 0, 0, 0], far])]).unique(dim=0), []
            for one in (model, plain):
                x = ts.SparseTensor(features(len(coords), 4, device=device), coords.clone(), 1, (2, 9, 8, 7))
                made.append(one(other(x)) if place == "in front" else other(one(x)))
            same(*made)
        if place == "replayed":
            assert graph_regions.summary()[0].hits > 3


@pytest.mark.parametrize("size", [2, 3])
def test_a_strided_level_that_leaves_its_range(device, rules, size):
    """The range behind 39 cells of three is 13 long, and there are 14 cells: layers behind know the rows for theirs."""
    rules.hold(graphs_of(512))
    with sparse_bridge.enable("torchsparse", mode="standin", profile="2.1"), torch.no_grad():
        import torchsparse as ts

        config = apis.hashmap_config(ts)
        model, plain = pair([ts.nn.Conv3d(4, 4, size, stride=size, config=config), ts.nn.Conv3d(4, 4, 3)], device)
        behind = ts.nn.Conv3d(4, 4, 2, stride=2, config=config).to(device)
        for seed in range(8):
            coords = torch.cat(
                [sparse_rows(seed, device, high=40), torch.tensor([[0, 39, 39, 39]], device=device)]
            ).int()
            coords, made = coords.unique(dim=0), []
            for one in (model, plain):
                x = ts.SparseTensor(features(len(coords), 4, device=device), coords.clone(), 1, (1, 40, 40, 40))
                made.append(behind(one(x)))
            same(*made)
        assert graph_regions.summary()[0].hits > 3


@pytest.mark.parametrize("trains", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("deep", [False, True])
def test_cells_below_zero(device, rules, monkeypatch, deep, trains):
    """torchsparse 2.0 rounds negative cells towards zero, which the kernels of a graph do not. No capture waits for the
    bounds of a level."""
    rules.hold(graphs_of(512))
    learn = DataBounds.learn

    def learnt(bounds, values):
        assert padded.current() is None
        return learn(bounds, values)

    monkeypatch.setattr(DataBounds, "learn", learnt)
    grad = torch.set_grad_enabled(trains)
    with sparse_bridge.enable("torchsparse", mode="standin", profile="2.0"), grad:
        import torchsparse as ts

        first = [ts.nn.Conv3d(4, 4, 3, stride=2)] if deep else []
        model, plain = pair([*first, ts.nn.Conv3d(4, 4, 2, stride=2), ts.nn.Conv3d(4, 4, 3)], device, trains)
        for seed in range(16):
            coords = sparse_rows(seed, device, low=-6 if seed > 9 else 0)[:, [1, 2, 3, 0]].contiguous()
            made = []
            for one in (model, plain):
                made.append(one(ts.SparseTensor(features(len(coords), 4, device=device), coords.clone())))
                if trains:
                    made[-1].F.sum().backward()
            same(*made)
        assert graph_regions.summary()[0].hits > 3


def test_back_to_a_level_of_the_same_stride(device, rules):
    """MinkowskiEngine's transposed layers go back to the coordinates that a strided layer made, and not to those of the
    output, which are of the same stride."""
    rules.hold(graphs_of(512))
    with sparse_bridge.enable("minkowski", mode="standin"), torch.no_grad():
        import MinkowskiEngine as me

        conv, two = me.MinkowskiConvolution, {"kernel_size": 2, "stride": 2, "dimension": 3}
        model, plain = pair(
            [conv(4, 4, **two), conv(4, 4, kernel_size=3, expand_coordinates=True, dimension=3)], device
        )
        down, up = conv(4, 4, **two).to(device), me.MinkowskiConvolutionTranspose(4, 4, **two).to(device)
        for seed in range(8):
            coords = cloud((12, 12, 12), 2, share=0.02, seed=seed, device=device)
            given = [me.SparseTensor(features(len(coords), 4, device=device), coords) for _ in range(2)]
            same(*(up(down(one(x))) for one, x in zip((model, plain), given, strict=True)))
        assert graph_regions.summary()[0].hits > 3


def test_coordinates_off_the_grid_of_their_stride(device, rules):
    """MinkowskiEngine takes coordinates of tensor stride 2 that are no multiples of 2, and rounds them behind a strided
    layer alone."""
    rules.hold(graphs_of(512))
    with sparse_bridge.enable("minkowski", mode="standin"), torch.no_grad():
        import MinkowskiEngine as me

        conv = me.MinkowskiConvolution
        layers = [conv(4, 4, kernel_size=3, dimension=3), conv(4, 4, kernel_size=2, stride=2, dimension=3)]
        model, plain = pair(layers, device)
        for seed in range(14):
            coords = sparse_rows(seed, device)
            if seed < 10:
                coords[:, 1:] *= 2
            values = features(len(coords), 4, device=device)
            same(*(one(me.SparseTensor(values, coords, tensor_stride=2)) for one in (model, plain)))
        assert graph_regions.summary()[0].hits > 3


@pytest.mark.usefixtures("errors_survived")
def test_the_reason_of_a_part_that_goes_back(device, rules):
    """Where no layer has been at stride 1, torchsparse keeps no coordinates of it."""
    rules.hold(graphs_of(512))
    with sparse_bridge.enable("torchsparse", mode="standin", profile="2.1"), torch.no_grad():
        import torchsparse as ts

        conv = ts.nn.Conv3d
        first = conv(4, 4, 2, stride=2).to(device)
        model, _ = pair([conv(4, 4, 3), conv(4, 4, 2, stride=2, transposed=True)], device)
        for seed in range(4):
            coords = cloud((9, 8, 7), 2, share=0.3, seed=seed, device=device)
            model(first(ts.SparseTensor(features(len(coords), 4, device=device), coords)))
        assert "GRAPH_HAS_MAPS" in graph_regions.summary()[0].reason


@pytest.mark.usefixtures("errors_survived")
@pytest.mark.parametrize("trains", [False, True], ids=["inference", "training"])
def test_the_range_behind_a_layer_that_shares_a_map(device, rules, trains):
    """In torchsparse 2.1 a second layer of a kernel size has the first one's range."""
    rules.hold(graphs_of(512))
    grad = torch.set_grad_enabled(trains)
    with sparse_bridge.enable("torchsparse", mode="standin", profile="2.1"), grad:
        import torchsparse as ts

        conv = ts.nn.Conv3d
        model, plain = pair([conv(4, 4, 3), conv(4, 4, 2)], device, trains)
        behind = nn.Sequential(conv(4, 4, 2), conv(4, 4, 2, stride=2)).to(device)
        for seed in range(8):
            coords = cloud((9, 8, 7), 2, share=0.3, seed=seed, device=device)
            values, made = features(len(coords), 4, device=device), []
            for one in (model, plain):
                made.append(behind(one(ts.SparseTensor(values, coords.clone(), 1, (2, 9, 8, 7)))))
                if trains:
                    made[-1].F.sum().backward()
            assert made[0].spatial_range == made[1].spatial_range
            same(*made)
        assert graph_regions.summary()[0].hits > 3


@pytest.mark.parametrize("kind", ["strided", "generative"])
def test_a_range_given_behind_a_level(device, rules, kind):
    """A range and the box of the data together decide where outputs end. Such a graph is of one box."""
    rules.hold(graphs_of(512))
    with sparse_bridge.enable("torchsparse", mode="standin", profile="2.1"), torch.no_grad():
        import torchsparse as ts

        conv, config = ts.nn.Conv3d, apis.hashmap_config(ts)
        generative = {"stride": 2, "transposed": True, "generative": True, "config": config}
        middle = conv(4, 4, 3, stride=2) if kind == "strided" else conv(4, 4, 2, **generative)
        model, plain = pair([conv(4, 4, 3), conv(4, 4, 3), middle, conv(4, 4, 3)], device)
        first = conv(4, 4, 2, stride=2).to(device)
        for seed, high in enumerate([13, 13, 13, 13, 13, 12, 10, 8, 9, 11, 9, 7, 10, 12, 40]):
            corners = torch.tensor([[0, 0, 0, 0], [0, high - 1, high - 1, high - 1]], dtype=torch.int32, device=device)
            coords, made = torch.cat([sparse_rows(seed, device, high=high), corners]).unique(dim=0), []
            for one in (model, plain):
                x = first(ts.SparseTensor(features(len(coords), 4, device=device), coords.clone()))
                x.spatial_range = (1, 30, 30, 30)
                made.append(one(x))
            same(*made)


@pytest.mark.parametrize("skips", [False, True])
def test_a_grid_that_a_layer_leaves_nothing_of(device, rules, skips):
    """It is the layer that says so, if the program calls it."""
    rules.hold(graphs_of(512, watched=True))

    class Net(nn.Module):
        def __init__(self, sp):
            super().__init__()
            self.first, self.down = sp.SubMConv3d(4, 8, 3), sp.SparseConv3d(8, 8, 3, 2)
            self.last = nn.Sequential(sp.SubMConv3d(8, 8, 3), sp.SubMConv3d(8, 4, 3))

        def forward(self, x):
            x = self.first(x)
            return self.last(x if skips and min(x.spatial_shape) < 3 else self.down(x))

    with spconv_apis.standin() as sp, torch.no_grad():
        model, plain = pair([Net(sp)], device)
        for seed, shape in enumerate([*((8 + i % 3, 8, 9) for i in range(8)), (2, 8, 9)]):
            coords, made = cloud((2, 8, 9), 2, share=0.2, seed=seed, device=device), []
            for one in (model, plain):
                x = sp.SparseConvTensor(features(len(coords), 4, device=device), coords.clone(), list(shape), 2)
                try:
                    made.append(one(x).features)
                except RuntimeError as error:
                    made.append(str(error))
            if isinstance(made[0], str):
                assert made[0] == made[1] and shape[0] == 2 and not skips
            else:
                torch.testing.assert_close(*made, rtol=1e-3, atol=1e-4)


class Seen:
    """What a program knows of a scene."""

    def __init__(self, x):
        self.x = x

    @property
    def height(self):
        return self.x.spatial_shape[0]


@dataclasses.dataclass
class Extents:
    height: int
    items: int = 1


READS = {
    "height": lambda x: x.features * 2 if x.spatial_shape[0] > 40 else x.features,
    "levels": lambda x: x.features * (1 + x.spatial_shape[1] // 32),
    "items": lambda x: x.features * 2 if x.batch_size > 4 else x.features,
    "by name": lambda x: x.features * 2 if getattr(x, "batch_size", 1) > 4 else x.features,
    "per item": lambda x: x.features * sum((x.indices[:, :1] == n) * (n + 1.0) for n in range(x.batch_size)),
    "property": lambda x: x.features * 2 if Seen(x).height > 40 else x.features,
    "fields": lambda x: x.features * 2 if Extents(x.spatial_shape[0]).height > 40 else x.features,
    "largest": lambda x: x.features * max(x.spatial_shape[0], 40),
    "handed on": lambda x: (
        type(x)(x.features, x.indices, x.spatial_shape, x.batch_size).features * len(x.spatial_shape)
    ),
}


class Reads(nn.Module):
    """Looks at the grid, or the number of batch items."""

    def __init__(self, sp, read):
        super().__init__()
        self.first, self.read = sp.SubMConv3d(4, 8, 3), read
        self.last = nn.Sequential(sp.SubMConv3d(8, 8, 3), sp.SubMConv3d(8, 8, 3), sp.SubMConv3d(8, 4, 3))

    def forward(self, x):
        x = self.first(x)
        return self.last(x.replace_feature(self.read(x)))


def test_a_check_of_the_grid(device, rules):
    """A capture limits how many rows there are, and no grid."""

    def checked(x):
        if x.batch_size > 4 or max(x.spatial_shape) > 40:
            raise ValueError("too large")
        return x.features

    rules.hold(graphs_of(512, watched=True))
    with spconv_apis.standin() as sp, torch.no_grad():
        model, _ = pair([Reads(sp, checked)], device)
        for seed, items in enumerate([2, 3, 2, 1, 3, 2, 3, 2, 6]):
            coords = cloud((6, 6, 7), items, share=0.1, seed=seed, device=device)
            values = features(len(coords), 4, device=device)
            with contextlib.nullcontext() if items < 5 else pytest.raises(ValueError, match="too large"):
                model(sp.SparseConvTensor(values, coords, [6, 6, 7], items))


@pytest.mark.parametrize("name", READS)
def test_what_a_program_decides_by_its_grid(device, rules, name):
    """It may have decided the same for all grids so far."""
    rules.hold(graphs_of(512, watched=True))
    with spconv_apis.standin() as sp, torch.no_grad():
        model, plain = pair([Reads(sp, READS[name])], device)
        scenes = [((6 + i % 3, 6 + i % 2, 7), 3 - (i > 4) * (i % 3)) for i in range(16)]
        for seed, (shape, items) in enumerate([*scenes, ((41, 40, 7), 6)]):
            coords = cloud((6, 6, 7), items, share=0.1, seed=seed, device=device)
            values, made = features(len(coords), 4, device=device), []
            for one in (model, plain):
                made.append(one(sp.SparseConvTensor(values, coords.clone(), list(shape), items)).features)
            torch.testing.assert_close(*made, rtol=1e-3, atol=1e-4)
        replayer = graph_regions.region_of(model).replayer
        assert (replayer.hits > 3 and not replayer.box_columns) == (name == "handed on")
        assert name == "handed on" or replayer.box_columns >= {0}  # graphs are for one number of items, at least


RETURNS = {
    "number": lambda x: min(x.spatial_shape),
    "text": lambda x: f"{min(x.spatial_shape)} cells or more",
    "by name": lambda x: max(4, getattr(x, "batch_size", 1)),
    "constant": lambda x: 8,
}


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("name", RETURNS)
def test_numbers_beside_the_result(device, rules, name, trains):
    """Those that follow from the grid have been the same so far."""

    class Returns(Reads):
        def forward(self, x):
            return super().forward(x), RETURNS[name](x)

    rules.hold(graphs_of(512, watched=True))
    with spconv_apis.standin() as sp, torch.set_grad_enabled(trains):
        model, plain = pair([Returns(sp, lambda x: x.features)], device, trains)
        scenes = [((6, 6 + i % 3, 7), 2 + i % 3) for i in range(16)]
        for seed, (shape, items) in enumerate([*scenes, ((6, 5, 7), 6)]):
            coords = cloud((6, 5, 7), items, share=0.2, seed=seed, device=device)
            values, made = features(len(coords), 4, device=device), []
            for one in (model, plain):
                y, number = one(sp.SparseConvTensor(values, coords.clone(), list(shape), items))
                made.append((y.features.detach(), number))
                if trains:
                    y.features.sum().backward()
            torch.testing.assert_close(made[0][0], made[1][0], rtol=1e-3, atol=1e-4)
            assert made[0][1] == made[1][1]
        if name == "constant":
            assert sum(part.hits for part in graph_regions.summary()) > 3
