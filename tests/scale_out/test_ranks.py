"""Two ranks train what one process would train, with torch's own engines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from ..examples.launch import start_ranks, wait
from ..once import once
from .networks import NETWORKS
from .ranks import CHECKS

TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
GPU = pytest.param("cuda", marks=[pytest.mark.gpu, TWO_GPUS])
WARNING = "ignore:torch.distributed is disabled:UserWarning"


@pytest.fixture(scope="module", params=["cpu", GPU])
def folder(request, tmp_path_factory) -> Path:
    """What two ranks have written."""

    def run(path: Path) -> None:
        wait(*start_ranks(2, "-m", "tests.scale_out.ranks", path, request.param))

    return once(tmp_path_factory, f"ranks-{request.param}", run)


@pytest.mark.sample(0)
@pytest.mark.parametrize("title", CHECKS)
@pytest.mark.parametrize("name", NETWORKS)
def test_two_ranks(folder: Path, name: str, title: str) -> None:
    for rank in (0, 1):
        results = json.loads((folder / f"rank{rank}.json").read_text())
        assert results[f"{name}-{title}"] == "", f"rank {rank}"


@pytest.mark.sample(0)
@pytest.mark.filterwarnings(WARNING)
def test_one_process_loads_what_two_have_saved(folder: Path, network: torch.nn.Module) -> None:
    path = folder / type(network).__name__.lower()
    saved = torch.load(f"{path}.pt")
    optimizer = torch.optim.Adam(network.parameters(), 1e-2)
    model, state = get_state_dict(network, optimizer)
    dcp.load({"model": model, "optimizer": state}, checkpoint_id=path)
    set_state_dict(network, optimizer, model_state_dict=model, optim_state_dict=state)
    assert network.state_dict().keys() == saved["model"].keys()
    for name, value in network.state_dict().items():
        assert torch.equal(value, saved["model"][name])
    states = [optimizer.state[p] for p in network.parameters()]
    moments = [one[name] for one in states for name in ("exp_avg", "exp_avg_sq")]
    for one, other in zip(moments, saved["moments"], strict=True):
        assert torch.equal(one, other) and other.abs().max() > 0
