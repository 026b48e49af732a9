"""Several processes train what one process would train on the joint batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.patience import PATIENCE

from .launch import start, start_ranks, wait

SCRIPT = "examples/train_ddp.py"
TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def logs(folder: Path, ranks: int) -> list[dict[str, Any]]:
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]


def check_agreement(folder: Path, tolerance: float, same_gradients: bool = True) -> None:
    """Ranks agree to the bit with one another, and closely with the single process."""
    (alone,) = logs(folder / "one", 1)
    first, second = logs(folder / "two", 2)
    assert first["loss"] == second["loss"] and len(first["loss"]) == len(alone["loss"]) >= 6
    assert first["loss"] == pytest.approx(alone["loss"], rel=tolerance)
    assert alone["loss"][-1] < 0.8 * alone["loss"][0]
    if same_gradients:
        assert first["gradients"] == second["gradients"]
        assert len(set(first["gradients"])) == len(first["loss"])
    weights = [torch.load(folder / name / "model.pt") for name in ("one", "two")]
    assert weights[0].keys() == weights[1].keys()
    for name, value in weights[0].items():
        torch.testing.assert_close(weights[1][name], value, rtol=100 * tolerance, atol=1e-4)


@pytest.mark.slow
def test_two_cpu_processes_equal_one_on_the_joint_batch(tmp_path: Path) -> None:
    # Layer norm: batch statistics of a half batch are not those of the joint one.
    common = [SCRIPT, "--quick", "--device", "cpu", "--norm", "layer", "--out"]
    ranks = start_ranks(2, *common, tmp_path / "two")
    wait(start(*common, tmp_path / "one"), *ranks)
    check_agreement(tmp_path, 1e-5)


@pytest.mark.slow
def test_torchrun_shards_parameters_over_cpu_processes(tmp_path: Path) -> None:
    options = [SCRIPT, "--quick", "--device", "cpu", "--norm", "layer", "--out"]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    wait(start(*launcher, *options, tmp_path / "two", "--fsdp"))
    wait(start(*options, tmp_path / "one"))
    check_agreement(tmp_path, 1e-5, same_gradients=False)


@pytest.mark.slow
def test_loading_processes_and_batch_norm_under_torchrun(tmp_path: Path) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    wait(
        start(*launcher, SCRIPT, "--quick", "--device", "cpu", "--workers", "1", "--out", tmp_path)
    )
    first, second = logs(tmp_path, 2)
    assert first == second and first["loss"][-1] < 0.8 * first["loss"][0]


@pytest.mark.gpu
@TWO_GPUS
@pytest.mark.parametrize("options", [["--norm", "layer"], ["--norm", "sync"], ["--fsdp"]], ids=str)
def test_two_gpus_equal_one_on_the_joint_batch(options: list[str], tmp_path: Path) -> None:
    options = options if "--norm" in options else [*options, "--norm", "layer"]
    common = [SCRIPT, "--quick", "--device", "cuda", *options, "--out"]
    wait(*start_ranks(2, *common, tmp_path / "two"))
    # Synchronised statistics of two ranks are the batch statistics of one process.
    alone = [option.replace("sync", "batch") for option in options]
    wait(start(SCRIPT, "--quick", "--device", "cuda", *alone, "--out", tmp_path / "one"))
    check_agreement(tmp_path, 2e-3, same_gradients="--fsdp" not in options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--norm", "sync"], "SyncBatchNorm needs GPUs"),
        (["--batch", "3", "--norm", "layer"], "does not divide into 2 ranks"),
    ],
)
@pytest.mark.slow
def test_refusals(options: list[str], said: str, tmp_path: Path) -> None:
    process = start(
        SCRIPT, "--device", "cpu", *options, "--out", tmp_path, WORLD_SIZE="2", RANK="0"
    )
    output = process.communicate(timeout=PATIENCE)[0]
    assert process.returncode == 2 and said in output and "Traceback" not in output
