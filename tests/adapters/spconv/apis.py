"""The two ways to meet spconv here: its stand-in, and the installed wheel with our patches."""

from __future__ import annotations

import contextlib
import importlib
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import sparse_bridge
from tests.patience import PATIENCE

ROOT = pathlib.Path(__file__).resolve().parents[3]


@contextlib.contextmanager
def without_wheel() -> Iterator[None]:
    """The wheel's modules, if imported, step aside."""
    real = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] in ("spconv", "cumm")}
    try:
        yield
    finally:
        sys.modules.update(real)


@contextlib.contextmanager
def standin() -> Iterator[Any]:
    """`spconv.pytorch` of the stand-in."""
    with without_wheel(), sparse_bridge.enable("spconv", mode="standin"):
        yield importlib.import_module("spconv.pytorch")


def wheel() -> Any:
    """`spconv.pytorch` of the installed wheel, able to run backward on the CPU; skips without."""
    sp = pytest.importorskip("spconv.pytorch", reason="the spconv wheel is not installed")
    if not torch.cuda.is_available():
        # Its CPU kernels ask for a CUDA stream in backward and never use it.
        for name, module in list(sys.modules.items()):
            if name.startswith("spconv") and "get_current_stream" in vars(module):
                module.get_current_stream = lambda: 0
    return sp


@contextlib.contextmanager
def patched() -> Iterator[Any]:
    """`spconv.pytorch` of the wheel while it is bridged."""
    sp = wheel()
    with sparse_bridge.enable("spconv", mode="patch"):
        yield sp


APIS = {"standin": standin, "patch": patched}


def tensor(
    sp: Any,
    shape: tuple[int, ...] = (7, 8, 9),
    channels: int = 4,
    rows: int = 60,
    batch_size: int = 2,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Any:
    """A `SparseConvTensor` of random features at distinct random sites, in random order."""
    generator = torch.Generator().manual_seed(seed)
    cells = batch_size
    for extent in shape:
        cells *= extent
    flat = torch.randperm(cells, generator=generator)[:rows]
    indices = torch.stack(torch.unravel_index(flat, (batch_size, *shape)), 1).int().contiguous()
    features = torch.randn(len(indices), channels, generator=generator, dtype=torch.float64)
    return sp.SparseConvTensor(features.to(dtype), indices, list(shape), batch_size)


def by_site(x: Any) -> dict[tuple[int, ...], torch.Tensor]:
    """Rows of a sparse tensor by their coordinates."""
    rows = x.features.detach()
    return {tuple(site): row for site, row in zip(x.indices.tolist(), rows, strict=True)}


def assert_same(got: Any, want: Any, tolerance: float = 1e-5) -> None:
    """Two sparse tensors agree in grid, sites and features, in whatever row order."""
    assert list(got.spatial_shape) == list(want.spatial_shape)
    mine, theirs = by_site(got), by_site(want)
    assert mine.keys() == theirs.keys()
    for site, row in theirs.items():
        torch.testing.assert_close(mine[site], row, rtol=tolerance, atol=tolerance)


def python(code: str, *arguments: str, **environment: str) -> str:
    """Run code in a fresh interpreter; its standard output. Fails with what it printed."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *arguments],
        env=env,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
