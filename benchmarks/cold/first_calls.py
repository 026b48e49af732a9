"""First calls on a GPU that is not there: which forms are begun early, which launches stand for,
and when launches could run.

    python -m benchmarks.cold.first_calls flex_gemm:64:16 flex_gemm:1024:16:train unet:20000:60000

A program is flex_gemm:CHANNELS:SHELL or NETWORK:VOXELS:VOXELS..., with :train for gradients. Each
takes a process of its own. Forms are compiled one at a time on this CPU; the timeline assumes eight
worker processes with a core each, and neither launchers in C nor the start of Triton, which both
take time.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import Any
from unittest import mock

from ..machine import describe
from . import programs
from .dry_run import DryRun, Event
from .timeline import HELD, Step, alone, timeline

PROGRAMS = (
    "flex_gemm:64:16:train",
    "flex_gemm:64:64:train",
    "flex_gemm:1024:16:train",
    "unet:20000:60000:100000:30000",
)


def dry_run_of(program: str, arch: str) -> DryRun:
    """The dry run of a program, see the module's text."""
    name, *numbers = program.split(":")
    train = numbers[-1:] == ["train"]
    sizes = [int(one) for one in numbers[: len(numbers) - train]]
    if name == "flex_gemm":
        return programs.flex_gemm(arch, sizes[0], sizes[1], train)
    return programs.scenes(arch, name, sizes, train)


def seconds(found: DryRun) -> dict[int, float]:
    """Processor seconds of every form, by its `id`."""
    with tempfile.TemporaryDirectory() as folder:
        with mock.patch.dict(os.environ, TRITON_CACHE_DIR=os.path.join(folder, "first")):
            found.driver.asked[0].compile()  # what the first one takes in any process
        with mock.patch.dict(os.environ, TRITON_CACHE_DIR=os.path.join(folder, "all")):
            return {id(form): form.compile() for form in found.driver.asked}


def record(program: str, arch: str) -> dict[str, Any]:
    """What a process finds out about a program."""
    found = dry_run_of(program, arch)
    costs = seconds(found)
    steps = [Step(one.key, one.early, costs[id(one.form)], one.part) for one in found.events]
    late, unused = found.late(), {one.key for one in found.unused()}

    def told(one: Event) -> dict[str, Any]:
        kind = "late" if not one.early else "unused" if one.key in unused else "early"
        held = {"kind": kind, "part": one.part, "seconds": round(costs[id(one.form)], 2)}
        return {"kernel": one.name, **held, "constants": one.constants}

    return {
        "program": program,
        "arch": arch,
        "forms": len(found.firsts()),
        "late": len(late),
        "unused": len(unused),
        "seconds": round(alone(steps), 2),
        "seconds_unused": round(alone(steps, lambda step: step.form in unused), 2),
        "timeline": {part: round(end, 2) for part, end in timeline(steps).items()},
        "each": [told(one) for one in found.firsts()],
    }


def line(row: Mapping[str, Any]) -> str:
    """A row of the table."""
    ends = ", ".join(f"{part} {end:.1f}" for part, end in row["timeline"].items())
    counts = f"{row['forms']} | {row['late']} | {row['unused']}"
    return f"| {row['program']} | {counts} | {row['seconds']:.1f} | {ends} |"


def _apart(program: str, arch: str) -> dict[str, Any]:
    """`record` in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.cold.first_calls", program, "--arch", arch, "--here"],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{program} failed:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cold.first_calls",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("programs", nargs="*", default=PROGRAMS)
    parser.add_argument("--arch", default="sm_90")
    parser.add_argument("--json", type=pathlib.Path, help="write the record there")
    parser.add_argument("--here", action="store_true", help="one program, as JSON")
    args = parser.parse_args()
    if args.here:
        print(json.dumps(record(args.programs[0], args.arch)))
        return
    print("| program | forms | late | unused | processor s | last launch at, s |")
    print("|---|---|---|---|---|---|")
    rows = []
    for program in args.programs:
        rows.append(_apart(program, args.arch))
        print(line(rows[-1]), flush=True)
    if args.json:
        found = {"machine": describe("cpu"), "held": HELD, "rows": rows}
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
