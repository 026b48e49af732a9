"""Loss curves of one training, as one process with the whole batch or ranks with a part each."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .. import peers
from ..works import fill
from .training import Network, Rank, Step, batch_of, labelled_scenes, spread, synchronised

ORDERS = {
    "given": lambda items: items,
    "opposite": lambda items: items[::-1],
    "turned": lambda items: items[1:] + items[:1],
}


def measure(rank: Rank, options: dict[str, Any]) -> dict[str, Any]:
    """peer -> losses.

    `order`: of the items of a batch; it changes the order of sums and nothing else.
    `norms`: with statistics of all ranks, joint, or of each, apart.
    """
    share = options["batch"] // rank.world
    scenes = labelled_scenes(options["scenes"], options["voxel_size"])
    found = {}
    for name in options["peers"]:
        peer = peers.load(name)
        peer.allow_tf32(False)
        model = Network(peer).to(rank.device)
        fill(peer, model.net)
        if options["norms"] == "joint":
            model = synchronised(model, peer, rank)
        step = Step(spread(model, rank), "fp32", rank.device, options["rate"])
        losses = []
        for number in range(options["steps"]):
            items = [(number * options["batch"] + i) % len(scenes) for i in range(options["batch"])]
            own = [scenes[item] for item in ORDERS[options["order"]](items)[rank.number * share :][:share]]
            losses.append(_joint_step(step, own, rank))
        found[name] = [float(loss) for loss in losses]
    return found


def _joint_step(step: Step, own: list[Any], rank: Rank) -> torch.Tensor:
    """A step on the mean over all voxels of all ranks; its loss."""
    scan, labels = batch_of(own, rank.device)
    losses = nn.functional.cross_entropy(step.forward(scan), labels, reduction="sum")
    voxels = losses.new_tensor(float(len(labels)))
    dist.all_reduce(voxels)
    # DDP averages over ranks: times the ranks, the sum over voxels remains.
    step.update(losses * rank.world / voxels)
    total = losses.detach()
    dist.all_reduce(total)
    return total / voxels
