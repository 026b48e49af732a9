"""Semantic segmentation: a small sparse U-Net for torchsparse learns to label a street.

    python examples/segmentation.py

Trains on synthetic lidar scans and is measured on a scan that it has not seen. The model, the data
set and the loader are ordinary torchsparse 2.1 code; `sparse_bridge.enable()` is the only addition.
"""

from __future__ import annotations

import sparse_bridge

sparse_bridge.enable("torchsparse", profile="2.1")

from itertools import pairwise

import numpy as np
import torch
import torchsparse
from matplotlib.colors import to_rgb
from shared import finish, parse, training
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchsparse import SparseTensor
from torchsparse import nn as spnn
from torchsparse.utils.collate import sparse_collate_fn
from torchsparse.utils.quantize import sparse_quantize

from sparse_bridge.demo.drawing import FAINT, legend, new_figure, plain_panel, save
from sparse_bridge.demo.scene import KINDS, labelled_scan
from sparse_bridge.demo.voxel_view import draw_voxels

CLASSES = {  # the kinds of things in each
    "road, grass": ("road", "grass"),
    "pavement": ("pavement",),
    "building": ("building",),
    "vegetation": ("vegetation",),
    "vehicle": ("vehicle",),
    "pole, person": ("pole", "person"),
}
COLOURS = np.array(
    [to_rgb(c) for c in ("#6b7f9e", "#e0a458", "#b8c4d6", "#4fb477", "#e4572e", "#d67bd6")]
)
CLASS_OF_KIND = np.array([[k in kinds for kinds in CLASSES.values()].index(True) for k in KINDS])
RANGE = 24.0  # metres to each side of the sensor


class Streets(Dataset):
    """Scans of `seeds`, voxelised; turned at random about z where `turn` is set."""

    def __init__(self, seeds, voxel_size: float, turn: bool) -> None:
        azimuths = min(int(600 / voxel_size), 2000)  # as fine as the voxels need
        self.scans = [labelled_scan(seed, azimuths) for seed in seeds]
        self.voxel_size, self.turn = voxel_size, turn

    def __len__(self) -> int:
        return len(self.scans)

    def __getitem__(self, index: int) -> dict[str, SparseTensor]:
        points, kinds = self.scans[index].points, self.scans[index].kinds
        near = (np.abs(points[:, :2]) < RANGE).all(1) & (points[:, 2] < 4)
        points, labels = points[near].copy(), CLASS_OF_KIND[kinds[near]]
        if self.turn:
            a = float(torch.rand(())) * 2 * np.pi
            points[:, :2] @= np.array([[np.cos(a), -np.sin(a)], [np.sin(a), np.cos(a)]], np.float32)
        cells = np.floor(points[:, :3] / self.voxel_size).astype(np.int32)
        cells -= cells.min(0)
        cells, rows = sparse_quantize(cells, return_index=True)
        height, brightness = points[rows, 2] + 1.7, points[rows, 3]
        features = np.stack([np.ones_like(height), height, brightness], 1)
        coords = torch.from_numpy(cells).int()
        return {
            "input": SparseTensor(torch.from_numpy(features), coords),
            "label": SparseTensor(torch.from_numpy(labels[rows]), coords),
        }


def block(c_in: int, c_out: int, kernel_size: int = 3, **conv) -> nn.Sequential:
    """Convolution, batch norm, ReLU."""
    return nn.Sequential(
        spnn.Conv3d(c_in, c_out, kernel_size, bias=False, **conv),
        spnn.BatchNorm(c_out),
        spnn.ReLU(True),
    )


class UNet(nn.Module):
    """Three levels down, three up, with skips."""

    def __init__(self, classes: int, widths=(16, 24, 32, 48)) -> None:
        super().__init__()
        self.stem = nn.Sequential(block(3, widths[0]), block(widths[0], widths[0]))
        self.down, self.up, self.merge = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        for fine, coarse in pairwise(widths):
            self.down.append(nn.Sequential(block(fine, coarse, 2, stride=2), block(coarse, coarse)))
            self.up.append(block(coarse, fine, 2, stride=2, transposed=True))
            self.merge.append(block(2 * fine, fine))
        self.head = nn.Linear(widths[0], classes)

    def forward(self, x: SparseTensor) -> torch.Tensor:
        levels = [self.stem(x)]
        for down in self.down:
            levels.append(down(levels[-1]))
        y = levels.pop()
        for up, merge in zip(reversed(self.up), reversed(self.merge), strict=True):
            y = merge(torchsparse.cat([up(y), levels.pop()]))
        return self.head(y.F)


