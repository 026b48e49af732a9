"""Models that several ranks compute together.

A trial and a capture call the model on one rank alone: a norm over all ranks would wait for the others. Parameters
that are sharded come and go with every call, and a backward pass finds them elsewhere than its graph.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import nn

from ...refusals import Refusal, Why
from .calls.frames import calls_under_way


def assert_on_one_rank(modules: Sequence[nn.Module]) -> None:
    """Raise Refusal where one of a model's modules, whose call is under way, waits for other ranks, or where FSDP
    shards parameters around it."""
    for module in modules:
        if isinstance(module, nn.SyncBatchNorm) and module.training and _several():
            raise Refusal(Why.GRAPH_RANKS, type(module).__name__)
    fsdp = sys.modules.get("torch.distributed.fsdp")
    sharding = tuple(getattr(fsdp, name) for name in ("FullyShardedDataParallel", "FSDPModule") if hasattr(fsdp, name))
    for module, _ in calls_under_way(sys._getframe()):
        if isinstance(module, sharding):
            raise Refusal(Why.GRAPH_RANKS, type(module).__name__)


def _several() -> bool:
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
