"""One of two ranks that train; the second is killed while it tunes a bucket.

python -m tests.scale_out.killed FOLDER      (RANK, WORLD_SIZE ... as torchrun sets them)
"""

from __future__ import annotations

import datetime
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import sparse_bridge
from sparse_bridge.core.tuning.tune_cache import Stamp, TuneCache
from tests.patience import PATIENCE

from .networks import NETWORKS, cloud

LIMIT = datetime.timedelta(seconds=PATIENCE / 30)  # of a collective
STAMP = Stamp("kernels", "3.4.0", "Some GPU", "sm_90", 132)
BUCKET = "fwd", "bucket"


def main(folder: Path) -> None:
    rank = int(os.environ["RANK"])
    sparse_bridge.enable("spconv")
    dist.init_process_group("gloo", timeout=LIMIT)
    torch.manual_seed(0)
    network = DistributedDataParallel(NETWORKS["spconv"]())
    for step in range(100):
        if rank == 1 and step == 2:
            with TuneCache(folder, STAMP).claim(*BUCKET, wait=0.0) as mine:
                assert mine
                os.kill(os.getpid(), signal.SIGKILL)
        network(*cloud(step)).square().sum().backward()
        print("step", step, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
