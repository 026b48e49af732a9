"""The engine and its adapters work with `core/capture` deleted: maps are built when asked for."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys

PACKAGE = pathlib.Path(__file__).resolve().parents[2] / "sparse_bridge"

PROGRAM = """
import importlib.util
import torch
import sparse_bridge
from sparse_bridge.core import functional
from sparse_bridge.core.maps import request

assert importlib.util.find_spec("sparse_bridge.core.capture") is None
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

assert request._provider is request._build
print("whole")
"""


def test_the_engine_without_capture(tmp_path):
    shutil.copytree(
        PACKAGE, tmp_path / "sparse_bridge",
        ignore=lambda folder, names: {"__pycache__"} | (
            {"capture"} if pathlib.Path(folder).name == "core" else set()
        ),
    )  # fmt: skip
    assert not (tmp_path / "sparse_bridge" / "core" / "capture").exists()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["whole"]
