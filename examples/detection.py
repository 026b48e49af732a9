"""Car detection: a SECOND backbone for spconv and a small head find the cars of a street.

    python examples/detection.py

Trains on synthetic lidar scans and is measured on a scan that it has not seen. Voxel generator and
model are ordinary spconv code; `sparse_bridge.enable()` is the only addition.
"""

from __future__ import annotations

import sparse_bridge

sparse_bridge.enable("spconv")

import numpy as np
import spconv.pytorch as spconv
import torch
from shared import finish, parse, training
from spconv.pytorch.utils import PointToVoxel
from torch import nn

from sparse_bridge.demo.birdseye import raster
from sparse_bridge.demo.drawing import FAINT, INK, legend, metric_panel, new_figure, save
from sparse_bridge.demo.scene import labelled_scan
from sparse_bridge.networks.spconv import Second

RANGE = (-32.0, -25.6, -2.6, 32.0, 25.6, 2.6)  # x, y, z: lowest, then highest, in metres
RIGHT = 1.5  # metres between the centres of a found and a true car, at most
MIN_POINTS = 8  # fewer echoes do not make a car visible


class Detector(nn.Module):
    """For every cell of the bird's-eye view: does it hold the centre of a car, and which box?

    The 7 outputs are a logit, the offset of the centre in x and y (cells), logarithms of length and
    width (metres), and sine and cosine of twice the heading, since front and rear look alike.
    """

    def __init__(self) -> None:
        super().__init__()
        self.backbone = Second(spconv, 2, (16, 32, 48, 64), out_channels=64, momentum=0.05)
        self.head = nn.Sequential(
            nn.Conv2d(64, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU(),
            nn.ConvTranspose2d(64, 64, 2, stride=2, bias=False), nn.BatchNorm2d(64), nn.ReLU(),
            nn.Conv2d(64, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU(),
            nn.Conv2d(64, 7, 1),
        )  # fmt: skip
        with torch.no_grad():
            self.head[-1].bias[0] = -4.0  # cars are rare

    def forward(self, x: spconv.SparseConvTensor) -> torch.Tensor:
        """[B, 7, H, W]; cells are 4 voxels wide in x and y."""
        return self.head(self.backbone(x).dense().flatten(1, 2))  # height into the channels


class Voxels:
    """From points to the input of the network."""

    def __init__(self, size_xy: float, device: torch.device) -> None:
        self.cell = 4 * size_xy
        size = (size_xy, size_xy, 0.2)
        self.shape = [round((RANGE[a + 3] - RANGE[a]) / size[a]) for a in (2, 1, 0)]
        self.device = device
        self.generate = PointToVoxel(
            vsize_xyz=size,
            coors_range_xyz=RANGE,
            num_point_features=4,
            max_num_voxels=60_000,
            max_num_points_per_voxel=8,
        )

    def __call__(self, scans: list[np.ndarray]) -> spconv.SparseConvTensor:
        features, indices = [], []
        for item, points in enumerate(scans):
            voxels, cells, count = self.generate(torch.from_numpy(points))
            mean = voxels.sum(1) / count[:, None]
            features.append(mean[:, 2:])  # height and brightness; the place is in the indices
            indices.append(nn.functional.pad(cells, (1, 0), value=item))
        x, sites = (torch.cat(parts).to(self.device) for parts in (features, indices))
        return spconv.SparseConvTensor(x, sites, self.shape, len(scans))


class Street:
    """A scan and those of its cars that have enough echoes to be found."""

    def __init__(self, seed: int, azimuths: int = 2000) -> None:
        scan = labelled_scan(seed, azimuths)
        near = np.hypot(scan.points[:, 0], scan.points[:, 1]) < 1.5 * RANGE[3]
        self.points = scan.points[near]
        self.cars = scan.cars[[self._echoes(car) >= MIN_POINTS for car in scan.cars]]

    def _echoes(self, car: np.ndarray) -> int:
        """How many points lie in the box."""
        x, y, z, length, width, height, yaw = car
        dx, dy, dz = (self.points[:, :3] - [x, y, z]).T
        ahead, left = np.cos(yaw) * dx + np.sin(yaw) * dy, np.cos(yaw) * dy - np.sin(yaw) * dx
        inside = (np.abs(ahead) < length / 2 + 0.1) & (np.abs(left) < width / 2 + 0.1)
        return int((inside & (np.abs(dz) < height / 2)).sum())

    def view(self, angle: float = 0.0, mirror: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Points [N, 4] and cars [M, 7] within the range, turned about z, and y mirrored."""
        points, cars = self.points.copy(), self.cars.copy()
        turn = np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])
        for rows in (points, cars):
            rows[:, :2] = rows[:, :2] @ turn
            rows[:, 1] *= -1 if mirror else 1
        cars[:, 6] = (cars[:, 6] + angle) * (-1 if mirror else 1)
        x, y = cars[:, 0], cars[:, 1]
        inside = (x > RANGE[0]) & (x < RANGE[3]) & (y > RANGE[1]) & (y < RANGE[4])
        return points, cars[inside]


def loss_of(output: torch.Tensor, cars: list[np.ndarray], cell: float) -> torch.Tensor:
    """Penalty-reduced focal loss of the centres, L1 loss of the boxes."""
    ys, xs = torch.meshgrid(*(torch.arange(n) + 0.5 for n in output.shape[2:]), indexing="ij")
    logit, total, count = output[:, 0], 0.0, max(sum(map(len, cars)), 1)
    for item, boxes in enumerate(cars):
        heat = torch.zeros(output.shape[2:])
        for x, y, _, length, width, _, yaw in boxes:
            u, v = (x - RANGE[0]) / cell, (y - RANGE[1]) / cell
            heat = torch.maximum(heat, torch.exp(-((xs - u) ** 2 + (ys - v) ** 2) / 0.8))
            heat[int(v), int(u)] = 1
            box = [u % 1, v % 1, np.log(length), np.log(width), np.sin(2 * yaw), np.cos(2 * yaw)]
            found = output[item, 1:, int(v), int(u)]
            total = total + (found - found.new_tensor(box)).abs().sum()
        heat = heat.to(output.device)
        p = logit[item].sigmoid().clamp(1e-4, 1 - 1e-4)
        total = total - ((1 - p) ** 2 * p.log() * (heat == 1)).sum()
        total = total - ((1 - heat) ** 4 * p**2 * (1 - p).log() * (heat < 1)).sum()
    return total / count


@torch.no_grad()
def detect(model: Detector, x: spconv.SparseConvTensor, cell: float):
    """Boxes [K, 6] of the first scan, best first (score, x, y, length, width, heading); scores."""
    model.eval()
    output = model(x)[0].float().cpu()
    model.train()
    heat = output[0].sigmoid()
    peak = heat == nn.functional.max_pool2d(heat[None], 3, 1, 1)[0]
    v, u = torch.nonzero(peak & (heat > 0.02), as_tuple=True)
    _, du, dv, length, width, sin, cos = output[:, v, u]
    rows = [
        heat[v, u],
        RANGE[0] + (u + du) * cell,
        RANGE[1] + (v + dv) * cell,
        length.clamp(-2, 3).exp(),
        width.clamp(-2, 3).exp(),
        torch.atan2(sin, cos) / 2,
    ]
    boxes = torch.stack(rows, 1).numpy()
    return boxes[np.argsort(-boxes[:, 0], kind="stable")], heat.numpy()


def match(boxes: np.ndarray, cars: np.ndarray) -> np.ndarray:
    """The car [K] that each box finds, -1 for none; each car is found once, by the best box."""
    free, found = np.ones(len(cars), bool), np.full(len(boxes), -1)
    for i, box in enumerate(boxes):
        distance = np.hypot(*(cars[:, :2] - box[1:3]).T) + np.where(free, 0, np.inf)
        if len(cars) and distance.min() < RIGHT:
            found[i] = distance.argmin()
            free[found[i]] = False
    return found


def average_precision(boxes: np.ndarray, cars: np.ndarray) -> float:
    """Area under the precision-recall curve."""
    right = match(boxes, cars) >= 0
    precision = np.cumsum(right) / np.arange(1, len(right) + 1)
    best_from_here = np.maximum.accumulate(precision[::-1])[::-1]
    return float((best_from_here * right).sum() / max(len(cars), 1))


def outlines(boxes: np.ndarray) -> np.ndarray:
    """Corners [K, 4, 2] of boxes given as x, y, length, width, heading."""
    corners = np.array([[1, 1], [1, -1], [-1, -1], [-1, 1]]) / 2 * boxes[:, None, 2:4]
    cos, sin = np.cos(boxes[:, 4]), np.sin(boxes[:, 4])
    turn = np.stack([np.stack([cos, sin], 1), np.stack([-sin, cos], 1)], 1)
    return corners @ turn + boxes[:, None, :2]


COLOURS = {"found": "#4fb477", "missed": "#e0a458", "false alarm": "#e4572e", "true car": INK}


def draw(args, points: np.ndarray, cars: np.ndarray, boxes: np.ndarray, heats, scores) -> None:
    from matplotlib.collections import PolyCollection

    figure = new_figure((19, 11), "Cars of a street that it has not seen (SECOND, spconv)")
    panels = figure.subplot_mosaic([["scene", "before"], ["scene", "after"]], width_ratios=[2.1, 1])
    extent = (RANGE[0], RANGE[3], RANGE[1], RANGE[4])
    inside = (np.abs(points[:, 0]) < RANGE[3]) & (np.abs(points[:, 1]) < RANGE[4])
    height = raster(points[inside, :3], points[inside, 2], extent, 0.16)
    scene = panels["scene"]
    grey = {"cmap": "bone", "vmin": -4.0, "vmax": 3.0, "interpolation": "nearest"}
    scene.imshow(height, extent=extent, origin="lower", **grey)
    boxes = boxes[boxes[:, 0] > 0.3]
    found = match(boxes, cars)
    missed = np.setdiff1d(np.arange(len(cars)), found)
    of_cars = outlines(cars[:, [0, 1, 3, 4, 6]])
    for shapes, name, style in (
        (of_cars, "true car", {"linewidths": 1.0, "linestyles": "dashed"}),
        (of_cars[missed], "missed", {"linewidths": 2.2}),
        (outlines(boxes[found < 0, 1:]), "false alarm", {"linewidths": 2.2}),
        (outlines(boxes[found >= 0, 1:]), "found", {"linewidths": 2.2}),
    ):
        edge = {"facecolors": "none", "edgecolors": COLOURS[name]}
        scene.add_collection(PolyCollection(shapes, **edge, **style))
    title = f"{(found >= 0).sum()} of {len(cars)} found; false alarms: {(found < 0).sum()}"
    metric_panel(scene, f"{title} (score above 0.3, within {RIGHT} m)", extent)
    legend(figure, COLOURS, loc="outside lower center", ncols=len(COLOURS))
    for name, heat, score in zip(("before", "after"), heats, scores, strict=True):
        panel = panels[name]
        panel.imshow(heat, extent=extent, origin="lower", cmap="inferno", vmin=0, vmax=1)
        panel.plot(cars[:, 0], cars[:, 1], "+", color=FAINT, markersize=5)
        steps = "before training" if name == "before" else f"after {args.steps} steps"
        metric_panel(panel, f"score of a centre, {steps}: AP {score:.2f}", extent)
    save(figure, args.picture)


def main() -> None:
    args = parse(__doc__.splitlines()[0], "detection", steps=80)
    voxels = Voxels(0.4 if args.quick else 0.2, args.device)
    rng = np.random.default_rng(args.seed)
    azimuths = 800 if args.quick else 2000
    streets = [Street(seed, azimuths) for seed in range(1, 3 if args.quick else 7)]
    unseen, true_cars = Street(0, azimuths).view()
    model = Detector().to(args.device)
    seen = voxels([unseen])
    found, heat = detect(model, seen, voxels.cell)
    optimiser = torch.optim.AdamW(model.parameters(), 4e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 4e-3, total_steps=args.steps + 1)
    for _, show in training(args.steps):
        picked = rng.choice(len(streets), 2, replace=False)
        batch = [streets[i].view(rng.uniform(-0.5, 0.5), rng.random() < 0.5) for i in picked]
        optimiser.zero_grad()
        output = model(voxels([points for points, _ in batch]))
        loss = loss_of(output, [cars for _, cars in batch], voxels.cell)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimiser.step(), schedule.step()
        show(loss.detach())
    found_after, heat_after = detect(model, seen, voxels.cell)
    scores = average_precision(found, true_cars), average_precision(found_after, true_cars)
    draw(args, unseen, true_cars, found_after, (heat, heat_after), scores)
    finish(args, {"average precision": scores})


if __name__ == "__main__":
    main()
