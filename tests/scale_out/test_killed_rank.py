"""A rank that is killed: the others end with an error, and nothing stays locked."""

from __future__ import annotations

import signal
import time

import pytest
import torch

from sparse_bridge.core.tuning.tune_cache import TuneCache
from tests.patience import PATIENCE

from ..examples.launch import start, start_ranks
from .killed import BUCKET, LIMIT, STAMP

TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, TWO_GPUS])])


@pytest.mark.sample(0)
@DEVICES
def test_the_others_end_with_an_error(device: str, tmp_path) -> None:
    """With gloo at once, with NCCL when the time of a collective is up."""
    ranks = start_ranks(2, "-m", "tests.scale_out.killed", tmp_path, device)
    try:
        ranks[1].wait(PATIENCE)
        killed = time.monotonic()
        output = ranks[0].communicate(timeout=PATIENCE)[0]
        seconds = time.monotonic() - killed
    finally:
        for rank in ranks:
            rank.kill()
    assert ranks[1].returncode == -signal.SIGKILL
    assert ranks[0].returncode not in (0, None) and "step 1" in output, output
    assert "step 2" not in output and "Error" in output
    assert seconds < LIMIT + 20  # and the interpreter's end on a busy machine
    with TuneCache(tmp_path, STAMP).claim(*BUCKET, wait=0.0) as mine:
        assert mine


@pytest.mark.slow
@DEVICES
def test_torchrun_ends_all_of_them(device: str, tmp_path) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    process = start(*launcher, "-m", "tests.scale_out.killed", tmp_path, device)
    output = process.communicate(timeout=PATIENCE)[0]
    assert process.returncode not in (0, None) and "SIGKILL" in output.upper(), output
    with TuneCache(tmp_path, STAMP).claim(*BUCKET, wait=0.0) as mine:
        assert mine
