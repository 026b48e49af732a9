"""`python -m sparse_bridge doctor --targets`: the compile check in a terminal."""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...errors import SettingError
from ...kernels.runtime.architectures import compiled, require_made
from ...tables import Column, Table
from ..harness.arguments import number
from ..harness.progress import Progress
from ..harness.results import require_writable

if TYPE_CHECKING:
    from rich.console import Console

    from .running import Result

_SHOWN = 20  # failures that are printed


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `doctor` that concern the compile check."""
    group = parser.add_argument_group(
        "compile check", "compile the kernels for GPUs that need not be there and check the code"
    )
    group.add_argument("--targets", nargs="*", metavar="ARCH", help=f"which (default: {' '.join(compiled())})")
    group.add_argument(
        "--full",
        action="store_true",
        help="every kernel variant that ships; some hundred per target (default: a few of each kind)",
    )
    group.add_argument(
        "--kernel", action="append", default=[], metavar="NAME", help="only this one; may be repeated (default: all)"
    )
    group.add_argument("--write", metavar="PATH", help="also write the tables there, as Markdown")
    group.add_argument("--workers", type=number(int, 1), metavar="N", help="processes (default: one per CPU)")


def refuse_without_targets(args: argparse.Namespace) -> None:
    """Raises SettingError for options of the compile check where it is not asked for: nothing
    would come of them."""
    given = {"full": args.full, "kernel": args.kernel}
    given |= {name: getattr(args, name) is not None for name in ("write", "workers")}
    named = [f"--{name}" for name, value in given.items() if value]
    if named:
        raise SettingError(f"{', '.join(named)} without --targets; add it.")


def main(args: argparse.Namespace, console: Console) -> int:
    """Run the compile check; 1 if a form may not ship.

    Raises: DeviceError for GPUs that do not exist, UnsupportedError without Triton 3.5.
    """
    archs = tuple(args.targets) or tuple(compiled())
    require_made(archs)
    if args.write:
        require_writable(pathlib.Path(args.write), "--write")
    from .triton_needed import require_triton

    require_triton()  # ahead of kernels, which import it
    from .running import failures, jobs_for
    from .summary import as_json, markdown

    results = _run(jobs_for(archs, args.full, args.kernel), args.workers)
    if args.write:
        pathlib.Path(args.write).write_text(markdown(results, args.full), encoding="utf-8")
    if args.json:
        console.print_json(data=as_json(results))
    else:
        _show(results, console)
    return 1 if any(failures(results)) else 0


def _run(jobs: Sequence, workers: int | None) -> list[Result]:
    from .running import run

    failed = 0
    with Progress(len(jobs), "compiling") as progress:

        def count(result: Result) -> None:
            nonlocal failed
            failed += bool(result.problems)
            progress.start(f"{result.arch}, {failed} failed")
            progress.done()

        return run(jobs, workers, count)


def _show(results: Sequence[Result], console: Console) -> None:
    from .running import failures
    from .summary import summaries

    targets = summaries(results)
    rows = []
    for s in targets:
        shared = f"{s.shared / 1024:.0f} / {s.target.shared_memory >> 10}"
        cells = [s.target.arch, s.target.family, *s.products.values(), s.forms, s.registers]
        rows.append([*map(str, cells), shared, str(s.failed)])
    columns = (
        Column("target", True),
        Column("family", True, 3),
        *(Column(name, True, 4) for name in targets[0].products),
        Column("variants"),
        Column("registers", spare=2),
        Column("shared KiB", spare=1),
        Column("failed"),
    )
    console.print(Table("Compiled for", columns, rows).plain(), soft_wrap=True)
    failed = list(failures(results))
    for result in failed[:_SHOWN]:
        form = result.form
        console.print(
            f"{result.arch} {form.kernel}{form.named} {dict(form.options)}: {'; '.join(result.problems)}",
            style="red",
            soft_wrap=True,
        )
    if len(failed) > _SHOWN:
        console.print(f"... and {len(failed) - _SHOWN} more; --json lists all.", style="red")
