"""Cells run in processes of their own; whatever happens in there becomes an outcome."""

from __future__ import annotations

import importlib.util

import pytest

import sparse_bridge
from compat import bridged, results
from compat.matrix import CHECKS
from sparse_bridge import __main__ as command_line
from sparse_bridge.adapters import base


def expecting(check, outcome, **more):
    lines = {"check": check, "outcome": outcome, "reason": "known limit", **more}
    return "[[model.expect]]\n" + "".join(f'{key} = "{text}"\n' for key, text in lines.items())


@pytest.mark.slow
def test_checks_in_further_processes(run_toy):
    _, checks = run_toy(checks=("ddp", "native"))
    assert (checks["ddp"].outcome, checks["ddp"].reason) == ("pass", "2 gloo processes")
    native = checks["native"]
    if importlib.util.find_spec("spconv") is None:
        assert (native.outcome, native.reason) == ("not run", "the real spconv is not installed")
    else:
        assert native.outcome == "pass"
        assert "float32: outputs within" in native.reason and "float64: " in native.reason


@pytest.mark.parametrize("framework", ["torchsparse", "minkowski", "flex_gemm"])
def test_a_standin_is_not_the_real_library(framework):
    real = bridged.installed(framework)
    with sparse_bridge.enable(framework):
        assert bridged.installed(framework) == real
    package = base.load(framework).packages[0]
    assert (real is None) == (importlib.util.find_spec(package) is None)


@pytest.mark.parametrize(
    ("fault", "check", "reason"),
    [
        ("raise", "forward", "RuntimeError: the toy broke, as asked"),
        ("nan", "forward", "elements are not finite"),
        ("idle", "backward", "1 parameters have no gradient: idle"),
    ],
)
def test_what_goes_wrong_is_the_reason(attempt, fault, check, reason):
    outcome, found = attempt(check, f'fault = "{fault}"')
    assert outcome == "fail" and reason in found


def test_checks_wait_for_those_that_they_need(attempt):
    assert attempt("eval", passed=("import",)) == ("not run", "construct has not passed")
    assert attempt("construct", passed=("import",))[0] == "pass"


def test_parameters_that_the_model_leaves_out_may_lack_gradients(attempt):
    outcome, remark = attempt("backward", 'fault = "idle"', 'without_gradient = ["idle"]')
    assert (outcome, remark) == ("pass", "6 gradients")


def test_inference_only_models_do_not_train(attempt):
    options = ('fault = "train"', "train = false")
    assert attempt("eval", *options)[0] == "pass"
    for check in ("backward", "step", "ddp"):
        assert attempt(check, *options) == ("not run", "the model is for inference only")


@pytest.mark.slow
def test_a_crash_is_a_failure_and_the_other_checks_go_on(run_toy, tmp_path):
    _, checks = run_toy('fault = "crash"', checks=("eval", "reference"), logs=tmp_path / "logs")
    assert checks["eval"].outcome == "fail"
    assert checks["eval"].reason == "killed by SIGABRT: Fatal Python error: Aborted"
    assert checks["reference"].outcome == "pass"
    (log,) = (tmp_path / "logs").iterdir()
    assert "about to crash" in log.read_text()


@pytest.mark.slow
def test_a_check_that_hangs_is_stopped(run_toy):
    _, checks = run_toy('fault = "hang"', checks=("eval",), limit=10)
    assert checks["forward"].outcome == "pass"
    assert (checks["eval"].outcome, checks["eval"].reason) == ("fail", "timed out after 10 s")


def test_expected_failures_are_reported_with_their_reason(run_toy):
    known = expecting("backward", "unsupported", device="cpu") + expecting("eval", "fail")
    result, checks = run_toy('fault = "idle"', known, checks=("backward", "eval"))
    backward, inference = checks["backward"], checks["eval"]
    assert (backward.outcome, backward.reason) == ("unsupported", "known limit")
    assert backward.expected
    # eval passes although the list says that it fails: the list is strict
    assert inference.outcome == "fail" and not inference.expected
    assert inference.reason == "passed, but the matrix expects fail: known limit"
    assert result.unexpected == [inference]


@pytest.mark.slow
def test_command_line(toys, tmp_path, capsys):
    folder = toys(("sound", "", ""), ("broken", 'fault = "raise"', ""))
    arguments = ["compat", "--matrix", str(folder), "--device", "cpu", "--mode", "standin"]
    assert command_line.main([*arguments, "--list"]) == 0
    assert "broken" in capsys.readouterr().out
    saved = tmp_path / "out" / "cpu.json"
    within = [check for check in CHECKS if check not in ("ddp", "native")]
    arguments += ["--size", "tiny", "--jobs", "2", "--json", str(saved)]
    assert command_line.main([*arguments, "--check", ",".join(within)]) == 1
    assert "forward: RuntimeError: the toy broke, as asked" in capsys.readouterr().err
    found = results.Results.read(saved)
    assert found.runs[0]["device"] == "CPU" and found.runs[0]["versions"]["torch"]
    cells = {cell.model: cell for cell in found.cells}
    sound = {check.check: check for check in cells["sound"].checks}
    assert cells["sound"].outcome == "pass" and cells["sound"].mode == "standin"
    assert {name: one.outcome for name, one in sound.items()} == dict.fromkeys(within, "pass")
    assert sound["copy"].reason == "equal bits" and "12 entries" in sound["state_dict"].reason
    assert sound["autocast_bf16"].reason == "bfloat16"
    assert sound["tiny"].reason == "voxels of the batch items: 16, 0, 16"
    broken = [check.outcome for check in cells["broken"].checks]
    assert broken == ["pass", "pass", "fail"] + ["not run"] * (len(within) - 3)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--framework", "caffe"], "expected spconv, torchsparse, minkowski"),
        (["--dtype", "fp32"], "expected float32"),
        (["--model", "no such model"], "no model matches"),
        (["report", "missing.json"], "holds no results of `compat`: No such file or directory"),
    ],
)
def test_wrong_usage_is_one_line(arguments, words, capsys):
    assert command_line.main(["compat", *arguments]) == 2
    assert words in " ".join(capsys.readouterr().err.split())
