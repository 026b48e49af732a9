"""The options of train_ddp.py, what it refuses before it begins, and where its checkpoints are."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch

TORCHRUN = (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0))


def parse(description: str) -> argparse.Namespace:
    """Options, and what torchrun says of this process: `rank`, `world`, `local`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--api", choices=("spconv", "torchsparse", "minkowski"), default="spconv")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cuda", "cpu"), default=default)
    parser.add_argument("--steps", type=int, default=300, help="in all (default: 300)")
    parser.add_argument("--batch", type=int, default=4, help="scans a step, over all ranks")
    parser.add_argument("--scenes", type=int, default=32, help="different streets (default: 32)")
    parser.add_argument("--voxel-size", type=float, default=0.4, help="metres (default: 0.4)")
    parser.add_argument("--rate", type=float, default=5e-3, help="the highest (default: 0.005)")
    parser.add_argument("--amp", action="store_true", help="fp16 on GPUs, bf16 on CPUs")
    parser.add_argument("--fsdp", action="store_true", help="shard the parameters instead of DDP")
    parser.add_argument("--norm", choices=("sync", "batch"), help="batch statistics over all ranks, or of each")
    parser.add_argument("--workers", type=int, default=1, help="loading processes of each rank")
    parser.add_argument("--every", type=int, default=20, help="steps from line to line")
    parser.add_argument("--save-every", type=int, default=100, help="steps between checkpoints")
    parser.add_argument("--held-out", type=int, default=4, help="streets for evaluation")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    parser.add_argument("--out", type=Path, default=Path("examples_out/train_ddp"))
    args = parser.parse_args()
    args.rank, args.world, args.local = (int(os.environ.get(name, n)) for name, n in TORCHRUN)
    args.norm = args.norm or ("batch" if args.device == "cpu" else "sync")
    if refusal := _refusal(args):
        parser.exit(2, f"{parser.prog}: {refusal}\n" if args.local == 0 else None)
    return args


def _refusal(args: argparse.Namespace) -> str | None:
    """What would fail later, or end in a training that nobody wants."""
    gpus, processes = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if args.device == "cuda" and processes > gpus:
        return f"--device cuda: a GPU for each process, of which there are {processes}; this machine has {gpus}."
    if args.norm == "sync" and args.device == "cpu":
        return "--norm sync: torch's SyncBatchNorm needs GPUs; take --norm batch."
    if min(args.batch, args.scenes, args.held_out, args.every, args.save_every) < 1:
        return "--batch, --scenes, --held-out, --every and --save-every are 1 or more."
    if args.batch % args.world:
        return f"--batch {args.batch} does not divide into {args.world} ranks."
    if args.scenes < args.batch:
        return f"--scenes {args.scenes}: fewer than --batch {args.batch}."
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"--out {args.out}: {error.strerror}."
    if not os.access(args.out, os.W_OK):
        return f"--out {args.out}: no permission to write."
    if args.resume and not checkpoints(args.out):
        return f"--resume: no checkpoint in {args.out}."
    if not args.resume and checkpoints(args.out):
        return f"--out {args.out} has checkpoints: go on with --resume, or take another folder."
    return None


def checkpoints(folder: Path) -> list[Path]:
    """Those that are whole, oldest first: a list of contents is written at the end."""
    return [path.parent for path in sorted(folder.glob("step*/.metadata"))]
