"""What the voxels of a scan belong to: classes, labelled samples, and how well they are found."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from .scene import KINDS, LabelledScan, labelled_scan

CLASSES = {  # the kinds of things in each
    "road, grass": ("road", "grass"),
    "pavement": ("pavement",),
    "building": ("building",),
    "vegetation": ("vegetation",),
    "vehicle": ("vehicle",),
    "pole, person": ("pole", "person"),
}
COLOURS = ("#3f5f9e", "#df8f10", "#dde4ee", "#12a07a", "#b8320c", "#f5ee6a")
CLASS_OF_KIND = np.array([[k in kinds for kinds in CLASSES.values()].index(True) for k in KINDS])
REACH, TOP = 24.0, 6.0  # metres to each side of the sensor, and above the ground, that are labelled
_GROUND = 5  # per cent of the points that lie below what is taken for the ground

Array = npt.NDArray[Any]


@dataclasses.dataclass(frozen=True)
class Sample:
    """A scan as the input of a segmentation network.

    Attributes:
        cells: [V, 3] int32, x, y, z from 0, each once.
        features: [V, 3] float32: 1, height above the ground (metres), intensity.
        labels: [V] int64, indices of `CLASSES`; None where the truth is not known.
    """

    cells: npt.NDArray[np.int32]
    features: npt.NDArray[np.float32]
    labels: npt.NDArray[np.int64] | None


@dataclasses.dataclass(frozen=True)
class Labelled:
    """A scan with the classes [V] that a network found, and how that one was trained.

    `losses`: of every step; `seconds`: of all of them.
    """

    scan: Sample
    classes: npt.NDArray[np.int64]
    voxel_size: float
    losses: list[float]
    seconds: float

    def iou(self) -> Array | None:
        """Intersection over union per class, NaN where there is none; None without the truth."""
        return None if self.scan.labels is None else class_iou(self.classes, self.scan.labels)


def sample(points: Array, kinds: Array | None, voxel_size: float, angle: float = 0.0) -> Sample:
    """Voxelise what lies within `REACH` of the sensor; a voxel is its first point.

    Args:
        points: [N, 4], x, y, z (metres) and intensity.
        kinds: [N], indices of `scene.KINDS`.
        angle: turns the scan about z first, radians.
    """
    near = np.abs(points[:, :2]).max(1) < REACH
    ground = float(np.percentile(points[near, 2], _GROUND)) if near.any() else 0.0
    near_rows = np.flatnonzero(near & (points[:, 2] < ground + TOP))
    turn = np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])
    turned = np.column_stack([points[near_rows, :2] @ turn, points[near_rows, 2]])
    cells = np.floor(turned / voxel_size).astype(np.int32)
    cells -= cells.min(0, initial=np.iinfo(np.int32).max)
    cells, first = np.unique(cells, axis=0, return_index=True)
    rows = near_rows[first]
    features = np.stack([np.ones(len(rows)), points[rows, 2] - ground, points[rows, 3]], 1)
    labels = None if kinds is None else CLASS_OF_KIND[kinds[rows]]
    return Sample(cells, features.astype(np.float32), labels)


def class_iou(predicted: Array, truth: Array, classes: int = len(CLASSES)) -> Array:
    """Intersection over union [classes] of labels [N]; NaN for a class that neither side has."""
    confusion = np.bincount(truth * classes + predicted, minlength=classes**2)
    confusion = confusion.reshape(classes, classes)
    both = np.diag(confusion)
    either = confusion.sum(0) + confusion.sum(1) - both
    return np.where(either > 0, both / np.maximum(either, 1), np.nan)


def class_weights(labels: Array, classes: int = len(CLASSES)) -> torch.Tensor:
    """Weights [classes] of the loss: rare classes count more, less than their rarity asks for."""
    weight = np.maximum(np.bincount(labels, minlength=classes), 1) ** -0.4
    return torch.tensor(weight / weight.mean(), dtype=torch.float32)


class Segmenter:
    """A small U-Net in spconv's API that learns to label scans of synthetic streets."""

    voxel_size = 0.3

    def __init__(self, device: torch.device, seeds: Sequence[int], seed: int = 0) -> None:
        """`seeds`: of the streets that it learns from; `seed`: of weights and turns."""
        import spconv.pytorch as spconv

        from ..networks.spconv import ResidualUNet

        torch.manual_seed(seed)
        widths = {"encoder": (24, 32, 48), "decoder": (32, 24, 16), "blocks": (1, 1, 1)}
        self.model = ResidualUNet(spconv, 3, len(CLASSES), stem=16, **widths).to(device)
        self.device, self._random = device, np.random.default_rng(seed)
        self._scans = [self._scan(seed) for seed in seeds]
        self.losses: list[float] = []
        self.seconds = 0.0

    def _scan(self, seed: int) -> LabelledScan:
        return labelled_scan(seed, int(450 / self.voxel_size))  # as fine as the voxels need

    def _forward(self, scan: Sample) -> torch.Tensor:
        """Logits [V, classes]."""
        import spconv.pytorch as spconv

        cells = torch.from_numpy(np.ascontiguousarray(scan.cells[:, ::-1]))
        shape = [-(-(int(edge) + 1) // 16) * 16 for edge in cells.amax(0)]
        indices = nn.functional.pad(cells, (1, 0)).to(self.device)
        features = torch.from_numpy(scan.features).to(self.device)
        return self.model(spconv.SparseConvTensor(features, indices, shape, 1)).features

    def train(self, steps: int, begun: Callable[[int], object] = lambda step: None) -> None:
        """`steps` updates, one turned scan each. begun: called with the number of each, from 0."""
        begin = time.perf_counter()
        for norm in self._norms():
            norm.momentum = 0.1  # few steps: the statistics must follow fast
        rate = 8e-3
        optimiser = torch.optim.AdamW(self.model.parameters(), rate)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, rate, total_steps=steps + 1)
        kinds = np.concatenate([scan.kinds for scan in self._scans])
        weight = class_weights(CLASS_OF_KIND[kinds]).to(self.device)
        self.model.train()
        for step in range(steps):
            begun(step)
            scan = self._scans[step % len(self._scans)]
            angle = self._random.uniform(0, 2 * np.pi)
            turned = sample(scan.points, scan.kinds, self.voxel_size, angle)
            truth = torch.from_numpy(turned.labels).to(self.device)
            optimiser.zero_grad()
            loss = nn.functional.cross_entropy(self._forward(turned), truth, weight)
            loss.backward()
            optimiser.step()
            schedule.step()
            self.losses.append(float(loss.detach()))
        self.model.eval()
        self.seconds += time.perf_counter() - begin

    def _norms(self) -> list[nn.BatchNorm1d]:
        return [m for m in self.model.modules() if isinstance(m, nn.BatchNorm1d)]

    @torch.no_grad()
    def label(self, scan: Sample) -> Labelled:
        """Find the class of each voxel."""
        classes = self._forward(scan).argmax(1).cpu().numpy()
        return Labelled(scan, classes, self.voxel_size, self.losses, self.seconds)
