"""The frameworks' recorded answers, which lie in a source checkout: 35 MB that the package does not
carry."""

from __future__ import annotations

import contextlib
import io
import json
import pathlib
import runpy
import sys
import tempfile
from collections.abc import Iterator

import sparse_bridge

from .setup import FAILED, PASSED, SKIPPED, Outcome, Setup

CHECKOUT = pathlib.Path(__file__).resolve().parents[3]
# Framework of `enable` and its profile, folder, further options of the runner, families that an
# emulated GPU replays in seconds.
RUNS = (
    ("spconv", None, "spconv", (), "subm,inverse"),
    ("torchsparse", "2.1", "torchsparse", ("--profile", "2.1"), "strided"),
    ("torchsparse", "1.4", "torchsparse", ("--profile", "1.4"), "transposed"),
    ("minkowski", None, "minkowski", (), "conv"),
    ("flex_gemm", None, "flexgemm", (), "dtype"),
)


def goldens(setup: Setup) -> Iterator[Outcome]:
    """Every recorded case of every framework, by the runner that comes with it."""
    for framework, profile, folder, options, few in RUNS:
        name = f"goldens, {framework}{f' {profile}' if profile else ''}"
        runner = CHECKOUT / "tests" / "goldens" / folder / "run_golden.py"
        if not any((runner.parent / "public").rglob("*.npz")):
            yield Outcome(name, SKIPPED, "the recorded answers are in a source checkout only")
            continue
        words = ("--filter", few) if setup.emulated else ()
        with sparse_bridge.enable(framework, profile=profile), setup.in_force():
            yield replay(name, runner, setup, (*options, *words))


def replay(name: str, runner: pathlib.Path, setup: Setup, options: tuple[str, ...]) -> Outcome:
    before, said = sys.argv, io.StringIO()
    sys.path.insert(0, str(CHECKOUT))
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "answers.json"
        sys.argv = [
            str(runner),
            "--cases",
            str(runner.parent / "public"),
            "--device",
            setup.device.type,
            "--json",
            str(file),
            "--quiet",
            *options,
        ]
        try:
            with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
                runpy.run_path(str(runner), run_name="__main__")
        finally:
            sys.argv = before
            sys.path.remove(str(CHECKOUT))
        facts = json.loads(file.read_text())
    bad = [case for case in facts["cases"] if not case["ok"]]
    figures = {"passed": facts["passed"], "failed": facts["failed"]}
    if not bad:
        return Outcome(name, PASSED, f"{facts['passed']} of {facts['passed']} cases", figures)
    first = "; ".join(f"{case['id']}: {case['reason'][:160]}" for case in bad[:3])
    figures["cases"] = [{k: case[k] for k in ("id", "reason")} for case in bad]
    return Outcome(name, FAILED, f"{len(bad)} of {len(facts['cases'])} fail: {first}", figures)
