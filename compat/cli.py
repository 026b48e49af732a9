"""Command line of the matrix: run cells, keep their results, write the report."""

from __future__ import annotations

import argparse
import os
import pathlib
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from sparse_bridge.errors import DeviceError, SettingError
from sparse_bridge.tools.harness.arguments import path
from sparse_bridge.tools.harness.progress import Progress
from sparse_bridge.tools.harness.results import require_writable

from . import matrix, results, runner
from .matrix import Cell
from .results import CellResult, Results

__all__ = ["add_parser"]

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = pathlib.Path(__file__).with_name("results")
_SUMMARY = "run the compatibility matrix: public models, unchanged, under the bridge"
_STYLES = {"pass": "green", "fail": "bold red", "known": "blue", "unsupported": "yellow", "not run": "dim"}


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Add the `compat` command to `argparse` sub-parsers."""
    parser = commands.add_parser("compat", help=_SUMMARY, description=_SUMMARY)
    _add_selection(parser.add_argument_group("what to run"))
    _add_running(parser.add_argument_group("how to run"))
    parser.set_defaults(func=_run)
    inner = parser.add_subparsers(title="instead of running", metavar="COMMAND")
    report = inner.add_parser("report", help="merge results into docs/compatibility.*")
    report.add_argument(
        "files",
        nargs="*",
        type=path,
        help="results of `compat --json` (default: compat/results/*.json); later ones win",
    )
    report.add_argument("--write", action="store_true", help="write the two files of docs/")
    report.add_argument("--docs", type=path, default=ROOT / "docs", metavar="DIR", help="where to (default: docs)")
    report.set_defaults(func=_report)
    return parser


def _add_selection(group: Any) -> None:
    group.add_argument("--framework", type=_names, default=(), metavar="A,B", help="default: all that have models")
    group.add_argument(
        "--model",
        type=_names,
        default=(),
        metavar="A,B",
        help="numbers, names, file names or patterns of these (default: all)",
    )
    group.add_argument(
        "--device", choices=("auto", *matrix.DEVICES), default="auto", help="default: auto, a GPU if there is one"
    )
    group.add_argument("--dtype", type=_names, default=(), metavar="A,B", help="default: all")
    group.add_argument(
        "--mode", type=_names, default=("auto",), metavar="A,B", help="standin, patch, auto (default: auto)"
    )
    group.add_argument("--size", default="small", help="tiny, small (default) or full scenes")
    group.add_argument("--check", type=_names, default=matrix.CHECKS, metavar="A,B", help="default: all")
    group.add_argument("--matrix", type=path, default=matrix.MATRIX, help=argparse.SUPPRESS)
    group.add_argument("--list", action="store_true", help="only show the cells")


def _add_running(group: Any) -> None:
    group.add_argument("--jobs", type=int, default=1, metavar="N", help="cells at a time (default: 1)")
    group.add_argument("--limit", type=float, default=300, metavar="S", help="seconds a check may take (default: 300)")
    group.add_argument(
        "--native-python",
        default="",
        metavar="PATH",
        help="interpreter that has the real library, for the check `native` (default: none)",
    )
    group.add_argument("--json", type=path, metavar="FILE", help="write the results there")
    group.add_argument("--logs", type=path, metavar="DIR", help="keep what cells print")
    group.add_argument(
        "--write", action="store_true", help="add the results to compat/results and write docs/compatibility.*"
    )


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _check_names(what: str, names: Sequence[str], known: Sequence[str]) -> None:
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SettingError(f"{what}: got {', '.join(unknown)}; expected {', '.join(known)}.")


def _console() -> Console:
    """Wide where nobody's window sets a width."""
    return Console(emoji=False, highlight=False, width=None if sys.stdout.isatty() else 140)


def _device(wanted: str) -> str:
    import torch

    if wanted == "cuda" and not torch.cuda.is_available():
        raise DeviceError("--device cuda: torch finds no GPU; pass --device cpu.")
    return wanted if wanted != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


