"""What the checks of two ranks share: clouds, gradients of one process, networks with norms."""

from __future__ import annotations

import copy
import datetime
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.scale_out.joint_norm import SpreadOnCpus

from .networks import cloud

Points = tuple[torch.Tensor, torch.Tensor]


def start_group(rank: int, device: torch.device, seconds: float) -> torch.device:
    """Join the others; a collective may take so long. The device of this rank."""
    limit = datetime.timedelta(seconds=seconds)
    if device.type == "cpu":
        dist.init_process_group("gloo", timeout=limit)
        return device
    # Else a rank whose time is up writes what it has seen, and waits a minute for others to do so.
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
    os.environ.setdefault("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "1000")
    own = torch.device("cuda", rank)
    torch.cuda.set_device(own)
    dist.init_process_group("nccl", timeout=limit, device_id=own)
    return own


def of(rank: int, device: torch.device, seed: int = 0, rows: int | None = None) -> Points:
    """The cloud of a rank: 200 points, or 350."""
    coords, x = cloud(10 * seed + rank, 200 + 150 * rank if rows is None else rows)
    return coords.to(device), x.to(device)


def loss_of(y: torch.Tensor) -> torch.Tensor:
    return (y * torch.linspace(-1, 1, y.numel(), device=y.device).view_as(y)).sum()


def own_gradients(network: nn.Module, *clouds: Points) -> list[torch.Tensor]:
    """Of one process: the sum over the clouds."""
    alone = copy.deepcopy(network)
    for points in clouds:
        loss_of(alone(*points)).backward()
    return [p.grad for p in alone.parameters()]


def mean_of(first: list[torch.Tensor], second: list[torch.Tensor]) -> list[torch.Tensor]:
    """As DDP computes it for two ranks: halves are exact, and a sum of two has no order."""
    return [a / 2 + b / 2 for a, b in zip(first, second, strict=True)]


def check_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other), float((one - other).abs().max())


def check_same_on_all_ranks(network: nn.Module) -> None:
    flat = torch.cat([p.detach().flatten() for p in network.parameters()])
    all_of_them = [torch.empty_like(flat) for _ in range(2)]
    dist.all_gather(all_of_them, flat)
    assert torch.equal(*all_of_them) and flat.isfinite().all()


def ddp(network: nn.Module, device: torch.device, **options: bool) -> DistributedDataParallel:
    return DistributedDataParallel(copy.deepcopy(network), [device] if device.type == "cuda" else None, **options)


def gradients(network: nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in network.parameters()]


def with_joint_statistics(network: nn.Module, device: torch.device) -> DistributedDataParallel:
    """DDP around norms that the framework's users turn into torch's SyncBatchNorm."""
    synced = synchronised(copy.deepcopy(network))
    return SpreadOnCpus(synced) if device.type == "cpu" else ddp(synced, device)


def synchronised(network: nn.Module) -> nn.Module:
    if "minkowski" in type(network).__name__.lower():
        import MinkowskiEngine as ME

        return ME.MinkowskiSyncBatchNorm.convert_sync_batchnorm(network)
    return nn.SyncBatchNorm.convert_sync_batchnorm(network)


def with_norms(network: nn.Module) -> nn.Module:
    """Norms of the framework's own, or torch's, behind the first layer."""
    normed = copy.deepcopy(network)
    name = type(network).__name__.lower()
    layers = list(normed.net.children())
    if name == "spconv":
        import spconv.pytorch as spconv

        normed.net = spconv.SparseSequential(layers[0], nn.BatchNorm1d(8), *layers[1:])
    elif name == "torchsparse":
        from torchsparse import nn as spnn

        normed.net = nn.Sequential(layers[0], spnn.BatchNorm(8), *layers[1:])
    else:
        import MinkowskiEngine as ME

        normed.net = nn.Sequential(layers[0], ME.MinkowskiBatchNorm(8), *layers[1:])
    return normed.to(next(network.parameters()).device)


def joint(
    device: torch.device, rows: tuple[int | None, int | None] = (None, None), seed: int = 0, scale: float = 1.0
) -> Points:
    """Both ranks' clouds as one batch of four items; those of the second rank have features times
    `scale`."""
    coords, x = zip(*(of(r, device, seed, rows[r]) for r in (0, 1)), strict=True)
    second = coords[1].clone()
    second[:, 0] += 2
    return torch.cat([coords[0], second]), torch.cat([x[0], x[1] * scale])
