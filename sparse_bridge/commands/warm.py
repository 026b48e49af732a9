"""What `python -m sparse_bridge warm` does: compile kernels, and tune their tiles, before they are needed."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import as_completed
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from .. import folders, settings
from ..core.tuning import tuner as tuners
from ..core.tuning.groups import Groups
from ..core.tuning.tune_cache import DIRECTIONS, Stamp, TuneCache, Winners, encode, shipped
from ..errors import DeviceError, SettingError
from ..kernels.runtime import target as targets
from ..tools import group_race
from ..tools.harness.pool import Pool
from ..tools.harness.progress import Progress
from .warm_jobs import LayerJob, ModelJob, layer_jobs
from .warm_names import MODELS

_MOST_JOBS = 8

Job = LayerJob | ModelJob
Timer = Callable[[Callable[[], object], float], float]


def run(args: argparse.Namespace, timer: Timer | None = None) -> int:
    """Run the command; 0 on success. timer: how tiles are timed, None by events of the GPU.

    Raises: DeviceError where no kernels run.
    """
    device = device_of(args.device)
    jobs = jobs_of(args)
    console = Console(stderr=args.json, emoji=False)  # then standard output is for the result
    setup = Setup(device, args.tune)
    start = time.perf_counter()
    compile_all(jobs, setup, args.jobs or _processes(len(jobs)), console)
    seconds = time.perf_counter() - start
    console.print(f"compiled in {seconds:.1f} s", highlight=False)
    tuner = _tune(jobs, setup, args, timer, console) if args.tune else tuners.Tuner()
    exported = _export(args.export, device, console) if args.export else None
    if args.json:
        done: dict[str, Any] = {"device": str(device), "jobs": [str(job) for job in jobs]}
        done["seconds"] = seconds
        done["tuned"] = [_facts(result) for result in tuner.results]
        done["groups"] = [dataclasses.asdict(group) for group in tuner.groups]
        sys.stdout.write(json.dumps({**done, "exported": exported}) + "\n")
    return 0


def jobs_of(args: argparse.Namespace) -> list[Job]:
    """Networks, layers, or if neither is named, all networks."""
    models = MODELS if args.models is None and not args.channels else args.models or ()
    rows, train = tuple(args.rows), not args.inference
    jobs: list[Job] = [ModelJob(m, dtype, rows, train) for m in models for dtype in args.dtypes]
    if args.channels:
        jobs += layer_jobs(args.channels, args.kernels, args.dtypes, args.layouts, args.rows, train)
    return jobs


def device_of(requested: str) -> torch.device:
    """The device whose kernels are warmed."""
    has_gpu = torch.cuda.is_available()
    if requested == "cuda" and not has_gpu:
        raise DeviceError(
            "--device cuda: torch finds no CUDA or ROCm device; expected one. "
            "Install a GPU build of torch, or run this where the GPU is."
        )
    gpu = has_gpu and requested != "cpu"
    device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
    reason = targets.unavailable(device)
    if reason is not None:
        without = "" if gpu else "torch finds no CUDA or ROCm device, and "
        raise DeviceError(
            f"there is nothing to compile: {without}{reason}. Layers on {device} run in plain "
            "torch and need no warming; run this where the GPU is."
        )
    return device


def _processes(jobs: int) -> int:
    return max(1, min(jobs, _MOST_JOBS, os.cpu_count() or 1))


@dataclasses.dataclass(frozen=True)
class Setup:
    """What a process needs before it runs jobs."""

    device: torch.device
    tune: bool

    @contextlib.contextmanager
    def in_force(self, tuner: tuners.Tuner) -> Iterator[None]:
        forced = settings.get().dataflow
        # CPU tensors take kernels (interpreted or emulated ones) only if told to.
        flow = "masked" if self.device.type == "cpu" and forced == "auto" else forced
        mode = "full" if self.tune else settings.get().tune
        with settings.override(dataflow=flow, tune=mode), tuners.use(tuner):
            yield


def _compile_one(job: Job, setup: Setup) -> None:
    """Run a job, and with tuning ahead every candidate of its problems."""
    timer = None if targets.of(setup.device).raw else _untimed
    with setup.in_force(tuners.Tuner(timer, how="compile")):
        job.run(setup.device)


def _compile_beside(job: Job, setup: Setup) -> None:
    """`_compile_one` in one of several processes, which start no more of them."""
    if targets.of(setup.device).raw:
        from ..kernels.runtime import compile_processes

        compile_processes.enabled = False
    _compile_one(job, setup)


def _untimed(run: Callable[[], object], limit: float) -> float:
    raise AssertionError("compiling times nothing")


def compile_all(jobs: Sequence[Job], setup: Setup, processes: int, console: Console) -> None:
    with Progress(len(jobs), "compile", console, transient=True) as progress:
        remaining = jobs
        if processes > 1:
            remaining = _compile_side_by_side(jobs, setup, processes, progress.done)
        for job in remaining:
            progress.start(f"compile {job}")
            _compile_one(job, setup)
            progress.done()


def _compile_side_by_side(jobs: Sequence[Job], setup: Setup, processes: int, done: Callable[[], object]) -> list[Job]:
    """Run jobs in several processes; those for which the device's memory was too small beside the
    others."""
    crowded = []
    with Pool(processes) as pool:
        futures = {pool.submit(_compile_beside, job, setup): job for job in jobs}
        for future in as_completed(futures):
            try:
                future.result()
            except torch.OutOfMemoryError:
                crowded.append(futures[future])
            else:
                done()
    return crowded


def _tune(
    jobs: Sequence[Job], setup: Setup, args: argparse.Namespace, timer: Timer | None, console: Console
) -> tuners.Tuner:
    """One after the other: a GPU that does two things at a time cannot be timed."""
    if timer is None and not targets.of(setup.device).raw:
        raise DeviceError(f"--tune: tiles cannot be timed on {setup.device}; expected a real GPU.")
    tuner = tuners.Tuner(timer, how="blocking", budget=args.budget, again=args.again)
    with Progress(len(jobs), "tune", console, transient=True) as progress, setup.in_force(tuner):
        for job in jobs:
            progress.start(f"tune {job}")
            # Networks tell what shares a map; a layer alone stands for nobody's group.
            with group_race.tuned() if isinstance(job, ModelJob) else contextlib.nullcontext():
                job.run(setup.device)
            progress.done()
    console.print(_results(tuner.results))
    for group in tuner.groups:
        console.print(f"{group}", highlight=False, markup=False, soft_wrap=True)
    return tuner


def _facts(result: tuners.Result) -> dict[str, Any]:
    """As JSON values."""
    winner = None if result.winner is None else dataclasses.asdict(result.winner)
    facts = {"direction": result.bucket.direction, "problem": str(result.bucket)}
    return {**facts, "winner": winner, "why": result.why}


def _results(results: Sequence[tuners.Result]) -> Table:
    table = Table("direction", "problem", "default us", "best us", "gain", "tile", title="Tuned", title_justify="left")
    for result in results:
        names = (result.bucket.direction, str(result.bucket))
        winner = result.winner
        if winner is None:
            table.add_row(*names, "-", "-", "-", result.why)
            continue
        default_us, best_us = winner.default_microseconds, winner.microseconds
        tile = dataclasses.astuple(winner.tile)
        shown = "x".join(map(str, tile[:3])) + f", {tile[3]} warps, {tile[4]} stages"
        shown += f", {dict(tile[5])}" if tile[5] else ""
        gain = f"{100 * (1 - best_us / default_us):.0f} %" if default_us else "-"
        table.add_row(*names, f"{default_us:.1f}", f"{best_us:.1f}", gain, shown)
    return table


def _export(path: Path, device: torch.device, console: Console) -> int:
    """The winners of this device in force: shipped ones, and over them those of the disk."""
    stamp = Stamp.of(device, targets.of(device))
    sources = [*reversed(shipped(stamp)), TuneCache(folders.cache(), stamp).contents()]
    winners: Winners = {direction: {} for direction in DIRECTIONS}
    groups: Groups = {}
    for source in sources:
        groups.update(source.groups)
        for direction, buckets in source.winners.items():
            winners[direction].update(buckets)
    try:
        path.write_text(encode(stamp, winners, groups), encoding="utf-8")
    except OSError as error:
        raise SettingError(f"--export {path}: {error}; expected a file that can be written.") from None
    count = sum(map(len, winners.values())) + len(groups)
    console.print(f"{count} tuned tiles and dataflows in {path}", highlight=False, soft_wrap=True, markup=False)
    return count
