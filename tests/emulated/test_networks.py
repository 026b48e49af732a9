"""Whole networks of all three frameworks on kernels, forward and backward, against the goldens.

Tensors lie on the CPU; the interpreter or an emulated GPU executes what a real GPU would.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json

import numpy as np
import pytest
import torch

import sparse_bridge
from sparse_bridge.core.device import trace
from tests.adapters.minkowski import test_goldens as minkowski
from tests.adapters.spconv import doors
from tests.adapters.torchsparse.conftest import speaking
from tests.goldens.spconv import run_golden as spconv_runner
from tests.goldens.torchsparse import run_golden as torchsparse_runner
from tests.recorded import RECORDED

pytestmark = RECORDED
GOLDENS = doors.ROOT / "tests" / "goldens"
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


@functools.cache
def cases(framework):
    entries = json.loads((GOLDENS / framework / "public" / "manifest.json").read_text())["cases"]
    return {entry["id"]: entry for entry in entries}


def arrays_of(framework, entry):
    if not entry.get("file"):
        return {}
    with np.load(GOLDENS / framework / "public" / entry["file"], allow_pickle=False) as stored:
        return {name: stored[name] for name in stored.files}


@contextlib.contextmanager
def spconv(profile=None):
    with doors.standin():
        env = spconv_runner.Env()
        yield lambda entry: spconv_runner.judge(env, entry["spec"], arrays_of("spconv", entry))


@contextlib.contextmanager
def torchsparse(profile="2.1"):
    with speaking(profile):
        yield lambda entry: torchsparse_runner.run_case(entry, arrays_of("torchsparse", entry))


@contextlib.contextmanager
def minkowski_engine(profile=None):
    with sparse_bridge.enable("minkowski"):
        ME = importlib.import_module("MinkowskiEngine")
        yield lambda entry: minkowski.runner.run_case(
            ME, entry, arrays_of("minkowski", entry), "cpu"
        )
        minkowski.runner.reset_globals(ME)


FRAMEWORKS = {"spconv": spconv, "torchsparse": torchsparse, "minkowski": minkowski_engine}


@pytest.fixture(autouse=True)
def small_tensors():
    """Row order of a golden is compared; one thread for tiny tensors."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.interpreted
@pytest.mark.emulated
@pytest.mark.parametrize(
    "framework, name, layers", [pytest.param(*n, id=f"{n[0]}-{n[1]}") for n in NETWORKS]
)
def test_network(kernel_lane, framework, name, layers):
    """Every layer ran on kernels, and outputs and all gradients are the recorded ones."""
    torch.manual_seed(0)
    with FRAMEWORKS[framework]() as replay, trace.record() as events:
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
    with FRAMEWORKS[framework](profile) as replay:
        for entry in chosen:
            torch.manual_seed(0)
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
