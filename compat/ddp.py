"""Data-parallel training of a model in two processes, compared with the same runs on their own.

python -m compat.ddp SPEC.json RANK STORE      (started twice by the check "ddp")
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import pathlib
import subprocess
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .bridged import enable
from .cellfile import from_json, to_json
from .compare import Limits, assert_gradients_close
from .matrix import Cell
from .subject import Subject

__all__ = ["WORLD", "run_ranks"]

WORLD = 2


class _WithLoss(nn.Module):
    """The network with its loss inside, as training code wraps it: DDP needs tensors back."""

    def __init__(self, network: nn.Module, subject: Subject) -> None:
        super().__init__()
        self.network = network
        self.subject = subject

    def forward(self, *batch: Any) -> torch.Tensor:
        return self.subject.loss(self.network(*batch))


def run_ranks(cell: Cell, folder: pathlib.Path) -> None:
    """Run all ranks as processes of this machine.

    Raises:
        AssertionError: a rank failed; the message is its last line.
    """
    spec = folder / "ddp.json"
    spec.write_text(json.dumps(to_json(cell)))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if sys.platform == "linux":
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    command = [sys.executable, "-m", "compat.ddp", str(spec)]
    logs = [folder / f"rank{rank}.log" for rank in range(WORLD)]
    with contextlib.ExitStack() as stack:
        ranks = []
        for rank, log in enumerate(logs):
            out = stack.enter_context(log.open("w"))
            arguments = [*command, str(rank), str(folder / "store")]
            ranks.append(subprocess.Popen(arguments, stdout=out, stderr=out, env=environment))
            stack.callback(ranks[-1].kill)
        # A rank that fails leaves the others waiting for it: the first to fail ends the wait.
        while any(rank.poll() is None for rank in ranks) and not any(r.poll() for r in ranks):
            time.sleep(0.05)
        codes = [rank.poll() for rank in ranks]
    for index, (code, log) in enumerate(zip(codes, logs, strict=True)):
        sys.stderr.write(log.read_text())
        last = log.read_text().strip().rpartition("\n")[2]
        assert not code, f"rank {index} ended with {code}: {last}"


def _rank(cell: Cell, rank: int, store: str) -> None:
    enable(cell)
    subject = Subject(cell.model, cell.device, cell.dtype, cell.size)
    scene = subject.scene(seed=rank)
    single = _WithLoss(subject.network(), subject).train()
    single(*subject.batch(scene)).backward()
    own = subject.gradients(single.network)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    try:
        spread = nn.parallel.DistributedDataParallel(
            _WithLoss(subject.network(), subject).train(), find_unused_parameters=True
        )
        spread(*subject.batch(scene)).backward()
        together = subject.gradients(spread.module.network)
        for name in sorted(own):
            dist.all_reduce(own[name])
            own[name] /= WORLD
        limits = Limits.of(cell.dtype, cell.model.tolerances)
        assert_gradients_close(together, own, limits)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    _rank(from_json(json.loads(pathlib.Path(sys.argv[1]).read_text())), int(sys.argv[2]), sys.argv[3])
    # A wrapped module is part of a cycle and keeps gloo's threads: one that lets go of a tensor
    # while the interpreter ends aborts the process.
    gc.collect()
