"""Two generations of FlexGEMM in one process, one at a time."""

from __future__ import annotations

import importlib

import pytest
import torch

import sparse_bridge
from sparse_bridge.adapters import protocol
from sparse_bridge.core.geometry.sparse_data import SparseData
from sparse_bridge.errors import GeometryError, LifecycleError, SettingError, SparseBridgeError, UnsupportedError

from . import installed
from .test_convolutions import voxels, weights


@pytest.fixture(autouse=True)
def disabled():
    sparse_bridge.disable()
    yield
    sparse_bridge.disable()


def generation(profile):
    return sparse_bridge.enable("flex_gemm", mode="standin", profile=profile)


def test_profiles_take_turns():
    with generation(None):
        first = importlib.import_module("flex_gemm")
        assert not hasattr(first, "nn") and hasattr(first.ops, "serialize")
        assert "profile 1" in sparse_bridge.status()["flex_gemm"].notes[0]
        with pytest.raises(LifecycleError, match="already with profile '1'"):
            generation("2.0")
        with pytest.raises(ImportError, match=r"profile='2\.0'"):
            importlib.import_module("flex_gemm.nn")
        with pytest.raises(UnsupportedError, match=r"profile='2\.0'"):
            _ = first.nn
    with generation("2.0"):
        second = importlib.import_module("flex_gemm")
        assert second is not first and hasattr(second, "nn") and hasattr(second, "config")
        assert not hasattr(second.ops, "serialize") and not hasattr(second.ops, "grid_sample")
        for name in ("flex_gemm.ops.serialize", "flex_gemm.ops.grid_sample"):
            with pytest.raises(ImportError, match="profile='1'"):
                importlib.import_module(name)
        with pytest.raises(UnsupportedError, match="profile='1'"):
            _ = second.ops.spconv.SubMConv3dFunction
        assert "sparse_conv4d" in second.ops.__all__
        assert "profile 2.0" in sparse_bridge.status()["flex_gemm"].notes[0]
    with generation("1"):
        assert importlib.import_module("flex_gemm") is first
    with pytest.raises(SettingError):
        generation("3")


def test_a_profile_of_two_frameworks_needs_a_name():
    with pytest.raises(SettingError, match="torchsparse and flex_gemm have a profile"):
        sparse_bridge.enable("torchsparse", "flex_gemm", profile="2.0")


def test_old_names_warn_and_agree():
    feats, coords, shape = voxels(40, 3)
    weight = weights(3, 4, (3, 3, 3))
    with generation("1"):
        from flex_gemm.ops.spconv import sparse_submanifold_conv3d

        want, _ = sparse_submanifold_conv3d(feats, coords, shape, weight)
    with generation("2.0"):
        from flex_gemm.ops import spconv

        last = (shape[0], *shape[2:], shape[1])
        with pytest.warns(DeprecationWarning, match="submanifold_conv3d"):
            got, cache = spconv.sparse_submanifold_conv3d(feats, coords, last, weight)
        assert torch.equal(got, want)
        with pytest.warns(DeprecationWarning):
            again, same = spconv.sparse_submanifold_conv3d(feats, coords, None, weight, None, cache)
        assert same is cache and torch.equal(again, got)
        with pytest.warns(DeprecationWarning, match="set_algorithm"):
            spconv.set_algorithm(spconv.Algorithm.EXPLICIT_GEMM)
        with pytest.warns(DeprecationWarning, match="set_hashmap_ratio"):
            spconv.set_hashmap_ratio(3.0)


MODULES = {
    "nn.pool": "SparsePool3d SubmanifoldPool",
    "nn.sparse_conv": "SparseConv2d SparseConvTranspose",
    "nn.submanifold_conv": "SubmanifoldConv4d",
    "nn.upsample": "SparseUpsample SparsePixelShuffle3d SparsePixelUnshuffle",
    "ops.neighbor_cache": "NeighborCache NeighborCacheT build_neighbor_cache",
    "ops.pool": "sparse_pool submanifold_pool2d",
    "ops.pool.sparse_pool": "sparse_pool sparse_pool3d",
    "ops.pool.submanifold_pool": "submanifold_pool",
    "ops.sample": "sparse_grid_sample sparse_upsample sparse_pixel_shuffle2d",
    "ops.sample.grid_sample": "sparse_grid_sample",
    "ops.sample.pixel_shuffle": "sparse_pixel_shuffle sparse_pixel_shuffle4d",
    "ops.sample.pixel_unshuffle": "sparse_pixel_unshuffle",
    "ops.sample.upsample": "sparse_upsample3d",
    "ops.spconv.sparse_conv": "sparse_conv sparse_conv3d",
    "ops.spconv.sparse_conv_transpose": "sparse_conv_transpose3d",
    "ops.spconv.submanifold_conv": "submanifold_conv submanifold_conv3d",
    "ops.utils": "sort_coords coalesce_coords compute_strided_kernel_size_output_shape",
}


