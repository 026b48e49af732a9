"""Models that several ranks compute together stay eager."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp

from sparse_bridge import settings
from sparse_bridge.core.capture import graph_regions
from sparse_bridge.core.capture.calls.foreign import ForeignReads
from sparse_bridge.core.capture.graph_key import assert_on_one_rank
from sparse_bridge.refusals import Refusal

from . import apis
from .graph_sizes import graphs_of


@pytest.mark.parametrize("ranks", [None, 1, 2])
def test_norms_over_all_ranks(monkeypatch, ranks):
    """In training, where there are several."""
    monkeypatch.setattr(dist, "is_initialized", lambda: ranks is not None)
    monkeypatch.setattr(dist, "get_world_size", lambda: ranks)
    norm = nn.SyncBatchNorm(4)
    assert_on_one_rank([nn.Linear(4, 4), norm.eval()])
    norm.train()
    if ranks == 2:
        with pytest.raises(Refusal, match="SyncBatchNorm is spread over ranks"):
            assert_on_one_rank([nn.Linear(4, 4), norm])
    else:
        assert_on_one_rank([nn.Linear(4, 4), norm])


def test_a_trial_sends_nothing_to_other_ranks(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        x = torch.ones(3)
        with pytest.raises(Refusal, match=r"c10d.* is spread over ranks"), ForeignReads([x]):
            dist.all_reduce(x)
    finally:
        dist.destroy_process_group()


class Program(nn.Module):
    """A model as the part of a program that FSDP shards."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


@pytest.mark.emulated
@pytest.mark.usefixtures("nothing_learnt")
@pytest.mark.parametrize("name", ["FSDPModule", "FullyShardedDataParallel", None])
def test_parameters_that_are_sharded(device, rules, monkeypatch, name):
    """As torch makes such modules: of another class, a subclass of the model's own."""
    rules.hold(graphs_of(512, watched=True))
    whole = Program
    if name is not None:
        monkeypatch.setattr(fsdp, name, type("Sharding", (nn.Module,), {}))
        whole = type("Sharded", (Program, getattr(fsdp, name)), {})
    with apis.standin("spconv") as module, settings.override(optimize="auto"):
        plain = Program(apis.network(module, "spconv", device)).train()
        model = copy.deepcopy(plain)
        model.__class__ = whole
        for seed in range(8):
            apis.both(model, plain, lambda s=seed: apis.scene(module, "spconv", s, device, 0.2), True, mode="auto")
        said = graph_regions.summary()
    assert (sum(one.hits for one in said) > 0) == (name is None)
    assert any("GRAPH_RANKS" in str(one.reason) for one in said) == (name is not None), said
