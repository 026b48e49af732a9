"""Which release the process speaks: chosen, set in the environment, or detected."""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import os
import subprocess
import sys
import warnings

import pytest
import torch

import sparse_bridge
from sparse_bridge import settings
from sparse_bridge.adapters import base
from sparse_bridge.errors import LifecycleError, SettingError, SparseBridgeError

from .conftest import speaking
from .test_conv import points

VERSIONS = {"2.1": "2.1.0", "2.0": "2.0.0b", "1.4": "1.4.0"}


def note():
    return sparse_bridge.status()["torchsparse"].notes[0]


@pytest.mark.parametrize("profile", VERSIONS)
def test_a_chosen_profile_shows_everywhere(profile):
    with speaking(profile) as ts:
        assert ts.__version__ == ts.version.__version__ == VERSIONS[profile]
        assert importlib.metadata.version("torchsparse") == VERSIONS[profile]
        status = sparse_bridge.status()["torchsparse"]
        assert status.version == VERSIONS[profile] and status.mode == "standin"
        assert note().startswith(f"profile {profile} (enable(profile={profile!r}))")
        assert f"profile {profile}" in str(sparse_bridge.report())


def test_the_default_is_the_newest():
    with speaking(None) as ts:
        assert ts.__version__ == "2.1.0" and "a call with an older release's signature" in note()
        ts.nn.Conv3d(4, 4, 3)(sample(ts, "2.1"))
        assert note() == "profile 2.1 (default), coordinates [b, x, y, z]"


def sample(ts, release):
    coords = points(release)
    return ts.SparseTensor(torch.randn(len(coords), 4), coords)


def test_a_setting_chooses(plain_settings, monkeypatch):
    monkeypatch.setenv("SPARSE_BRIDGE_ENABLE", "torchsparse_profile=2.0")
    settings.reset()
    sparse_bridge.disable()
    with sparse_bridge.enable("torchsparse", mode="standin"):
        assert note().startswith("profile 2.0 (SPARSE_BRIDGE_ENABLE)")
    with sparse_bridge.enable("torchsparse", mode="standin", profile="1.4"):
        assert note().startswith("profile 1.4 (enable")
    with pytest.raises(SettingError, match=r"is '3.0'; expected one of auto, 2.1, 2.0, 1.4"):
        settings.from_environment({"SPARSE_BRIDGE_ENABLE": "torchsparse_profile=3.0"})


@pytest.mark.parametrize("call", ["layer", "function"])
def test_an_old_call_decides(call, caplog):
    with speaking(None) as ts:
        with caplog.at_level(logging.WARNING, "sparse_bridge"):
            if call == "layer":
                conv = ts.nn.Conv3d(4, 5, 3, 1, 1, False, False)  # mmdetection3d's way
            else:
                x = sample(ts, "1.4")
                y = ts.nn.functional.conv3d(x, torch.randn(27, 4, 5), 3, None, 1, 1, False)
                assert y.F.shape[1] == 5
                conv = ts.nn.Conv3d(4, 5, 3)
        assert "profile 1.4 was detected" in caplog.text
        assert ts.__version__ == "1.4.0" and "detected" in note()
        assert sparse_bridge.status()["torchsparse"].version == "1.4.0"
        assert conv(sample(ts, "1.4")).F.shape[1] == 5


def test_an_old_call_comes_too_late_or_contradicts():
    with speaking(None) as ts:
        ts.nn.Conv3d(4, 4, 3)(sample(ts, "2.1"))
        with pytest.raises(TypeError, match="tensors were processed with it"):
            ts.nn.Conv3d(4, 5, 3, 1, 1, False, False)
    with speaking("2.1") as ts:
        with pytest.raises(TypeError, match=r"as torchsparse 1.4 and 2.0 take it") as caught:
            ts.nn.Conv3d(4, 5, 3, 1, 1, False, True)
        assert isinstance(caught.value, SparseBridgeError)
        assert ts.nn.Conv3d(4, 5, 3, 1, 0, 1, True).bias is not None  # TRELLIS's way
    for profile in ("1.4", "2.0"):
        with speaking(profile) as ts:
            with pytest.raises(TypeError, match=r"where torchsparse .* takes a bool"):
                ts.nn.Conv3d(4, 5, 3, 1, 0, 1, True)
            with pytest.raises(TypeError, match="takes a bool"):
                ts.nn.functional.conv3d(sample(ts, profile), torch.ones(27, 4, 4), 3, None, 1, 0, 1)


