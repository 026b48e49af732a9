"""Recorded answers of torchsparse 1.4, 2.0 and 2.1."""

from __future__ import annotations

import pytest
import torch

from tests.goldens import driver
from tests.goldens.torchsparse.run_golden import TorchSparse
from tests.recorded import RECORDED

from .conftest import DEVICES, speaking

pytestmark = RECORDED
CASES = driver.public("torchsparse")
NAMES = [pytest.param(case, profile, id=f"{profile}-{case['id']}") for case in CASES for profile in case["profiles"]]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case, profile", NAMES)
def test_recorded(case, profile, device):
    with speaking(profile):
        driver.judge(TorchSparse, case, device=device)


@pytest.mark.parametrize("profile", ["2.1", "2.0", "1.4"])
def test_double_precision_agrees_further(profile):
    """The networks in fp64: what is left is the rounding of the recorded fp32 numbers."""
    for case in CASES:
        if profile in case["profiles"] and case["family"] == "unet":
            with speaking(profile):
                report = driver.judge(TorchSparse, case, dtype=torch.float64)
            assert report.errors and report.worst < 5e-5, case["id"]


def test_every_family_is_there():
    families = {case["family"] for case in CASES}
    assert families >= {"submanifold", "strided", "transposed", "unet", "hash", "points", "bev"}
    assert len(NAMES) == 46 + 33 + 33
