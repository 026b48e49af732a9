"""Whole networks, packaged for gfx942, played by the C code and executed on the emulator, against the same
layers run from Python there."""

from __future__ import annotations

import pytest
import torch

from sparse_bridge import tolerances
from sparse_bridge.export.player import package_file
from sparse_bridge.kernels.maps import mask_order
from tests.adapters.spconv import apis
from tests.quick import quick

from . import networks
from .played import ROWS, Played, expected, packaged

pytest.importorskip("amd_emulator")
pytestmark = [pytest.mark.emulated, pytest.mark.slow]  # in a process of their own: an emulator runs inside of a driver


@pytest.fixture
def sp():
    with apis.standin() as module:
        yield module


@pytest.mark.parametrize("gpu", ["hip"], indirect=True)
@pytest.mark.parametrize("name", quick(("second", "encoder"), ("second", "unet", "encoder")))
def test_results_are_those_of_the_layers(gpu, sp, tmp_path, name):
    """The same bits, for any number of rows, whatever memory held before; in a graph in an order as far from that of
    the steps as their edges allow."""
    model, grid = getattr(networks, name)(sp)
    networks.ready(model)
    program = packaged(tmp_path / "model.sbp", model, networks.scene(grid, 250, seed=1))
    played = Played(gpu, tmp_path / "model.sbp", program, graph=name != "encoder")
    for seed, rows in enumerate((250, 1, ROWS, 37)):
        features, coords = networks.scene(grid, rows, seed)
        wanted = expected(model, features, coords)
        played.poison()
        for mine, theirs in zip(played(features, coords), wanted, strict=True):
            assert mine.shape == theirs.shape and mine.dtype == theirs.dtype
            assert torch.equal(mine, theirs), (seed, (mine - theirs).abs().max())
    assert played.unchanged()
    assert played.emulator.launches == 4 * sum(step.kind == package_file.LAUNCH for step in program.steps)
    played.close()


KINDS = {
    "max pool": lambda sp: [sp.SubMConv3d(4, 8, 3, indice_key="a"), sp.SparseMaxPool3d(2, 2), sp.SubMConv3d(8, 8, 3)],
    "overlapping pool": lambda sp: [sp.SubMConv3d(4, 8, 3), sp.SparseMaxPool3d(3, 2, padding=1, indice_key="p")],
    "average pool": lambda sp: [sp.SubMConv3d(4, 8, 3), sp.SparseAvgPool3d(2, 2)],
    "transposed": lambda sp: [sp.SparseConv3d(4, 8, 2, 2), sp.SparseConvTranspose3d(8, 8, 2, 2)],
    "inverse": lambda sp: [
        sp.SparseConv3d(4, 8, 3, 2, padding=1, indice_key="d"),
        torch.nn.BatchNorm1d(8),
        torch.nn.LeakyReLU(0.1),
        sp.SparseInverseConv3d(8, 4, 3, indice_key="d"),
    ],
    "every site": lambda sp: [sp.SparseConv3d(4, 8, 3, padding=1)],
    "dilated": lambda sp: [sp.SubMConv3d(4, 8, 3, dilation=2), torch.nn.Dropout(0.5)],
    "sorted": lambda sp: [sp.SparseConv3d(4, 8, (3, 3, 7), 2, padding=1), sp.SubMConv3d(8, 8, 3)],
}


@pytest.mark.parametrize("gpu", ["hip"], indirect=True)
@pytest.mark.parametrize("kind", KINDS)
def test_layers_of_every_kind(gpu, sp, tmp_path, kind):
    grid, path = (16, 16, 32), tmp_path / "model.sbp"
    model = networks.ready(networks.Model(sp, sp.SparseSequential(*KINDS[kind](sp)), grid, False))
    played = Played(gpu, path, packaged(path, model, networks.scene(grid, 200, seed=1)), graph=True)
    features, coords = networks.scene(grid, 222, seed=4)
    wanted = expected(model, features, coords)
    played.poison()
    for mine, theirs in zip(played(features, coords), wanted, strict=True):
        assert torch.equal(mine, theirs)
    played.close()


class Between(torch.nn.Module):
    """A quotient, the larger and the smaller of two."""

    def forward(self, x):
        steps = torch.linspace(-1, 2, x.shape[1], dtype=x.dtype)
        return torch.minimum(torch.maximum(x / (steps.abs() + 1), steps - 1), steps + 0.5)


HEADS = {
    "layer norm": lambda: [torch.nn.LayerNorm(8), torch.nn.Tanh(), torch.nn.LeakyReLU(0.2), torch.nn.Linear(8, 8)],
    "between": lambda: [Between(), torch.nn.ELU()],
    "linear": lambda: [torch.nn.Linear(8, 5)],
    "linear without bias": lambda: [torch.nn.Linear(8, 5, bias=False), torch.nn.Sigmoid()],
    "norm": lambda: [torch.nn.ReLU(), torch.nn.BatchNorm1d(8), torch.nn.SiLU()],
    "gelu": lambda: [torch.nn.GELU(), torch.nn.Linear(8, 8), torch.nn.ReLU(inplace=True)],
}


