"""Semantic segmentation: a small residual U-Net for torchsparse learns to label a street.

    python examples/segmentation.py
    python examples/segmentation.py --model public

Trains on synthetic lidar scans and is measured on scans that it has not seen, by the intersection
over union of each class and their mean. `--model public` takes the MinkUNet of SPVNAS as its model
zoo defines it, unchanged, at half width. The models, the data set and the loader are ordinary
torchsparse 2.1 code; `sparse_bridge.enable()` is the only addition.
"""

from __future__ import annotations

import sparse_bridge

sparse_bridge.enable("torchsparse", profile="2.1")

import dataclasses
from functools import partial

import numpy as np
import torch
import torchsparse
from matplotlib.colors import to_rgb
from shared import Outcome, over_seeds, parse, public, training
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchsparse import SparseTensor
from torchsparse.utils.collate import sparse_collate_fn
from torchsparse.utils.quantize import sparse_quantize

from sparse_bridge.tools.demo.drawing import FAINT, INK, legend, new_figure, plain_panel, save
from sparse_bridge.tools.demo.scene import labelled_scan
from sparse_bridge.tools.demo.segmentation import CLASS_OF_KIND, CLASSES, COLOURS, class_iou, class_weights
from sparse_bridge.tools.demo.voxel_view import draw_voxels
from sparse_bridge.tools.networks.torchsparse import ResidualUNet

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


@dataclasses.dataclass(frozen=True)
class Labels:
    """Classes [V] of the voxels of each scan, found and true."""

    found: list[np.ndarray]
    truth: list[np.ndarray]

    def iou(self, scans: int | None = None) -> np.ndarray:
        """Intersection over union of each class, over the first scans together."""
        return class_iou(*(np.concatenate(part[:scans]) for part in (self.found, self.truth)))


@torch.no_grad()
def predict(model: nn.Module, scans: list[dict[str, SparseTensor]], device) -> Labels:
    model.eval()
    found = [model(scan["input"].to(device)).argmax(1).cpu().numpy() for scan in scans]
    model.train()
    return Labels(found, [scan["label"].F.numpy() for scan in scans])


def metrics_of(labels: Labels) -> dict[str, float]:
    iou = labels.iou()
    classes = {f"IoU, {name}": value for name, value in zip(CLASSES, iou, strict=True)}
    return {**classes, "mean IoU": float(np.nanmean(iou))}


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


def draw(args, scan: dict[str, SparseTensor], voxel_size: float, after: Labels, before: Labels):
    """The first scan with the classes found in it and the true ones, and the IoU over all scans."""
    found, first = after.iou(), before.iou()
    mean = f"mean IoU {np.nanmean(found):.2f}"
    title = f"{mean} on streets that it has not seen ({args.model} U-Net)"
    figure = new_figure((15, 18.5), title)
    rows = [["after", "after"], ["truth", "iou"]]
    panels = figure.subplot_mosaic(rows, height_ratios=[1.35, 1], width_ratios=[1.1, 1])
    paint = np.array([to_rgb(colour) for colour in COLOURS])
    cells = scan["input"].C[:, 1:].cpu().numpy()
    alone = f"mean IoU {np.nanmean(after.iou(1)):.2f} in this scan"
    for name, labels, title in (
        ("after", after.found[0], f"classes found after {args.steps} steps: {alone}"),
        ("truth", after.truth[0], f"truth: {len(cells):,} voxels of {voxel_size * 100:g} cm"),
    ):
        scale = (10.0, "10 m")
        draw_voxels(panels[name], cells, paint[labels], title, cell_size=voxel_size, scale=scale)
    bars, places = panels["iou"], np.arange(len(CLASSES))
    scans = f"{len(after.found)} scans" if len(after.found) > 1 else "1 scan"
    plain_panel(bars, f"IoU by class, {scans}: {mean}", "intersection over union")
    for offset, values, look in ((-0.2, first, {"color": FAINT}), (0.2, found, {"color": COLOURS})):
        drawn = bars.barh(places + offset, np.nan_to_num(values), 0.36, **look)
        labels = ["-" if np.isnan(value) else f"{value:.2f}" for value in values]
        ink = FAINT if values is first else INK
        bars.bar_label(drawn, labels, color=ink, padding=4, fontsize=12)
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


def experiment(args, streets: Streets, scans: list[dict[str, SparseTensor]]) -> Outcome:
    loader = DataLoader(streets, batch_size=2, shuffle=True, collate_fn=sparse_collate_fn, drop_last=True)
    model = model_of(args).to(args.device)
    before = predict(model, scans, args.device)
    train(model, loader, args)
    after = predict(model, scans, args.device)
    picture = partial(draw, args, scans[0], streets.voxel_size, after, before)
    return Outcome(metrics_of(before), metrics_of(after), picture)


def main() -> None:
    args = parse(__doc__.splitlines()[0], "segmentation", steps=100, quick=12)
    voxel_size = 0.8 if args.quick else 0.3
    streets = Streets(range(1, 3 if args.quick else 7), voxel_size, turn=True)
    unseen = Streets((0,) if args.quick else (0, 101, 102, 103), voxel_size, turn=False)
    scans = [sparse_collate_fn([unseen[index]]) for index in range(len(unseen))]
    run = partial(experiment, streets=streets, scans=scans)
    over_seeds(args, run, f"{len(scans)} street scan(s)")


if __name__ == "__main__":
    main()
