"""One rank of a part; torchrun starts it.

python -m torch.distributed.run --nproc-per-node N -m benchmarks.scale_out.rank PART OPTIONS FOLDER

OPTIONS: JSON.  FOLDER: gets `rank<N>.json`.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from . import checkpoint, curves, first_step, throughput
from .joint_norm import join_on_cpus
from .launch import START
from .training import Rank

PARTS = {
    "idle": lambda rank, options: {},
    "first_step": first_step.measure,
    "throughput": throughput.measure,
    "curves": curves.measure,
    "save": checkpoint.save,
    "load": checkpoint.load,
}


def main(part: str, options: dict[str, Any], folder: Path) -> None:
    started = time.time() - float(os.environ[START])
    number, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device(options["device"])
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) if device.index is None else device.index)
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
        join_on_cpus()
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, device_id=device if backend == "nccl" else None)
    rank = Rank(number, world, device, started)
    try:
        rank.barrier()
        measured = PARTS[part](rank, options)
        (folder / f"rank{number}.json").write_text(json.dumps(measured))
        rank.barrier()
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # the end of a group waits for the other ranks, who wait for this one
    finally:
        dist.destroy_process_group()
        gc.collect()  # DDP is part of a cycle; gloo's threads must end before Python does


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3]))
