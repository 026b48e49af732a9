"""A GPU that is not there, and work whose speed and results tests decide."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from unittest import mock

import pytest
import torch

from sparse_bridge import settings
from sparse_bridge.core.tuning import cost, tune_cache, tuner
from sparse_bridge.core.tuning.problem import Problem
from sparse_bridge.core.tuning.trial import Trial
from sparse_bridge.core.tuning.tune_cache import Stamp, TuneCache, Winner
from sparse_bridge.core.tuning.tuner import Tuner
from sparse_bridge.kernels.runtime.target import Target
from tests.patience import PATIENCE

H200 = Target("cuda", "sm_90", 32, 132, 227 << 10, raw=False)
CPU = torch.device("cpu")
STAMP = Stamp("abc", "3.6.0", "NVIDIA H200", "sm_90", 132)

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")


def problem(direction="fwd", n_rows=94_444, c=64, **changes):
    """A submanifold 3x3x3 layer in fp16."""
    flow, pairs = ("pairs", 284_298) if direction == "wgrad" else ("unmasked", 0)
    found = Problem(direction, flow, CPU, H200, torch.float16, "ieee", "io", c, c, 1, 27, n_rows, n_rows, pairs)
    return found._replace(**changes)


def tile(block_m=64, block_n=64, block_k=64, num_warps=4, num_stages=2, vendor=()):
    pytest.importorskip("triton")
    from sparse_bridge.kernels.tiles.tile import TileConfig

    return TileConfig(block_m, block_n, block_k, num_warps, num_stages, vendor)


def winner(microseconds=10.0, **sizes):
    return Winner(tile(**sizes), microseconds, 20.0, 3)


class Work:
    """A problem whose tiles take the seconds of `speed` (default 1e-3) and all give `value`, but
    for those with a `fault`: a function that spoils the result or raises."""

    def __init__(self, value=None, speed=None, faults=None):
        self.value = torch.randn(40, 64) if value is None else value
        self.speed, self.faults = speed or {}, faults or {}
        self.timed, self.ran = [], []
        self._last = None

    def trial(self):
        table = torch.empty((27, 94_444), dtype=torch.int32, device="meta")
        return Trial(self._build, (self.value,), lambda: torch.empty_like(self.value), table)

    def _build(self, tile):
        def plan(value, result):
            self._last = tile
            self.ran.append(tile)
            result.copy_(value)
            if tile in self.faults:
                self.faults[tile](result)

        return plan

    def timer(self, run, limit):
        run()
        self.timed.append(self._last)
        return self.speed.get(self._last, 1e-3)


@contextlib.contextmanager
def tuning(mode, folder, **changes):
    """The mode in force, with winners in `folder` and shipped ones in `folder`/shipped only."""
    with contextlib.ExitStack() as stack:
        shipped = mock.patch.object(tune_cache, "shipped_folder", lambda: folder / "shipped")
        stack.enter_context(shipped)
        stack.enter_context(settings.override(tune=mode, cache_dir=folder, **changes))
        yield


def here(place, one=None):
    """The cache that a tuner of this process uses for `one`."""
    one = one or problem()
    return TuneCache(place, Stamp.of(one.device, one.target))


def blocking(work, **options):
    return Tuner(work.timer, how="blocking", **options)


def never(run, limit):
    raise AssertionError("nothing may be timed")


def fastest(one, work, rank=1):
    """Make a candidate of `one` ten times as fast as the rest; it is among those that are timed."""
    found = cost.shortlist(one, work.trial().live, tuner.COUNT)[rank]
    work.speed[found] = 1e-4
    return found


def fork(work, *arguments):
    """A started child process that runs `work(connection, *arguments)`, and our connection."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=work, args=(theirs, *arguments))
    child.start()
    theirs.close()
    return child, ours


def kill(child):
    os.kill(child.pid, signal.SIGKILL)
    child.join(PATIENCE)
    assert not child.is_alive()
