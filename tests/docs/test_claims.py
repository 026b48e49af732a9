"""What pages say of the original libraries, where one is installed."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys

import pytest
import torch

from tests.patience import PATIENCE

from .pages import ROOT

STEP = """
import torch
import spconv.pytorch as spconv

layer = spconv.SubMConv3d(4, 8, 3, bias=False)
coords = torch.nonzero(torch.ones(1, 3, 3, 3)).int()
y = layer(spconv.SparseConvTensor(torch.randn(27, 4), coords, [3, 3, 3], 1))
assert y.features.shape == (27, 8)
y.features.sum().backward()
"""
ERROR = "AssertionError: Torch not compiled with CUDA enabled"


def test_the_original_spconv_cannot_train_on_a_cpu() -> None:
    try:
        importlib.metadata.version("spconv")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("spconv's wheel for CPUs is not installed")
    if torch.version.cuda or torch.version.hip:
        pytest.skip("torch's builds for GPUs have the function that is missing")
    done = subprocess.run([sys.executable, "-c", STEP], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 1 and done.stderr.strip().splitlines()[-1] == ERROR, done.stderr


@pytest.mark.parametrize("page", ["spconv.md", "speed.md", "questions.md"])
def test_pages_say_so(page: str) -> None:
    text = " ".join((ROOT / "docs" / page).read_text(encoding="utf-8").split())
    assert f"`{ERROR}`" in text
