"""Recorded answers of MinkowskiEngine 0.5.4, replayed by their own runner."""

from __future__ import annotations

import warnings

import pytest
import torch

from sparse_bridge import settings
from sparse_bridge.core.conv import registry
from tests.goldens import driver, half
from tests.goldens.minkowski.run_golden import Minkowski
from tests.recorded import RECORDED

pytestmark = RECORDED
CASES = driver.public("minkowski")


def replay(device):
    """Ids of the cases that fail, with the reason."""
    wrong = {}
    for entry in CASES:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                driver.judge(Minkowski, entry, device=device)
        except Exception as error:
            wrong[entry["id"]] = f"{type(error).__name__}: {error}"
    return wrong


def test_every_public_case(ME):
    assert len(CASES) == 166
    assert replay("cpu") == {}


@pytest.mark.gpu
@pytest.mark.parametrize("dataflow", ["masked", "unmasked", "per_offset"])
def test_every_public_case_on_the_gpu(ME, dataflow):
    """Cases that keep tensors on the CPU stay there, so kernel dataflows are chosen, not forced."""
    assert not torch.backends.cuda.matmul.allow_tf32
    forced = "per_offset" if dataflow == "per_offset" else "auto"
    with registry.preferred(dataflow), settings.override(dataflow=forced):
        assert replay("cuda") == {}


@pytest.mark.emulated
def test_every_public_case_on_kernels(ME, kernel_lane):
    assert replay(kernel_lane.device) == {}


# Layers whose values are rounded inputs times weights, and nothing that a tie or a threshold moves.
FAMILIES = ("conv", "channelwise", "transpose", "generative")


@pytest.mark.parametrize(("device", "dtype"), half.LANES)
def test_convolutions_in_half_precision(ME, device, dtype):
    """One layer each: rounding between layers is another question."""
    entries = [e for e in CASES if e["family"] in FAMILIES and e["kind"] == "net"]
    assert len(entries) >= 30
    for entry in entries:
        if len(entry["spec"]["layers"]) == 1:
            half.judge(Minkowski, entry, device, dtype)
