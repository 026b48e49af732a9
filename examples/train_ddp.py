"""Training on several GPUs or machines: torch's own DDP or FSDP around a sparse network.

    torchrun --nproc_per_node 4 examples/train_ddp.py --norm sync
    torchrun --nproc_per_node 4 examples/train_ddp.py --fsdp --norm layer
    torchrun --nproc_per_node 2 examples/train_ddp.py --device cpu --norm layer    (gloo)
    python examples/train_ddp.py                                                   (one process)

Every process calls `sparse_bridge.enable()` at its top level; nothing else differs from training
with dense layers. The network takes and returns plain tensors, because that is where DDP and FSDP
hang their hooks. The loss is a mean over all voxels of all ranks, so the gradients are those of one
process that sees the joint batch.
"""

from __future__ import annotations

import sparse_bridge

sparse_bridge.enable("spconv")

import argparse
import gc
import hashlib
import itertools
import json
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import spconv.pytorch as spconv
import torch
import torch.distributed as dist
from shared import console, training
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from sparse_bridge.demo.scene import KINDS, labelled_scan

RANGE = 25.6  # metres to each side of the sensor


class Streets(Dataset):
    """Voxelised synthetic scans: features [N, 2], indices [N, 3] (z, y, x) and kinds [N]."""

    def __init__(self, count: int, voxel_size: float) -> None:
        self.count, self.voxel_size = count, voxel_size
        self.shape = [32, *[round(2 * RANGE / voxel_size)] * 2]

    def __len__(self) -> int:
        return self.count

    @cache  # noqa: B019 (the data set lives as long as the process)
    def __getitem__(self, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        scan = labelled_scan(seed, azimuths=600)
        cells = np.floor((scan.points[:, [2, 1, 0]] + [2.4, RANGE, RANGE]) / self.voxel_size)
        inside = ((cells >= 0) & (cells < self.shape)).all(1)
        cells, rows = np.unique(cells[inside].astype(np.int32), axis=0, return_index=True)
        features = torch.from_numpy(scan.points[inside][rows][:, 2:])
        return features, torch.from_numpy(cells), torch.from_numpy(scan.kinds[inside][rows])


def collate(samples: list) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    features, cells, kinds = zip(*samples, strict=True)
    indices = [nn.functional.pad(c, (1, 0), value=item) for item, c in enumerate(cells)]
    return torch.cat(features), torch.cat(indices), torch.cat(kinds), len(samples)


class Network(nn.Module):
    """A sparse U-Net of one level, from plain tensors to plain tensors."""

    def __init__(self, shape: list[int], norm: str, width: int = 32) -> None:
        super().__init__()
        self.shape = shape
        layer = nn.LayerNorm if norm == "layer" else nn.BatchNorm1d

        def unit(conv: nn.Module) -> list[nn.Module]:
            return [conv, layer(conv.out_channels), nn.ReLU()]

        self.down = spconv.SparseSequential(
            *unit(spconv.SubMConv3d(2, width, 3, bias=False, indice_key="fine")),
            *unit(spconv.SparseConv3d(width, 2 * width, 2, 2, bias=False, indice_key="down")),
            *unit(spconv.SubMConv3d(2 * width, 2 * width, 3, bias=False, indice_key="coarse")),
        )
        self.up = spconv.SparseSequential(
            *unit(spconv.SparseInverseConv3d(2 * width, width, 2, bias=False, indice_key="down")),
            *unit(spconv.SubMConv3d(width, width, 3, bias=False, indice_key="fine")),
        )
        self.head = nn.Linear(width, len(KINDS))

    def forward(self, features: torch.Tensor, indices: torch.Tensor, items: int) -> torch.Tensor:
        x = spconv.SparseConvTensor(features, indices, self.shape, items)
        return self.head(self.up(self.down(x)).features)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--fsdp", action="store_true", help="shard the parameters instead of DDP")
    parser.add_argument("--norm", choices=("batch", "sync", "layer"), default="batch")
    parser.add_argument("--batch", type=int, default=4, help="scans per step, over all ranks")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--workers", type=int, default=0, help="data loading processes per rank")
    parser.add_argument("--quick", action="store_true", help="coarse and short: a smoke test")
    parser.add_argument("--out", type=Path, help="folder for the weights and a log of each rank")
    args = parser.parse_args()
    args.rank, args.world = (int(os.environ.get(name, n)) for name, n in RANKS)
    if args.norm == "sync" and torch.device(args.device).type == "cpu":
        parser.error("--norm sync: torch's SyncBatchNorm needs GPUs; take --norm layer or batch.")
    if args.batch % args.world:
        parser.error(f"--batch {args.batch} does not divide into {args.world} ranks.")
    return args


RANKS = (("RANK", 0), ("WORLD_SIZE", 1))  # set by torchrun


def device_of(args: argparse.Namespace) -> torch.device:
    """The rank's own GPU. It need not be the current device: layers run where their tensors are."""
    if args.device == "cuda":
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    return torch.device(args.device)


def distribute(model: nn.Module, args: argparse.Namespace, device: torch.device) -> nn.Module:
    if args.norm == "sync":
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if args.world == 1:
        return model
    if args.fsdp:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        # One group of parameters: units inside would have to return tensors, as the network does.
        return fully_shard(model, mesh=init_device_mesh(device.type, (args.world,)))
    return DistributedDataParallel(model, [device] if device.type == "cuda" else None)


def total(value: torch.Tensor, args: argparse.Namespace) -> torch.Tensor:
    """The sum over all ranks."""
    value = value.detach().clone()
    if args.world > 1:
        dist.all_reduce(value)
    return value


def fingerprint(model: nn.Module) -> str:
    """Changes with any bit of any gradient."""
    digest = hashlib.sha1()
    for parameter in model.parameters():
        digest.update(parameter.grad.cpu().numpy().tobytes())
    return digest.hexdigest()


def epochs(loader: DataLoader, sampler: DistributedSampler) -> Iterator[tuple]:
    """Batches without end, shuffled anew in each epoch."""
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        yield from loader


def train(args: argparse.Namespace, device: torch.device) -> None:
    streets = Streets(12 if args.quick else 64, 0.8 if args.quick else 0.4)
    sampler = DistributedSampler(streets, args.world, args.rank, shuffle=True, seed=0)
    loader = DataLoader(
        streets, args.batch // args.world, sampler=sampler, collate_fn=collate,
        num_workers=args.workers, drop_last=True,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Network(streets.shape, args.norm, 16 if args.quick else 32).to(device)
    model = distribute(model, args, device)
    optimiser = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    log = {"loss": [], "gradients": []}
    steps = training(args.epochs * len(loader), args.rank == 0)
    for (_, show), batch in zip(steps, epochs(loader, sampler), strict=False):
        features, indices, kinds = (part.to(device) for part in batch[:3])
        optimiser.zero_grad()
        logits = model(features, indices, batch[3])
        losses = nn.functional.cross_entropy(logits, kinds, reduction="sum")
        voxels = total(losses.new_tensor(float(len(kinds))), args)
        # DDP and FSDP average over ranks: times the ranks, the sum over voxels remains.
        (losses * args.world / voxels).backward()
        optimiser.step()
        log["loss"].append(float(total(losses, args) / voxels))
        if not args.fsdp:
            log["gradients"].append(fingerprint(model))
        show(log["loss"][-1])
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=whole)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / f"rank{args.rank}.json").write_text(json.dumps(log))
        if args.rank == 0:
            torch.save(weights, args.out / "model.pt")
    if args.rank == 0:
        console.print(f"{args.world} ranks, loss {log['loss'][0]:.3f} to {log['loss'][-1]:.3f}")


def main() -> None:
    args = arguments()
    device = device_of(args)
    if args.world > 1:
        if args.fsdp and device.type == "cuda":
            torch.cuda.set_device(device)  # FSDP gathers parameters on the current device
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        train(args, device)
    finally:
        if args.world > 1:
            dist.destroy_process_group()
            gc.collect()  # DDP is part of a cycle; gloo's threads must end before Python does


if __name__ == "__main__":
    main()
