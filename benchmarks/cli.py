"""`python -m sparse_bridge bench`: time layers and networks, peers side by side."""

from __future__ import annotations

import argparse
import datetime
import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sparse_bridge.errors import DeviceError, SettingError
from sparse_bridge.tools.harness.arguments import path
from sparse_bridge.tools.harness.results import require_writable

from .headline import details, facts, headline, write_into
from .machine import describe
from .peers import PEERS, installed
from .registry import DTYPES, SUITES, Case, Selection, enumerate_cases
from .report import markdown, show
from .results import Run, load_run, merge
from .runner import SKIPPED, Limits, Runner
from .workloads import VOXEL_SIZE

__all__ = ["add_parser", "skipped_note"]

# Without options: what a CPU gets through in the default time budget, and what a GPU does.
_CPU_SCANS, _CPU_CASES = ["street:0.2"], ("layers/street_0.2/c[36]*", "networks/street_0.2/*")
_SUITES, _SCANS = ["layers", "networks"], ["street", "street:0.2"]

_SUMMARY = "time layers and networks, peers side by side"
_EXAMPLES = """\
  python -m sparse_bridge bench                             layers and networks, built-in street
  python -m sparse_bridge bench --suite layers --scans scan.bin --json out.json --markdown out.md
  python -m sparse_bridge bench --suite all --list            every case there is
  python -m sparse_bridge bench report out.json --markdown out.md --plots plots"""


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Add the `bench` command; `args.func` runs it and returns the exit status."""
    parser = commands.add_parser(
        "bench",
        help=_SUMMARY,
        description=_SUMMARY + "; every peer runs in a process of its own.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_what(parser.add_argument_group("what to time"))
    _add_how(parser.add_argument_group("how long"))
    _add_outputs(parser.add_argument_group("where to"))
    parser.set_defaults(func=_run)
    actions = parser.add_subparsers(title="from records", metavar="report")
    report = actions.add_parser("report", help="make a report of recorded runs")
    report.add_argument("files", type=path, nargs="+", metavar="FILE", help="JSON of a run")
    report.add_argument("--merge", action="store_true", help="treat all files as one run")
    report.add_argument("--markdown", type=path, metavar="OUT", help="ratios and losses")
    report.add_argument(
        "--headline",
        type=path,
        nargs="*",
        metavar="PAGE",
        help="the README's table of streams, its quartiles, times and facts; written into pages that have them",
    )
    report.add_argument("--plots", type=path, metavar="DIR", help="pictures")
    report.set_defaults(func=_report)
    return parser


def _add_what(group: Any) -> None:
    group.add_argument(
        "--suite",
        nargs="+",
        choices=(*SUITES, "all"),
        metavar="NAME",
        help=f"{', '.join(SUITES)} or all (default: {' '.join(_SUITES)}; on the CPU a few of their cases)",
    )
    group.add_argument("--case", nargs="+", default=[], metavar="GLOB", help="only cases whose names match")
    group.add_argument(
        "--peers",
        nargs="+",
        choices=tuple(PEERS),
        metavar="NAME",
        help=f"the first is the base of the ratios: {', '.join(PEERS)} "
        "(default: spconv bridge, or bridge where spconv is not installed)",
    )
    group.add_argument(
        "--dtype",
        nargs="+",
        choices=DTYPES,
        metavar="NAME",
        help=f"{', '.join(DTYPES)} (default: fp16 on a GPU, fp32 on the CPU)",
    )
    group.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: auto, a GPU if there is one"
    )
    group.add_argument(
        "--scans",
        nargs="+",
        metavar="SCAN",
        help="files (.npz, .npy, .bin, .ply, .pcd), street[:VOXEL], shell:RES or sheet:N; batches "
        f"are made of the first, host and cpu cases of the last (default: {' '.join(_SCANS)}; "
        f"on the CPU {' '.join(_CPU_SCANS)})",
    )
    group.add_argument(
        "--voxel-size",
        type=float,
        default=VOXEL_SIZE,
        metavar="M",
        help=f"for files of points, metres (default: {VOXEL_SIZE})",
    )
    group.add_argument(
        "--threads", type=int, nargs="+", default=[1, 2], metavar="N", help="of the cpu suite (default: 1 2)"
    )
    group.add_argument("--list", action="store_true", help="name the cases and stop")


def _add_how(group: Any) -> None:
    limits = Limits()
    group.add_argument(
        "--rounds", type=int, default=limits.rounds, help="paired rounds per case (default: %(default)s)"
    )
    group.add_argument(
        "--seconds",
        type=float,
        default=limits.seconds,
        metavar="S",
        help=f"per case and peer (default: {limits.seconds})",
    )
    group.add_argument(
        "--time-budget",
        type=float,
        default=limits.budget,
        metavar="S",
        help=f"of the whole run; the rest is skipped and says so (default: {limits.budget:.0f})",
    )
    group.add_argument(
        "--patience",
        type=float,
        default=limits.answer,
        metavar="S",
        help=f"for one answer of a peer, compiling included (default: {limits.answer:.0f})",
    )


def _add_outputs(group: Any) -> None:
    group.add_argument("--json", type=path, metavar="OUT", help="every figure; written case by case")
    group.add_argument("--markdown", type=path, metavar="OUT", help="ratios and losses")
    group.add_argument("--plots", type=path, metavar="DIR", help="pictures (needs matplotlib)")


def _run(args: argparse.Namespace) -> int:
    """Time the cases; 1 if no peer gave a figure.

    Raises:
        SettingError, DeviceError: an option does not fit; says what to change.
    """
    if args.rounds < 1 or args.seconds <= 0:
        raise SettingError(f"got --rounds {args.rounds}, --seconds {args.seconds}; expected 1 or more, above 0.")
    device = _device(args.device)
    cases = _cases(args, device)
    if args.list:
        print("\n".join(case.name for case in cases))
        return 0
    _require_outputs(args)
    run = Run(_peers(args.peers), command=_command(), started=_now())
    run.machine = describe("cuda" if any(case.device == "cuda" for case in cases) else "cpu")
    store = (lambda: run.save(args.json)) if args.json else (lambda: None)
    limits = Limits(args.rounds, args.seconds, args.time_budget, args.patience)
    begin = time.monotonic()
    Runner(run, limits, store).measure(cases)
    run.machine["seconds"] = round(time.monotonic() - begin)
    run.notes += skipped_note(run, limits)
    store()
    show(run)
    _write([run], args)
    return 0 if any(figure.error is None for figure in run.figures) else 1


def skipped_note(run: Run, limits: Limits) -> list[str]:
    """What the time budget left out, and how to get it."""
    cases = {figure.case for figure in run.figures}
    skipped = {figure.case for figure in run.figures if figure.error == SKIPPED}
    if not skipped:
        return []
    return [
        f"{len(skipped)} of {len(cases)} cases were skipped after {limits.budget:.0f} s; "
        "a longer --time-budget runs them all, --case fewer of them."
    ]


def _report(args: argparse.Namespace) -> int:
    """Read records and write what was asked for; the terminal otherwise."""
    _require_outputs(args)
    runs = [load_run(path) for path in args.files]
    runs = [merge(runs)] if args.merge else runs
    if args.headline is not None:
        for run in runs:
            for page in args.headline:
                write_into(page, run)
            if not args.headline:
                print(headline(run), details(run), facts(run), sep="\n\n")
        return 0
    if args.markdown is None and args.plots is None:
        for run in runs:
            show(run)
    _write(runs, args)
    return 0


def _write(runs: Sequence[Run], args: argparse.Namespace) -> None:
    """Markdown and plots, as asked."""
    pictures: list[Path] = []
    if args.plots is not None:
        from .plots import draw

        pictures = draw(runs, args.plots)
    if args.markdown is not None:
        folder = args.markdown.parent
        folder.mkdir(parents=True, exist_ok=True)
        links = [_relative(picture, folder) for picture in pictures]
        args.markdown.write_text(markdown(runs, links))


def _relative(picture: Path, folder: Path) -> Path:
    return Path(os.path.relpath(picture, folder))


def _require_outputs(args: argparse.Namespace) -> None:
    """Say before minutes of work that a result cannot be written or a picture not be drawn."""
    for option in ("json", "markdown"):
        path = getattr(args, option, None)
        if path is not None:
            require_writable(path, f"--{option}")
    if args.plots is None:
        return
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise SettingError(
            "--plots needs matplotlib, which is not installed; leave it out, keep --json, and run "
            "`python -m sparse_bridge bench report FILE --plots DIR` where it is."
        ) from error


def _device(wanted: str) -> str:
    import torch

    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise DeviceError(
            "--device cuda: torch finds no CUDA or ROCm device; expected one. "
            "Install a GPU build of torch, or pass --device cpu."
        )
    return ("cuda" if available else "cpu") if wanted == "auto" else wanted


def _cases(args: argparse.Namespace, device: str) -> list[Case]:
    cpu = device == "cpu" and args.suite is None
    few = cpu and not args.scans and not args.case
    suites = args.suite or _SUITES
    scans = args.scans or (_CPU_SCANS if cpu else _SCANS)
    for scan in scans:
        built_in = scan.partition(":")[0] in ("street", "shell", "sheet")
        if not built_in and not Path(scan).is_file():
            raise SettingError(f"--scans {scan}: no such file; expected a scan or street.")
    selection = Selection(
        suites=SUITES if "all" in suites else suites,
        scans=scans,
        dtypes=args.dtype or (["fp16"] if device == "cuda" else ["fp32"]),
        device=device,
        threads=args.threads,
        patterns=_CPU_CASES if few else args.case,
        voxel_size=args.voxel_size,
    )
    return enumerate_cases(selection)


def _peers(wanted: Sequence[str] | None) -> list[str]:
    if wanted:
        return list(dict.fromkeys(wanted))
    return ["spconv", "bridge"] if installed("spconv") else ["bridge"]


def _command() -> str:
    """The command line, files without their folders."""
    folders = [word for word in sys.argv[1:] if "/" in word and "*" not in word]
    words = [Path(word).name if word in folders else word for word in sys.argv[1:]]
    return shlex.join(["python", "-m", "sparse_bridge", *words])


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
