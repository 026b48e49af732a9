"""What needs no kernels on a CPU is there where torch has no Triton, as its CPU wheels: records, tables, pickles."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.patience import PATIENCE

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
SETUP = """
import sys
sys.modules["triton"] = None
import pickle, torch, sparse_bridge
cells = torch.unique(torch.randint(0, 9, (200, 3), dtype=torch.int32), dim=0)
coords = torch.cat([torch.zeros(len(cells), 1, dtype=torch.int32), cells], 1)
feats = torch.rand(len(coords), 8)
"""
SPCONV = """
sparse_bridge.enable("spconv", mode="standin")
import spconv.pytorch as sp
from spconv.core import ConvAlgo
layers = [
    sp.SubMConv3d(8, 8, 3, indice_key="a"), sp.SparseConv3d(8, 8, 3, 2, 1, indice_key="b"),
    sp.SparseConvTranspose3d(8, 8, 3, 2, 1, indice_key="c"), sp.SparseMaxPool3d(2, 2, indice_key="d"),
]
for layer, key in zip(layers, "abcd"):
    y = layer(sp.SparseConvTensor(feats, coords, [9] * 3, 1))
    record = y.indice_dict[key]
    for name in ("pair_fwd", "pair_bwd", "pair_mask_fwd_splits", "mask_argsort_fwd_splits", "masks"):
        assert getattr(record, name) is not None, name
    assert torch.equal(pickle.loads(pickle.dumps(y)).features, y.features)
norm = sp.SparseSequential(sp.SubMConv3d(8, 8, 3), torch.nn.BatchNorm1d(8), torch.nn.ReLU())
norm(sp.SparseConvTensor(feats, coords, [9] * 3, 1)).features.sum().backward()
for algorithm in (ConvAlgo.Native, ConvAlgo.MaskImplicitGemm):
    geometry = (coords, 1, [9] * 3, algorithm, [3] * 3, [1] * 3, [1] * 3, [1] * 3, [0] * 3, True)
    assert len(sp.ops.get_indice_pairs_implicit_gemm(*geometry)) > 5
"""
TORCHSPARSE = """
sparse_bridge.enable("torchsparse", mode="standin")
import torchsparse, torchsparse.nn as spnn
y = spnn.Conv3d(8, 8, 2, stride=2)(torchsparse.SparseTensor(feats, coords))
(record,) = y.kmaps.values()
assert record["out_in_map"].dtype == record["out_in_map_t"].dtype == torch.int32
assert torch.equal(pickle.loads(pickle.dumps(y)).feats, y.feats)
"""
MINKOWSKI = """
sparse_bridge.enable("minkowski", mode="standin")
import MinkowskiEngine as ME
x = ME.SparseTensor(feats, coords)
y = ME.MinkowskiConvolution(8, 8, kernel_size=3, stride=2, dimension=3)(x)
maps = x.coordinate_manager.kernel_map(x.coordinate_map_key, y.coordinate_map_key, kernel_size=3, stride=2)
assert sum(pair.shape[1] for pair in maps.values()) > len(coords)
y.F.sum().backward()
"""
FLEX_GEMM = """
sparse_bridge.enable("flex_gemm", mode="standin")
from flex_gemm.ops.spconv import sparse_submanifold_conv3d
shape = torch.Size([1, 8, 9, 9, 9])
y, cache = sparse_submanifold_conv3d(feats, coords, shape, torch.randn(4, 3, 3, 3, 8), None)
assert cache["neighbor_map"].shape == (len(coords), 27)
"""
FLEX_GEMM_2 = """
sparse_bridge.enable("flex_gemm", mode="standin", profile="2.0")
import flex_gemm
shape = torch.Size([1, 8, 9, 9, 9])
flex_gemm.submanifold_conv3d(feats, coords, shape, torch.randn(4, 3, 3, 3, 8))
for run in (flex_gemm.sparse_upsample3d, flex_gemm.sparse_pixel_shuffle3d, flex_gemm.sparse_pixel_unshuffle3d):
    run(feats, coords, shape, 2)
"""
EXPORT = """
import onnx
sparse_bridge.enable("spconv", mode="standin")
import spconv.pytorch as sp
from sparse_bridge.export import export_onnx
layers = sp.SubMConv3d(8, 8, 3, indice_key="a"), torch.nn.ReLU(), sp.SparseConv3d(8, 8, 3, 2, 1)
net, x = sp.SparseSequential(*layers).eval(), sp.SparseConvTensor(feats, coords, [9] * 3, 1)
export_onnx(net, x, "net.onnx", verify=True)
assert onnx.load("net.onnx").graph.node
"""
PROGRAMS = {
    "spconv": SPCONV,
    "torchsparse": TORCHSPARSE,
    "minkowski": MINKOWSKI,
    "flex_gemm": FLEX_GEMM,
    "flex_gemm 2.0": FLEX_GEMM_2,
    "export": EXPORT,
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", PROGRAMS)
def test_on_a_cpu(name, tmp_path):
    if name == "export":
        pytest.importorskip("onnx")
    code = SETUP + PROGRAMS[name] + '\nassert sys.modules["triton"] is None\n'
    run = [sys.executable, "-c", code]
    environment = {**os.environ, "PYTHONPATH": ROOT}
    done = subprocess.run(run, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
