"""`python -m sparse_bridge prove`: ten minutes that show whether this GPU computes rightly."""

from __future__ import annotations

import argparse
import re
from typing import Any

from rich.console import Console

from ..errors import DeviceError
from ..tools.acceptance import checks
from ..tools.harness.arguments import number, path
from ..tools.harness.progress import Progress
from ..tools.harness.results import require_writable

_SUMMARY = "show that this GPU computes rightly: one line a check, a JSON file, a text to paste"
_TEXT = """\
Check maps, products of every dtype, gradients, pools, problems beyond 2 GiB, networks of every
framework against the CPU, repeatability, a training run that must converge, a cold start, speed,
and in a source checkout the frameworks' recorded answers. Ten minutes on a GPU, of which compiling
takes most. Without a GPU the same runs on the CPU, smaller.

  python -m sparse_bridge prove --json proof.json
  python -m sparse_bridge prove --only products --only maps"""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the `prove` command; `args.func` becomes `run`."""
    parser = subparsers.add_parser(
        "prove", help=_SUMMARY, description=_TEXT, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=path, metavar="FILE", help="write everything there")
    parser.add_argument(
        "--only", action="append", default=[], metavar="CHECK", help="these checks (repeatable; default: all)"
    )
    parser.add_argument("--skip", action="append", default=[], metavar="CHECK", help="all but these (repeatable)")
    parser.add_argument(
        "--minutes",
        type=number(float, above=0),
        default=10.0,
        metavar="M",
        help="begin no check after so many (default: %(default)g)",
    )
    parser.add_argument(
        "--device", default="auto", help="cuda, cuda:1 or cpu (default: %(default)s, a GPU if there is one)"
    )
    parser.set_defaults(func=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the command: 0 where nothing failed, else 1.

    Raises: SettingError for unknown checks, DeviceError for a device that is not there.
    """
    names = checks.chosen(args.only, args.skip)
    if args.json:
        require_writable(args.json, "--json")
    if not re.fullmatch(r"auto|cpu|(cuda|xpu)(:\d+)?", args.device):
        raise DeviceError(f"--device {args.device}: expected cpu, cuda or cuda:1.")

    import torch

    from ..tools.acceptance import record, runner
    from ..tools.acceptance.setup import FAILED, Setup

    if args.device.startswith("cuda") and not torch.cuda.is_available():
        raise DeviceError(
            f"--device {args.device}: torch finds no CUDA or ROCm device; expected one. Install a "
            "GPU build of torch, or leave --device out to prove the CPU."
        )
    console = Console(emoji=False, markup=False, highlight=False, soft_wrap=True)
    setup, facts, outcomes = Setup.find(args.device), record.machine(), []
    console.print(setup.title, style="bold")
    with Progress(1, "checking", console, transient=True) as progress:
        for outcome in runner.prove(setup, names, args.minutes, progress.start):
            outcomes.append(outcome)
            console.print(record.line(outcome), style="red" if outcome.status == FAILED else None)
            if args.json:  # also where a later check takes the machine down
                record.save(args.json, record.values(setup, facts, outcomes))
    content = record.values(setup, facts, outcomes)
    counts = record.counts(outcomes)
    console.print(", ".join(f"{n} {status}" for status, n in counts.items()), style="bold")
    console.print("\nTo paste into an issue:\n")
    console.print(record.markdown(content))
    return 1 if counts[FAILED] else 0
