"""The folder for C programs: the example as a reader builds it, and the command that writes it."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys

import pytest
import torch

from sparse_bridge import __main__ as command_line
from sparse_bridge.export import ExportError, export_gpu_package
from sparse_bridge.export.player import package_file
from sparse_bridge.export.player.library import SOURCES
from sparse_bridge.native.build import compiler
from tests.adapters.spconv import apis

from . import networks
from .fake_gpu import built
from .played import Example

MODULE = """
import torch
from torch import nn
import spconv.pytorch as spconv

class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = spconv.SparseSequential(
            spconv.SubMConv3d(5, 8, 3, indice_key="a"), nn.BatchNorm1d(8), nn.ReLU(), spconv.SparseConv3d(8, 8, 2, 2)
        )

    def forward(self, coords, features):
        y = self.layers(spconv.SparseConvTensor(features, coords, [8, 16, 16], 1))
        return y.dense(), y.features

def make():
    torch.manual_seed(0)
    cells = torch.randperm(8 * 16 * 16)[:200]
    coords = torch.cat([torch.zeros(200, 1), torch.stack(torch.unravel_index(cells, (8, 16, 16)), 1)], 1).int()
    return Encoder().eval(), (coords, torch.randn(200, 5))
"""


@pytest.fixture
def folder(tmp_path):
    """A package for gfx942, with its scenes."""
    with apis.standin() as sp:
        model, grid = networks.encoder(sp)
        scenes = [networks.scene(grid, rows, seed=rows) for rows in (250, 90)]
        out = tmp_path / "package"
        export_gpu_package(networks.ready(model), scenes[0], out, targets=["hip:gfx942"], rows=300, scenes=scenes[1:])
    return out


@pytest.mark.emulated
@pytest.mark.slow  # in a process of its own, as `test_emulated`
@pytest.mark.parametrize("gpu", ["hip"], indirect=True)
def test_the_example_plays_the_recorded_scenes(gpu, folder, tmp_path, capfd):
    """With the exit codes that it has."""
    pytest.importorskip("amd_emulator")
    example = Example(gpu, folder, tmp_path)

    def run(*options):
        return example(*options), capfd.readouterr()

    status, said = run(b"--repeat", b"2")
    assert status == 0, said
    assert [line.split(" rows")[0] for line in said.out.splitlines()] == ["250", "90"]
    assert said.out.count(": ok") == 2
    values = bytearray((folder / "scenes.bin").read_bytes())
    values[-3] ^= 1  # coordinates of the last result
    (folder / "scenes.bin").write_bytes(values)
    status, said = run()
    assert status == 1 and said.out.count("ok") == 1 and said.out.count("DIFFERS") == 1
    (folder / "scenes.bin").write_bytes(values[:-8])
    status, said = run()
    assert status == 2 and "cannot be read" in said.err
    (folder / "model.sbp").write_bytes(b"nothing")
    words = [b"run_package", os.fsencode(folder)]
    assert example.library.played(2, (ctypes.c_char_p * 2)(*words)) == 2
    assert "no package" in capfd.readouterr().err


@pytest.mark.parametrize(("dtype", "function"), [(torch.float16, "half"), (torch.bfloat16, "brain")], ids=str)
def test_the_example_reads_every_number_of_16_bits(tmp_path, dtype, function):
    source, library = tmp_path / "numbers.c", tmp_path / "numbers.so"
    source.write_text(f'#define main played\n#include "example.c"\ndouble of(int x) {{ return {function}(x); }}\n')
    words = [*(compiler() or ["cc"]), "-std=c99", "-O2", "-shared", "-fPIC", f"-I{SOURCES}", str(source)]
    subprocess.run([*words, str(SOURCES / "sparse_bridge_rt.c"), "-ldl", "-lm", "-o", str(library)], check=True)
    of = ctypes.CDLL(str(library)).of
    of.restype = ctypes.c_double
    read = torch.tensor([of(bits) for bits in range(1 << 16)], dtype=torch.float64)
    wanted = torch.arange(1 << 16).to(torch.uint16).view(dtype).double()
    assert torch.equal(read.nan_to_num(12345), wanted.nan_to_num(12345)) and read.isnan().sum() == wanted.isnan().sum()


@pytest.mark.emulated
@pytest.mark.slow
@pytest.mark.parametrize("gpu", ["hip"], indirect=True)
def test_the_example_plays_scenes_in_bfloat16(gpu, tmp_path, capfd):
    pytest.importorskip("amd_emulator")
    with apis.standin() as sp:
        model, grid = networks.encoder(sp)
        networks.ready(model).bfloat16()
        scene = networks.scene(grid, 250, seed=1, dtype=torch.bfloat16)
        export_gpu_package(model, scene, tmp_path / "package", targets=["hip:gfx942"], rows=300)
    assert Example(gpu, tmp_path / "package", tmp_path)() == 0, capfd.readouterr()


def test_cmake_builds_it_and_it_asks_for_a_driver(folder, tmp_path):
    cmake = shutil.which("cmake")
    if cmake is None:
        pytest.skip("CMake is not installed")
    build = tmp_path / "build"
    subprocess.run([cmake, "-S", str(folder), "-B", str(build)], check=True, capture_output=True)
    subprocess.run([cmake, "--build", str(build)], check=True, capture_output=True)
    empty, pretended = tmp_path / "empty", tmp_path / "driver"
    for path in (empty, pretended):
        path.mkdir()
    built("hip", pretended)
    for libraries, words in ((empty, "libamdhip64.so is missing"), (pretended, "rows have coordinates outside")):
        environment = {**os.environ, "LD_LIBRARY_PATH": str(libraries)}
        done = subprocess.run([build / "run_package", folder], env=environment, capture_output=True, text=True)
        if libraries == empty and words not in done.stderr:
            pytest.skip("there is a driver of AMD's")
        assert done.returncode == 2 and words in done.stderr


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "packaged_encoder.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("packaged_encoder", None)


def test_the_command(here, capsys):
    words = ["package", "packaged_encoder:make", "--target", "hip:gfx942", "--rows", "400", "--out", "out"]
    assert command_line.main([*words, "--dtype", "float16"]) == 0
    said = capsys.readouterr().out
    assert "model.sbp" in said and "hip:gfx942:" in said and "MiB for 400 rows" in said
    (program,) = package_file.read((here / "out" / "model.sbp").read_bytes())
    assert program.target == "hip:gfx942" and program.rows == 400
    assert [it.dtype for it in program.inputs] == [torch.int32, torch.float16]
    assert [it.name for it in program.inputs] == ["coords", "features"]
    assert {path.name for path in (here / "out").iterdir()} >= {*os.listdir(SOURCES), "scenes.txt", "scenes.bin"}
    assert command_line.main([*words, "--target", "hip:gfx1100", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert [it["target"] for it in facts["targets"]] == ["hip:gfx942", "hip:gfx1100"]


FRAMEWORKS = """
import torch
def scene(rows):
    cells = torch.randperm(8 * 16 * 16)[:rows]
    coords = torch.cat([torch.zeros(rows, 1), torch.stack(torch.unravel_index(cells, (8, 16, 16)), 1)], 1).int()
    return torch.randn(rows, 4), coords

