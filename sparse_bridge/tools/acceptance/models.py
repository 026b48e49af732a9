"""Whole networks: each framework's against the CPU, a training run, repeatability, a first step."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

import sparse_bridge

from ... import tolerances
from ..demo.training import train
from ..demo.voxels import street_voxels
from ..networks import minkowski, spconv, torchsparse
from .kinks import away_from_kinks
from .setup import SKIPPED, Outcome, Setup, error_of, plain_torch, synchronize, verdict

THIN: dict[str, Any] = {"encoder": (16, 24, 32, 48), "decoder": (48, 32, 24, 24), "blocks": (1, 1, 1, 1), "stem": 16}
CLASSES = 4
_STEPS, _LEARNT = 12, 0.7


def _spconv(model: Any, features: torch.Tensor, scan: Any) -> torch.Tensor:
    module = importlib.import_module("spconv.pytorch")
    coords, shape, batch = scan
    x = module.SparseConvTensor(features, coords.to(features.device), list(shape), batch)
    return model(x).features


def _torchsparse(model: Any, features: torch.Tensor, scan: Any) -> torch.Tensor:
    module = importlib.import_module("torchsparse")
    return model(module.SparseTensor(features, scan[0].to(features.device))).feats


def _minkowski(model: Any, features: torch.Tensor, scan: Any) -> torch.Tensor:
    module = importlib.import_module("MinkowskiEngine")
    return model(module.SparseTensor(features, coordinates=scan[0].to(features.device))).F


def make(name: str) -> nn.Module:
    """A thin residual U-Net in a framework's API."""
    torch.manual_seed(0)
    if name == "spconv":
        return spconv.ResidualUNet(importlib.import_module("spconv.pytorch"), 4, CLASSES, **THIN)
    if name == "torchsparse":
        blocks = {**THIN, "blocks": (1,) * 8}
        return torchsparse.ResidualUNet(importlib.import_module(name), 4, CLASSES, **blocks)
    return minkowski.MinkUNet(
        importlib.import_module("MinkowskiEngine"),
        4,
        CLASSES,
        layers=(1,) * 8,
        planes=(16, 24, 32, 48, 48, 32, 24, 24),
        init=16,
    )


# name: the output of a model in its API, from features and (coordinates, shape, batch size)
RUN: dict[str, Callable[[Any, torch.Tensor, Any], torch.Tensor]] = {
    "spconv": _spconv,
    "torchsparse": _torchsparse,
    "minkowski": _minkowski,
}


