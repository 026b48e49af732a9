"""Command line of the demo: one scan through two spconv networks, with a table and a picture."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

import sparse_bridge

from ..errors import DeviceError, SettingError
from .birdseye import draw_birdseye, require_matplotlib
from .points import PointCloud, load_points
from .profile import NetworkProfile, profile_network, stopwatch
from .report import facts_table, layers_table, times_table
from .scene import street_scan
from .training import TrainingResult, train
from .voxels import VoxelGrid, voxelize

if TYPE_CHECKING:
    from torch import nn

    from ..adapters.lifecycle import FrameworkStatus

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_CLASSES = 20
_WIDTH = 140  # characters, where there is no terminal to ask
_VOXEL_SIZE = 0.1
_SUMMARY = "voxelise a scan, run two spconv networks on it, print what ran, draw it from above"


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
        help=".bin, .npy, .npz, .ply or .pcd (default: a synthetic 64-beam street)",
    )
    scan.add_argument(
        "--points-columns",
        type=int,
        metavar="N",
        help="float32 values per point of a .bin file (default: guessed)",
    )
    scan.add_argument(
        "--voxel-size",
        type=float,
        metavar="M",
        help=f"edge in metres (default: the file's own, or {_VOXEL_SIZE})",
    )
    scan.add_argument(
        "--range",
        type=float,
        nargs=6,
        metavar=("X0", "Y0", "Z0", "X1", "Y1", "Z1"),
        help="crop in metres (default: derived from the points)",
    )
    runs = parser.add_argument_group("run")
    runs.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    runs.add_argument("--dtype", choices=tuple(_DTYPES), default="fp32")
    runs.add_argument(
        "--train",
        type=int,
        nargs="?",
        const=3,
        default=0,
        metavar="STEPS",
        help="also time training steps (3 if no number is given)",
    )
    runs.add_argument("--repeats", type=int, metavar="N", help="timed passes per network")
    runs.add_argument("--small", action="store_true", help="a thinner U-Net, for slow machines")
    runs.add_argument("--seed", type=int, default=0, help="of weights and synthetic street")
    runs.add_argument(
        "--output",
        type=Path,
        default=Path("demo_out"),
        metavar="DIR_OR_PNG",
        help="where the picture goes (default: demo_out/birdseye.png)",
    )
    runs.add_argument("--no-picture", action="store_true", help="only print the tables")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Run the demo; 0 on success.

    Raises:
        SparseBridgeError: an option, the scan or the machine does not fit; says what to change.
    """
    if args.train < 0 or (args.repeats is not None and args.repeats < 1):
        raise SettingError(
            f"got --train {args.train}, --repeats {args.repeats}; expected 0 or more, 1 or more."
        )
    picture = None if args.no_picture else _picture_path(args.output)
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


@dataclasses.dataclass
class _Network:
    """A network, the head that training puts on it, and the name of both."""

    title: str
    model: nn.Module
    head: nn.Module


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
    args: argparse.Namespace,
    console: Console,
    device: torch.device,
    picture: Path | None,
    status: FrameworkStatus,
) -> None:
    steps = _Steps(console, 4 + 2 * bool(args.train) + bool(picture))
    with steps.bar:
        with steps.step("scan"):
            cloud = _scan(args)
        with steps.step("voxelise"):
            grid, voxelise_ms = _voxels(args, cloud, device)
        console.print(facts_table(cloud, grid, device, args.dtype, status))
        profiles: list[NetworkProfile] = []
        trained: list[TrainingResult] = []
        networks = _networks(args, device)
        for network in networks:
            with steps.step(f"{network.title}: inference"):
                _calibrate(network.model, _forward(network, grid, args))
                profiles.append(_profile(network, grid, args, device))
            console.print(layers_table(profiles[-1], device, console.width))
            if args.train:
                with steps.step(f"{network.title}: training"):
                    trained.append(_train(network, grid, args))
        console.print(times_table(profiles, trained, voxelise_ms))
        if picture:
            with steps.step("picture"):
                _draw(picture, networks, cloud, grid, args)


