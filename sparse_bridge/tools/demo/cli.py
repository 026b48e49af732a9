"""Command line of the demo: two spconv networks timed on a scan, a third one taught to label it."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

import sparse_bridge

from ...errors import DeviceError, SettingError, ShapeError
from ..harness.results import require_writable, save
from .birdseye import draw_birdseye
from .drawing import require_matplotlib
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
_VOXEL_SIZE = 0.1
_SEGMENT_STEPS = 60
_STREETS = range(1001, 1005)  # seeds of the scans that the segmentation network learns from
_SUMMARY = "time two spconv networks on a scan, teach a third one to label it, draw the result"


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the `demo` command to `argparse` sub-parsers; `args.func` becomes `run`."""
    parser = subparsers.add_parser("demo", help=_SUMMARY, description=_SUMMARY)
    configure(parser)
    return parser


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the demo's options to `parser`."""
    scan = parser.add_argument_group("scan")
    scan.add_argument(
        "--points",
        type=Path,
        metavar="FILE",
        help=".bin, .npy, .npz, .ply, .pcd, .las or .laz (default: a synthetic 64-beam street)",
    )
    scan.add_argument(
        "--points-columns", type=int, metavar="N", help="float32 values per point of a .bin file (default: guessed)"
    )
    scan.add_argument(
        "--voxel-size", type=float, metavar="M", help=f"edge in metres (default: the file's own, or {_VOXEL_SIZE})"
    )
    scan.add_argument(
        "--range",
        type=float,
        nargs=6,
        metavar=("X0", "Y0", "Z0", "X1", "Y1", "Z1"),
        help="crop in metres (default: derived from the points)",
    )
    runs = parser.add_argument_group("run")
    runs.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: %(default)s, a GPU if there is one"
    )
    runs.add_argument(
        "--dtype", choices=tuple(_DTYPES), default="fp32", help="of the two timed networks (default: %(default)s)"
    )
    runs.add_argument(
        "--train",
        type=int,
        nargs="?",
        const=3,
        default=0,
        metavar="STEPS",
        help="also time training steps (3 if no number is given)",
    )
    runs.add_argument(
        "--segment",
        type=int,
        metavar="STEPS",
        default=_SEGMENT_STEPS,
        help="steps in which a small network learns to label the scan, on synthetic streets "
        "(default: %(default)s; 0: none)",
    )
    runs.add_argument(
        "--repeats", type=int, metavar="N", help="timed passes per network (default: 10 on a GPU, 3 on the CPU)"
    )
    runs.add_argument("--layers", action="store_true", help="also print a row per layer of the timed networks")
    runs.add_argument("--small", action="store_true", help="a thinner U-Net, for slow machines")
    runs.add_argument("--seed", type=int, default=0, help="of weights and synthetic street (default: %(default)s)")
    runs.add_argument(
        "--output",
        type=Path,
        default=Path("demo_out"),
        metavar="DIR_OR_PNG",
        help="where the picture goes (default: demo_out/birdseye.png)",
    )
    runs.add_argument("--json", type=Path, metavar="FILE", help="also write every figure there")
    runs.add_argument("--no-picture", action="store_true", help="only print the tables")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Run the demo; 0 on success.

    Raises:
        SparseBridgeError: an option, the scan or the machine does not fit; says what to change.
    """
    for option, lowest in (("train", 0), ("segment", 0), ("repeats", 1), ("seed", 0)):
        value = getattr(args, option)
        if value is not None and value < lowest:
            raise SettingError(f"got --{option} {value}; expected {lowest} or more.")
    picture = None if args.no_picture else _picture_path(args.output)
    if args.json:
        require_writable(args.json, "--json")
    device = _device(args.device)
    console = _console()
    with sparse_bridge.enable("spconv") as handle:
        _run(args, console, device, picture, handle.status()["spconv"])
    if picture:
        console.print("picture:", str(picture), markup=False, soft_wrap=True)
    return 0


def _console() -> Console:
    """As wide as the terminal; files and pipes, which have no width, get room for all columns."""
    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(width=_WIDTH)
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


class _Steps:
    """The progress bar: one line, one step after the other."""

    def __init__(self, console: Console, total: int) -> None:
        self.bar = Progress(
            SpinnerColumn(),
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self.task = self.bar.add_task("", total=total)

    @contextlib.contextmanager
    def step(self, what: str) -> Iterator[None]:
        self.bar.update(self.task, description=what)
        yield
        self.bar.advance(self.task)


def _run(
    args: argparse.Namespace, console: Console, device: torch.device, picture: Path | None, status: FrameworkStatus
) -> None:
    segments = bool(args.segment)
    steps = _Steps(console, 4 + 2 * bool(args.train) + segments + bool(picture))
    labelled: Labelled | None = None
    with steps.bar:
        with steps.step("scan"):
            cloud, kinds = _scan(args)
        with steps.step("voxelise"):
            grid, voxelise_ms = _voxels(args, cloud, device)
        console.print(facts_table(cloud, grid, device, args.dtype, status))
        profiles: list[NetworkProfile] = []
        trained: list[TrainingResult] = []
        for network in make_networks(device, args.seed, args.small):
            forward = forward_of(network, grid, _DTYPES[args.dtype])
            with steps.step(f"{network.title}: inference"):
                calibrate(network.model, forward)
                profiles.append(_profile(network, forward, args, device))
            if args.train:
                with steps.step(f"{network.title}: training"):
                    trained.append(_train(network, forward, profiles[-1], args))
        console.print(times_table(profiles, trained, voxelise_ms))
        if segments:
            with steps.step("segmentation: training"):
                labelled = _label(args, cloud, kinds, device)
            console.print(classes_table(labelled))
        if args.layers:
            for profile in profiles:
                console.print(layers_table(profile, device, console.width))
        if args.json:
            save(args.json, _SCHEMA, _figures(profiles, trained, labelled, voxelise_ms))
        if picture:
            with steps.step("picture"):
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


def _label(args: argparse.Namespace, cloud: PointCloud, kinds: np.ndarray | None, device: torch.device) -> Labelled:
    """The scan as a network that has learnt from synthetic streets labels it."""
    scan = sample(cloud.points, kinds, Segmenter.voxel_size)
    if not len(scan.cells):
        raise SettingError(
            f"{cloud.source}: no point within {REACH:g} m of the sensor to label; expected some. Pass --segment 0."
        )
    segmenter = Segmenter(device, _STREETS, args.seed)
    segmenter.train(args.segment)
    return segmenter.label(scan)


def _picture_path(output: Path) -> Path:
    require_matplotlib(", or pass --no-picture")
    if output.suffix and output.suffix.lower() != ".png":
        raise SettingError(f"--output {output}: expected a folder or a file ending in .png.")
    path = output if output.suffix else output / "birdseye.png"
    require_writable(path, "--output")
    return path


def _scan(args: argparse.Namespace) -> tuple[PointCloud, np.ndarray | None]:
    """The scan, and the kinds of its points where they are known."""
    if args.points is None:
        street = labelled_scan(args.seed)
        return PointCloud(street.points, "synthetic 64-beam street"), street.kinds
    return load_points(args.points, args.points_columns), None


def _voxels(args: argparse.Namespace, cloud: PointCloud, device: torch.device) -> tuple[VoxelGrid, float]:
    size = args.voxel_size if args.voxel_size is not None else cloud.voxel_size or _VOXEL_SIZE
    times: list[float] = []
    grid = voxelize(cloud, size, device, args.range)  # the first call loads and compiles
    with stopwatch(device, times):
        grid = voxelize(cloud, size, device, args.range)
    return grid, times[0]
