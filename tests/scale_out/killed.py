"""One of two ranks that train; the second is killed while it tunes a bucket.

python -m tests.scale_out.killed FOLDER cpu|cuda      (RANK, WORLD_SIZE ... as torchrun sets them)
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch

import sparse_bridge
from sparse_bridge.core.tuning.tune_cache import Stamp, TuneCache
from tests.patience import PATIENCE

from .networks import NETWORKS
from .rank_tools import ddp, of, start_group

LIMIT = PATIENCE / 20  # seconds of a collective
STAMP = Stamp("kernels", "3.4.0", "Some GPU", "sm_90", 132)
BUCKET = "fwd", "bucket"


def main(folder: Path, device: torch.device) -> None:
    rank = int(os.environ["RANK"])
    sparse_bridge.enable("spconv")
    device = start_group(rank, device, LIMIT)
    torch.manual_seed(0)
    network = ddp(NETWORKS["spconv"]().to(device), device)
    for step in range(100):
        if rank == 1 and step == 2:
            with TuneCache(folder, STAMP).claim(*BUCKET, wait=0.0) as mine:
                assert mine
                os.kill(os.getpid(), signal.SIGKILL)
        network(*of(rank, device, step)).square().sum().backward()
        if device.type == "cuda":
            torch.cuda.synchronize()  # until then the step has only been asked for
        print("step", step, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), torch.device(sys.argv[2]))