def torchsparse():
    import torchsparse as ts
    scenes = [[ts.SparseTensor(*scene(rows))] for rows in (200, 70)]
    return ts.nn.Conv3d(4, 8, 3, stride=2).eval(), scenes[0], scenes[1:]

def minkowski():
    import MinkowskiEngine as ME
    return ME.MinkowskiConvolution(4, 8, 2, 2, dimension=3).eval(), [ME.SparseTensor(*scene(200))]

class Submanifold(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(8, 3, 3, 3, 4))

    def forward(self, features, coords):
        from flex_gemm.ops.spconv import sparse_submanifold_conv3d
        return sparse_submanifold_conv3d(features, coords, torch.Size([1, 4, 8, 16, 16]), self.weight)[0]

def flex_gemm():
    return Submanifold().eval(), scene(200)
"""


@pytest.mark.parametrize("name", ["torchsparse", "minkowski", "flex_gemm"])
def test_the_command_takes_models_of_other_frameworks(here, capsys, name):
    (here / "packaged_encoder.py").write_text(FRAMEWORKS)
    words = ["package", f"packaged_encoder:{name}", "--target", "hip:gfx942", "--rows", "300", "--out", "out"]
    assert command_line.main([*words, "--dtype", "float16"]) == 0
    assert "MiB for 300 rows" in capsys.readouterr().out
    (program,) = package_file.read((here / "out" / "model.sbp").read_bytes())
    assert [it.dtype for it in program.inputs] == [torch.int32, torch.float16]
    sparse = name != "flex_gemm"  # functions of plain tensors
    assert [it.dtype for it in program.outputs] == [torch.float16, torch.int32][: 1 + sparse]
    rows = [line.split()[-2] for line in (here / "out" / "scenes.txt").read_text().splitlines() if "int32 2" in line]
    assert rows[0] == "200" and rows[1 + sparse] == ("70" if name == "torchsparse" else "100")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--dtype", "float16"], "--dtype float16 is for packages with --target"),
        (["--target", "cuda:87", "--rows", "400", "500"], "expected one number with --target"),
        (["--target", "cuda87"], "target 'cuda87'; expected"),
        (["--target", "cuda:87", "--rows", "100"], "rows is 100; expected at least the 200 rows"),
    ],
)
def test_what_the_command_refuses(here, capsys, words, said):
    assert command_line.main(["package", "packaged_encoder:make", "--out", "out", *words]) == 2
    assert said in capsys.readouterr().err


def test_models_in_training_and_no_targets(tmp_path):
    with apis.standin() as sp:
        model, grid = networks.encoder(sp)
        scene = networks.scene(grid, 20)
        with pytest.raises(ExportError, match="training mode"):
            export_gpu_package(model.train(), scene, tmp_path, targets=["cuda:87"], rows=50)
        with pytest.raises(ExportError, match="no target"):
            export_gpu_package(model.eval(), scene, tmp_path, targets=[], rows=50)
