"""Training on one GPU and on several of one host, beside spconv where it can be imported.

    python -m benchmarks.scale_out --ranks 1 2 --json scale_out.json
    python -m benchmarks.scale_out --parts throughput --ranks 1 2 4 --peers bridge spconv
    python -m benchmarks.scale_out --device cpu --quick                     (what a test runs)

| part | what |
|---|---|
| `first_step` | seconds from the start of torchrun until the first step has ended, with empty and with warm caches |
| `throughput` | samples a second of a U-Net's training; every step has new scenes on every rank |
| `curves` | losses of one training as one process with the whole batch and as ranks with a part each, whose batch statistics are joint; and how far the order of a batch alone moves them |
| `checkpoint` | sharded on most ranks and saved; loaded on fewer, and on a CPU |

The record is written after every run. A part that fails says so in it, and the others follow. The
command ends with 1 where a part fails, or where `curves` or `checkpoint` do not agree as `agreement`
says they must. Neither is timed: some of their runs go on side by side.
"""  # noqa: E501

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from .. import machine, peers
from ..processes import empty_caches
from . import agreement, tables
from .curves import ORDERS
from .launch import LaunchError, launch

Record = dict[str, Any]


def _first_step(args: argparse.Namespace) -> Iterator[Record]:
    """With empty caches, then again with what that left."""
    if args.parts[0] == "first_step":
        # What the operating system reads from disk for the first time is nobody's first step.
        launch("idle", 1, {"device": args.device})
    for ranks in args.ranks:
        with tempfile.TemporaryDirectory() as folder:
            environment = empty_caches(Path(folder))
            for caches in ("empty", "warm"):
                found = launch("first_step", ranks, _options(args, args.peers[0]), environment, args.limit)
                kernels = len(list(Path(folder).rglob("*.cubin")))
                yield {"ranks": ranks, "caches": caches, "kernels": kernels, "of_ranks": found}


def _throughput(args: argparse.Namespace) -> Iterator[Record]:
    sizes = {"rounds": 3, "steps": args.steps, "warm": args.warm, "local_statistics": args.local_statistics}
    for ranks in args.ranks:
        for peer in args.peers:
            try:
                found = launch("throughput", ranks, {**_options(args, peer), **sizes}, timeout=args.limit)
            except LaunchError as error:
                yield {"peer": peer, "ranks": ranks, "error": str(error)}
                continue
            yield {"peer": peer, "ranks": ranks, "of_ranks": found}


def _curves(args: argparse.Namespace) -> Iterator[Record]:
    options = {
        "device": args.device,
        "peers": args.curve_peers,
        "batch": args.curve_batch,
        "steps": args.curve_steps,
        "scenes": args.scenes,
        "voxel_size": args.voxel_size,
        "rate": 0.01,
    }
    gpus = torch.cuda.device_count() if args.device == "cuda" else 0
    many = [ranks for ranks in args.ranks if ranks > 1]
    alone = [{"ranks": 1, "order": order, "norms": "joint"} for order in ORDERS]
    joint = [{"ranks": ranks, "order": "given", "norms": "joint"} for ranks in many]
    # What must not agree shows in the first steps.
    few = min(_FEW, args.curve_steps)
    apart = [{"ranks": max(many), "order": "given", "norms": "apart", "steps": few}] if many else []

    def run(number: int, row: Record) -> Record:
        own = {"device": f"cuda:{number % gpus}"} if gpus and row["ranks"] == 1 else {}
        return {**row, "losses": launch("curves", row["ranks"], {**options, **own, **row}, timeout=args.limit)[0]}

    # One by one where norms exchange much: ranks of several runs on one GPU would wait for its turns.
    with ThreadPoolExecutor(min(len(alone), os.cpu_count() or 1)) as pool:
        yield from pool.map(run, range(len(alone)), alone)
    yield from map(run, itertools.count(), joint + apart)


def _checkpoint(args: argparse.Namespace) -> Iterator[Record]:
    """Saved by the most ranks; loaded by every smaller number, and by one process without GPUs."""
    options = {"peers": args.curve_peers, "batch": args.curve_batch, "voxel_size": args.voxel_size}
    with tempfile.TemporaryDirectory() as folder:
        options |= {"rate": 0.01, "checkpoint": folder}
        ranks = max(args.ranks)
        found = launch("save", ranks, {**options, "device": args.device}, timeout=args.limit)
        yield from _by_peer({"part": "save", "ranks": ranks, "device": args.device}, found)
        runs = [(args.device, fewer) for fewer in args.ranks if fewer < ranks]
        runs += [("cpu", 1)] if ("cpu", 1) not in runs else []
        with ThreadPoolExecutor(min(len(runs), os.cpu_count() or 1)) as pool:
            of_runs = [
                pool.submit(launch, "load", number, {**options, "device": device}, _without_gpus(device), args.limit)
                for device, number in runs
            ]
            for (device, number), run in zip(runs, of_runs, strict=True):
                yield from _by_peer({"part": "load", "ranks": number, "device": device}, run.result())


