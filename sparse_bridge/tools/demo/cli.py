"""Command line of the demo: its options, and what is refused before torch is imported."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ...errors import SettingError
from ..harness.arguments import number, path
from ..harness.results import require_writable
from . import VOXEL_SIZE
from .drawing import require_matplotlib

_DTYPES = ("fp32", "fp16", "bf16")
_LARGEST_VOXEL = 100.0  # metres; no scan has anything to show in larger ones
_SEGMENT_STEPS = 60
_MOST_SEED = 2**64 - 1  # what torch takes
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
        type=path,
        metavar="FILE",
        help=".bin, .npy, .npz, .ply, .pcd, .las or .laz (default: a synthetic 64-beam street)",
    )
    scan.add_argument(
        "--points-columns",
        type=number(int, 3),
        metavar="N",
        help="float32 values per point of a .bin file (default: guessed)",
    )
    scan.add_argument(
        "--voxel-size",
        type=number(float, above=0, most=_LARGEST_VOXEL),
        metavar="M",
        help=f"edge in metres (default: the file's own, or {VOXEL_SIZE})",
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
        "--dtype", choices=_DTYPES, default="fp32", help="of the two timed networks (default: %(default)s)"
    )
    runs.add_argument(
        "--train",
        type=number(int, 0),
        nargs="?",
        const=3,
        default=0,
        metavar="STEPS",
        help="also time training steps (3 if no number is given)",
    )
    runs.add_argument(
        "--segment",
        type=number(int, 0),
        metavar="STEPS",
        default=_SEGMENT_STEPS,
        help="steps in which a small network learns to label the scan, on synthetic streets "
        "(default: %(default)s; 0: none)",
    )
    runs.add_argument(
        "--repeats",
        type=number(int, 1),
        metavar="N",
        help="timed passes per network (default: 10 on a GPU, 3 on the CPU)",
    )
    runs.add_argument("--layers", action="store_true", help="also print a row per layer of the timed networks")
    runs.add_argument("--small", action="store_true", help="a thinner U-Net, for slow machines")
    runs.add_argument(
        "--seed",
        type=number(int, 0, _MOST_SEED),
        default=0,
        help="of weights and synthetic street (default: %(default)s)",
    )
    runs.add_argument(
        "--output",
        type=path,
        default=Path("demo_out"),
        metavar="DIR_OR_PNG",
        help="where the picture goes (default: demo_out/birdseye.png)",
    )
    runs.add_argument("--json", type=path, metavar="FILE", help="also write every figure there")
    runs.add_argument("--no-picture", action="store_true", help="only print the tables")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Run the demo; 0 on success.

    Raises:
        SparseBridgeError: an option, the scan or the machine does not fit; says what to change.
    """
    picture = None if args.no_picture else _picture_path(args.output)
    if args.json:
        require_writable(args.json, "--json")
    from .points import require_crop, require_scan

    if args.points is not None:
        require_scan(args.points, args.points_columns)
    if args.range is not None:
        require_crop(args.range)
    from . import running

    return running.run(args, picture)


def _picture_path(output: Path) -> Path:
    require_matplotlib(", or pass --no-picture")
    if output.suffix and output.suffix.lower() != ".png":
        raise SettingError(f"--output {output}: expected a folder or a file ending in .png.")
    path = output if output.suffix else output / "birdseye.png"
    require_writable(path, "--output")
    return path