def _run(args: argparse.Namespace) -> int:
    """Run the chosen cells; 1 if a check fails that the matrix does not list."""
    _check_names("--framework", args.framework, matrix.FRAMEWORKS)
    _check_names("--dtype", args.dtype, matrix.DTYPES)
    _check_names("--mode", args.mode, matrix.MODES)
    _check_names("--check", args.check, matrix.CHECKS)
    device = _device(args.device)
    cells = matrix.cells(matrix.load(args.matrix), args.framework, args.model, device, args.dtype, args.mode, args.size)
    console = _console()
    if args.list:
        console.print(_cells_table(cells))
        return 0
    options = runner.Options(args.check, args.limit, args.native_python, args.logs)
    run = results.run_facts(device)
    if args.json:
        require_writable(args.json, "--json")
    collected = _Collected(run, args.json)
    _run_shown(cells, options, args.jobs, console, collected.add)
    all_found = results.merge([collected.results()])
    console.print(_results_table(all_found.cells))
    if args.write:
        _keep(all_found, run["device"], console)
    return 1 if all_found.unexpected else 0


class _Collected:
    """Results so far, saved after each cell, so that an interrupted run is not lost."""

    def __init__(self, run: dict[str, Any], path: pathlib.Path | None) -> None:
        self._run, self._path = run, path
        self._cells: list[CellResult] = []
        self._lock = threading.Lock()

    def add(self, cell: CellResult) -> None:
        with self._lock:
            self._cells.append(cell)
            if self._path:
                self.results().save(self._path)

    def results(self) -> Results:
        return Results((self._run,), tuple(self._cells))


def _run_shown(
    cells: Sequence[Cell], options: runner.Options, jobs: int, console: Console, keep: Callable[[CellResult], None]
) -> None:
    """Run with a progress bar; failures are printed as they come."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // jobs, 1)))
    with Progress(len(cells), console=console, transient=True) as progress:

        def finished(cell: Cell, result: CellResult) -> None:
            progress.done()
            keep(result)
            for check in result.unexpected:
                progress.note(f"{cell.title}: {check.check}: {check.reason}", "red")

        runner.run_all(cells, options, jobs, lambda cell: progress.start(cell.title), finished)


def _keep(found: Results, device: str, console: Console) -> None:
    """Add to the stored results of this device, and write the report over those of all."""
    path = RESULTS / f"{'-'.join(device.lower().split())}.json"
    earlier = [Results.read(path)] if path.is_file() else []
    results.merge([*earlier, found]).save(path)
    console.print(f"results: {path}", markup=False, soft_wrap=True)
    _write_report(_stored(), ROOT / "docs", console)


def _stored() -> Results:
    files = sorted(RESULTS.glob("*.json"))
    if not files:
        raise SettingError(f"no results in {RESULTS}; run `compat --write` first, or name files.")
    return results.merge(map(Results.read, files))


def write_stored() -> None:
    """Write the report over all stored results."""
    _write_report(_stored(), ROOT / "docs", _console())


def _report(args: argparse.Namespace) -> int:
    """Merge results; print their counts, and write the report if asked to."""
    found = results.merge(map(Results.read, args.files)) if args.files else _stored()
    console = _console()
    console.print(_results_table(found.cells))
    if args.write:
        _write_report(found, args.docs, console)
    return 0


def _write_report(found: Results, folder: pathlib.Path, console: Console) -> None:
    from . import markdown, page, replays

    models = matrix.load()
    texts = {
        "md": markdown.render(found, models, replays.read(), replays.on_gpus()),
        "html": page.render(found, models),
    }
    for kind, text in texts.items():
        path = folder / f"compatibility.{kind}"
        path.write_text(text)
        console.print(f"report: {path}", markup=False, soft_wrap=True)


def _cells_table(cells: Sequence[Cell]) -> Table:
    table = Table("number", "model", "framework", "device", "dtype", "mode", "size")
    for cell in cells:
        model = cell.model
        where = (cell.device, cell.dtype, cell.mode, cell.size)
        table.add_row(str(model.number), model.name, model.framework, *where)
    return table


def _results_table(found: Sequence[CellResult]) -> Table:
    table = Table("model", "framework", "where", "outcome", "checks passed", "not passed")
    for cell in found:
        passed = sum(check.outcome == "pass" for check in cell.checks)
        rest = [c.check for c in cell.checks if c.outcome in ("fail", "unsupported")]
        table.add_row(
            cell.model,
            cell.framework,
            f"{cell.device}, {cell.dtype}, {cell.mode}, {cell.size}",
            f"[{_STYLES[cell.outcome]}]{cell.outcome}",
            f"{passed} of {sum(check.outcome != 'not run' for check in cell.checks)}",
            ", ".join(rest),
        )
    return table