def test_trilinear_weights_of_an_old_layout():
    """The layer that follows has read the coordinates by then, so the release is settled; else this decides."""
    point, index = torch.rand(5, 4), torch.zeros(8, 5, dtype=torch.int32)
    with speaking(None) as ts:
        ts.nn.Conv3d(4, 4, 3)(sample(ts, "2.1"))
        with pytest.raises(TypeError, match=r"\[8, N\], as torchsparse 1.4 and 2.0 take it.*profile='1.4'"):
            ts.nn.functional.calc_ti_weights(point, index, scale=2)
    with speaking(None) as ts:
        assert ts.nn.functional.calc_ti_weights(point, index, scale=2).shape == (8, 5)
        assert ts.__version__ == "1.4.0" and "idx_query" in note()
    with speaking("2.1") as ts:
        assert ts.nn.functional.calc_ti_weights(point.repeat(8, 1)[:8], torch.zeros(8, 8).int()).shape == (8, 8)
        with pytest.raises(ValueError, match="expected"):
            ts.nn.functional.calc_ti_weights(point, index[:, :4])


@pytest.mark.parametrize("name", ["cmaps", "kmaps"])
def test_attributes_of_old_releases_warn_where_nobody_chose(name):
    for profile in (None, "2.1", "1.4"):
        with speaking(profile) as ts, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            x, y = sample(ts, "2.1"), sample(ts, "2.1")
            ts.nn.Conv3d(4, 4, 3)(x)
            assert not caught and getattr(x, name) is not None
            setattr(y, name, getattr(x, name))
            assert len(caught) == (profile is None)
            for warning in caught:
                assert f"SparseTensor.{name}" in str(warning.message) and "profile='1.4'" in str(warning.message)
                assert warning.filename == __file__


def test_wrong_profiles():
    sparse_bridge.disable()
    with pytest.raises(SettingError, match=r"'1.3'; expected one of torchsparse: 2.1, 2.0, 1.4"):
        sparse_bridge.enable("torchsparse", profile="1.3")
    with pytest.raises(SettingError, match="spconv has no profiles"):
        sparse_bridge.enable("spconv", profile="2.1")
    with speaking("2.1"):
        with sparse_bridge.enable("torchsparse"), sparse_bridge.enable("torchsparse", profile="2.1"):
            pass
        with pytest.raises(LifecycleError, match=r"with profile '2\.1', not '1\.4'"):
            sparse_bridge.enable("torchsparse", profile="1.4")
    with speaking(None):
        sparse_bridge.enable("torchsparse", profile="2.1").disable()
        assert note().startswith("profile 2.1 (enable(profile='2.1'))"), "named now, settled now"


def test_profiles_one_after_the_other():
    """One class object per name, whatever the profile; a model made before speaks the new one."""
    with speaking("1.4") as ts:
        kind = ts.nn.Conv3d
        conv = kind(4, 5, 2, stride=2)
        assert conv(sample(ts, "1.4")).C.max() >= 4
    with speaking("2.1") as ts:
        assert ts.nn.Conv3d is kind
        assert conv(sample(ts, "2.1")).C.max() <= 3


