"""Semantic segmentation on several GPUs or machines: a training to start from.

    torchrun --nproc-per-node 4 examples/train_ddp.py --amp
    torchrun --nproc-per-node 2 examples/train_ddp.py --amp --steps 600 --resume
    torchrun --nproc-per-node 2 examples/train_ddp.py --steps 3          (no GPU: gloo, on the CPU)
    python examples/train_ddp.py --api minkowski                         (one process)

torch's own DDP or FSDP (`--fsdp`), SyncBatchNorm and checkpoints around a U-Net of spconv,
torchsparse or MinkowskiEngine, on synthetic lidar scans. Every process calls
`sparse_bridge.enable()`; nothing else differs from training with dense layers. The network takes
and returns plain tensors, because that is where DDP and FSDP hang their hooks. The loss is a mean
over the voxels of all ranks, and batches do not depend on the number of ranks, so that a training
may go on with another number.
"""

from __future__ import annotations

import time

BEGIN = time.perf_counter()

import argparse
import contextlib
import gc
import json
import os
import traceback
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ddp_options import checkpoints, parse
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import sparse_bridge
from sparse_bridge.tools.demo.scene import LabelledScan, labelled_scan
from sparse_bridge.tools.demo.segmentation import CLASSES, sample

HELD_OUT = 100_000  # seeds from here on are for evaluation
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[int], int]


class Streets(Dataset):
    """Voxelised scans; a key is (seed of the street, epoch), and every epoch turns it anew."""

    def __init__(self, voxel_size: float) -> None:
        self.voxel_size = voxel_size

    def __getitem__(self, key: tuple[int, int]) -> tuple[torch.Tensor, ...]:
        seed = key[0]
        scan = self._scan(seed)
        angle = np.random.default_rng(key).uniform(0, 2 * np.pi) if seed < HELD_OUT else 0.0
        one = sample(scan.points, scan.kinds, self.voxel_size, angle)
        return tuple(map(torch.from_numpy, (one.features, one.cells, one.labels)))

    @cache  # noqa: B019 (the data set lives as long as the process)
    def _scan(self, seed: int) -> LabelledScan:
        return labelled_scan(seed, azimuths=int(450 / self.voxel_size))


