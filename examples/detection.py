"""Car detection: a SECOND backbone for spconv and a centre head find the cars of a street.

    python examples/detection.py
    python examples/detection.py --model public

Trains on synthetic lidar scans and is measured on scans that it has not seen: average precision at
a bird's-eye-view IoU of 0.3, 0.5 and 0.7, and the error of the heading. `--model public` takes the
backbone of SECOND as OpenPCDet defines it, unchanged. Voxel generator and models are ordinary
spconv code; `sparse_bridge.enable()` is the only addition.
"""

from __future__ import annotations

import sparse_bridge

sparse_bridge.enable("spconv")

import itertools
from functools import partial

import numpy as np
import spconv.pytorch as spconv
import torch
from box_view import draw
from boxes import Found, average_precision, bev_iou, heading_errors
from shared import Outcome, over_seeds, parse, precise_norms, public, training
from spconv.pytorch.utils import PointToVoxel
from torch import nn

from sparse_bridge.tools.demo.scene import labelled_scan
from sparse_bridge.tools.networks.spconv import Second

RANGE = (-32.0, -25.6, -2.6, 32.0, 25.6, 2.6)  # x, y, z: lowest, then highest, in metres
MIN_POINTS = 8  # cars with fewer echoes need not be found, and are no false alarm
THRESHOLDS = (0.3, 0.5, 0.7)  # of the overlap that makes a box right; KITTI takes 0.7 for cars


class SmallBackbone(Second):
    """The layers of SECOND, thinner."""

    widths = 48, 64  # of the two outputs, heights merged: 7 and 1 layers

    def __init__(self) -> None:
        super().__init__(spconv, 2, (16, 32, 48, 64), out_channels=64)

    def forward(self, x: spconv.SparseConvTensor) -> list[spconv.SparseConvTensor]:
        """Features at a quarter and at an eighth of the resolution in x and y."""
        fine = self.conv3(self.conv2(self.conv1(self.conv_input(x))))
        return [fine, self.conv_out(self.conv4(fine))]


class PublicBackbone(nn.Module):
    """`VoxelBackBone8x`, with its two last outputs."""

    widths = 64, 128

    def __init__(self, grid: list[int]) -> None:
        super().__init__()
        self.net = public("spconv.second").VoxelBackBone8x(2, grid[::-1])

    def forward(self, x: spconv.SparseConvTensor) -> list[spconv.SparseConvTensor]:
        batch = {"voxel_features": x.features, "voxel_coords": x.indices}
        found = self.net({**batch, "batch_size": x.batch_size})
        return [found["multi_scale_3d_features"]["x_conv3"], found["encoded_spconv_tensor"]]


def unit(conv: nn.Module) -> nn.Sequential:
    return nn.Sequential(conv, nn.BatchNorm2d(conv.out_channels), nn.ReLU())


class Detector(nn.Module):
    """For every cell of the bird's-eye view: does it hold the centre of a car, and which box?

    The 7 outputs are a logit, the offset of the centre in x and y (cells, from the cell's middle),
    logarithms of length and width (metres), and sine and cosine of twice the heading, since front
    and rear look alike.
    """

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        fine, coarse = backbone.widths
        self.backbone = backbone
        self.fine = unit(nn.Conv2d(7 * fine, 64, 1, bias=False))
        self.coarse = unit(nn.ConvTranspose2d(coarse, 64, 2, stride=2, bias=False))
        self.head = nn.Sequential(
            *(unit(nn.Conv2d(c, 64, 3, padding=1, bias=False)) for c in (128, 64)), nn.Conv2d(64, 7, 1)
        )
        with torch.no_grad():
            self.head[-1].bias[0] = -4.0  # cars are rare

    def forward(self, x: spconv.SparseConvTensor) -> torch.Tensor:
        """[B, 7, H, W]; cells are 4 voxels wide in x and y."""
        fine, coarse = (y.dense().flatten(1, 2) for y in self.backbone(x))
        return self.head(torch.cat([self.fine(fine), self.coarse(coarse)], 1))