def test_probing_for_the_package():
    with speaking("2.1") as ts:
        spec = importlib.util.find_spec("torchsparse")
        assert spec is not None and spec.origin.endswith("__init__.py")
        assert ts.__spec__.name == "torchsparse"
        for name in (
            "torchsparse.nn.functional.devoxelize",
            "torchsparse.nn.functional.conv.conv_config",
            "torchsparse.nn.functional.conv.utils.collections",
            "torchsparse.utils.quantize",
            "torchsparse.utils.collate",
            "torchsparse.utils.tensor_cache",
            "torchsparse.utils.tune",
            "torchsparse.tensor",
            "torchsparse.operators",
            "torchsparse.backbones.resnet",
            "torchsparse.backend",
            "torchsparse.backends",
            "torchsparse.nn.modules.conv",
            "torchsparse.nn.functional.voxelize",
            "torchsparse.nn.functional.query",
            "torchsparse.nn.functional.hash",
            "torchsparse.nn.functional.count",
            "torchsparse.nn.functional.downsample",
            "torchsparse.nn.utils.kernel",
        ):
            module = importlib.import_module(name)
            assert all(hasattr(module, listed) for listed in getattr(module, "__all__", ()))
        with pytest.raises(ImportError, match="stand-in"):
            importlib.import_module("torchsparse.tuning")
        with pytest.raises(ImportError):
            importlib.import_module("torchsparse.nonesuch")
        with pytest.raises(AttributeError):
            _ = ts.TensorCache
        F = ts.nn.functional
        assert F.conv.conv3d is F.conv3d and F.hash.sphash is F.sphash
        assert F.conv.conv_config is F.conv_config


PUBLIC = {
    "torchsparse": """
        PointTensor SparseTensor backend backends cat generative_add nn operators tensor tune
        utils version
    """,
    "torchsparse.nn": """
        BatchNorm Conv3d GlobalAvgPool GlobalMaxPool GroupNorm InstanceNorm LeakyReLU ReLU SiLU
        SparseCrop ToBEVConvolution ToBEVHeightCompression ToBEVReduction ToDenseBEVConvolution
        functional modules utils
    """,
    "torchsparse.nn.functional": """
        ConvMode Dataflow build_kernel_map calc_ti_weights conv conv3d conv_config conv_mode
        convert_transposed_out_in_map get_conv_mode get_default_conv_config get_downsample_mode
        get_global_conv_config get_kmap_mode global_avg_pool global_max_pool hash kmap
        leaky_relu relu set_conv_mode set_downsample_mode set_global_conv_config set_kmap_mode
        silu spcount spcrop spdevoxelize spdownsample sphash sphashquery spupsample_generative
        spvoxelize transpose_kernel_map utils
    """,
    "torchsparse.utils.tensor_cache": """
        TensorCache TensorCacheMode clear_global_tensor_cache get_global_tensor_cache
        get_tensor_cache_mode set_global_tensor_cache set_tensor_cache_mode
    """,
    "torchsparse.backbones": """
        SparseResNet21D SparseResUNet42 modules resnet unet
    """,
}


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names(name):
    with speaking("2.1"):
        module = importlib.import_module(name)
        assert set(module.__all__) == set(PUBLIC[name].split())
        assert all(hasattr(module, each) for each in module.__all__)


def test_layers_are_counted():
    with speaking("2.1") as ts:
        before = sparse_bridge.report().layers.get("torchsparse", {})
        x = sample(ts, "2.1")
        y = ts.nn.Conv3d(4, 4, 2, 2, transposed=True)(ts.nn.Conv3d(4, 4, 2, 2)(ts.nn.Conv3d(4, 4, 1)(x)))
        ts.nn.GlobalAvgPool()(y)
        now = sparse_bridge.report().layers["torchsparse"]
        for layer in ("Conv3d", "Conv3d transposed", "Conv3d 1x1x1", "GlobalAvgPool"):
            known = before[layer].bridged if layer in before else 0
            assert now[layer].bridged == known + 1


@pytest.mark.slow
def test_importing_wakes_no_gpu_and_imports_no_triton():
    code = (
        "import sys, sparse_bridge; sparse_bridge.enable('torchsparse', mode='standin')\n"
        "import torchsparse, torchsparse.backbones, torch\n"
        "assert not torch.cuda.is_initialized() and 'triton' not in sys.modules\n"
        "assert torchsparse.__version__ == '1.4.0'"
    )
    environment = {**os.environ, "SPARSE_BRIDGE_ENABLE": "torchsparse_profile=1.4"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def test_the_adapter_is_registered():
    adapter = base.load("torchsparse")
    assert adapter.profiles == ("2.1", "2.0", "1.4") and adapter.packages == ("torchsparse",)