@pytest.mark.parametrize("gpu", ["hip"], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("kind", HEADS)
def test_modules_of_torch_behind_layers(gpu, sp, tmp_path, kind, dtype):
    """Kernels of ours compute what torch computes elsewhere: not its bits."""
    grid, path = (16, 16, 32), tmp_path / "model.sbp"
    layers = sp.SparseSequential(sp.SubMConv3d(4, 8, 3), *HEADS[kind]())
    model = networks.ready(networks.Model(sp, layers, grid, False)).to(dtype)
    example = networks.scene(grid, 200, seed=1, dtype=dtype)
    played = Played(gpu, path, packaged(path, model, example), graph=True)
    features, coords = networks.scene(grid, 222, seed=4, dtype=dtype)
    played.poison()
    mine = played(features, coords)[0]
    with torch.no_grad():
        theirs = model.double()(features.double(), coords)["rows"]
    assert mine.dtype == dtype
    assert (mine - theirs).norm() / theirs.norm() < tolerances.of("network", dtype).rms
    played.close()


class Moved(networks.Model):
    """Coordinates that are computed late, of what is changed in place meanwhile."""

    def forward(self, features, coords):
        x = self.network(self.sp.SparseConvTensor(features, coords, self.grid, 2)).indices
        own = x.clone()
        before, twice = own + 7, torch.cat([own, own], 1).flip(1)
        own.mul_(2)
        after = own - 1
        own.add_(1)
        return before, twice, after, own, x


@pytest.mark.parametrize("gpu", ["hip"], indirect=True)
def test_coordinates_are_those_at_their_line(gpu, sp, tmp_path):
    path, grid = tmp_path / "model.sbp", (16, 16, 32)
    model = networks.ready(Moved(sp, sp.SparseSequential(sp.SparseConv3d(4, 8, 2, 2)), grid, False))
    played = Played(gpu, path, packaged(path, model, networks.scene(grid, 200, seed=1)))
    features, coords = networks.scene(grid, 222, seed=4)
    wanted = expected(model, features, coords)
    played.poison()
    for mine, theirs in zip(played(features, coords), wanted, strict=True):
        assert torch.equal(mine, theirs)
    played.close()


@pytest.mark.parametrize("gpu", ["hip"], indirect=True)
def test_half_precision(gpu, sp, tmp_path):
    model, grid = networks.unet(sp)
    networks.ready(model).half()
    example = networks.scene(grid, 200, seed=1, dtype=torch.float16)
    played = Played(gpu, tmp_path / "model.sbp", packaged(tmp_path / "model.sbp", model, example), graph=True)
    features, coords = networks.scene(grid, 150, seed=5, dtype=torch.float16)
    mine, theirs = played(features, coords)[0], expected(model, features, coords)[0]
    assert mine.dtype == torch.float16 and torch.equal(mine, theirs)
    reference = model.float()(features.float(), coords)["rows"]
    assert (mine - reference).norm() / reference.norm() < tolerances.of("network", torch.float16).rms
    played.close()


@pytest.mark.parametrize("gpu", ["hip"], indirect=True)
def test_many_rows_are_sorted_by_kernels_of_ours(gpu, sp, tmp_path, rules):
    """Above so many rows; torch sorts them elsewhere."""
    rules.set(mask_order, FEW_ROWS=128)
    model, grid = networks.second(sp)
    networks.ready(model)
    program = packaged(tmp_path / "model.sbp", model, networks.scene(grid, 250, seed=1))
    names = [program.kernels[step.kernel].name for step in program.steps if step.kind == package_file.LAUNCH]
    # 24 bits of a mask's rank and two or three of the table, in digits of four; int32 would take eight.
    assert names.count("_radix_count") == names.count("_radix_scan") == names.count("_radix_place") == 7
    played = Played(gpu, tmp_path / "model.sbp", program, graph=True)
    features, coords = networks.scene(grid, 300, seed=3)
    assert torch.equal(played(features, coords)[0], expected(model, features, coords)[0])
    played.close()


@pytest.mark.parametrize("gpu", ["hip"], indirect=True)
def test_inputs_that_cannot_be_served_are_refused(gpu, sp, tmp_path):
    model, grid = networks.encoder(sp)
    networks.ready(model)
    path = tmp_path / "model.sbp"
    played = Played(gpu, path, packaged(path, model, networks.scene(grid, 100, seed=1)))
    features, coords = networks.scene(grid, 60, seed=2)
    equal, outside = coords.clone(), coords.clone()
    equal[5], outside[7, 3] = equal[17], grid[2]
    for wrong, words in ((equal, "1 of 60 rows repeat"), (outside, "1 of 60 rows have coordinates outside")):
        with pytest.raises(Exception, match=words):
            played(features, wrong)
    assert torch.equal(played(features, coords)[0], expected(model, features, coords)[0])
    assert played(features[:0], coords[:0])[0].shape == (0, 16)
    played.close()


@pytest.mark.parametrize("gpu", ["hip"], indirect=True)
def test_a_level_that_outgrows_its_memory(gpu, sp, tmp_path):
    """An example whose rows lie close, and an input whose rows do not."""
    model, grid = networks.encoder(sp)
    networks.ready(model)
    path, rows = tmp_path / "model.sbp", 1200
    places = torch.arange(1000)
    close = torch.stack(torch.unravel_index(places, (2, *grid)), 1).int()
    played = Played(gpu, path, packaged(path, model, (torch.randn(1000, 4), close), rows))
    assert played.program.levels[0].capacity < 2000
    features, coords = networks.scene(grid, rows, seed=3)
    with pytest.raises(Exception, match=r"has more rows .* than the memory that was planned"):
        played(features, coords)
    features, coords = torch.randn(900, 4), close[50:950]
    assert torch.equal(played(features, coords)[0], expected(model, features, coords)[0])
    played.close()
