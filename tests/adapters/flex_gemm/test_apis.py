"""Patch mode on a package with FlexGEMM's names, conversion, and the life cycle."""

from __future__ import annotations

import types

import pytest
import torch

import sparse_bridge
from sparse_bridge.adapters.flex_gemm.interchange import Voxels
from sparse_bridge.errors import GeometryError
from tests.adapters.spconv import apis

from . import installed
from .test_convolutions import voxels, weights


def test_patched_functions_serve_and_come_back(flex_gemm, monkeypatch):
    feats, coords, shape = voxels(30, 3)
    weight = weights(3, 4, (3, 3, 3))
    want, _ = flex_gemm.ops.spconv.sparse_submanifold_conv3d(feats, coords, shape, weight)
    codes = flex_gemm.ops.serialize.encode_seq(coords, shape)
    real = installed.first(monkeypatch)
    switch = real.kernels.triton.spconv.config
    imported = real.ops.spconv.sparse_submanifold_conv3d  # as `from ... import` does
    before = real.ops.spconv.SubMConv3dFunction.__dict__.copy()
    with sparse_bridge.enable("flex_gemm", mode="patch"):
        assert sparse_bridge.status()["flex_gemm"].mode == "patch"
        out, cache = imported(feats, coords, shape, weight)
        assert torch.equal(out, want)
        again, same = imported(feats, coords, shape, weight, None, cache)
        assert same is cache and torch.equal(again, out)
        assert torch.equal(real.ops.serialize.encode_seq(coords, shape), codes)
        apply = real.ops.grid_sample.GridSample3dFunction.apply
        assert apply(feats, coords, shape, torch.rand(2, 4, 3)).shape == (2, 4, 3)
        strided = real.ops.spconv.SparseConv3dFunction.apply
        _, places, _ = strided(feats, coords, shape, None, weight, None, None, (2, 2, 2))
        assert len(places)
        assert switch.allow_tf32 is None  # torch's own decides, until somebody assigns it
    assert real.ops.spconv.SubMConv3dFunction.__dict__ == before and switch.allow_tf32 is True
    with pytest.raises(RuntimeError, match="no kernel image"):
        imported(feats, coords, shape, weight)


def test_caches_of_the_installed_build_are_read(flex_gemm, monkeypatch):
    """Made before it was patched."""
    feats, coords, shape = voxels(30, 3)
    weight = weights(3, 4, (3, 3, 3))
    want, ours = flex_gemm.ops.spconv.sparse_submanifold_conv3d(feats, coords, shape, weight)
    real = installed.first(monkeypatch)
    theirs = types.SimpleNamespace(neighbor_map=ours.neighbor_map)
    function = real.ops.spconv.sparse_submanifold_conv3d
    with sparse_bridge.enable("flex_gemm", mode="patch"):
        out, same = function(feats, coords, shape, weight, None, theirs)
        assert same is theirs and torch.equal(out, want)
        theirs.neighbor_map = ours.neighbor_map.flip(0)
        assert not torch.equal(function(feats, coords, shape, weight, None, theirs)[0], want)


def test_conversion(flex_gemm):
    feats, coords, shape = voxels(30, 3, dtype=torch.float32)
    feats.requires_grad_()
    with apis.standin():
        there = sparse_bridge.convert(Voxels(feats, coords, shape), to="spconv")
        assert there.spatial_shape == list(shape[2:]) and there.batch_size == shape[0]
        back = sparse_bridge.convert(there, to="flex_gemm")
    assert torch.equal(back.feats, feats) and torch.equal(back.coords, coords)
    assert back.shape == shape
    back.feats.sum().backward()
    assert feats.grad is not None
    core = sparse_bridge.convert(back, to="core", spatial_shape=(9, 9, 9))
    assert sparse_bridge.convert(core, to="flex_gemm").shape == (2, 3, 9, 9, 9)
    bare = type(core)(feats, coords - 3, (1, 1, 1))
    with pytest.raises(GeometryError, match="negative"):
        sparse_bridge.convert(bare, to="flex_gemm")


def test_layers_are_counted(flex_gemm):
    feats, coords, shape = voxels(10, 3)
    flex_gemm.ops.spconv.sparse_submanifold_conv3d(feats, coords, shape, weights(3, 3, (3, 3, 3)))
    layers = sparse_bridge.report().layers["flex_gemm"]
    assert layers["sparse_submanifold_conv3d"].bridged >= 1