def collate(samples: list[tuple[torch.Tensor, ...]]) -> Batch:
    """Features [N, 3], coordinates [N, 4] (batch, x, y, z), labels [N], grid, batch size."""
    features, cells, labels = zip(*samples, strict=True)
    coords = torch.cat([nn.functional.pad(c, (1, 0), value=i) for i, c in enumerate(cells)])
    # A multiple of the coarsest stride, so that no voxel at the border loses its parent.
    grid = [(int(axis.max()) // 16 + 1) * 16 if len(axis) else 16 for axis in coords[:, 1:].T]
    return torch.cat(features), coords, torch.cat(labels), grid, len(samples)


class Shares:
    """The keys of a rank's part of every batch, from step `first` on. Batches are the same on any
    number of ranks."""

    def __init__(self, args: argparse.Namespace, first: int) -> None:
        self.args, self.first = args, first

    def __len__(self) -> int:
        return max(0, self.args.steps - self.first)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        args = self.args
        for step in range(self.first, args.steps):
            epoch, place = divmod(step, args.scenes // args.batch)
            order = torch.randperm(args.scenes, generator=torch.Generator().manual_seed(epoch))
            whole = order[place * args.batch :][: args.batch].tolist()
            yield [(seed, epoch) for seed in whole[args.rank :: args.world]]


class Network(nn.Module):
    """A residual U-Net of three levels in the API of a framework; a class per voxel."""

    def __init__(self, api: str) -> None:
        super().__init__()
        self.api = api
        widths = {"stem": 16, "encoder": (24, 32, 48), "decoder": (32, 24, 16)}
        if api == "spconv":
            import spconv.pytorch as framework

            from sparse_bridge.tools.networks.spconv import ResidualUNet

            self.net = ResidualUNet(framework, 3, len(CLASSES), blocks=(1, 1, 1), **widths)
        elif api == "torchsparse":
            import torchsparse as framework

            from sparse_bridge.tools.networks.torchsparse import ResidualUNet

            self.net = ResidualUNet(framework, 3, len(CLASSES), blocks=(1,) * 6, **widths)
        else:
            import MinkowskiEngine as framework

            from sparse_bridge.tools.networks.minkowski import MinkUNet

            planes = (24, 32, 48, 64, 48, 32, 24, 16)
            self.net = MinkUNet(framework, 3, len(CLASSES), layers=(1,) * 8, planes=planes, init=16)
        self.framework = framework
        for norm in self.modules():
            if isinstance(norm, nn.BatchNorm1d):
                norm.momentum = 0.1  # a short training: the statistics must follow fast

    def forward(self, features: torch.Tensor, coords: torch.Tensor, grid: list[int], items: int) -> torch.Tensor:
        if self.api == "spconv":
            x = self.framework.SparseConvTensor(features, coords, grid, items)
            return self.net(x).features
        if self.api == "torchsparse":
            # Without a range, strided layers end at the batch's last voxel: another for every rank.
            x = self.framework.SparseTensor(features, coords, spatial_range=(items, *grid))
            return self.net(x).F
        return self.net(self.framework.SparseTensor(features, coords)).F


def distribute(model: nn.Module, args: argparse.Namespace, device: torch.device) -> nn.Module:
    if args.norm == "sync":
        convert = nn.SyncBatchNorm.convert_sync_batchnorm
        if args.api == "minkowski":
            convert = model.framework.MinkowskiSyncBatchNorm.convert_sync_batchnorm
        model = convert(model)
    if args.fsdp:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        # One group of parameters: units inside would have to return tensors, as the network does.
        return fully_shard(model, mesh=init_device_mesh(device.type, (args.world,)))
    if args.world == 1:
        return model
    devices = [device] if device.type == "cuda" else None
    spread = DistributedDataParallel(model, devices, gradient_as_bucket_view=True)
    # Statistics of norms are sent before evaluation and checkpoints, not in every step. The argument of this name is
    # deprecated as of torch 2.13, the attribute works in all releases.
    spread.broadcast_buffers = False
    return spread


def total(value: torch.Tensor) -> torch.Tensor:
    """The sum over all ranks."""
    value = value.detach().clone()
    dist.all_reduce(value)
    return value


class Training:
    """Model, optimiser and what belongs to them in a checkpoint."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        torch.manual_seed(0)  # the same weights on every rank
        self.args, self.device, self.step = args, device, 0
        self.model = distribute(Network(args.api).to(device), args, device)
        self.optimiser = torch.optim.AdamW(self.model.parameters(), args.rate)
        self.dtype = torch.float16 if device.type == "cuda" else torch.bfloat16
        scales = args.amp and self.dtype == torch.float16
        self.scaler = torch.amp.GradScaler(device.type, enabled=scales)

    def logits(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        features, coords = (part.to(self.device, non_blocking=True) for part in batch[:2])
        with torch.autocast(self.device.type, self.dtype, self.args.amp):
            return model(features, coords, *batch[3:]).float()

    def update(self, batch: Batch) -> torch.Tensor:
        """One step; the loss over all ranks, still on the device."""
        for group in self.optimiser.param_groups:
            group["lr"] = self.args.rate * (1 - self.step / self.args.steps) ** 0.9
        self.optimiser.zero_grad()
        labels = batch[2].to(self.device, non_blocking=True)
        losses = nn.functional.cross_entropy(self.logits(self.model, batch), labels, reduction="sum")
        voxels = total(losses.new_tensor(float(len(labels)))).clamp(min=1)  # all scenes may be empty
        # DDP and FSDP average over ranks: times the ranks, the sum over voxels remains.
        self.scaler.scale(losses * self.args.world / voxels).backward()
        self.scaler.step(self.optimiser)
        self.scaler.update()
        self.step += 1
        return total(losses) / voxels

    @torch.no_grad()
    def mean_iou(self, streets: Streets) -> float:
        """Over the voxels of all held-out streets, which the ranks share."""
        self._same_statistics()
        model = getattr(self.model, "module", self.model)  # DDP's own forward pass waits for others
        model.eval()
        args, n = self.args, len(CLASSES)
        confusion = torch.zeros(n * n, dtype=torch.long, device=self.device)
        # Every rank has as many forward passes, because those of FSDP wait for one another.
        for first in range(0, args.held_out, args.world):
            seed = min(first + args.rank, args.held_out - 1)
            batch = collate([streets[HELD_OUT + seed, 0]])
            places = batch[2].to(self.device) * n + self.logits(model, batch).argmax(1)
            if first + args.rank < args.held_out:
                confusion += torch.bincount(places, minlength=n * n)
        model.train()
        confusion = total(confusion).view(n, n).double()
        both = confusion.diag()
        return float((both / (confusion.sum(0) + confusion.sum(1) - both)).nanmean())

    def _same_statistics(self) -> None:
        """Of norms with statistics of their own on every rank, those of the first rank."""
        for buffer in self.model.buffers():
            dist.broadcast(buffer, 0)

    def save(self) -> None:
        self._same_statistics()
        folder = self.args.out / f"step{self.step:08d}"
        # What an interruption has left there is written over.
        dcp.save(self._state(), storage_writer=dcp.FileSystemWriter(folder, overwrite=True))

    def resume(self) -> None:
        """From the last checkpoint, on any number of ranks."""
        (*_, last) = checkpoints(self.args.out)
        self._check_same_training(last)
        state = self._state()
        known = dcp.FileSystemReader(last).read_metadata().state_dict_metadata
        if not any(name.startswith("scaler.") for name in known):
            del state["scaler"]  # of a training without --amp, or on a CPU
        dcp.load(state, checkpoint_id=last)
        set_state_dict(self.model, self.optimiser, model_state_dict=state["model"], optim_state_dict=state["optimiser"])
        if state.get("scaler"):
            self.scaler.load_state_dict(state["scaler"])
        self.step = state["step"]

    def _check_same_training(self, folder: Path) -> None:
        """Another network would not fit, and other batches would not go on with these."""
        saved = {"options": self._options()}
        dcp.load(saved, checkpoint_id=folder)
        for name, value in self._options().items():
            if saved["options"][name] != value:
                was = saved["options"][name]
                raise SystemExit(f"--resume: {folder} was trained with --{name.replace('_', '-')} {was}, not {value}.")

    def _options(self) -> dict:
        return {name: getattr(self.args, name) for name in ("api", "batch", "scenes", "voxel_size")}

    def _state(self) -> dict:
        model, optimiser = get_state_dict(self.model, self.optimiser)
        parts = {"model": model, "optimiser": optimiser, "scaler": self.scaler.state_dict()}
        return {**parts, "step": self.step, "options": self._options()}


def train(args: argparse.Namespace, device: torch.device) -> None:
    def say(text: str) -> None:
        if args.rank == 0:
            print(text, flush=True)

    streets, training, losses = Streets(args.voxel_size), Training(args, device), []
    if args.resume:
        training.resume()
        say(f"resumed at step {training.step}")
    loader = DataLoader(
        streets,
        batch_sampler=Shares(args, training.step),
        collate_fn=collate,
        num_workers=args.workers,
        pin_memory=device.type == "cuda",
    )
    since, first = time.perf_counter(), training.step
    for batch in loader:
        losses.append(training.update(batch))
        step = training.step
        if step == first + 1:
            losses[-1].item()  # wait for the device
            say(f"{args.world} ranks, first step after {time.perf_counter() - BEGIN:.1f} s")
            since = time.perf_counter()
        elif step % args.every == 0 or step == args.steps:
            loss, now = losses[-1].item(), time.perf_counter()
            steps = step - max(first + 1, (step - 1) // args.every * args.every)
            rate = steps * args.batch / (now - since)
            say(f"step {step}  loss {loss:.4f}  {rate:.1f} samples a second")
            since = now
        if step % args.save_every == 0 or step == args.steps:
            training.save()
            say(f"saved at step {step}, mean IoU {training.mean_iou(streets):.4f}")
            since = time.perf_counter()  # neither counts as training
    iou = training.mean_iou(streets)
    say(f"mean IoU {iou:.4f} on {args.held_out} streets not trained on")
    if args.rank == 0:
        log = {"first": first, "loss": [loss.item() for loss in losses], "mean IoU": iou}
        (args.out / "log.json").write_text(json.dumps(log))


@contextlib.contextmanager
def process_group(device: torch.device) -> Iterator[None]:
    """Of one process, too, where torchrun has not started this one."""
    how = {"backend": "gloo"}
    if device.type == "cuda":
        how = {"backend": "nccl", "device_id": device}
    if "RANK" not in os.environ:
        how |= {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(**how)
    try:
        yield
    except Exception:
        if device.type == "cuda":
            traceback.print_exc()
            os._exit(1)  # NCCL would end the group together with the other ranks, who wait for this one
        raise
    finally:
        dist.destroy_process_group()
        gc.collect()  # DDP is part of a cycle; gloo's threads must end before Python does


def main() -> None:
    args = parse(__doc__.splitlines()[0])
    sparse_bridge.enable(args.api)
    device = torch.device("cpu")
    if args.device == "cuda":
        device = torch.device("cuda", args.local)
        torch.cuda.set_device(device)  # collectives and FSDP work on the current device
    with process_group(device):
        train(args, device)


if __name__ == "__main__":
    main()