def _picture_path(output: Path) -> Path:
    require_matplotlib(", or pass --no-picture")
    if output.suffix and output.suffix.lower() != ".png":
        raise SettingError(f"--output {output}: expected a folder or a file ending in .png.")
    return output if output.suffix else output / "birdseye.png"


def _scan(args: argparse.Namespace) -> PointCloud:
    if args.points is None:
        return PointCloud(street_scan(args.seed), "synthetic 64-beam street")
    return load_points(args.points, args.points_columns)


def _voxels(
    args: argparse.Namespace, cloud: PointCloud, device: torch.device
) -> tuple[VoxelGrid, float]:
    size = args.voxel_size if args.voxel_size is not None else cloud.voxel_size or _VOXEL_SIZE
    times: list[float] = []
    grid = voxelize(cloud, size, device, args.range)  # the first call loads and compiles
    with stopwatch(device, times):
        grid = voxelize(cloud, size, device, args.range)
    return grid, times[0]


def _networks(args: argparse.Namespace, device: torch.device) -> list[_Network]:
    """Random weights, the same for the same seed."""
    import spconv.pytorch as spconv

    from ..networks.spconv import ResidualUNet, Second

    torch.manual_seed(args.seed)
    thin: dict[str, Any] = {}
    if args.small:
        thin = {"encoder": (16, 24, 32, 48), "decoder": (48, 32, 24, 24), "blocks": (1, 1, 1, 1)}
        thin["stem"] = 16
    second, unet = Second(spconv), ResidualUNet(spconv, classes=_CLASSES, **thin)
    return [
        _Network("SECOND encoder", second.to(device), torch.nn.Linear(128, _CLASSES).to(device)),
        _Network("residual U-Net", unet.to(device), torch.nn.Identity()),
    ]


def _forward(network: _Network, grid: VoxelGrid, args: argparse.Namespace) -> Any:
    """A function that runs the network on a new sparse tensor, so that nothing is cached."""
    import spconv.pytorch as spconv

    dtype = _DTYPES[args.dtype]
    device = grid.features.device.type

    def forward() -> Any:
        x = spconv.SparseConvTensor(grid.features, grid.indices, list(grid.shape), batch_size=1)
        with torch.autocast(device, dtype, enabled=dtype != torch.float32):
            return network.model(x)

    return forward


def _calibrate(model: nn.Module, forward: Any) -> None:
    """Give the batch norms this scan's statistics: random weights then keep a sane scale."""
    norms = [m for m in model.modules() if isinstance(m, torch.nn.BatchNorm1d)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = None  # average instead of decay: one pass is enough
        norm.reset_running_stats()
    model.train()
    with torch.no_grad():
        forward()
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
    model.eval()


def _profile(
    network: _Network, grid: VoxelGrid, args: argparse.Namespace, device: torch.device
) -> NetworkProfile:
    repeats = args.repeats or (10 if device.type == "cuda" else 3)
    with torch.no_grad():
        forward = _forward(network, grid, args)
        return profile_network(network.title, network.model, forward, device, repeats)


def _train(network: _Network, grid: VoxelGrid, args: argparse.Namespace) -> TrainingResult:
    forward = _forward(network, grid, args)
    dtype = _DTYPES[args.dtype]
    return train(network.title, network.model, network.head, forward, _CLASSES, args.train, dtype)


def _draw(
    path: Path,
    networks: list[_Network],
    cloud: PointCloud,
    grid: VoxelGrid,
    args: argparse.Namespace,
) -> None:
    second, unet = networks
    with torch.no_grad():
        bev = _forward(second, grid, args)().dense().float()
        outputs = _forward(unet, grid, args)().features.float()
    state = f"after {args.train} training steps" if args.train else "untrained"
    draw_birdseye(
        path,
        grid,
        bev.flatten(1, 2)[0].cpu().numpy(),
        outputs.cpu().numpy(),
        f"{cloud.source}: {len(cloud.points):,} points, {len(grid.features):,} voxels "
        f"of {grid.voxel_size * 100:g} cm",
        f"U-Net: {outputs.shape[1]} values per voxel ({state})",
    )
