"""Options of `python -m sparse_bridge warm`, and what is refused before torch is imported."""

from __future__ import annotations

import argparse
from typing import Any

from ..errors import SettingError
from ..tools.harness.arguments import number, path
from ..tools.harness.results import require_writable
from .warm_names import DTYPES, MODELS

_SUMMARY = "compile and tune kernels before they are needed"
_TEXT = """\
Run layers and networks once, so that their kernels lie compiled in Triton's cache and the first
inference of the next process is fast. With --tune also time tiles, and for networks the dataflows
of layers that share a kernel map, and keep the fastest for SPARSE_BRIDGE_TUNE=cached (the default).

  python -m sparse_bridge warm --models second --dtypes fp16
  python -m sparse_bridge warm --channels 16 32 64 --kernels 3 2 --tune --export mine.json"""
_BUDGET = 1.0  # seconds of timing per bucket: nobody waits for a layer


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the `warm` command; `args.func` becomes `run`."""
    parser = subparsers.add_parser(
        "warm", help=_SUMMARY, description=_TEXT, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    problems = parser.add_argument_group("what to run")
    problems.add_argument("--models", nargs="*", choices=MODELS, help="networks (default: all)")
    problems.add_argument("--channels", nargs="+", type=number(int, 1), metavar="C", help="layers of these widths")
    problems.add_argument(
        "--kernels",
        nargs="+",
        type=number(int, 1),
        default=[3, 2],
        metavar="K",
        help="edges of their kernels (default: 3 2)",
    )
    problems.add_argument("--dtypes", nargs="+", choices=tuple(DTYPES), default=["fp16"], help="default: fp16")
    problems.add_argument(
        "--rows",
        nargs="+",
        type=number(int, 1),
        default=[20_000, 100_000],
        metavar="N",
        help="voxels (default: 20000 100000)",
    )
    problems.add_argument(
        "--layouts",
        nargs="+",
        choices=("ovi", "vio"),
        default=["ovi", "vio"],
        help="order of a layer's weights: ovi is output channels, kernel, input channels (spconv); "
        "vio is kernel, input, output (torchsparse, MinkowskiEngine); default: both",
    )
    problems.add_argument("--inference", action="store_true", help="no gradients")
    how = parser.add_argument_group("how")
    how.add_argument("--tune", action="store_true", help="time tiles and store the fastest")
    how.add_argument("--again", action="store_true", help="tune what has a tuned tile already, too")
    how.add_argument(
        "--budget",
        type=number(float, above=0),
        default=_BUDGET,
        metavar="S",
        help="seconds of timing per problem (default: %(default)g)",
    )
    how.add_argument("--export", type=path, metavar="FILE", help="also write all tuned tiles and dataflows there")
    how.add_argument("--jobs", type=number(int, 1), metavar="N", help="processes (default: by CPU cores)")
    how.add_argument("--json", action="store_true", help="machine-readable output")
    how.add_argument(
        "--device",
        choices=("auto", "cuda", "cpu"),
        default="auto",
        help="default: %(default)s, the GPU if there is one",
    )
    parser.set_defaults(func=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the command. Raises: as `warm.run`, and SettingError for options that contradict each other."""
    if args.again and not args.tune:
        raise SettingError("--again is about --tune; pass both, or neither.")
    if args.models == [] and not args.channels:
        raise SettingError("nothing to run; name --models or --channels.")
    if args.export:
        require_writable(args.export, "--export")
    from . import warm

    return warm.run(args)
