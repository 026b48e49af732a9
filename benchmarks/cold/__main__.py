"""Forms and compile seconds of first training steps, per GPU, on this CPU.

    python -m benchmarks.cold --peer-python PEER/bin/python --json cold.json
    python -m benchmarks.cold --read cold.json --plot cold.png

PEER is an environment with this checkout's requirements and spconv-triton. Every network, package
and GPU takes a process of its own with empty caches. See `counting` for what is run and what not.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from amd_emulator import cache_dir

from ..machine import describe
from ..processes import empty_caches
from .counting import UNITS
from .worker import MODULES, NETWORKS

ROOT = pathlib.Path(__file__).resolve().parents[2]
TITLES = {"second": "SECOND", "spunet": "SpUNet", "minkunet": "MinkUNet34"}
PACKAGES = ("sparse_bridge", "spconv_triton")
ARCHS = ("gfx942", "gfx1100", "gfx1201", "sm_89", "sm_120")

Row = dict[str, Any]


def _measure(python: str, row: Row, rows: int, at_most: int) -> Row:
    """`row` with what its process found, or with why it could not."""
    given = [row["package"], row["network"], row["arch"], str(rows), str(at_most)]
    with tempfile.TemporaryDirectory() as folder:
        environment = empty_caches(pathlib.Path(folder))
        environment["AMD_EMULATOR_CACHE"] = str(cache_dir())  # no figure depends on it
        environment["PYTHONPATH"] = f"{ROOT}{os.pathsep}{ROOT / 'tools'}"
        done = subprocess.run(
            [python, "-m", "benchmarks.cold.worker", *given], capture_output=True, text=True, cwd=ROOT, env=environment
        )
    if done.returncode:
        return {**row, "error": (done.stderr.strip().splitlines() or ["no message"])[-1]}
    return {**row, **json.loads(done.stdout.strip().splitlines()[-1])}


def _wanted(args: argparse.Namespace) -> Iterator[tuple[str, Row]]:
    pythons = {"sparse_bridge": sys.executable, "spconv_triton": args.peer_python}
    pythons = {package: pythons[package] for package in args.packages}
    for network in args.networks:
        for package, python in pythons.items():
            if python and (package, NETWORKS[network]) in MODULES:
                for arch in args.archs:
                    yield python, {"package": package, "network": network, "arch": arch}


def total(row: Row) -> tuple[float, float]:
    """(processor seconds of all forms, its standard error): exact where all were compiled."""
    found, n = row["seconds"], row["forms"]
    if len(found) == n:
        return sum(found), 0.0
    spread = statistics.stdev(found) / len(found) ** 0.5 * (1 - len(found) / n) ** 0.5
    return n * statistics.mean(found), n * spread


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    if "error" in row:
        return row["error"]
    seconds, error = total(row)
    return f"{row['forms']} / {seconds:.0f}" + (f" ± {error:.0f}" if error else "")


def markdown(rows: Sequence[Row]) -> str:
    """A line per network and package, a column per GPU: forms / processor seconds."""
    archs = list(dict.fromkeys(row["arch"] for row in rows))
    cases = dict.fromkeys((row["network"], row["package"]) for row in rows)
    by_case = {(row["network"], row["package"], row["arch"]): row for row in rows}
    lines = [f"| first training step of | package | {' | '.join(archs)} |"]
    lines.append("|---" * (2 + len(archs)) + "|")
    for network, package in cases:
        cells = (_cell(by_case.get((network, package, arch))) for arch in archs)
        lines.append(f"| {TITLES[network]} | {package} | {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(rows: Sequence[Row], path: pathlib.Path) -> None:
    """A panel per network: seconds per GPU and package."""
    from .. import style

    good = [row for row in rows if "error" not in row]
    networks = list(dict.fromkeys(row["network"] for row in good))
    archs = list(dict.fromkeys(row["arch"] for row in good))
    packages = {"sparse_bridge": style.FASTER, "spconv_triton": style.colour_of("spconv_triton")}
    picture, panels = style.grid(
        1,
        len(networks),
        3.4 * len(networks) + 1,
        3.4,
        "Compiling for a first training step: seconds of one core",
        sharex=True,
        sharey=True,
    )
    for axes, network in zip(panels[0], networks, strict=True):
        for row in good:
            if row["network"] == network:
                place = archs.index(row["arch"]) + 0.2 * (2 * list(packages).index(row["package"]) - 1)
                seconds = total(row)[0]
                axes.barh(place, seconds, height=0.36, color=packages[row["package"]])
                axes.annotate(
                    f"{seconds:.0f}",
                    (seconds, place),
                    xytext=(3, 0),
                    va="center",
                    textcoords="offset points",
                    fontsize=8,
                )
        style.clean(axes, TITLES[network], along="x")
        axes.margins(x=0.12)
        axes.set_yticks(range(len(archs)), archs)
    panels[0][0].invert_yaxis()
    style.legend(picture, [(name, colour, "s") for name, colour in packages.items()])
    style.save(picture, path)


def _run(args: argparse.Namespace) -> Mapping[str, Any]:
    """The record; what there is of it is written after every process."""
    import torch
    import triton

    rows: list[Row] = []
    record = {
        "machine": describe("cpu"),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "voxels": args.rows,
        "sample": args.sample,
        "units": UNITS,
        "rows": rows,
    }
    for python, row in _wanted(args):
        rows.append(_measure(python, row, args.rows, args.sample))
        print(row["network"], row["package"], row["arch"], _cell(rows[-1]), file=sys.stderr)
        if args.json:
            args.json.write_text(json.dumps(record, indent=1) + "\n")
    return record


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cold", description=__doc__)
    parser.add_argument("--archs", nargs="+", default=ARCHS, choices=tuple(UNITS))
    parser.add_argument("--networks", nargs="+", default=tuple(NETWORKS), choices=tuple(NETWORKS))
    parser.add_argument("--packages", nargs="+", default=PACKAGES, choices=PACKAGES)
    parser.add_argument("--rows", type=int, default=3000, help="voxels of the street scan")
    parser.add_argument("--sample", type=int, default=0, help="forms to compile (0: all)")
    parser.add_argument("--peer-python", help="the interpreter of an environment with spconv-triton")
    parser.add_argument("--json", type=pathlib.Path, help="write the record there")
    parser.add_argument("--read", type=pathlib.Path, help="a record, instead of a run")
    parser.add_argument("--plot", type=pathlib.Path, help="draw it there")
    args = parser.parse_args()
    found = json.loads(args.read.read_text()) if args.read else _run(args)
    if args.plot:
        plot(found["rows"], args.plot)
    print(markdown(found["rows"]))


if __name__ == "__main__":
    main()
