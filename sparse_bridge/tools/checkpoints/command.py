"""The command line of `verify`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import SettingError
from ...tables import Column, Table
from ..harness.arguments import path
from . import reno, weights
from .projects import PROJECTS, Paths, Project, locate
from .running import EvaluationError, evaluate

_SUMMARY = "evaluate published weights with their own project on this engine"
_TEXT = """\
Load a published checkpoint, run the project's own evaluation of it with its sparse layers bridged,
and print its metric beside the published one.

{projects}

  python -m sparse_bridge verify openpcdet --project OpenPCDet \\
      --checkpoint second_7862.pth --data OpenPCDet/data/kitti
  python -m sparse_bridge verify reno --checkpoint ckpt.pt --data scan.bin

Checked without the project: that the file holds the sparse layers with the published names and
shapes, and that the data folder has what the evaluation reads (--check stops there). All else is
the project's: its other layers, its extensions, its GPU.

RENO's weights need no project: its network is here. A scan is written and read back, at 12 and 14
bits a coordinate, and the size of the file is printed. With --project, RENO's own program does it.

Exit status: 0 the metric is the published one within the tolerance; 1 it is not, or the evaluation
failed; 2 nothing was evaluated, because the project, the file or the data is not what it should
be."""
_COLUMNS = (Column("metric", True), Column("published"), Column("here"), Column("difference"), Column("verdict", True))


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the `verify` command; `args.func` becomes `run`."""
    titles = {**{project.name: project.title for project in PROJECTS.values()}, reno.NAME: reno.TITLE}
    listed = "\n".join(f"  {name:12} {title}" for name, title in titles.items())
    parser = subparsers.add_parser(
        "verify",
        help=_SUMMARY,
        description=_TEXT.format(projects=listed),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("project", metavar="PROJECT", choices=titles, help=", ".join(titles))
    parser.add_argument("--checkpoint", type=path, required=True, metavar="FILE", help="the published weights")
    parser.add_argument(
        "--data",
        type=path,
        required=True,
        metavar="PATH",
        help="folder of prepared data; of reno a scan, see demo --points",
    )
    parser.add_argument(
        "--project",
        dest="tree",
        type=path,
        metavar="DIR",
        help="the project's source tree (default: where it is installed)",
    )
    parser.add_argument(
        "--expect",
        action="append",
        default=[],
        metavar="METRIC=PERCENT",
        help="compare with this number instead of the published one (repeatable); of reno BITS=BYTES",
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        metavar="POINTS",
        help=f"percentage points (default: {Project.tolerance:g}); of reno per cent of a size "
        f"(default: {reno.TOLERANCE:g})",
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="reno: where it runs (default: a GPU if there is one)"
    )
    parser.add_argument(
        "--bits",
        type=int,
        action="append",
        help=f"reno: of a coordinate; repeatable (default: {' and '.join(map(str, reno.PRECISIONS))})",
    )
    parser.add_argument(
        "--trust",
        action="store_true",
        help="unpickle whatever the checkpoint holds, which may run code that it contains",
    )
    parser.add_argument("--check", action="store_true", help="only check the file and the data")
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    parser.set_defaults(func=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the command: 0 or 1, see its help.

    Raises: SettingError, ShapeError, DataTypeError, which are exit status 2.
    """
    if args.tolerance is not None and not (math.isfinite(args.tolerance) and args.tolerance >= 0):
        raise SettingError(f"--tolerance {args.tolerance}: expected percentage points, 0 or more.")
    if args.project == reno.NAME:
        return reno.run(args, _say)
    for option in ("device", "bits"):
        if getattr(args, option) is not None:
            raise SettingError(f"--{option} is for {reno.NAME}; {args.project} chooses itself.")
    project: Project = PROJECTS[args.project]
    expected = {} if args.check else _expected(project, args.expect)
    tolerance = project.tolerance if args.tolerance is None else args.tolerance
    weights.require_file(args.checkpoint, "--checkpoint")
    _check_data(project, args.data)
    shapes = weights.load(args.checkpoint, args.trust)
    checked = weights.compare(shapes, project.keys(), project.title)
    _say(_describe(args.checkpoint, checked))
    if args.check:
        return _checked(args, project, checked)
    tree = locate(project, args.tree)
    try:
        with tempfile.TemporaryDirectory(prefix="sparse_bridge_verify_") as scratch:
            paths = Paths(tree, args.checkpoint.resolve(), args.data.resolve(), Path(scratch))
            text = evaluate(project, paths, args.trust, _say)
    except EvaluationError as error:
        _say(f"sparse_bridge: {error}")
        return 1
    return _compare(args, project, checked, project.metrics(text), expected, tolerance)


def _say(line: str) -> None:
    """To standard error; standard output is for the result."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def _expected(project: Project, options: list[str]) -> dict[str, float]:
    metrics = dict(project.published)
    for text in options:
        name, _, value = text.partition("=")
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if name not in metrics or not math.isfinite(number):
            raise SettingError(f"--expect {text}: expected METRIC=PERCENT with one of {', '.join(metrics)}.")
        metrics[name] = number
    unknown = [name for name, value in metrics.items() if value is None]
    if unknown:
        raise SettingError(
            f"nobody has published a number with the weights of {project.title}; give the one in "
            f"{project.source}: --expect {unknown[0]}=PERCENT."
        )
    return {name: value for name, value in metrics.items() if value is not None}


def _check_data(project: Project, folder: Path) -> None:
    if not folder.is_dir():
        raise SettingError(f"--data {folder}: there is no such folder.")
    faults = list(project.data(folder))
    if faults:
        raise SettingError(f"--data {folder} is not the prepared data of {project.title}: {'; '.join(faults)}.")


def _describe(path: Path, checked: weights.Checked) -> str:
    return (
        f"{path.name}: {checked.keys} keys of sparse layers as published, in the layout of "
        f"{weights.LAYOUTS[checked.layout]}; {checked.others} other keys are for the project."
    )


def _facts(args: argparse.Namespace, project: Project, checked: weights.Checked) -> dict[str, Any]:
    return {
        "project": project.name,
        "model": project.title,
        "checkpoint": str(args.checkpoint),
        "data": str(args.data),
        "weights": dataclasses.asdict(checked),
    }


def _checked(args: argparse.Namespace, project: Project, checked: weights.Checked) -> int:
    if args.json:
        sys.stdout.write(json.dumps({**_facts(args, project, checked), "metrics": None}) + "\n")
    else:
        sys.stdout.write("The file and the data are as expected. Nothing was evaluated.\n")
    return 0


def _compare(
    args: argparse.Namespace,
    project: Project,
    checked: weights.Checked,
    scores: Mapping[str, float],
    expected: Mapping[str, float],
    tolerance: float,
) -> int:
    """Print the comparison; the exit status."""
    reached = {name: name in scores and abs(scores[name] - wanted) <= tolerance for name, wanted in expected.items()}
    if args.json:
        metrics = {
            name: {"published": wanted, "here": scores.get(name), "reached": reached[name]}
            for name, wanted in expected.items()
        }
        facts = {**_facts(args, project, checked), "tolerance": tolerance, "metrics": metrics}
        sys.stdout.write(json.dumps(facts) + "\n")
    else:
        sys.stdout.write(_table(project, scores, expected, reached, tolerance).plain() + "\n")
    return 0 if all(reached.values()) else 1


def _table(
    project: Project,
    scores: Mapping[str, float],
    expected: Mapping[str, float],
    reached: Mapping[str, bool],
    tolerance: float,
) -> Table:
    rows = []
    for name, wanted in expected.items():
        here = scores.get(name)
        values = ("-", "-") if here is None else (f"{here:.2f}", f"{here - wanted:+.2f}")
        verdict = "not printed" if here is None else "reached" if reached[name] else "differs"
        rows.append((name, f"{wanted:.2f}", *values, verdict))
    remark = f"Published: {project.source}. Tolerance: {tolerance:g} percentage points."
    return Table(project.title, _COLUMNS, rows, remark=remark)
