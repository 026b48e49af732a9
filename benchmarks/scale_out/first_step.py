"""Seconds from the start of the program until its first steps have ended."""

from __future__ import annotations

import itertools
import os
import time
from typing import Any

from .. import peers, workloads
from ..works import fill
from .launch import START
from .training import Network, Rank, Step, spread

_STEPS = 6


def measure(rank: Rank, options: dict[str, Any]) -> dict[str, Any]:
    begun = time.time() - float(os.environ[START])
    peer = peers.load(options["peer"])
    model = Network(peer).to(rank.device)
    fill(peer, model.net)
    step = Step(spread(model, rank), options["dtype"], rank.device, 1e-3)
    scan = workloads.load(options["source"], device=rank.device)
    scans = list(itertools.islice(workloads.stream([scan], options["batch"]), _STEPS))
    ready, ends = time.time() - float(os.environ[START]), []
    for scan in scans:
        step(scan)
        rank.wait()
        ends.append(time.time() - float(os.environ[START]))
    return {"started": rank.started, "connected": begun, "ready": ready, "steps": ends, **_compiled()}


def _compiled() -> dict[str, int]:
    """Kernels that this process's worker processes have compiled."""
    from sparse_bridge.kernels.runtime import compile_processes

    return {"compiled": compile_processes.compiled()}