@torch.no_grad()
def predict(model: nn.Module, batch: dict[str, SparseTensor], device) -> np.ndarray:
    model.eval()
    labels = model(batch["input"].to(device)).argmax(1)
    model.train()
    return labels.cpu().numpy()


def iou(predicted: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Intersection over union of each class."""
    both = [((predicted == c) & (truth == c)).sum() for c in range(len(CLASSES))]
    either = [((predicted == c) | (truth == c)).sum() for c in range(len(CLASSES))]
    return np.array(both) / np.maximum(either, 1)


def train(model: nn.Module, loader: DataLoader, args) -> None:
    optimiser = torch.optim.AdamW(model.parameters(), 8e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 8e-3, total_steps=args.steps + 1)
    # Rare classes count more, though less than their rarity would ask for.
    seen = np.concatenate([loader.dataset[i]["label"].F for i in range(len(loader.dataset))])
    weight = torch.tensor(np.bincount(seen, minlength=len(CLASSES)) ** -0.4, dtype=torch.float32)
    loss_of = nn.CrossEntropyLoss((weight / weight.mean()).to(args.device))
    batches = iter(())
    for _, show in training(args.steps):
        batch = next(batches, None)
        if batch is None:
            batches = iter(loader)
            batch = next(batches)
        optimiser.zero_grad()
        loss = loss_of(model(batch["input"].to(args.device)), batch["label"].F.to(args.device))
        loss.backward()
        optimiser.step(), schedule.step()
        show(loss.detach())


def draw(args, cells, voxel_size: float, truth, before, after) -> None:
    figure = new_figure((17.5, 13.5), "Sparse U-Net (torchsparse) on a street that it has not seen")
    panels = figure.subplot_mosaic([["truth", "iou"], ["before", "after"]], width_ratios=[1, 1])
    for name, labels, title in (
        ("truth", truth, f"truth: {len(cells):,} voxels of {voxel_size * 100:g} cm"),
        ("before", before, f"before training: {(before == truth).mean():.0%} of voxels right"),
        ("after", after, f"after {args.steps} steps: {(after == truth).mean():.0%} right"),
    ):
        scale = (10.0, "10 m")
        draw_voxels(panels[name], cells, COLOURS[labels], title, cell_size=voxel_size, scale=scale)
    bars, places = panels["iou"], np.arange(len(CLASSES))
    plain_panel(bars, "intersection over union by class", "IoU")
    bars.barh(places - 0.2, iou(before, truth), 0.36, color=FAINT)
    bars.barh(places + 0.2, iou(after, truth), 0.36, color=COLOURS)
    bars.set_yticks(places, CLASSES)
    bars.invert_yaxis()
    bars.set_xlim(0, 1)
    legend(
        bars, {"before training": FAINT, "after (colour of the class)": "white"}, loc="lower right"
    )
    legend(
        figure,
        dict(zip(CLASSES, COLOURS, strict=True)),
        loc="outside lower center",
        ncols=len(CLASSES),
    )
    save(figure, args.picture)


def main() -> None:
    args = parse(__doc__.splitlines()[0], "segmentation", steps=100)
    voxel_size = 0.8 if args.quick else 0.3
    streets = Streets(range(1, 3 if args.quick else 7), voxel_size, turn=True)
    loader = DataLoader(
        streets, batch_size=2, shuffle=True, collate_fn=sparse_collate_fn, drop_last=True
    )
    unseen = sparse_collate_fn([Streets([0], voxel_size, turn=False)[0]])
    truth = unseen["label"].F.numpy()
    model = UNet(len(CLASSES)).to(args.device)
    before = predict(model, unseen, args.device)
    train(model, loader, args)
    after = predict(model, unseen, args.device)
    draw(args, unseen["input"].C[:, 1:].cpu().numpy(), voxel_size, truth, before, after)
    finish(args, {"mean IoU": (iou(before, truth).mean(), iou(after, truth).mean())})


if __name__ == "__main__":
    main()
