"""Patch mode on a package with FlexGEMM's names, conversion, and the life cycle."""

from __future__ import annotations

import sys
import types

import pytest
import torch

import sparse_bridge
from sparse_bridge.adapters.flex_gemm.interchange import Voxels
from sparse_bridge.errors import GeometryError, UnsupportedError

from .test_convolutions import voxels, weights


class _Refuses:
    """An autograd function of a build that does not run here."""

    @staticmethod
    def apply(*args, **kwargs):
        raise RuntimeError("no kernel image")

    @staticmethod
    def _compute_neighbor_cache(*args):
        raise RuntimeError("no kernel image")


def installed(monkeypatch, **more):
    """A package that calls its functions as FlexGEMM does."""
    sparse_bridge.disable()
    names = ["", ".ops", ".ops.spconv", ".ops.grid_sample", ".ops.serialize"]
    for name in [key for key in sys.modules if key.partition(".")[0] == "flex_gemm"]:
        monkeypatch.delitem(sys.modules, name)
    made = {name: types.ModuleType(f"flex_gemm{name}") for name in names}
    for name, module in made.items():
        module.__file__, module.__path__ = "elsewhere", []
        module.__spec__ = types.SimpleNamespace(name=module.__name__, origin="elsewhere")
        monkeypatch.setitem(sys.modules, module.__name__, module)
        parent, _, leaf = name.rpartition(".")
        if name:
            setattr(made[parent], leaf, module)
    spconv, grid = made[".ops.spconv"], made[".ops.grid_sample"]
    spconv.SubMConv3dFunction = type("SubMConv3dFunction", (_Refuses,), {})
    spconv.SparseConv3dFunction = type("SparseConv3dFunction", (_Refuses,), {})
    grid.GridSample3dFunction = type("GridSample3dFunction", (_Refuses,), {})
    made[".ops.serialize"].encode_seq = made[".ops.serialize"].decode_seq = _Refuses.apply

    def sparse_submanifold_conv3d(
        feats, coords, shape, weight, bias=None, neighbor_cache=None, dilation=(1, 1, 1)
    ):
        apply = spconv.SubMConv3dFunction.apply
        return apply(feats, coords, shape, neighbor_cache, weight, bias, dilation)

    spconv.sparse_submanifold_conv3d = sparse_submanifold_conv3d
    for name, value in more.items():
        setattr(made[""], name, value)
    return made[""]


def test_patched_functions_serve_and_come_back(flex_gemm, monkeypatch):
    feats, coords, shape = voxels(30, 3)
    weight = weights(3, 4, (3, 3, 3))
    want, _ = flex_gemm.ops.spconv.sparse_submanifold_conv3d(feats, coords, shape, weight)
    codes = flex_gemm.ops.serialize.encode_seq(coords, shape)
    real = installed(monkeypatch)
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
    assert real.ops.spconv.SubMConv3dFunction.__dict__ == before
    with pytest.raises(RuntimeError, match="no kernel image"):
        imported(feats, coords, shape, weight)


def test_another_generation_is_not_patched(monkeypatch):
    installed(monkeypatch, nn=types.ModuleType("flex_gemm.nn"))
    with pytest.raises(UnsupportedError, match=r"2\.0"):
        sparse_bridge.enable("flex_gemm", mode="patch")


def test_conversion(flex_gemm):
    feats, coords, shape = voxels(30, 3, dtype=torch.float32)
    feats.requires_grad_()
    with sparse_bridge.enable("spconv", mode="standin"):
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
