"""A matrix of toys, and results as a run would leave them."""

from __future__ import annotations

import sys

import pytest

from compat import checks, matrix, runner, worker
from compat.matrix import CHECKS
from compat.results import CellResult, CheckResult, Results

from ..adapters.spconv import apis

_TOY = """
[[model]]
number = {number}
name = "{name}"
framework = "spconv"
module = "tests.compat.toy"
preset = "kitti"
features = 4
options = {{ {options} }}
"""


@pytest.fixture
def toys(tmp_path):
    """Write a matrix of toys, one per (name, options, further TOML lines); gives its folder."""

    def write(*models):
        text = "".join(
            _TOY.format(number=index, name=name, options=options) + more + "\n"
            for index, (name, options, more) in enumerate(models)
        )
        (tmp_path / "toys.toml").write_text(text)
        return tmp_path

    return write


@pytest.fixture
def run_toy(toys):
    """Run one toy on a tiny scene; its results by check."""

    def run(options="", more="", checks=("forward", "eval"), **how):
        models = matrix.load(toys(("toy", options, more)))
        (cell,) = matrix.cells(models, modes=("standin",), size="tiny")
        result = runner.run_cell(cell, runner.Options(checks=checks, **how))
        return result, {check.check: check for check in result.checks}

    return run


@pytest.fixture
def attempt(toys):
    """Run one check of a toy in this process; outcome and reason."""
    with apis.standin():
        sys.modules.pop("tests.compat.toy", None)

        def run(check, options="", more="", passed=CHECKS[:3]):
            (model,) = matrix.load(toys(("toy", options, more)))
            one = matrix.Cell(model, "cpu", "float32", "standin", "tiny")
            return worker.attempt(checks.Bench(one, passed=set(passed)), check)

        yield run
        sys.modules.pop("tests.compat.toy", None)


def cell(model="SECOND", number=1, framework="spconv", device="cpu", run=0, **outcomes):
    """A result; outcomes by check: "pass", or (outcome, reason[, expected])."""
    found = []
    for check, outcome in outcomes.items():
        outcome, reason, *known = (outcome, "") if isinstance(outcome, str) else outcome
        found.append(CheckResult(check, outcome, reason, 0.5, bool(known)))
    where = (device, "float32", "standin", "small")
    return CellResult(number, model, framework, *where, tuple(found), run)


def facts(device="CPU", date="2026-01-02 03:04 UTC", version="0.1.0"):
    """What a run says of itself."""
    versions = {"sparse_bridge": version, "torch": "2.9.0", "real spconv": None}
    return {"date": date, "device": device, "versions": versions}


@pytest.fixture
def results():
    """Two frameworks on two devices."""
    cells = (
        cell(forward="pass", native="pass"),
        cell("UNet", 3, forward=("fail", "rows <differ> | by *3*"), native=("not run", "x")),
        cell("UNet", 3, device="cuda", run=1, forward="pass", native=("not run", "on CPU")),
        cell("FCGF", 24, "minkowski", forward=("unsupported", "refused on purpose", True)),
    )
    return Results((facts(), facts("NVIDIA H200")), cells)