class Voxels:
    """From points to the input of the network."""

    def __init__(self, size_xy: float, device: torch.device) -> None:
        self.cell = 4 * size_xy
        size = (size_xy, size_xy, 0.2)
        # The layer on top is OpenPCDet's: its strides in z then divide without a rest.
        cells = [round((RANGE[a + 3] - RANGE[a]) / size[a]) for a in (2, 1, 0)]
        self.shape = [cells[0] + 1, *cells[1:]]
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
    """A scan and its cars."""

    def __init__(self, seed: int, azimuths: int = 2000) -> None:
        scan = labelled_scan(seed, azimuths)
        near = np.hypot(scan.points[:, 0], scan.points[:, 1]) < 1.5 * RANGE[3]
        self.points, self.cars = scan.points[near], scan.cars
        self.counted = np.array([self._echoes(car) >= MIN_POINTS for car in scan.cars])

    def _echoes(self, car: np.ndarray) -> int:
        """How many points lie in the box."""
        x, y, z, length, width, height, yaw = car
        dx, dy, dz = (self.points[:, :3] - [x, y, z]).T
        ahead, left = np.cos(yaw) * dx + np.sin(yaw) * dy, np.cos(yaw) * dy - np.sin(yaw) * dx
        inside = (np.abs(ahead) < length / 2 + 0.1) & (np.abs(left) < width / 2 + 0.1)
        return int((inside & (np.abs(dz) < height / 2)).sum())

    def view(self, angle: float = 0.0, mirror: bool = False) -> tuple[np.ndarray, ...]:
        """Points [N, 4], cars [M, 7] and which of them count, turned about z, and y mirrored."""
        points, cars = self.points.copy(), self.cars.copy()
        turn = np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])
        for rows in (points, cars):
            rows[:, :2] = rows[:, :2] @ turn
            rows[:, 1] *= -1 if mirror else 1
        cars[:, 6] = (cars[:, 6] + angle) * (-1 if mirror else 1)
        x, y = cars[:, 0], cars[:, 1]
        inside = (x > RANGE[0]) & (x < RANGE[3]) & (y > RANGE[1]) & (y < RANGE[4])
        return points, cars[inside], self.counted[inside]


def loss_of(output: torch.Tensor, cars: list[np.ndarray], cell: float) -> torch.Tensor:
    """Penalty-reduced focal loss of the centres, L1 loss of the boxes around them."""
    shape, items = output.shape[2:], []
    ys, xs = torch.meshgrid(*(torch.arange(n) + 0.5 for n in shape), indexing="ij")
    heat = torch.zeros(len(cars), *shape)
    for item, boxes in enumerate(cars):
        for x, y, _, length, width, _, yaw in boxes:
            u, v = (x - RANGE[0]) / cell, (y - RANGE[1]) / cell
            heat[item] = heat[item].maximum(torch.exp(-((xs - u) ** 2 + (ys - v) ** 2) / 0.8))
            heat[item, int(v), int(u)] = 1
            # The cells around the centre learn the box, too.
            for row, column in itertools.product((-1, 0, 1), repeat=2):
                i, j = int(v) + row, int(u) + column
                if 0 <= i < shape[0] and 0 <= j < shape[1]:
                    place = [u - j - 0.5, v - i - 0.5, np.log(length), np.log(width)]
                    turn = [np.sin(2 * yaw), np.cos(2 * yaw)]
                    weight = 1.0 if row == column == 0 else 0.3
                    items.append([item, i, j, weight, *place, *turn])
    count, heat = max(sum(map(len, cars)), 1), heat.to(output.device)
    p = output[:, 0].float().sigmoid().clamp(1e-4, 1 - 1e-4)
    centres = -((1 - p) ** 2 * p.log() * (heat == 1)).sum()
    centres = centres - ((1 - heat) ** 4 * p**2 * (1 - p).log() * (heat < 1)).sum()
    if not items:
        return centres
    table = torch.tensor(items, dtype=torch.float32, device=output.device)
    b, i, j = table[:, :3].long().T
    wrong = (output[b, 1:, i, j] - table[:, 4:]).abs() * table[:, 3:4]
    return (centres + 2 * wrong.sum()) / count