def step_of(name: str, model: nn.Module, features: torch.Tensor, scan: Any) -> list[torch.Tensor]:
    """Output and gradients of every parameter after one training step."""
    y = RUN[name](model, features, scan)
    (y.square().mean() + y[:, 0].mean()).backward()
    return [y.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@contextlib.contextmanager
def _ieee(name: str) -> Iterator[None]:
    """fp32 is not rounded to TF32, which torchsparse allows unless told otherwise."""
    if name != "torchsparse":
        yield
        return
    switches: Any = importlib.import_module("torchsparse.backends")
    before, switches.allow_tf32 = switches.allow_tf32, False
    try:
        yield
    finally:
        switches.allow_tf32 = before


def networks(setup: Setup) -> Iterator[Outcome]:
    """A residual U-Net through each framework's API, one training step, against fp64 on the CPU."""
    limit = tolerances.of("network", "fp32").rms
    scan = street_voxels(setup.rows(20_000, 5_000, 60))
    features = torch.randn(len(scan[0]), 4, generator=torch.Generator().manual_seed(2))
    wide = features.double()
    for name, run in RUN.items():
        with sparse_bridge.enable(name), _ieee(name):
            with plain_torch():
                model = make(name).double()
                away_from_kinks(model, functools.partial(run, model, wide, scan))
                want = step_of(name, copy.deepcopy(model), wide, scan)
            with setup.in_force():
                model = model.to(setup.device, torch.float32)
                got = step_of(name, model, features.to(setup.device), scan)
        errors = [error_of(a, b)[1] for a, b in zip(got, want, strict=True)]
        # Gradients pass through norms of few rows, which magnify rounding.
        bad = errors[0] > limit or max(errors) > 10 * limit
        detail = f"RMS errors: output {errors[0]:.1e}, gradients up to {max(errors):.1e}"
        problem = f"{detail}; allowed {limit:.0e} and {10 * limit:.0e}" if bad else None
        yield verdict(f"network, {name}", problem, detail, output=errors[0], most=max(errors))


def train_once(setup: Setup, steps: int, rows: int) -> tuple[list[float], list[torch.Tensor], float]:
    """Losses, final parameters and milliseconds per step of a U-Net that learns height bands."""
    module = importlib.import_module("spconv.pytorch")
    coords, shape, batch = street_voxels(rows)
    model = make("spconv").to(setup.device)
    heights = coords[:, 1:].float() / torch.tensor(shape)
    noise = torch.randn(len(coords), 1, generator=torch.Generator().manual_seed(3))
    features = torch.cat([heights, noise], 1).to(setup.device)

    def forward() -> Any:
        x = module.SparseConvTensor(features, coords.to(setup.device), list(shape), batch)
        return model(x)

    done = train("U-Net", model, nn.Identity(), forward, CLASSES, steps, torch.float32)
    synchronize(setup.device)
    return done.losses, [p.detach().cpu() for p in model.parameters()], done.ms


def training(setup: Setup) -> Iterator[Outcome]:
    """A training run that must converge."""
    with sparse_bridge.enable("spconv"), setup.in_force():
        losses, _, ms = train_once(setup, _STEPS, setup.rows(40_000, 4_000, 100))
    ratio = losses[-1] / losses[0]
    detail = f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {_STEPS} steps of {ms:.1f} ms"
    problem = None if ratio < _LEARNT else f"{detail}; expected less than {_LEARNT:g} of the first"
    yield verdict("training", problem, detail, losses=losses, milliseconds=ms)


def determinism(setup: Setup) -> Iterator[Outcome]:
    """Three training steps from the same seed, twice: the same bits."""
    rows = setup.rows(40_000, 4_000, 100)
    with sparse_bridge.enable("spconv"), setup.in_force():
        runs = [train_once(setup, 3, rows) for _ in range(2)]
    same = sum(torch.equal(a, b) for a, b in zip(runs[0][1], runs[1][1], strict=True))
    total = len(runs[0][1])
    problem = None if same == total else f"{total - same} of {total} parameters differ"
    yield verdict("determinism", problem, f"{total} parameters, the same bits after 3 steps")


_FIRST_STEP = """
import json, sys, time
start = time.perf_counter()
import torch
imported = time.perf_counter()
from sparse_bridge.tools.acceptance import models, setup
import sparse_bridge
there = setup.Setup.find(sys.argv[1])
with sparse_bridge.enable("spconv"), there.in_force():
    ms = []
    for _ in range(3):
        begin = time.perf_counter()
        models.one_step(there, int(sys.argv[2]))
        ms.append(time.perf_counter() - begin)
print(json.dumps(dict(torch_s=imported - start, first_s=ms[0], third_s=ms[2])))
"""


def one_step(setup: Setup, rows: int) -> None:
    """Forward and backward of SECOND under fp16 autocast, as detectors train."""
    module = importlib.import_module("spconv.pytorch")
    coords, shape, batch = street_voxels(rows)
    torch.manual_seed(0)
    model = spconv.Second(module).to(setup.device)
    features = torch.randn(len(coords), 4, device=setup.device)
    x = module.SparseConvTensor(features, coords.to(setup.device), list(shape), batch)
    half = setup.device.type == "cuda"
    with torch.autocast(setup.device.type, torch.float16, enabled=half):
        y = model(x).features
    (2.0**10 * y.float().square().mean()).backward()
    synchronize(setup.device)


def cold_start(setup: Setup) -> Iterator[Outcome]:
    """The first training step of a process with nothing compiled."""
    if setup.emulated:
        yield Outcome("cold start", SKIPPED, "compiling for an emulated GPU says nothing of one")
        return
    rows = setup.rows(60_000, 4_000, 0)
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-c", _FIRST_STEP, str(setup.device), str(rows)],
            env={**os.environ, "TRITON_CACHE_DIR": folder},
            capture_output=True,
            text=True,
        )
        files = [name for *_, names in os.walk(folder) for name in names]
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        yield verdict("cold start", f"the process failed: {last}", "")
        return
    forms = sum(name.endswith((".cubin", ".hsaco")) for name in files)
    facts = json.loads(done.stdout.strip().splitlines()[-1])
    detail = (
        f"SECOND, first training step {facts['first_s']:.1f} s with {forms} kernel variants "
        f"to compile, third {1e3 * facts['third_s']:.0f} ms"
    )
    yield verdict("cold start", None, detail, forms=forms, **facts)
