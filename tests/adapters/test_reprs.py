"""Tensors and maps in a terminal: what the frameworks print themselves, else one short line."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
import torch

import sparse_bridge
from sparse_bridge.adapters import protocol
from sparse_bridge.core import functional as sparse
from sparse_bridge.core.geometry.sparse_data import SparseData
from tests.adapters.spconv import apis
from tests.rules import layers_deferred

COORDS = torch.tensor([[0, 1, 2, 3], [0, 1, 2, 4]], dtype=torch.int32)


@pytest.fixture(autouse=True)
def _plain(plain_settings):
    yield
    sparse_bridge.disable()


def test_spconv_prints_what_the_wheel_does():
    with apis.standin() as sp:
        mine = repr(apis.tensor(sp, rows=7))
    assert mine == "SparseConvTensor[shape=torch.Size([7, 4])]"
    assert repr(apis.tensor(apis.wheel(), rows=7)) == mine


def test_torchsparse():
    sparse_bridge.enable("torchsparse")
    torchsparse = importlib.import_module("torchsparse")
    x = torchsparse.SparseTensor(torch.ones(2, 3), COORDS, 2)
    parts = "feats=[2, 3] float32 cpu, coords=[2, 4] int32 cpu, stride=(2, 2, 2)"
    assert repr(x) == f"SparseTensor({parts})"
    x.spatial_range = (1, 4, 4, 5)
    assert repr(x) == f"SparseTensor({parts}, spatial_range=(1, 4, 4, 5))"
    raw = torchsparse.SparseTensor(np.ones((2, 3)), COORDS.numpy())
    assert repr(raw).startswith("SparseTensor(feats=[2, 3] float64")
    points = torchsparse.PointTensor(torch.ones(2, 3), COORDS.float())
    assert repr(points) == "PointTensor(F=[2, 3] float32 cpu, C=[2, 4] float32 cpu)"


def test_enumerations_of_minkowski_print_their_names():
    sparse_bridge.enable("minkowski")
    ME = importlib.import_module("MinkowskiEngine")
    cross = ME.RegionType.HYPER_CROSS
    assert str(cross) == f"{cross}" == "RegionType.HYPER_CROSS" and repr(cross) == "<RegionType.HYPER_CROSS: 1>"
    assert f"{cross:d}" == "1" and cross == 1 and ME.RegionType.HYPERCROSS is cross
    mode = "PoolingMode.GLOBAL_MAX_POOLING_PYTORCH_INDEX"
    assert repr(ME.MinkowskiGlobalMaxPooling()) == f"MinkowskiGlobalMaxPooling(mode={mode})"


def test_a_tensor_that_waits_is_printed_without_being_computed(rules):
    rules.hold(layers_deferred())
    sparse_bridge.enable("torchsparse")
    layers, torchsparse = (importlib.import_module(n) for n in ("torchsparse.nn", "torchsparse"))
    conv, norm = layers.Conv3d(3, 5, 3).eval(), layers.BatchNorm(5).eval()
    with torch.no_grad():
        for _ in range(2):  # the second call knows what follows
            y = conv(torchsparse.SparseTensor(torch.ones(2, 3), COORDS))
            shown = repr(y)
            waits = "feats" not in vars(y)
            norm(y)
    assert waits and shown.startswith("SparseTensor(feats=[2, 5] float32 cpu")


def test_flex_gemm_and_plain_data():
    sparse_bridge.enable("flex_gemm")
    data = SparseData(torch.ones(2, 3), COORDS, (1, 1, 1), (4, 4, 5), 1)
    assert repr(data) == (
        "SparseData(feats=[2, 3] float32 cpu, coords=[2, 4] int32 cpu, tensor_stride=(1, 1, 1), "
        "spatial_shape=(4, 4, 5), batch_size=1)"
    )
    voxels = protocol.of_framework("flex_gemm").from_core(data)
    assert repr(voxels) == ("Voxels(feats=[2, 3] float32 cpu, coords=[2, 4] int32 cpu, shape=[1, 3, 4, 4, 5])")


def test_maps():
    voxels = sparse.coordinate_map(COORDS, spatial_shape=(4, 4, 5), batch_size=1)
    assert repr(voxels) == ("CoordinateMap([2, 4] int32 cpu, Box(lo=[0, 0, 0, 0], size=[1, 4, 4, 5]))")
    kmap = sparse.submanifold(voxels, sparse.kernel_offsets((3, 3, 3)))
    assert repr(kmap) == "KernelMap(27 offsets, 2 -> 2 rows, cpu)"
    edges = torch.tensor([[0, 1], [1, 0]])
    relations = sparse.relation_map(edges, torch.tensor([0, 2]), 3, 2, 2)
    assert repr(relations) == "RelationMap(3 relations, 2 -> 2 nodes, 2 edges)"
