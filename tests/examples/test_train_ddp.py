"""A training on several processes: what is printed, saved, and taken up again by another number."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.patience import PATIENCE

from .empty_streets import no_voxels, train_ddp
from .launch import start, wait

SCRIPT = "examples/train_ddp.py"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
TWO = [*TORCHRUN, SCRIPT]
TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
SMALL = ["--voxel-size", "0.8", "--held-out", "3", "--scenes", "8"]


def log(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "log.json").read_text())


def mean_iou(output: str) -> list[str]:
    return re.findall(r"mean IoU (\S+)", output)


@pytest.mark.slow
def test_two_processes_under_torchrun(tmp_path: Path) -> None:
    common = [*SMALL, "--device", "cpu", "--out", tmp_path]
    two = wait(start(*TWO, "--steps", "3", *common))
    assert re.search(r"2 ranks, first step after \d+\.\d s\n", two), two
    assert re.search(r"step 3  loss \d\.\d+  \d+\.\d samples a second\n", two), two
    saved, last = mean_iou(two)
    assert saved == last and len(log(tmp_path)["loss"]) == 3 and 0 < float(last) < 1


@pytest.mark.slow
@pytest.mark.parametrize("options", [["--amp"], ["--fsdp"]], ids=" ".join)
@pytest.mark.parametrize("api", ["spconv", "torchsparse", "minkowski"])
def test_every_api_goes_on_with_other_processes(api: str, options: list, tmp_path: Path) -> None:
    """Three held-out streets on two ranks, then on one, not sharded: the same weights."""
    common = [*SMALL, "--device", "cpu", "--api", api, "--out", tmp_path]
    (_, saved) = mean_iou(wait(start(*TWO, "--steps", "2", *common, *options)))
    alone = [option for option in options if option != "--fsdp"]
    one = wait(start(SCRIPT, "--steps", "2", "--resume", "--workers", "0", *common, *alone))
    assert "resumed at step 2\n" in one and mean_iou(one) == [saved]
    wait(start(*TWO, "--steps", "4", "--resume", *common, *options))
    assert log(tmp_path)["first"] == 2 and len(log(tmp_path)["loss"]) == 2
    assert len(list(tmp_path.glob("step*/.metadata"))) == 2


@pytest.mark.slow
def test_interruption_leaves_no_trace(tmp_path: Path) -> None:
    """Four steps at once are those of two and two: order, turns, rate and momenta go on."""
    common = [*SMALL, "--device", "cpu", "--save-every", "2", "--steps", "4"]
    wait(start(*TWO, *common, "--out", tmp_path / "whole"))
    (tmp_path / "parts").mkdir()
    (tmp_path / "whole" / "step00000002").rename(tmp_path / "parts" / "step00000002")
    # Four ranks were interrupted while they saved the next.
    (tmp_path / "parts" / "step00000004").mkdir()
    (tmp_path / "parts" / "step00000004" / "__3_0.distcp").write_text("half")
    wait(start(*TWO, *common, "--resume", "--out", tmp_path / "parts"))
    whole, parts = log(tmp_path / "whole"), log(tmp_path / "parts")
    assert whole["loss"][2:] == parts["loss"] and whole["mean IoU"] == parts["mean IoU"]


@pytest.mark.slow
def test_it_learns(tmp_path: Path) -> None:
    wait(start(*TWO, *SMALL, "--device", "cpu", "--steps", "24", "--out", tmp_path))
    losses = log(tmp_path)["loss"]
    assert losses[-1] < 0.7 * losses[0]


def test_batches_do_not_depend_on_the_number_of_ranks() -> None:
    def shares(rank: int, world: int, first: int = 0) -> list[set]:
        args = argparse.Namespace(steps=9, scenes=10, batch=4, rank=rank, world=world)
        made = train_ddp.Shares(args, first)
        batches = list(map(set, made))
        assert len(made) == len(batches)
        return batches

    alone = shares(0, 1)
    assert all(len(batch) == 4 for batch in alone) and len(alone) == 9
    assert [a | b for a, b in zip(shares(0, 2), shares(1, 2), strict=True)] == alone
    assert shares(0, 1, first=5) == alone[5:] and shares(0, 1, first=9) == []
    assert not alone[0] & alone[1] and {epoch for _, epoch in alone[2]} == {1}


@pytest.mark.gpu
@TWO_GPUS
@pytest.mark.parametrize("options", [[], ["--fsdp"], ["--amp"]], ids=str)
@pytest.mark.parametrize("api", ["spconv", "torchsparse", "minkowski"])
def test_two_gpus_equal_one(api: str, options: list[str], tmp_path: Path) -> None:
    """Synchronised statistics of two ranks are the batch statistics of one process."""
    common = [*SMALL, "--device", "cuda", "--api", api, "--steps", "6", "--rate", "1e-3"]
    wait(start(*TWO, *common, *options, "--out", tmp_path / "two"))
    alone = [option for option in options if option != "--fsdp"]
    wait(start(SCRIPT, *common, *alone, "--norm", "batch", "--out", tmp_path / "one"))
    two, one = log(tmp_path / "two"), log(tmp_path / "one")
    # Sums in another order; Adam lifts the smallest gradients' last bits into the weights.
    assert two["loss"] == pytest.approx(one["loss"], rel=2e-2 if "--amp" in options else 2e-3)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--norm sync", "SyncBatchNorm needs GPUs"),
        ("--batch 3", "does not divide into 2 ranks"),
        ("--batch 0", "are 1 or more"),
        ("--scenes 2", "fewer than --batch 4"),
        ("--resume", "no checkpoint in"),
        ("--out {old}", "has checkpoints"),
        ("--out {old}/step1/.metadata", "File exists"),
        ("--out {old}/step1/.metadata/under", "Not a directory"),
        ("--device cuda", "a GPU for each process"),
    ],
)
def test_refusals(options: str, said: str, tmp_path: Path, monkeypatch, capsys) -> None:
    old = tmp_path / "old"
    (old / "step1").mkdir(parents=True)
    (old / "step1" / ".metadata").touch()
    line = f"train_ddp.py --device cpu --out {tmp_path / 'new'} {options.format(old=old)}"
    monkeypatch.setattr(sys, "argv", line.split())
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    with pytest.raises(SystemExit) as exit:
        train_ddp.parse("")
    assert exit.value.code == 2 and said in capsys.readouterr().err


@pytest.mark.slow
def test_another_training_is_not_resumed(tmp_path: Path) -> None:
    common = [SCRIPT, *SMALL, "--device", "cpu", "--workers", "0", "--out", tmp_path]
    wait(start(*common, "--steps", "1"))
    process = start(*common, "--steps", "2", "--resume", "--api", "minkowski")
    output = process.communicate(timeout=PATIENCE)[0]
    assert process.returncode == 1 and "was trained with --api spconv, not minkowski" in output
    assert "Traceback" not in output


def test_batches_without_voxels() -> None:
    full = torch.ones(3, 3), torch.tensor([[0, 0, 0], [15, 16, 2], [1, 1, 1]], dtype=torch.int32), torch.ones(3).long()
    features, coords, labels, grid, items = train_ddp.collate([no_voxels(), full])
    assert features.shape == (3, 3) and coords[:, 0].tolist() == [1, 1, 1] and len(labels) == 3
    assert grid == [16, 32, 16] and items == 2
    features, coords, labels, grid, items = train_ddp.collate([no_voxels(), no_voxels()])
    assert features.shape == (0, 3) and coords.shape == (0, 4) and grid == [16, 16, 16] and items == 2


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--fsdp"]], ids=str)
@pytest.mark.parametrize("api", ["spconv", "torchsparse", "minkowski"])
def test_empty_scenes_on_one_rank_and_on_both(api: str, options: list[str], tmp_path: Path) -> None:
    two = [*TORCHRUN, "-m", "tests.examples.empty_streets", "--batch", "2", "--steps", "4"]
    output = wait(start(*two, *SMALL, "--device", "cpu", "--api", api, *options, "--out", tmp_path))
    losses = log(tmp_path)["loss"]
    assert [loss == 0 for loss in losses] == [True, False] * 2, losses  # of two empty scenes, and of one
    assert losses[3] < losses[1]
    assert all(0 < float(iou) < 1 for iou in mean_iou(output))
