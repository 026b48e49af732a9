"""Samples a second of a U-Net's training over new scenes; every rank has scenes of its own."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist

from .. import peers, workloads
from ..works import fill
from .training import Network, Rank, Step, spread, timed


def measure(rank: Rank, options: dict[str, Any]) -> dict[str, Any]:
    """balance: mean over the largest number of rows of a step, which bounds what ranks that wait
    for one another can reach."""
    peer = peers.load(options["peer"])
    peer.allow_tf32(False)
    model = Network(peer).to(rank.device)
    fill(peer, model.net)
    spread_out = spread(model, rank, options["local_statistics"])
    step = Step(spread_out, options["dtype"], rank.device, 1e-3)
    rounds, steps, warm = options["rounds"], options["steps"], options["warm"]
    whole = workloads.load(options["source"], device=rank.device)
    stream = workloads.stream([whole], options["batch"])
    count = warm + rounds * steps
    # The ranks share one stream, as they share a data set.
    scans = list(itertools.islice(stream, rank.number, rank.number + rank.world * count, rank.world))
    timed(step, scans[:warm], rank)
    seconds = [timed(step, scans[begin : begin + steps], rank) for begin in range(warm, count, steps)]
    per_step = rank.world * options["batch"]
    return {
        "seconds": seconds,
        "samples_per_second": [per_step * steps / one for one in seconds],
        "rows": sum(len(scan.coords) for scan in scans[warm:]) / (len(scans) - warm),
        "balance": _balance(scans[warm:], rank),
        "peak_mb": _peak(rank),
    }


def _balance(scans: list[workloads.Scan], rank: Rank) -> float:
    own = torch.tensor([float(len(scan.coords)) for scan in scans], device=rank.device)
    of_all = [torch.empty_like(own) for _ in range(rank.world)]
    dist.all_gather(of_all, own)
    rows = torch.stack(of_all)
    return float(rows.mean(0).sum() / rows.amax(0).sum())


def _peak(rank: Rank) -> float | None:
    if rank.device.type != "cuda":
        return None
    return torch.cuda.max_memory_allocated(rank.device) / (1 << 20)
