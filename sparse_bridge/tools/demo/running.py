"""What the demo runs: two spconv networks timed on a scan, a third one taught to label it, a picture of all."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console

import sparse_bridge

from ...errors import DeviceError, SettingError, ShapeError
from ..harness.progress import Progress
from ..harness.results import save
from . import VOXEL_SIZE
from .birdseye import draw_birdseye
from .networks import CLASSES, Network, calibrate, forward_of, make_networks
from .points import PointCloud, load_points
from .profile import NetworkProfile, profile_network, stopwatch
from .report import classes_table, facts_table, layers_table, times_table
from .scene import labelled_scan
from .segmentation import REACH, Labelled, Segmenter, sample
from .training import TrainingResult, train
from .voxels import VoxelGrid, voxelize

if TYPE_CHECKING:
    import numpy as np

    from ...adapters.lifecycle import FrameworkStatus

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_WIDTH = 140  # characters, where there is no terminal to ask
_SCHEMA = 1  # of --json
_STREETS = range(1001, 1005)  # seeds of the scans that the segmentation network learns from


def run(args: argparse.Namespace, picture: Path | None) -> int:
    """Run it with the options of `cli`, and write the picture there; 0."""
    device = _device(args.device)
    console = _console()
    with sparse_bridge.enable("spconv") as handle:
        _run(args, console, device, picture, handle.status()["spconv"])
    if picture:
        console.print("picture:", str(picture), markup=False, soft_wrap=True)
    return 0


def _console() -> Console:
    """As wide as the terminal; files and pipes, which have no width, get room for all columns."""
    console = Console(emoji=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(width=_WIDTH, emoji=False)
    return console


def _device(wanted: str) -> torch.device:
    if wanted == "cuda" and not torch.cuda.is_available():
        raise DeviceError(
            "--device cuda: torch finds no CUDA or ROCm device; expected one. "
            "Install a GPU build of torch, or pass --device cpu."
        )
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(wanted)


@contextlib.contextmanager
def _step(progress: Progress, what: str) -> Iterator[None]:
    progress.start(what)
    yield
    progress.done()


def _run(
    args: argparse.Namespace, console: Console, device: torch.device, picture: Path | None, status: FrameworkStatus
) -> None:
    segments = bool(args.segment)
    count = 4 + 2 * bool(args.train) + segments + bool(picture)
    labelled: Labelled | None = None
    with Progress(count, console=console, transient=True) as progress:
        step = partial(_step, progress)
        with step("scan"):
            cloud, kinds = _scan(args)
        with step("voxelise"):
            grid, voxelise_ms = _voxels(args, cloud, device)
        console.print(facts_table(cloud, grid, device, args.dtype, status))
        profiles: list[NetworkProfile] = []
        trained: list[TrainingResult] = []
        for network in make_networks(device, args.seed, args.small):
            forward = forward_of(network, grid, _DTYPES[args.dtype])
            with step(f"{network.title}: inference"):
                calibrate(network.model, forward)
                profiles.append(_profile(network, forward, args, device))
            if args.train:
                with step(f"{network.title}: training"):
                    trained.append(_train(network, forward, profiles[-1], args))
        console.print(times_table(profiles, trained, voxelise_ms))
        if segments:
            with step("segmentation: training"):
                labelled = _label(args, cloud, kinds, device, progress)
            console.print(classes_table(labelled))
        if args.layers:
            for profile in profiles:
                console.print(layers_table(profile, device, console.width))
        if args.json:
            save(args.json, _SCHEMA, _figures(profiles, trained, labelled, voxelise_ms))
        if picture:
            with step("picture"):
                title = f"{cloud.source}, {len(cloud.points):,} points"
                draw_birdseye(picture, grid, labelled, title)


def _figures(
    profiles: list[NetworkProfile], trained: list[TrainingResult], labelled: Labelled | None, voxelise_ms: float
) -> dict[str, Any]:
    """What the tables show, as JSON values."""
    iou = None if labelled is None else labelled.iou()
    return {
        "voxelise_ms": voxelise_ms,
        "networks": [{**dataclasses.asdict(network), "ms": network.ms} for network in profiles],
        "training": [{**dataclasses.asdict(network), "ms": network.ms} for network in trained],
        "iou": None if iou is None else [None if math.isnan(network) else float(network) for network in iou],
    }


def _profile(
    network: Network, forward: Callable[[], Any], args: argparse.Namespace, device: torch.device
) -> NetworkProfile:
    repeats = args.repeats or (10 if device.type == "cuda" else 3)
    probed = repeats if args.layers or args.json else 1  # else their times are not shown
    with torch.no_grad():
        return profile_network(network.title, network.model, forward, device, repeats, probed)


def _train(
    network: Network, forward: Callable[[], Any], profile: NetworkProfile, args: argparse.Namespace
) -> TrainingResult:
    single = next((layer.name for layer in profile.layers if (layer.rows_out or 0) < 2), None)
    if single is not None:
        raise ShapeError(
            f"--train: layer {single} of the {network.title} has 1 voxel, and batch norm learns "
            "from 2 or more. Leave --train out, or take a smaller --voxel-size or another scan."
        )
    dtype = _DTYPES[args.dtype]
    return train(network.title, network.model, network.head, forward, CLASSES, args.train, dtype)


def _label(
    args: argparse.Namespace, cloud: PointCloud, kinds: np.ndarray | None, device: torch.device, progress: Progress
) -> Labelled:
    """The scan as a network that has learnt from synthetic streets labels it."""
    scan = sample(cloud.points, kinds, Segmenter.voxel_size)
    if not len(scan.cells):
        raise SettingError(
            f"{cloud.source}: no point within {REACH:g} m of the sensor to label; expected some. Pass --segment 0."
        )
    segmenter = Segmenter(device, _STREETS, args.seed)
    segmenter.train(
        args.segment, lambda step: progress.start(f"segmentation: training, step {step + 1} of {args.segment}")
    )
    return segmenter.label(scan)


def _scan(args: argparse.Namespace) -> tuple[PointCloud, np.ndarray | None]:
    """The scan, and the kinds of its points where they are known."""
    if args.points is None:
        street = labelled_scan(args.seed)
        return PointCloud(street.points, "synthetic 64-beam street"), street.kinds
    return load_points(args.points, args.points_columns), None


def _voxels(args: argparse.Namespace, cloud: PointCloud, device: torch.device) -> tuple[VoxelGrid, float]:
    size = args.voxel_size if args.voxel_size is not None else cloud.voxel_size or VOXEL_SIZE
    times: list[float] = []
    grid = voxelize(cloud, size, device, args.range)  # the first call loads and compiles
    with stopwatch(device, times):
        grid = voxelize(cloud, size, device, args.range)
    return grid, times[0]
