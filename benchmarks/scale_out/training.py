"""What the parts share: a network between plain tensors, one step of training, and scenes."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sparse_bridge.tools.demo.scene import labelled_scan
from sparse_bridge.tools.demo.segmentation import sample

from ..peers import Peer
from ..workloads import Scan
from ..works import TORCH_DTYPES
from .joint_norm import SpreadOnCpus

__all__ = ["Network", "Rank", "Step", "labelled_scenes", "spread", "synchronised"]

_SCANS = 8  # different streets; a scene is one of them, turned
_ROOM = 32  # the spatial shape is a multiple, so that no voxel loses its parent


@dataclasses.dataclass(frozen=True)
class Rank:
    """started: seconds from the start of the launcher until this process ran."""

    number: int
    world: int
    device: torch.device
    started: float

    def barrier(self) -> None:
        """Wait for the other ranks, and for what the device still has to do."""
        dist.barrier()
        self.wait()

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class Network(nn.Module):
    """A peer's U-Net from plain tensors to plain tensors, where DDP and FSDP hang their hooks."""

    def __init__(self, peer: Peer) -> None:
        super().__init__()
        self.net = peer.network("unet")
        self._peer = peer

    def forward(
        self, feats: torch.Tensor, coords: torch.Tensor, shape: tuple[int, int, int], items: int
    ) -> torch.Tensor:
        if self._peer.api == "torchsparse":
            # Without a range, what strided layers make of a scene depends on the others of its batch.
            tensor = self._peer.ts.SparseTensor(feats, coords, spatial_range=(items, *shape))
            return self.net(tensor).feats
        return self._peer.call(self.net, feats, Scan("", coords, feats, shape, items))


def synchronised(model: nn.Module, peer: Peer, rank: Rank) -> nn.Module:
    """Batch statistics over all ranks."""
    if rank.world == 1:
        return model
    if peer.api == "minkowski":
        import MinkowskiEngine as ME

        return ME.MinkowskiSyncBatchNorm.convert_sync_batchnorm(model)
    return nn.SyncBatchNorm.convert_sync_batchnorm(model)


def spread(model: nn.Module, rank: Rank, local_statistics: bool = False) -> nn.Module:
    """DDP, where there is more than one rank.  local_statistics: those of norms are not sent to the other ranks in
    every step."""
    if rank.world == 1:
        return model
    kind = SpreadOnCpus if rank.device.type == "cpu" else DistributedDataParallel
    devices = None if rank.device.type == "cpu" else [rank.device]
    made = kind(model, devices, gradient_as_bucket_view=True)
    made.broadcast_buffers = not local_statistics  # the argument is deprecated as of torch 2.13
    return made


class Step:
    """A training step as projects write it: fp32 weights, autocast, a scaler for fp16, SGD."""

    def __init__(self, model: nn.Module, dtype: str, device: torch.device, rate: float) -> None:
        self.model, self.device, self._dtype = model, device, TORCH_DTYPES[dtype]
        self.optimizer = torch.optim.SGD(model.parameters(), rate, momentum=0.9)
        scaled = self._dtype == torch.float16
        self.scaler = torch.amp.GradScaler(device.type, enabled=scaled)

    def forward(self, scan: Scan) -> torch.Tensor:
        with torch.autocast(self.device.type, self._dtype, self._dtype != torch.float32):
            logits = self.model(scan.feats, scan.coords, scan.shape, scan.batch_size)
        return logits.float()

    def update(self, loss: torch.Tensor) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def __call__(self, scan: Scan) -> torch.Tensor:
        loss = self.forward(scan).square().mean()
        self.update(loss)
        return loss.detach()


def timed(step: Step, scans: list[Scan], rank: Rank) -> float:
    """Seconds that all ranks take for a step per scene."""
    rank.barrier()
    begin = time.perf_counter()
    for scan in scans:
        step(scan)
    rank.barrier()
    return time.perf_counter() - begin


def labelled_scenes(count: int, voxel_size: float, azimuths: int = 500) -> list[tuple[Any, torch.Tensor]]:
    """(cells and features, classes [V]) of streets, the same in every process."""
    scans = [labelled_scan(seed, azimuths) for seed in range(min(count, _SCANS))]
    random, scenes = np.random.default_rng(0), []
    for number in range(count):
        scan = scans[number % len(scans)]
        angle = random.uniform(0, 2 * np.pi)
        scene = sample(scan.points, scan.kinds, voxel_size, angle)
        scenes.append((scene, torch.from_numpy(scene.labels)))
    return scenes


def batch_of(scenes: list[tuple[Any, torch.Tensor]], device: torch.device) -> tuple[Scan, Any]:
    """The scenes as one input, and the classes [N] of its voxels."""
    coords, feats, labels = [], [], []
    for item, (scene, classes) in enumerate(scenes):
        cells = torch.from_numpy(scene.cells)
        coords.append(nn.functional.pad(cells, (1, 0), value=item))
        feats.append(nn.functional.pad(torch.from_numpy(scene.features), (0, 1)))
        labels.append(classes)
    joint = torch.cat(coords)
    shape = tuple(-(-(int(edge) + 1) // _ROOM) * _ROOM for edge in joint[:, 1:].amax(0))
    scan = Scan("street", joint, torch.cat(feats), shape, len(scenes))
    return scan.to(device), torch.cat(labels).to(device)
