"""`python -m sparse_bridge run`: a script or module with the bridge enabled, as python runs it."""

from __future__ import annotations

import argparse
import logging
import os
import runpy
import sys
from typing import Any

from .. import settings
from ..adapters.enabling import inherited
from ..errors import SettingError, UnsupportedError
from ..log import logger
from ..tools.harness import results
from ..tools.harness.arguments import number, path
from .program_frames import frames_of_program, show_program_alone
from .program_report import ProgramReport

_SUMMARY = "run a script or module with the bridge enabled"
_TEXT = """\
Run a script or module with the bridge enabled, as python would run it.

  python -m sparse_bridge run train.py --cfg model.yaml
  python -m sparse_bridge run --report -m mypackage.train --cfg model.yaml
  python -m sparse_bridge run --optimize inference train.py --cfg model.yaml
  python -m sparse_bridge run --profile infer.py

Options of `run` come before the script; everything after it belongs to the script."""
_CALLS = 100  # of outermost modules: some scenes, and no more memory than a report may take


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Add the `run` command; `args.func` becomes `run`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "run",
        help=_SUMMARY,
        description=_TEXT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--framework",
        action="extend",
        type=_names,
        default=[],
        metavar="A,B",
        help=f"which to bridge (default: all): {_frameworks()}; may be repeated",
    )
    parser.add_argument(
        "--mode",
        choices=settings.MODES,
        help="patch the framework, or let its stand-in answer (default: auto, patch what imports)",
    )
    parser.add_argument(
        "--optimize",
        choices=settings.CHOICES["optimize"],
        help="what is done to models as they run (default: that of SPARSE_BRIDGE_OPTIMIZE, else auto, replayed from "
        "captured CUDA graphs on NVIDIA GPUs); graphs: the same, with a warning about what is not; inference: without "
        "training steps; fuse: nothing is replayed; off: every layer computes by itself",
    )
    parser.add_argument(
        "--memory-limit",
        metavar="SIZE",
        help="such as 8GiB: in inference, layers that would take more compute in blocks",
    )
    parser.add_argument("--strict", action="store_true", help="raise where a layer would run in the original")
    parser.add_argument(
        "-v", dest="verbose", action="count", default=0, help="log to stderr what is decided; -vv: more"
    )
    parser.add_argument("--report", action="store_true", help="print what ran to stderr at the end")
    parser.add_argument(
        "--profile",
        action="store_true",
        help="print to stderr at the end what each layer did and cost; nothing is fused meanwhile",
    )
    parser.add_argument(
        "--profile-calls",
        type=number(int, 1),
        metavar="N",
        help=f"profile the first N calls of models (default: {_CALLS})",
    )
    parser.add_argument(
        "--report-json", type=path, metavar="FILE", help="write what ran there, and the profile, as JSON"
    )
    parser.add_argument("-m", dest="module", action="store_true", help="target names a module")
    parser.add_argument("target", metavar="SCRIPT", help="script, or with -m a module")
    arguments = parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script")
    arguments.required = False  # argparse would name it where the script is missing
    parser.set_defaults(func=run)
    return parser


def _names(text: str) -> list[str]:
    """What a comma-separated option names; argparse refuses it where that is nothing."""
    names = [name for name in text.split(",") if name]
    if not names:
        raise argparse.ArgumentTypeError(f"{text!r} names none; expected some of {_frameworks()}, or leave it out")
    return names


def _frameworks() -> str:
    from ..adapters import base

    return ", ".join(sorted({*base.BY_NAME, *base.ADAPTERS, *base.OTHER_NAMES}))


def run(args: argparse.Namespace) -> int:
    """Run the program; what it raises or exits with passes through.

    Raises: SettingError, UnsupportedError for what can be refused before the program begins.
    """
    from ..adapters import base, lifecycle

    for name in args.framework:
        base.load(name)
    if args.profile_calls and not args.profile:
        raise SettingError("--profile-calls without --profile, which it needs; add it.")
    if not args.module and not os.path.exists(args.target):
        raise SettingError(f"can't find {args.target!r}")
    if args.report_json:
        results.require_writable(args.report_json, "--report-json")
    _warn_of_unreachable_children(args.strict)
    if args.verbose:
        _log_to_stderr(logging.INFO if args.verbose == 1 else logging.DEBUG)
    report = ProgramReport(args.report, args.report_json, args.profile and (args.profile_calls or _CALLS))
    strict = True if args.strict else None
    handle = lifecycle.enable(
        *args.framework, mode=args.mode, strict=strict, optimize=args.optimize, memory_limit=args.memory_limit
    )
    lifecycle.hand_on(report.counts)
    report.of(handle)
    args.in_script = True
    try:
        execute(args.target, args.arguments, args.module)
    except (ImportError, OSError) as error:
        if frames_of_program(error.__traceback__, execute.__code__) is not None:
            raise
        args.in_script = False  # it has not begun: runpy finds no such module, no such file
        raise UnsupportedError(str(error)) from None
    finally:
        report.program_ended()
    return 0


def _warn_of_unreachable_children(strict: bool) -> None:
    """Raises UnsupportedError where children might run in the original, and may not."""
    option = inherited.unreachable()
    if option is None:
        return
    why = f"python {option} keeps child processes of the program from being bridged"
    if strict:
        raise UnsupportedError(f"{why}, which --strict does not allow; leave {option} out.")
    sys.stderr.write(f"sparse_bridge: {why}.\n")


def _log_to_stderr(level: int) -> None:
    """Of this package alone; what the program does to the root logger is its own."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(level)


def execute(target: str, arguments: list[str], is_module: bool) -> None:
    """As `python target arguments` or `python -m target arguments`, in this process."""
    sys.argv[:] = [target, *arguments]
    first = os.getcwd() if is_module else os.path.dirname(os.path.realpath(target))
    if not getattr(sys.flags, "safe_path", False):  # under -P python adds no folder either
        sys.path[0] = first
    try:
        if is_module:
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(target, run_name="__main__")
    except BaseException:
        show_program_alone(execute.__code__)
        raise
