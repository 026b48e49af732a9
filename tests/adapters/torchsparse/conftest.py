from __future__ import annotations

import contextlib

import pytest
import torch

import sparse_bridge
from sparse_bridge import settings

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@contextlib.contextmanager
def speaking(profile):
    """The stand-in under one profile (None: undecided), with its switches as they were made."""
    sparse_bridge.disable()
    with settings.override(torchsparse_profile="auto"):
        handle = sparse_bridge.enable("torchsparse", mode="standin", profile=profile)
        try:
            import torchsparse
            from torchsparse.nn import functional as F
            from torchsparse.utils import tensor_cache

            torchsparse.backends.init()
            torchsparse.backends.allow_tf32 = False
            F.conv_config.clear_global_conv_config()
            default = dict(F.conv_config.get_default_conv_config())
            yield torchsparse
        finally:
            F.conv_config.get_default_conv_config().update(default)
            F.conv_config.clear_global_conv_config()
            F.set_conv_mode(0)
            tensor_cache.set_tensor_cache_mode(tensor_cache.TensorCacheMode.SEPARATE_TENSOR_CACHE)
            tensor_cache.clear_global_tensor_cache()
            torchsparse.backends.init()
            handle.disable()


@pytest.fixture
def ts21():
    """torchsparse 2.1."""
    with speaking("2.1") as module:
        yield module


@pytest.fixture
def ts14():
    """torchsparse 1.4."""
    with speaking("1.4") as module:
        yield module


@pytest.fixture(params=["2.1", "2.0", "1.4"])
def ts(request):
    """torchsparse under each profile; `ts.release` names it."""
    with speaking(request.param) as module:
        module.release = request.param
        yield module
        del module.release


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
