"""Sharded training on several ranks, saved, and loaded elsewhere: the same numbers."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from .. import peers
from ..works import fill
from .training import Network, Rank, Step, batch_of, labelled_scenes, synchronised

_STEPS = 4


def save(rank: Rank, options: dict[str, Any]) -> dict[str, Any]:
    """Train with sharded parameters, save, and go on. peer -> `_facts`."""
    found = {}
    for name in options["peers"]:
        step = _new(name, rank, options)
        scenes = labelled_scenes((_STEPS + 1) * options["batch"] + 1, options["voxel_size"])
        share = options["batch"] // rank.world
        for number in range(_STEPS):
            first = number * options["batch"] + rank.number * share
            _train(step, scenes[first : first + share], rank)
        state = dict(zip(("model", "optimizer"), get_state_dict(step.model, step.optimizer), strict=True))
        dcp.save(state, checkpoint_id=Path(options["checkpoint"], name))
        found[name] = _facts(step, scenes[-1], rank)
    return found


def load(rank: Rank, options: dict[str, Any]) -> dict[str, Any]:
    """Load what `save` has saved, whatever the number of ranks and the device. peer -> `_facts`."""
    found = {}
    for name in options["peers"]:
        step = _new(name, rank, options)
        # An optimiser has no state to load into before its first step: the helper makes it.
        model, optimizer = get_state_dict(step.model, step.optimizer)
        dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=Path(options["checkpoint"], name))
        set_state_dict(step.model, step.optimizer, model_state_dict=model, optim_state_dict=optimizer)
        scenes = labelled_scenes((_STEPS + 1) * options["batch"] + 1, options["voxel_size"])
        found[name] = _facts(step, scenes[-1], rank)
    return found


def _new(name: str, rank: Rank, options: dict[str, Any]) -> Step:
    peer = peers.load(name)
    peer.allow_tf32(False)
    model = Network(peer).to(rank.device)
    fill(peer, model.net)
    model = synchronised(model, peer, rank)
    if rank.world > 1:
        model = fully_shard(model, mesh=init_device_mesh(rank.device.type, (rank.world,)))
    return Step(model, "fp32", rank.device, options["rate"])


def _train(step: Step, scenes: list[Any], rank: Rank) -> float:
    scan, labels = batch_of(scenes, rank.device)
    loss = nn.functional.cross_entropy(step.forward(scan), labels)
    step.update(loss)
    return float(loss.detach())


def _facts(step: Step, scene: Any, rank: Rank) -> dict[str, Any]:
    """Digests of the weights and the momenta, the loss of a scene in evaluation, and the losses of
    two steps on it, which the momenta take part in."""
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights, optimizer = get_state_dict(step.model, step.optimizer, options=whole)
    momenta = {name: state["momentum_buffer"] for name, state in optimizer.get("state", {}).items()}
    scan, labels = batch_of([scene], rank.device)
    step.model.eval()
    with torch.no_grad():
        logits = step.forward(scan)
        loss = float(nn.functional.cross_entropy(logits, labels))
    step.model.train()
    return {
        "weights": _digest(weights) if rank.number == 0 else None,
        "momenta": _digest(momenta) if rank.number == 0 else None,
        "loss": loss,
        "logits": _digest({"": logits.cpu()}),
        "next": [_train(step, [scene], rank) for _ in range(2)],
    }


def _digest(tensors: dict[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name, value in sorted(tensors.items()):
        digest.update(name.encode())
        digest.update(value.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]
