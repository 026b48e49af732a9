"""The page of launches is what the rules say, and its layers are those of the models."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from compat import launches, layers
from compat.launches import FAMILIES, PASSES, Question, chosen, page
from compat.layers import Layer
from sparse_bridge.core.conv import choice
from sparse_bridge.kernels.runtime.architectures import GENERATIONS
from sparse_bridge.kernels.runtime.target import described

SAME = Layer("conv", 27, True, 64, 64)
DOWN = Layer("conv", 8, False, 64, 64)
HALF = torch.float16


def on(arch, *question):
    return chosen(Question(*question), described(arch, 132))


def test_the_page_is_what_the_rules_say():
    """Where this fails after a change of a rule: `python -m compat.launches`, and read the diff."""
    assert page(layers.read()) == launches.PAGE.read_text(encoding="utf-8")


def test_a_changed_rule_changes_the_page(rules):
    counts = {DOWN: 1}
    before = page(counts)
    rules.set(choice, _FEW_OFFSETS=4)
    assert page(counts) != before


@pytest.mark.parametrize(
    ("layer", "dtype", "which", "n_rows", "answer"),
    [
        (SAME, HALF, "inference", 5000, "gather_gemm (masked)"),
        (DOWN, HALF, "inference", 5000, "gather_gemm (unmasked)"),
        (DOWN, HALF, "training", 5000, "gather_gemm (masked)"),
        (Layer("conv", 27, True, 4, 16), HALF, "inference", 5000, "narrow_gemm (masked)"),
        (Layer("conv", 27, True, 4, 16), HALF, "input gradient", 5000, "gather_gemm (masked)"),
        (SAME, HALF, "weight gradient", 5000, "wgrad_gemm"),
        (SAME, torch.float64, "inference", 5000, "torch"),
        (Layer("linear", 1, True, 64, 64), HALF, "inference", 5000, "torch"),
        (Layer("pool", 8, False, 64, 64), HALF, "input gradient", 5000, "pool_backward"),
        (Layer("channelwise", 27, True, 8, 8), HALF, "weight gradient", 9, "channelwise_wgrad"),
    ],
)
def test_answers(layer, dtype, which, n_rows, answer):
    assert on("sm_90", layer, dtype, which, n_rows) == answer


def test_turing_multiplies_no_bf16():
    found = {on("sm_75", SAME, torch.bfloat16, which, 5000) for which in PASSES}
    assert found == {"torch"} != {on("sm_75", SAME, HALF, which, 5000) for which in PASSES}


def test_every_family_has_its_column():
    listed = {one.family for one in GENERATIONS if any(chip.gpus for chip in one.chips.values())}
    shown = {described(arch).family for arch, _ in FAMILIES.values()}
    assert shown == listed


ONE_MODEL = """
from compat import layers, matrix
second = next(model for model in matrix.load() if model.number == 1)
found = layers.layers_of(matrix.Cell(second, "cpu", "float32", "standin", "tiny"))
assert len(found) >= 8 and found <= layers.read().keys(), found
"""


@pytest.mark.slow
def test_the_layers_of_a_model_are_on_the_list():
    """In a process of its own: the model's program sets spconv's switches."""
    done = subprocess.run([sys.executable, "-c", ONE_MODEL], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_list_is_that_of_the_models(monkeypatch, tmp_path):
    kept = []
    monkeypatch.setattr(layers, "write", kept.append)
    layers.main([])
    assert kept == [layers.read()]


def test_the_list_is_read_as_it_was_written(tmp_path):
    counts = {SAME: 3, Layer("conv", 27, True, 4, 8, groups=2): 1}
    layers.write(counts, tmp_path / "layers.json")
    assert layers.read(tmp_path / "layers.json") == counts
