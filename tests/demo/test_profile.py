"""Probes, tables and training."""

from __future__ import annotations

import dataclasses
import types
from collections import OrderedDict
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import nn

from sparse_bridge.errors import GeometryError, SettingError
from sparse_bridge.tools.demo import profile, report, training, voxels
from sparse_bridge.tools.demo.points import PointCloud
from tests.adapters.spconv import apis

CPU = torch.device("cpu")


@pytest.fixture
def profiled() -> Iterator[profile.NetworkProfile]:
    torch.manual_seed(0)
    with apis.standin() as sp:
        net = sp.SparseSequential(
            OrderedDict(
                stem=sp.SubMConv3d(4, 8, 3, bias=False, indice_key="a"),
                down=sp.SparseConv3d(8, 16, 2, 2, bias=False),
                act=nn.ReLU(),
                proj=sp.SubMConv3d(16, 6, 1, bias=False),
            )
        )
        one = apis.tensor(sp, shape=(8, 8, 8), rows=100)

        def forward() -> object:
            return net(sp.SparseConvTensor(one.features, one.indices, [8, 8, 8], 2))

        yield profile.profile_network("a net", net, forward, CPU, repeats=3, probed=2)


def test_layers_in_order_with_their_facts(profiled: profile.NetworkProfile) -> None:
    stem, down, proj = profiled.layers
    assert [layer.name for layer in profiled.layers] == ["stem", "down", "proj"]
    assert [one.kind for one in profiled.layers] == ["submanifold", "strided", "pointwise"]
    assert (stem.rows_in, stem.rows_out) == (100, 100) and down.rows_out == proj.rows_in < 100
    assert (down.channels_in, down.channels_out) == (8, 16)
    assert [one.dataflow for one in profiled.layers] == ["per_offset", "per_offset", "mm"]
    assert stem.memory == 100 * 8 * 4 and profiled.peak_memory is None
    assert all(layer.median_ms > 0 and layer.calls == 2 for layer in profiled.layers)
    assert len(profiled.passes) == 3 and profiled.ms == sorted(profiled.passes)[1] > 0
    assert profiled.parameters == 27 * 4 * 8 + 8 * 8 * 16 + 16 * 6


def render(*tables: object) -> str:
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    for table in tables:
        console.print(table)
    return console.export_text()


def test_table_contents(profiled: profile.NetworkProfile) -> None:
    layers = [dataclasses.replace(layer, host_ms=(1.5, 1.5)) for layer in profiled.layers]
    layers[0] = dataclasses.replace(layers[0], rows_in=1234567, output_bytes=3 << 20)
    text = render(report.layers_table(dataclasses.replace(profiled, layers=layers), CPU, 160))
    assert "a net: 3 sparse layers" in text and "output MB" in text
    row = next(line for line in text.splitlines() if "stem" in line)
    for cell in ("submanifold", "3x3x3", "1,234,567", "4 > 8", "per_offset", "1.50", "3.0"):
        assert cell in row
    total = next(line for line in text.splitlines() if "all layers" in line)
    assert "4.50" in total and "max 3.0" in total


@pytest.mark.parametrize("width", [50, 64, 80, 100, 140])
def test_a_table_has_whole_cells_at_any_width(profiled, width) -> None:
    table = report.layers_table(profiled, CPU, width)
    console = Console(width=max(width, 60), record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table)
    text = console.export_text()
    assert "\u2026" not in text, "nothing is cut"
    for word in ("layer", "voxels out", "dataflow", "ms", "per_offset"):
        assert word in text
    assert ("voxels in" in text) == (width > 100)


