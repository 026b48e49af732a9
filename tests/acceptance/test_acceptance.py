"""`prove`: its checks pass on a CPU and notice what is wrong; its runner survives what crashes."""

from __future__ import annotations

import json

import pytest
import torch

import sparse_bridge
from sparse_bridge.__main__ import main
from sparse_bridge.core import functional
from sparse_bridge.errors import SettingError
from sparse_bridge.tools.acceptance import checks, goldens, kernels, large, models, record, runner, speed
from sparse_bridge.tools.acceptance.setup import FAILED, PASSED, SKIPPED, Outcome, Setup, error_of
from tests.recorded import RECORDED

CPU = Setup(torch.device("cpu"), None, False)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Problems of a few hundred rows."""
    monkeypatch.setattr(Setup, "rows", lambda self, gpu, cpu, emulated: 300)


def statuses(outcomes):
    return {outcome.name: outcome.status for outcome in outcomes}


@pytest.mark.parametrize("check", ["maps", "products", "pools", "networks", "determinism"])
def test_a_cpu_passes(check):
    found = statuses(runner.CHECKS[check](CPU))
    assert found.pop("products, tf32", SKIPPED) == SKIPPED
    assert found and set(found.values()) == {PASSED}


def test_training_converges_and_a_model_that_does_not_learn_fails(monkeypatch):
    assert statuses(models.training(CPU)) == {"training": PASSED}
    monkeypatch.setattr(torch.optim.SGD, "step", lambda self, *args, **kwargs: None)
    assert statuses(models.training(CPU)) == {"training": FAILED}


@pytest.mark.parametrize("part, place", [("y", 0), ("dx", 1), ("dw", 2), ("db", 3)])
def test_one_wrong_value_of_a_product_is_seen(monkeypatch, part, place):
    real = kernels.product

    def wrong(built, device, operands, tf32):
        found = [tensor.detach().clone() for tensor in real(built, device, operands, tf32)]
        if operands[0].dtype != torch.float64:  # not the reference
            found[place].view(-1)[-1] += 1.0
        return found

    monkeypatch.setattr(kernels, "product", wrong)
    bad = [outcome for outcome in kernels.products(CPU) if outcome.status == FAILED]
    assert bad[0].name == "products, fp16"
    assert all(f"{part} of" in outcome.detail for outcome in bad) and len(bad) >= 3


def test_a_wrong_map_is_seen(monkeypatch):
    calls = []
    real = functional.submanifold

    def wrong(cmap, offsets):
        calls.append(cmap)
        flipped = functional.kernel_offsets((3, 3, 3), dilation=2)
        return real(cmap, flipped if len(calls) % 2 == 0 else offsets)

    monkeypatch.setattr(functional, "submanifold", wrong)
    bad = [outcome for outcome in kernels.maps(CPU) if outcome.status == FAILED]
    assert len(bad) == 3 and all("submanifold differ" in outcome.detail for outcome in bad)


def test_results_that_do_not_repeat_are_seen(monkeypatch):
    real, turns = models.train_once, iter(range(9))

    def noisy(setup, steps, rows):
        turn = next(turns)
        losses, parameters, ms = real(setup, steps, rows)
        return losses, [p + 1e-3 * turn for p in parameters], ms

    monkeypatch.setattr(models, "train_once", noisy)
    assert statuses(models.determinism(CPU)) == {"determinism": FAILED}


def test_the_reference_of_large_problems_is_right_on_a_small_one(monkeypatch):
    """The same code on a cube of 7^3 cells, where every row is known."""
    assert large.large_scene(CPU, "small", 7, 16).status == PASSED
    wide = functional.kernel_offsets((3, 3, 3), dilation=2)
    monkeypatch.setattr(functional, "kernel_offsets", lambda size: wide)
    assert large.large_scene(CPU, "small", 7, 16).status == FAILED


@pytest.mark.parametrize("rows", [1, 26, 27, 1 << 24])
def test_a_cube_holds_more_rows_than_the_limit(rows):
    side = large.side_of(rows)
    assert side**3 > rows >= (side - 1) ** 3


@pytest.mark.parametrize("check", [large.large, speed.speed])
def test_what_needs_a_gpu_says_so(check):
    assert {(o.status, o.detail) for o in check(CPU)} == {(SKIPPED, "needs a GPU")}


def test_goldens_of_an_installation_without_a_checkout(monkeypatch, tmp_path):
    monkeypatch.setattr(goldens, "CHECKOUT", tmp_path)
    found = list(goldens.goldens(CPU))
    assert len(found) == len(goldens.RUNS)
    assert all(o.status == SKIPPED and "source checkout" in o.detail for o in found)


@RECORDED
def test_goldens_are_replayed_and_failures_named():
    runner_file = goldens.CHECKOUT / "tests" / "goldens" / "flexgemm" / "run_golden.py"
    options = ("--filter", "dtype")
    with sparse_bridge.enable("flex_gemm"):
        good = goldens.replay("goldens", runner_file, CPU, options)
        assert (good.status, good.figures) == (PASSED, {"passed": 5, "failed": 0}), good.detail
        bad = goldens.replay("goldens", runner_file, CPU, (*options, "--tol", "-1"))
    assert bad.status == FAILED and bad.detail.startswith("4 of 5 fail: ")


def test_an_error_is_relative_and_nan_is_infinite():
    want = torch.full((4,), 2.0)
    assert error_of(want + 0.2, want)[0] == pytest.approx(0.1)
    assert error_of(torch.tensor([1.0, float("nan")]), torch.ones(2))[0] == float("inf")


def test_a_check_that_raises_has_failed(monkeypatch):
    def broken(setup):
        yield Outcome("first", PASSED, "fine")
        raise RuntimeError("the compiler gave up\nwith many lines")

    monkeypatch.setitem(runner.CHECKS, "maps", broken)
    first, second = runner.run("maps", CPU)
    assert first.status == PASSED and second.status == FAILED
    assert second.detail == "RuntimeError: the compiler gave up"


def test_a_process_that_crashes_or_hangs_is_replaced():
    process = runner.SeparateProcess(CPU, "tests.acceptance.crashing")
    try:
        (crashed,) = process.run("crash", 60.0)
        assert crashed.status == FAILED and "illegal memory access" in crashed.detail
        (fine,) = process.run("maps", 60.0)
        assert fine.status == PASSED and fine.name == "maps"
        (hung,) = process.run("hang", 1.0)
        assert hung.status == FAILED and "no answer within 1 s" in hung.detail
        assert [o.status for o in process.run("pools", 60.0)] == [PASSED]
    finally:
        process.end()


def test_checks_behind_the_budget_are_skipped(monkeypatch):
    monkeypatch.setitem(runner.CHECKS, "maps", lambda setup: iter([Outcome("m", PASSED, "")]))
    found = list(runner.prove(CPU, ["maps"], minutes=-1.0))
    assert [o.status for o in found] == [SKIPPED] and "-1 minutes" in found[0].detail


def test_names_of_checks():
    assert checks.chosen((), ("goldens",)) == [n for n in runner.CHECKS if n != "goldens"]
    assert checks.chosen(("pools", "maps"), ()) == ["maps", "pools"]
    with pytest.raises(SettingError, match="no check is called 'speeed'"):
        checks.chosen(("speeed",), ())


def test_the_command_writes_json_and_markdown(tmp_path, capsys, monkeypatch):
    file = tmp_path / "proof.json"
    bad = Outcome("pools, max", FAILED, "a | b\nc", {"largest": 3.0})
    monkeypatch.setitem(runner.CHECKS, "pools", lambda setup: iter([bad]))
    status = main(["prove", "--device", "cpu", "--only", "pools", "--json", str(file)])
    said, content = capsys.readouterr().out, json.loads(file.read_text())
    assert status == 1 and "1 failed" in said and "| FAIL | pools, max | a \\| b c |" in said
    assert content["schema"] == record.SCHEMA and content["counts"]["failed"] == 1
    assert content["outcomes"][0]["figures"] == {"largest": 3.0}
    assert content["machine"]["torch"] == torch.__version__


def test_the_command_refuses_in_one_line(capsys):
    assert main(["prove", "--only", "speeed"]) == 2
    assert "Did you mean: 'speed'?" in capsys.readouterr().err
    assert main(["prove", "--device", "foo"]) == 2
    assert capsys.readouterr().err == "sparse_bridge: --device foo: expected cpu, cuda or cuda:1.\n"
    with pytest.raises(SystemExit):
        main(["prove", "--minutes", "0"])
    assert "--minutes: got 0; expected a number above 0" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.slow
def test_a_gpu_passes_everything(monkeypatch):
    monkeypatch.undo()
    setup = Setup.find()
    found = list(runner.prove(setup, list(runner.CHECKS), 10.0))
    assert [o for o in found if o.status == FAILED] == []


@pytest.mark.emulated
@pytest.mark.parametrize("check", ["maps", "products"])
def test_an_emulated_gpu_passes(kernel_lane, check, monkeypatch):
    """In the lane of one architecture; elsewhere the same on plain torch."""
    monkeypatch.setattr(Setup, "rows", lambda self, gpu, cpu, emulated: 150)
    found = statuses(runner.CHECKS[check](Setup.find("cpu")))
    assert FAILED not in found.values() and PASSED in found.values()
