"""Whole networks of all three frameworks on kernels, forward and backward, against the goldens.

Tensors lie on the CPU; the interpreter or an emulated GPU executes what a real GPU would.
"""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch

import sparse_bridge
from sparse_bridge.core.device import trace
from tests.adapters.spconv import apis
from tests.adapters.torchsparse.conftest import speaking
from tests.goldens import driver
from tests.goldens.minkowski.run_golden import Minkowski
from tests.goldens.spconv.run_golden import SpConv
from tests.goldens.torchsparse.run_golden import TorchSparse
from tests.recorded import RECORDED

pytestmark = RECORDED
# (framework, case, fewest sparse convolutions in it): encoders and U-Nets with gradients of every
# parameter.
NETWORKS = [
    ("spconv", "prog_unet_k3_head", 3),
    ("spconv", "prog_unet_k2", 5),
    ("spconv", "net_second_train", 5),
    ("torchsparse", "p21_unet_b2", 5),
    ("torchsparse", "p21_minkunet", 8),
    ("minkowski", "net_dense_decoder", 2),
    ("minkowski", "net_minkunet_train", 8),
]
SPCONV_LAYERS = ("conv", "subm", "inverse", "maxpool", "transpose", "net", "edge")
TORCHSPARSE_LAYERS = ("submanifold", "strided", "transposed", "unet", "pool", "points", "bev")


# The dialect of each, and how its stand-in is met under a profile.
FRAMEWORKS = {
    "spconv": (SpConv, lambda profile: apis.standin()),
    "torchsparse": (TorchSparse, lambda profile: speaking(profile or "2.1")),
    "minkowski": (Minkowski, lambda profile: sparse_bridge.enable("minkowski")),
}


@functools.cache
def cases(framework):
    return {entry["id"]: entry for entry in driver.public(framework)}


@contextlib.contextmanager
def replaying(framework, profile=None):
    dialect, standin = FRAMEWORKS[framework]
    with standin(profile):
        yield lambda entry: driver.judge(dialect, entry)


@pytest.fixture(autouse=True)
def small_tensors():
    """Row order of a golden is compared; one thread for tiny tensors."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.interpreted
@pytest.mark.emulated
@pytest.mark.parametrize("framework, name, layers", [pytest.param(*n, id=f"{n[0]}-{n[1]}") for n in NETWORKS])
def test_network(kernel_lane, framework, name, layers):
    """Every layer ran on kernels, and outputs and all gradients are the recorded ones."""
    with replaying(framework) as replay, trace.record() as events:
        replay(cases(framework)[name])
    convolutions = [event for event in events if event.kind == "conv"]
    assert len(convolutions) >= layers
    assert {event.dataflow for event in convolutions} == {kernel_lane.dataflow}


def failing(framework, families, profile=None):
    """Ids of the recorded cases of `families` that fail, with the reason; and how many ran."""
    chosen = [
        entry
        for entry in cases(framework).values()
        if entry["family"] in families and (profile is None or profile in entry["profiles"])
    ]
    wrong = {}
    with replaying(framework, profile) as replay:
        for entry in chosen:
            try:
                replay(entry)
            except Exception as error:
                wrong[entry["id"]] = f"{type(error).__name__}: {error}"
    return wrong, len(chosen)


@pytest.mark.slow
@pytest.mark.emulated
def test_recorded_layers_of_spconv(kernel_lane):
    wrong, n = failing("spconv", SPCONV_LAYERS)
    assert wrong == {} and n >= 80


@pytest.mark.slow
@pytest.mark.emulated
@pytest.mark.parametrize("profile, least", [("2.1", 25), ("1.4", 20)])
def test_recorded_layers_of_torchsparse(kernel_lane, profile, least):
    wrong, n = failing("torchsparse", TORCHSPARSE_LAYERS, profile)
    assert wrong == {} and n >= least
