"""Recorded answers of torchsparse 1.4, 2.0 and 2.1."""

from __future__ import annotations

import functools
import json
import pathlib

import pytest
import torch

from tests.goldens.torchsparse import run_golden
from tests.recorded import RECORDED

from .conftest import DEVICES, speaking

pytestmark = RECORDED
PUBLIC = pathlib.Path(run_golden.__file__).parent / "public"


@functools.cache
def cases():
    return json.loads((PUBLIC / "manifest.json").read_text())["cases"]


NAMES = [
    pytest.param(case, profile, id=f"{profile}-{case['id']}")
    for case in cases()
    for profile in case["profiles"]
]


def arrays_of(case):
    return run_golden.load_arrays(PUBLIC / case["file"])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case, profile", NAMES)
def test_recorded(case, profile, device):
    with speaking(profile):
        run_golden.run_case(case, arrays_of(case), device)


@pytest.mark.parametrize("profile", ["2.1", "2.0", "1.4"])
def test_double_precision_agrees_further(profile):
    """The networks in fp64: what is left is the rounding of the recorded fp32 numbers."""
    for case in cases():
        if profile in case["profiles"] and case["family"] == "unet":
            with speaking(profile):
                worst = run_golden.run_case(case, arrays_of(case), "cpu", torch.float64)
            assert max(worst.values()) < 5e-5, case["id"]


def test_every_family_is_there():
    families = {case["family"] for case in cases()}
    assert families >= {"submanifold", "strided", "transposed", "unet", "hash", "points", "bev"}
    assert len(NAMES) == 46 + 33 + 33