def test_facts_and_times(profiled: profile.NetworkProfile) -> None:
    cloud = PointCloud(np.zeros((9, 4), np.float32), "some [red].bin", dropped=2)
    indices = torch.zeros(3, 4, dtype=torch.int32)
    grid = voxels.VoxelGrid(torch.zeros(3, 4), indices, (32, 16, 48), (0, 0, 0), 0.1, 6)
    status = types.SimpleNamespace(version="2.3.8", mode="standin", reason="no spconv here")
    trained = training.TrainingResult("a net", [3.0, 2.5], (12.0,))
    text = render(
        report.facts_table(cloud, grid, CPU, "fp32", status),  # type: ignore[arg-type]
        report.times_table([profiled], [trained], 7.5),
    )
    for part in (
        "some [red].bin, 9 points (2 more were NaN",
        "3 of 10 cm from 6 points inside",
        "48 x 16 x 32 cells",
        "2.3.8, standin: no spconv here",
        "a net, inference",
        "3.000 > 2.500",
        "7.5",
    ):
        assert part in text


@pytest.mark.parametrize(("passes", "busy"), [((20.0, 21.0, 22.0), ""), ((20.0, 21.0, 50.0), "differ by 2.5x")])
def test_times_have_a_spread_and_a_busy_machine_is_named(profiled, passes, busy) -> None:
    one = dataclasses.replace(profiled, passes=passes)
    text = render(report.times_table([one], [], 7.5))
    assert "21.0" in text and f"20.0 to {max(passes):.1f}" in text
    assert busy in text and ("machine was busy" in text) == bool(busy)
    alone = render(report.times_table([dataclasses.replace(one, passes=(20.0,))], [], 7.5))
    assert "20.0 to" not in alone and "busy" not in alone


@pytest.mark.parametrize(("ms", "shown"), [(1.0, "100 k voxels/s"), (10.0, "10 k voxels/s"), (200.0, "500 voxels/s")])
def test_no_rate_is_shown_as_nought(profiled, ms, shown) -> None:
    assert f", {shown}" in render(  # of 100 voxels
        report.times_table([dataclasses.replace(profiled, passes=(ms,))], [], 7.5)
    )


def test_training_lowers_the_loss() -> None:
    torch.manual_seed(0)
    indices = torch.zeros(200, 4, dtype=torch.int32)
    indices[:, 1] = torch.arange(200) % 32
    net = nn.Sequential(nn.Linear(1, 32), nn.ReLU())

    def forward() -> object:
        features = net(indices[:, 1:2] / 32)
        return types.SimpleNamespace(features=features, indices=indices)

    result = training.train("net", net, nn.Linear(32, 4), forward, 4, 12, torch.float32)
    assert len(result.losses) == 12 and result.losses[-1] < result.losses[0]
    assert len(result.passes) == 11 and result.ms > 0 and not net.training


def test_height_bands_share_the_voxels() -> None:
    indices = torch.zeros(1000, 4, dtype=torch.int32)
    indices[:, 1] = torch.arange(1000) // 10
    bands = training.height_bands(indices, 5)
    assert torch.bincount(bands).tolist() == [200] * 5
    assert (bands.diff() >= 0).all()


def test_crop_forgets_strays_and_keeps_the_rest() -> None:
    rng = np.random.default_rng(0)
    points = rng.uniform(-10, 10, (5000, 4)).astype(np.float32)
    points[:, 2] *= 0.1
    whole = PointCloud(points, "a")
    crop = voxels.crop_of(whole, 0.1)
    assert (points[:, :3] >= np.array(crop[:3]) - 1e-5).all()
    assert (points[:, :3] < np.array(crop[3:])).all()
    stray = points.copy()
    stray[0, :3] = 500, -500, -90
    np.testing.assert_allclose(voxels.crop_of(PointCloud(stray, "a"), 0.1), crop, atol=0.3)


def test_grid_fits_the_strides() -> None:
    assert voxels.grid_shape((0, 0, 0, 1, 3.3, 0.5), 0.1) == (32, 48, 16)
    assert voxels.grid_shape((0, 0, 0, 6.4, 6.4, 6.4), 0.1) == (64, 64, 64)
    with pytest.raises(SettingError, match="lowest"):
        voxels.grid_shape((0, 0, 0, 1, -1, 1), 0.1)
    with pytest.raises(GeometryError, match="--voxel-size"):
        voxels.grid_shape((0, 0, 0, 200, 200, 20), 0.01)
