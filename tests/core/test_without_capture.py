"""The engine and its adapters work with `core/capture` deleted, and with `core/prefetch` deleted as well: maps are
built when asked for. All tests but those of these folders run then."""

from __future__ import annotations

import ast
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

TESTS = pathlib.Path(__file__).resolve().parents[1]
PACKAGE = TESTS.parent / "sparse_bridge"

# The folders that may be deleted, each with those before it.
OPTIONAL = ["capture", "prefetch"]


def skipped(folder: str) -> str:
    """What stands before the imports of tests elsewhere that are about `folder`, too: they are skipped without it."""
    return f'pytest.importorskip("sparse_bridge.core.{folder}")'


PROGRAM = """
import importlib.util
import sys
import torch
import sparse_bridge
from sparse_bridge.core import functional
from sparse_bridge.core.maps import request

gone = sys.argv[1:]
assert all(importlib.util.find_spec(f"sparse_bridge.core.{folder}") is None for folder in gone)
torch.manual_seed(0)
cells = torch.randperm(8 * 8 * 8)[:90]
coords = torch.stack([cells * 0, cells // 64, cells // 8 % 8, cells % 8], 1).int().contiguous()
x = torch.randn(90, 4)

cmap = functional.coordinate_map(coords)
kmap = functional.submanifold(cmap, functional.kernel_offsets((3, 3, 3)))
functional.conv(x, torch.randn(27, 4, 4), None, kmap)

with sparse_bridge.enable("spconv", mode="standin"):
    import spconv.pytorch as sp
    net = torch.nn.Sequential(
        sp.SubMConv3d(4, 8, 3), sp.SparseConv3d(8, 8, 3, 2, padding=1, indice_key="d"),
        sp.SparseInverseConv3d(8, 4, 3, indice_key="d"),
    )
    y = x.clone().requires_grad_()
    out = sp.SparseConvTensor(y, coords, [8, 8, 8], 1)
    for layer in net:
        out = layer(out)
    out.dense().sum().backward()
    assert out.features.shape == (90, 4) and torch.isfinite(y.grad).all()

with sparse_bridge.enable("torchsparse", mode="standin"):
    import torchsparse
    from torchsparse import nn as spnn
    down, up = spnn.Conv3d(4, 8, 2, 2), spnn.Conv3d(8, 4, 2, 2, transposed=True)
    y = up(down(spnn.Conv3d(4, 4, 3)(torchsparse.SparseTensor(x, coords))))
    assert y.feats.shape == (90, 4)

with sparse_bridge.enable("minkowski"):
    import MinkowskiEngine as ME
    down = ME.MinkowskiConvolution(4, 8, 2, 2, dimension=3)
    up = ME.MinkowskiConvolutionTranspose(8, 4, 2, 2, dimension=3)
    assert up(down(ME.SparseTensor(x, coords))).F.shape == (90, 4)

assert (request._provider is request._build) == ("prefetch" in gone)
print("whole")
"""


@pytest.mark.slow
@pytest.mark.parametrize("gone", [OPTIONAL[:1], OPTIONAL], ids="-".join)
def test_the_engine_without(tmp_path, gone):
    shutil.copytree(
        PACKAGE,
        tmp_path / "sparse_bridge",
        ignore=lambda folder, names: {"__pycache__"} | (set(gone) if pathlib.Path(folder).name == "core" else set()),
    )
    assert not (tmp_path / "sparse_bridge" / "core" / "capture").exists()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *gone],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["whole"]


def needs(folder: str, source: str) -> bool:
    """Whether a file imports that folder or its tests, in functions too, where it is not skipped."""
    skips = [skipped(one) for one in OPTIONAL[: OPTIONAL.index(folder) + 1]]
    found = set()
    for statement in ast.parse(source).body:
        if ast.unparse(statement).replace("'", '"') in skips:
            break
        for node in ast.walk(statement):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            if isinstance(node, ast.ImportFrom):
                start = ("core." if node.level else "") + (node.module or "")
                found |= {f"{start}.{alias.name}" for alias in node.names}
    return any(f"core.{folder}." in f"{name}." for name in found)


@pytest.mark.slow
@pytest.mark.parametrize("folder", OPTIONAL)
def test_no_other_test_needs(folder):
    """With the folders and their tests deleted, whatever is left of the tests can be run as it is."""
    gone = OPTIONAL[: OPTIONAL.index(folder) + 1]
    files = {path: path.read_text(encoding="utf-8") for path in sorted(TESTS.rglob("*.py"))}
    own = [path for path in files if path.is_relative_to(TESTS / "core") and path.relative_to(TESTS).parts[1] in gone]
    others = [path for path in files if path not in own]
    assert len(others) > 300
    assert not own or sum(needs(folder, files[path]) for path in own) > 10
    assert [str(path.relative_to(TESTS)) for path in others if needs(folder, files[path])] == []


def test_what_needs_a_folder():
    late = "def test():\n    from sparse_bridge.core import capture\n"
    assert needs("capture", late) and needs("capture", "import sparse_bridge.core.capture.graph_key")
    assert needs("capture", "from .capture.apis import scene") and not needs("prefetch", late)
    assert not needs("capture", "from sparse_bridge.core import conv, captured")
    early = skipped("capture")
    assert needs("capture", f"{late}{early}") and not needs("capture", f"{early}\n{late}")
    later = late.replace("capture", "prefetch")
    assert needs("prefetch", later) and not needs("prefetch", f"{early}\n{later}")
    assert needs("capture", f"{skipped('prefetch')}\n{late}")
