"""The table of activations: its rows agree with torch, spconv and the operators in C++, and a row is enough."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

import pytest
import torch

import sparse_bridge
from sparse_bridge.adapters.spconv.upstream.tensorview import Activation as OfSpconv
from sparse_bridge.core.conv import activations
from sparse_bridge.core.conv.epilogue import ACTIVATIONS, Epilogue
from tests.export import operator_calls
from tests.patience import PATIENCE

ROWS = pytest.mark.parametrize("row", ACTIVATIONS.values(), ids=ACTIVATIONS)
ROOT = pathlib.Path(sparse_bridge.__file__).parents[1]


@ROWS
def test_a_row_computes_what_its_module_does(row):
    module = row.module() if row.slope is None else row.module(0.3)
    y = torch.linspace(-3, 3, 50)
    slope, want = row.slope_of(module), module(y)
    given = y.clone()
    assert torch.equal(row.apply(given, slope), want) and torch.equal(given, y)
    assert torch.equal(activations.activated(given, row.name, slope), want)
    assert row.apply_(given, slope) is given and torch.equal(given, want)
    assert torch.equal(Epilogue(None, row.name, slope).finish(y.clone(), y.dtype), want)
    assert activations.row_of(module) is row and row.arguments(*[slope][: row.slope is not None]) == (slope, False)
    for call in row.calls + row.calls_:
        assert torch.equal(call(y.clone(), *[slope][: row.slope is not None]), want)


def test_none_changes_nothing():
    y = torch.randn(3)
    assert activations.activated(y, None, 0.0) is y and activations.activated_(y, None, 0.0) is y
    assert activations.row_of(torch.nn.GELU()) is None


def test_numbers_are_their_own():
    numbers = list(activations.NUMBERS.values())
    assert len(set(numbers)) == len(numbers) and activations.NUMBERS[None] == 0
    types = [row.act_type for row in ACTIVATIONS.values() if row.act_type]
    assert len(set(types)) == len(types)


def test_the_numbers_are_those_of_spconv():
    by_name = {row.module.__name__: row.act_type for row in ACTIVATIONS.values() if row.act_type}
    assert {"None_": 0} | by_name == {name: int(member) for name, member in OfSpconv.__members__.items()}


def test_operators_in_cpp_have_every_row():
    source = (ROOT / "sparse_bridge/export/cpp/operators/products.cpp").read_text(encoding="utf-8")
    assert set(re.findall(r'name == "(\w+)"', source)) == set(ACTIVATIONS) == set(operator_calls.ACTIVATIONS)


@pytest.mark.slow
def test_a_row_is_enough_for_every_api_and_graph():
    """In a process of its own, since tables are made of the rows as files are imported."""
    words = [sys.executable, "-m", "tests.core.conv.new_activation"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
