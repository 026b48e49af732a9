"""`import spconv_triton` is answered as spconv where it is missing, or where it was asked for."""

from __future__ import annotations

import importlib
import importlib.util
import pickle
import sys

import pytest
import torch

import sparse_bridge
from sparse_bridge.errors import LifecycleError, SettingError

from . import apis

BELOW = (
    "pytorch",
    "pytorch.utils",
    "pytorch.functional",
    "pytorch.quantization",
    "core",
    "utils",
    "constants",
    "tools",
)


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Another package of that name, where imports look."""
    package = tmp_path / "spconv_triton"
    package.mkdir()
    (package / "__init__.py").write_text("mark = 'real'\n")
    (package / "pytorch.py").write_text("mark = 'real'\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in ("spconv_triton", "spconv_triton.pytorch"):
        sys.modules.pop(name, None)


def note():
    notes = sparse_bridge.status()["spconv"].notes
    return [text for text in notes if "spconv_triton" in text]


def test_a_missing_package_is_answered_with_the_same_modules(sp):
    assert importlib.util.find_spec("spconv_triton") is not None and not note()
    whole = importlib.import_module("spconv_triton")
    assert whole is sys.modules["spconv"] and note()
    for name in BELOW:
        if name != "pytorch.quantization" or hasattr(sp.SparseConvTensor, "_switches"):
            ours = importlib.import_module(f"spconv_triton.{name}")
            assert ours is importlib.import_module(f"spconv.{name}"), name
    from spconv_triton.pytorch import SubMConv3d
    from spconv_triton.pytorch.conv import SparseConvolution

    assert SubMConv3d is sp.SubMConv3d and issubclass(SubMConv3d, SparseConvolution)
    x = apis.tensor(sp)
    again = pickle.loads(pickle.dumps(x))
    assert type(again) is sp.SparseConvTensor and torch.equal(again.features, x.features)
    with pytest.raises(ImportError):
        importlib.import_module("spconv_triton.nowhere")


def test_nothing_is_left_when_spconv_is_disabled():
    with apis.standin():
        importlib.import_module("spconv_triton.pytorch.ops")
    assert not [name for name in sys.modules if name.startswith("spconv_triton")]
    with pytest.raises(ModuleNotFoundError, match="spconv_triton"):
        importlib.import_module("spconv_triton")
    with apis.standin() as sp:
        assert importlib.import_module("spconv_triton.pytorch") is sp


def test_an_installed_package_answers_for_itself(installed):
    with apis.standin():
        assert importlib.import_module("spconv_triton.pytorch").mark == "real" and not note()
    assert sys.modules["spconv_triton"].mark == "real", "nobody takes it away"


def test_unless_its_name_is_given(installed):
    with apis.standin() as sp:
        with sparse_bridge.enable("spconv_triton") as handle:
            assert list(handle.status()) == ["spconv"] and note()
            assert importlib.import_module("spconv_triton.pytorch") is sp
        assert sparse_bridge.status()["spconv"].enabled
    assert importlib.import_module("spconv_triton.pytorch").mark == "real"
    assert not sparse_bridge.status()["spconv"].enabled
    with pytest.raises(LifecycleError, match="real spconv_triton is imported already"):
        sparse_bridge.enable("spconv_triton")
    assert not sparse_bridge.status()["spconv"].enabled, "nothing is half enabled"


def test_a_claim_ends_with_its_handle(installed):
    with apis.standin(), sparse_bridge.enable("spconv_triton"):
        pass
    with apis.standin():
        assert importlib.import_module("spconv_triton").mark == "real"


@pytest.mark.slow
def test_the_name_disables_as_it_enables():
    code = """
import sys, sparse_bridge
sparse_bridge.enable("spconv_triton", mode="standin")
import spconv_triton.pytorch as spconv
import torch
y = spconv.SubMConv3d(2, 3, 3)(spconv.SparseConvTensor(
    torch.ones(1, 2), torch.tensor([[0, 1, 1, 1]], dtype=torch.int32), [3] * 3, 1))
sparse_bridge.disable("spconv_triton")
print(list(y.features.shape), sparse_bridge.status()["spconv"].enabled,
      [name for name in sys.modules if name.startswith("spconv")])
"""
    assert apis.python(code).strip() == "[1, 3] False []"


def test_unknown_names_are_refused_and_known_ones_listed():
    with pytest.raises(SettingError, match="spconv_triton"):
        sparse_bridge.enable("spconv_tritton")