def _by_peer(row: Record, of_ranks: list[Record]) -> Iterator[Record]:
    for peer in of_ranks[0]:
        yield {**row, "peer": peer, "of_ranks": [one[peer] for one in of_ranks]}


def _without_gpus(device: str) -> dict[str, str] | None:
    """Variables under which a CPU is all there is."""
    return {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""} if device == "cpu" else None


PARTS: dict[str, Callable[[argparse.Namespace], Iterator[Record]]] = {
    "throughput": _throughput,
    "first_step": _first_step,
    "curves": _curves,
    "checkpoint": _checkpoint,
}


def _options(args: argparse.Namespace, peer: str) -> dict[str, Any]:
    return {"peer": peer, "device": args.device, "source": args.source, "batch": args.batch, "dtype": args.dtype}


def main(argv: list[str] | None = None) -> int:
    args = _arguments(argv)
    record: Record = {
        "machine": machine.describe(args.device),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "versions": _versions(),
        "options": {name: value for name, value in vars(args).items() if name != "json"},
        "parts": {},
        "disagreements": {},
    }
    failed = False
    for part in args.parts:
        rows = record["parts"][part] = []
        begin = time.monotonic()
        try:
            for row in PARTS[part](args):
                rows.append(row)
                print(f"{time.monotonic() - begin:6.1f} s  {tables.line(part, row)}", flush=True)
                _write(record, args.json)
        except LaunchError as error:
            failed = True
            rows.append({"error": str(error)})
            print(f"{part}: {error}", file=sys.stderr, flush=True)
        print(tables.table(part, rows), flush=True)
        good = [row for row in rows if "error" not in row]
        wrong = record["disagreements"][part] = agreement.failures(part, good)
        failed = failed or bool(wrong) or len(good) < len(rows)
        for text in wrong:
            print(text, file=sys.stderr, flush=True)
        _write(record, args.json)
    return int(failed)


def _versions() -> dict[str, str]:
    owners = importlib.metadata.packages_distributions()
    return {
        name: importlib.metadata.version(owners[name][0]) for name in ("torch", "triton", "spconv") if name in owners
    }


def _write(record: Record, path: Path | None) -> None:
    if path is not None:
        path.write_text(json.dumps(record, indent=1) + "\n")


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale_out")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--ranks", nargs="+", type=int, help="default: 1 and all GPUs")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--peers", nargs="+", choices=peers.PEERS, metavar="PEER", help="of `benchmarks.peers`; default: bridge, spconv"
    )
    parser.add_argument("--source", default="street:0.1", help="of the stream; see workloads")
    parser.add_argument("--batch", type=int, default=4, help="scenes of a rank's step")
    parser.add_argument("--dtype", default="fp16", help="of autocast, or fp32")
    parser.add_argument("--steps", type=int, default=20, help="of each of three rounds")
    parser.add_argument("--warm", type=int, default=12, help="steps before them")
    parser.add_argument(
        "--local-statistics", action="store_true", help="DDP does not send the norms' statistics in every step"
    )
    parser.add_argument("--curve-peers", nargs="+", choices=peers.PEERS, metavar="PEER", default=list(_BRIDGES))
    parser.add_argument("--curve-steps", type=int, default=200)
    parser.add_argument("--curve-batch", type=int, default=4, help="over all ranks")
    parser.add_argument("--scenes", type=int, default=32, help="of the curves")
    parser.add_argument("--voxel-size", type=float, default=0.4, help="of the curves, metres")
    parser.add_argument("--limit", type=float, default=300, help="seconds for each start of torchrun")
    parser.add_argument("--quick", action="store_true", help="a few small steps: a smoke test")
    parser.add_argument("--json", type=Path, help="file of the record")
    args = parser.parse_args(argv)
    args.ranks = args.ranks or sorted({1, torch.cuda.device_count() if args.device == "cuda" else 2})
    args.peers = args.peers or ["bridge", "spconv"]
    for name in [name for name in args.peers if not peers.installed(name)]:
        print(f"{name} cannot be imported here: left out.", file=sys.stderr)
        args.peers.remove(name)
    if args.quick:
        args.source, args.batch, args.dtype, args.steps, args.warm = "sheet:500", 1, "fp32", 1, 1
        args.curve_steps, args.scenes, args.voxel_size, args.curve_batch = 2, 2, 1.6, max(2, *args.ranks)
    if any(args.curve_batch % ranks for ranks in args.ranks):
        parser.error(f"--curve-batch {args.curve_batch} does not divide among {args.ranks} ranks.")
    return args


_FEW = 20  # steps
_BRIDGES = ("bridge", "bridge_torchsparse", "bridge_minkowski")

if __name__ == "__main__":
    sys.exit(main())
