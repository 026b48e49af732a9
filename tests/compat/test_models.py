"""Models of the matrix: one per framework in every run, all of them when asked for."""

from __future__ import annotations

import os

import pytest

from compat import matrix, runner
from tests.quick import quick

MODELS = {model.name: model for model in matrix.load()}
ONE_OF_EACH = ("second", "spvnas_minkunet", "fcgf")


def unexpected(model, device, dtype, size="small", **options):
    cell = matrix.Cell(model, device, dtype, "standin", size)
    result = runner.run_cell(cell, runner.Options(**options))
    return result, [f"{check.check}: {check.reason}" for check in result.unexpected]


@pytest.mark.parametrize("module", quick(["fcgf"], ONE_OF_EACH))
def test_one_model_of_each_framework(module):
    model = next(one for one in MODELS.values() if one.module.endswith(f".{module}"))
    result, problems = unexpected(model, "cpu", "float32", "tiny", checks=("state_dict",))
    assert not problems
    assert [check.outcome for check in result.checks] == ["pass"] * 4


@pytest.mark.slow
@pytest.mark.skipif(
    not os.environ.get("SPARSE_BRIDGE_TEST_MATRIX"),
    reason="the whole matrix takes an hour: set SPARSE_BRIDGE_TEST_MATRIX=1",
)
@pytest.mark.parametrize("name", MODELS)
def test_whole_matrix_on_the_cpu(name):
    model = MODELS[name]
    if "small" not in model.sizes:
        pytest.skip("the model has no scene for CPUs")
    for dtype in model.dtypes:
        _, problems = unexpected(model, "cpu", dtype, limit=1800)
        assert not problems