@torch.no_grad()
def detect(model: Detector, x: spconv.SparseConvTensor, cell: float) -> tuple[np.ndarray, ...]:
    """Boxes [K, 5] of the first scan (x, y, length, width, heading) and scores [K], best first."""
    output = model(x)[0].float().cpu()
    heat = output[0].sigmoid()
    peak = heat == nn.functional.max_pool2d(heat[None], 3, 1, 1)[0]
    v, u = torch.nonzero(peak & (heat > 0.02), as_tuple=True)
    _, du, dv, length, width, sin, cos = output[:, v, u]
    place = [RANGE[0] + (u + 0.5 + du) * cell, RANGE[1] + (v + 0.5 + dv) * cell]
    size = [length.clamp(-2, 3).exp(), width.clamp(-2, 3).exp()]
    boxes = torch.stack([*place, *size, torch.atan2(sin, cos) / 2], 1).double().numpy()
    scores = heat[v, u].numpy()
    order = np.argsort(-scores, kind="stable")
    boxes, scores = boxes[order], scores[order]
    # Cars do not overlap: of two boxes that do, the better one stays.
    overlap, kept = bev_iou(boxes, boxes) > 0.1, np.ones(len(boxes), bool)
    for row in range(len(boxes)):
        kept[row] = not (overlap[row, :row] & kept[:row]).any()
    return boxes[kept], scores[kept]


def evaluate(model: Detector, voxels: Voxels, streets: list[Street]) -> list[Found]:
    """What the model finds in each street."""
    model.eval()
    found = []
    for street in streets:
        points, cars, counted = street.view()
        boxes, scores = detect(model, voxels([points]), voxels.cell)
        found.append(Found(boxes, scores, cars[:, [0, 1, 3, 4, 6]], counted))
    model.train()
    return found


def metrics_of(found: list[Found]) -> dict[str, float]:
    errors = heading_errors(found)
    return {
        "heading error, degrees (mean)": float(errors.mean()) if len(errors) else np.nan,
        "heading error, degrees (median)": float(np.median(errors)) if len(errors) else np.nan,
        **{f"AP at IoU {t}": average_precision(found, t) for t in THRESHOLDS},
    }


def experiment(args, voxels: Voxels, streets: list[Street], unseen: list[Street]) -> Outcome:
    rng = np.random.default_rng(args.seed)
    backbone = PublicBackbone(voxels.shape) if args.model == "public" else SmallBackbone()
    model = Detector(backbone).to(args.device)
    before = evaluate(model, voxels, unseen)
    optimiser = torch.optim.AdamW(model.parameters(), 4e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 4e-3, total_steps=args.steps + 1)

    def batch() -> tuple[spconv.SparseConvTensor, list[np.ndarray]]:
        picked = rng.choice(len(streets), 2, replace=False)
        views = [streets[i].view(rng.uniform(-0.8, 0.8), rng.random() < 0.5) for i in picked]
        return voxels([view[0] for view in views]), [cars[seen] for _, cars, seen in views]

    for _, show in training(args.steps):
        x, cars = batch()
        optimiser.zero_grad()
        loss = loss_of(model(x), cars, voxels.cell)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimiser.step(), schedule.step()
        show(loss.detach())
    precise_norms(model, lambda: model(batch()[0]))
    after = evaluate(model, voxels, unseen)
    scene = (RANGE[0], RANGE[3], RANGE[1], RANGE[4])
    picture = partial(draw, args, unseen[0].view()[0], after, scene)
    return Outcome(metrics_of(before), metrics_of(after), picture)


def main() -> None:
    args = parse(__doc__.splitlines()[0], "detection", steps=240, quick=15)
    voxels = Voxels(0.4 if args.quick else 0.2, args.device)
    azimuths = 800 if args.quick else 2000
    streets = [Street(seed, azimuths) for seed in range(1, 3 if args.quick else 13)]
    unseen = [Street(seed, azimuths) for seed in ((0,) if args.quick else (0, 101, 102, 103))]
    run = partial(experiment, voxels=voxels, streets=streets, unseen=unseen)
    over_seeds(args, run, f"{len(unseen)} street scan(s)")


if __name__ == "__main__":
    main()