@pytest.mark.parametrize("module", MODULES)
def test_modules_by_what_they_hold(module):
    with generation("2.0"):
        found = importlib.import_module(f"flex_gemm.{module}")
        above = importlib.import_module(f"flex_gemm.{module.partition('.')[0]}")
        for name in MODULES[module].split():
            assert getattr(found, name) is getattr(above, name) and name in found.__all__


def test_what_is_installed_decides(monkeypatch, tmp_path):
    folder = tmp_path / "flex_gemm" / "nn"
    folder.mkdir(parents=True)
    for place in (folder, folder.parent):
        (place / "__init__.py").write_text("raise ImportError('no kernel image')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with sparse_bridge.enable("flex_gemm"):
        assert "2.0 is installed" in sparse_bridge.status()["flex_gemm"].notes[0]
        assert hasattr(importlib.import_module("flex_gemm"), "nn")
    with generation("1"):
        assert not hasattr(importlib.import_module("flex_gemm"), "nn")


def test_another_generation_than_the_installed_one_is_not_patched(monkeypatch):
    installed.first(monkeypatch)
    with pytest.raises(LifecycleError, match="FlexGEMM 1 is installed"):
        sparse_bridge.enable("flex_gemm", mode="patch", profile="2.0")
    installed.second(monkeypatch)
    with pytest.raises(LifecycleError, match=r"FlexGEMM 2\.0 is installed"):
        sparse_bridge.enable("flex_gemm", mode="patch", profile="1")


@pytest.mark.parametrize("profile", ["1", "2.0"])
def test_conversions_have_the_shape_of_the_generation(profile):
    """The tuple is what its functions take: read by the other generation, channels would be an extent."""
    data = SparseData(torch.randn(2, 3), torch.tensor([[0, 4, 5, 6], [1, 0, 2, 3]]).int(), (1, 1, 1), (5, 6, 7), 2)
    with generation(profile):
        voxels = sparse_bridge.convert(data, to="flex_gemm")
        assert voxels.shape == ((2, 3, 5, 6, 7) if profile == "1" else (2, 5, 6, 7, 3))
        wider = protocol.of_framework("flex_gemm").with_features(voxels, torch.randn(2, 8)).shape
        assert wider == ((2, 8, 5, 6, 7) if profile == "1" else (2, 5, 6, 7, 8))
        for given in (voxels, tuple(voxels), (data.feats, data.coords, list(voxels.shape))):
            back = sparse_bridge.convert(given, to="core")
            assert back.feats is data.feats and torch.equal(back.coords, data.coords)
            assert (back.spatial_shape, back.batch_size, back.tensor_stride) == ((5, 6, 7), 2, (1, 1, 1))
        with pytest.raises(SparseBridgeError, match="entries"):
            sparse_bridge.convert((data.feats, data.coords, (2, 3)), to="core")
        for spoilt in (data.coords.long(), data.coords[:, :1]):
            with pytest.raises(SparseBridgeError, match=r"int32|shape"):
                sparse_bridge.convert((data.feats, spoilt, voxels.shape), to="core")
        flat = SparseData(data.feats, data.coords[:, :3].contiguous(), (1, 1), (5, 6), 2)
        if profile == "2.0":
            assert sparse_bridge.convert(flat, to="flex_gemm").shape == (2, 5, 6, 3)
        else:
            with pytest.raises(GeometryError, match="three axes"):
                sparse_bridge.convert(flat, to="flex_gemm")


def test_a_profile_is_text():
    """A number prints as the text would, so that the list of profiles would say nothing."""
    with pytest.raises(SettingError, match=r"profile is 2\.0, a float; give it as text, profile='2\.0'"):
        generation(2.0)
