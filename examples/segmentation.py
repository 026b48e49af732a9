"""Semantic segmentation: a small residual U-Net for torchsparse learns to label a street.

    python examples/segmentation.py
    python examples/segmentation.py --model public

Trains on synthetic lidar scans and is measured on a scan that it has not seen, by the intersection
over union of each class. `--model public` takes the MinkUNet of SPVNAS as its model zoo defines it,
unchanged, at half width. The models, the data set and the loader are ordinary torchsparse 2.1 code;
`sparse_bridge.enable()` is the only addition.
"""

from __future__ import annotations

import sparse_bridge

sparse_bridge.enable("torchsparse", profile="2.1")

import numpy as np
import torch
import torchsparse
from matplotlib.colors import to_rgb
from shared import finish, parse, public, training
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchsparse import SparseTensor
from torchsparse.utils.collate import sparse_collate_fn
from torchsparse.utils.quantize import sparse_quantize

from sparse_bridge.demo.drawing import FAINT, INK, legend, new_figure, plain_panel, save
from sparse_bridge.demo.scene import labelled_scan
from sparse_bridge.demo.segmentation import (
    CLASS_OF_KIND,
    CLASSES,
    COLOURS,
    class_iou,
    class_weights,
)
from sparse_bridge.demo.voxel_view import draw_voxels
from sparse_bridge.networks.torchsparse import ResidualUNet

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


class UNet(nn.Module):
    """A residual U-Net of three levels; a class per voxel."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        widths = {"stem": 16, "encoder": (24, 32, 48), "decoder": (32, 24, 16)}
        self.net = ResidualUNet(torchsparse, 3, classes, blocks=(1,) * 6, **widths)

    def forward(self, x: SparseTensor) -> torch.Tensor:
        return self.net(x).F


@torch.no_grad()
def predict(model: nn.Module, batch: dict[str, SparseTensor], device) -> np.ndarray:
    model.eval()
    labels = model(batch["input"].to(device)).argmax(1)
    model.train()
    return labels.cpu().numpy()


def train(model: nn.Module, loader: DataLoader, args) -> None:
    optimiser = torch.optim.AdamW(model.parameters(), 8e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 8e-3, total_steps=args.steps + 1)
    seen = np.concatenate([loader.dataset[i]["label"].F for i in range(len(loader.dataset))])
    loss_of = nn.CrossEntropyLoss(class_weights(seen).to(args.device))
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
    figure = new_figure((15, 18.5), f"A street that it has not seen ({args.model} U-Net)")
    rows = [["after", "after"], ["truth", "iou"]]
    panels = figure.subplot_mosaic(rows, height_ratios=[1.35, 1], width_ratios=[1.1, 1])
    paint = np.array([to_rgb(colour) for colour in COLOURS])
    right = f"{(after == truth).mean():.0%} of voxels right ({(before == truth).mean():.0%} before)"
    for name, labels, title in (
        ("after", after, f"classes found after {args.steps} steps: {right}"),
        ("truth", truth, f"truth: {len(cells):,} voxels of {voxel_size * 100:g} cm"),
    ):
        scale = (10.0, "10 m")
        draw_voxels(panels[name], cells, paint[labels], title, cell_size=voxel_size, scale=scale)
    bars, places = panels["iou"], np.arange(len(CLASSES))
    found, first = class_iou(after, truth), class_iou(before, truth)
    plain_panel(bars, f"IoU by class, mean {np.nanmean(found):.2f}", "intersection over union")
    bars.barh(places - 0.2, first, 0.36, color=FAINT)
    drawn = bars.barh(places + 0.2, found, 0.36, color=COLOURS)
    bars.bar_label(drawn, fmt="%.2f", color=INK, padding=4, fontsize=12)
    bars.set_yticks(places, [name.replace(", ", ",\n") for name in CLASSES])
    bars.invert_yaxis()
    bars.set_xlim(0, 1.15)
    names = dict(zip(CLASSES, COLOURS, strict=True))
    legend(figure, {**names, "before training": FAINT}, loc="outside lower center", ncols=4)
    save(figure, args.picture)


def model_of(args) -> nn.Module:
    if args.model == "public":
        definition = public("torchsparse.spvnas_minkunet")
        return definition.MinkUNet(in_channels=3, num_classes=len(CLASSES), cr=0.5)
    return UNet(len(CLASSES))


def main() -> None:
    args = parse(__doc__.splitlines()[0], "segmentation", steps=100, quick=12)
    voxel_size = 0.8 if args.quick else 0.3
    streets = Streets(range(1, 3 if args.quick else 7), voxel_size, turn=True)
    loader = DataLoader(
        streets, batch_size=2, shuffle=True, collate_fn=sparse_collate_fn, drop_last=True
    )
    unseen = sparse_collate_fn([Streets([0], voxel_size, turn=False)[0]])
    truth = unseen["label"].F.numpy()
    model = model_of(args).to(args.device)
    before = predict(model, unseen, args.device)
    train(model, loader, args)
    after = predict(model, unseen, args.device)
    draw(args, unseen["input"].C[:, 1:].cpu().numpy(), voxel_size, truth, before, after)
    first, last = class_iou(before, truth), class_iou(after, truth)
    metrics = {f"IoU, {name}": pair for name, *pair in zip(CLASSES, first, last, strict=True)}
    finish(args, {**metrics, "mean IoU": (np.nanmean(first), np.nanmean(last))})


if __name__ == "__main__":
    main()
