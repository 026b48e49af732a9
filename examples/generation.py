"""Shape completion: a generative network for MinkowskiEngine grows the missing side of a vase.

    python examples/generation.py
    python examples/generation.py --model public

The input is a part of a surface. An encoder reads it down to a few coarse voxels; the
decoder splits every voxel into eight, level by level, and prunes those that it holds for empty.
`--model public` takes the completion network of MinkowskiEngine's own examples, with the five
levels that a small vase needs. Ordinary MinkowskiEngine 0.5 code; `sparse_bridge.enable()` is the
only addition.
"""

from __future__ import annotations

import sparse_bridge

sparse_bridge.enable("minkowski")

from functools import partial
from itertools import pairwise
from typing import NamedTuple

import MinkowskiEngine as ME
import numpy as np
import torch
from matplotlib.colors import to_rgb
from shared import Outcome, over_seeds, parse, public, training
from torch import nn

from sparse_bridge.tools.demo.drawing import legend, new_figure, save
from sparse_bridge.tools.demo.voxel_view import draw_voxels

AWAY = np.pi / 4  # the input is the far side of the picture, which then shows what grows
Cells = np.ndarray  # integers [V, 3]: x, y, z


def vase(rng: np.random.Generator, size: int) -> Cells:
    """The surface of a random solid of revolution with a foot and an open top."""
    low, high = size * rng.uniform(0.06, 0.14), size * rng.uniform(0.8, 0.94)
    along = np.linspace(0, 1, 2 * size)[:, None]
    radius = rng.uniform(0.2, 0.28) + sum(
        rng.uniform(0.02, 0.07) * np.sin(np.pi * order * along + rng.uniform(0, 2 * np.pi)) for order in (1, 2, 3)
    )
    radius = size * np.clip(radius, 0.07, 0.42)
    height = low + (high - low) * along
    # The wall from bottom to top, then the foot from the middle outwards, turned about z.
    radius = np.concatenate([radius, np.linspace(0, 1, size)[:, None] * radius[0]])
    height = np.concatenate([height, np.full((size, 1), low)])
    turn = np.linspace(0, 2 * np.pi, 4 * size, endpoint=False)
    middle = size / 2 + rng.uniform(-0.05, 0.05, 2) * size
    x, y = middle[0] + radius * np.cos(turn), middle[1] + radius * np.sin(turn)
    hit = np.zeros((size,) * 3, bool)
    hit[tuple(np.floor(c).astype(int) for c in (x, y, np.broadcast_to(height, x.shape)))] = True
    return np.argwhere(hit)


def seen_of(cells: Cells, azimuth: float) -> Cells:
    """What is left of a vase that was broken on the side away from `azimuth` (radians)."""
    toward = (cells[:, :2] - cells[:, :2].mean(0)) @ [np.cos(azimuth), np.sin(azimuth)]
    return cells[toward > 0.3 * toward.min()]


def block(conv: nn.Module) -> nn.Sequential:
    return nn.Sequential(conv, ME.MinkowskiBatchNorm(conv.out_channels), ME.MinkowskiELU())


class Completion(nn.Module):
    """Strided convolutions down; generative transposed convolutions and pruning up."""

    def __init__(self, widths=(16, 32, 64, 96)) -> None:
        super().__init__()
        conv = {"dimension": 3, "bias": False}
        self.stem = block(ME.MinkowskiConvolution(1, widths[0], kernel_size=3, **conv))
        self.down, self.up, self.occupied = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        for fine, coarse in pairwise(widths):
            down = ME.MinkowskiConvolution(fine, coarse, kernel_size=2, stride=2, **conv)
            same = ME.MinkowskiConvolution(coarse, coarse, kernel_size=3, **conv)
            self.down.append(nn.Sequential(block(down), block(same)))
        # What is missing lies far away, but down here that is two voxels.
        wide = ME.MinkowskiConvolution(widths[-1], widths[-1], kernel_size=5, expand_coordinates=True, **conv)
        self.bottom = block(wide)
        self.bottom_occupied = ME.MinkowskiConvolution(widths[-1], 1, kernel_size=1, dimension=3)
        for fine, coarse in pairwise(widths):
            grow = ME.MinkowskiGenerativeConvolutionTranspose(coarse, fine, kernel_size=2, stride=2, **conv)
            more = (ME.MinkowskiConvolution(fine, fine, kernel_size=3, **conv) for _ in range(2))
            self.up.append(nn.Sequential(block(grow), *map(block, more)))
            self.occupied.append(ME.MinkowskiConvolution(fine, 1, kernel_size=1, bias=True, dimension=3))
        self.prune = ME.MinkowskiPruning()

    def forward(self, x: ME.SparseTensor, truth: ME.CoordinateMapKey | None = None):
        """Returns the voxels kept at each level, coarse to fine, and the loss of their choice."""
        levels = [self.stem(x)]
        for down in self.down:
            levels.append(down(levels[-1]))
        seen = levels.pop()
        y = self.bottom(seen)
        y, loss = self.choose(y, self.bottom_occupied(y), seen, truth)
        kept = [y]
        for up, occupied in zip(reversed(self.up), reversed(self.occupied), strict=True):
            seen = levels.pop()
            y = up(y) + seen  # the union of both
            y, more = self.choose(y, occupied(y), seen, truth)
            kept.append(y)
            loss = loss + more
        return kept, loss

    def choose(self, y: ME.SparseTensor, logit: ME.SparseTensor, seen: ME.SparseTensor, truth):
        """Prune the voxels held for empty; those of the input stay.

        In training those of the truth stay too, so that the finer levels have something to learn.
        """
        keep = (logit.F[:, 0] > 0) | rows_in(y, seen.coordinate_map_key)
        if truth is None:
            return self.prune(y, keep), 0.0
        wanted = rows_in(y, y.coordinate_manager.stride(truth, y.tensor_stride))
        loss = nn.functional.binary_cross_entropy_with_logits(logit.F[:, 0], wanted.float())
        return self.prune(y, keep | wanted if self.training else keep), loss


class PublicCompletion(nn.Module):
    """`CompletionNet` with the outputs of the network above."""

    def __init__(self) -> None:
        super().__init__()
        self.definition = definition = public("minkowski.completion")

        class FiveLevels(definition.CompletionNet):
            ENC_CHANNELS = DEC_CHANNELS = definition.CHANNELS[:5]

        self.net = FiveLevels()

    def forward(self, x: ME.SparseTensor, truth: ME.CoordinateMapKey | None = None):
        # Without the truth the input stands in for it: it bounds the voxels of untrained networks.
        found = self.net(x, x.coordinate_map_key if truth is None else truth)
        logits, targets, out = found
        kept = [
            self.net.pruning(level, self.net.plausible(level.F[:, 0], target))
            for level, target in zip(logits[:-1], targets[:-1], strict=True)
        ]
        return [*kept, out], self.definition.loss(found)


def rows_in(x: ME.SparseTensor, key: ME.CoordinateMapKey) -> torch.Tensor:
    """Mask of the rows of `x` whose coordinates are in another map."""
    found = torch.zeros(len(x), dtype=torch.bool, device=x.device)
    pairs = x.coordinate_manager.kernel_map(x.coordinate_map_key, key, kernel_size=1)
    for rows in pairs.values():
        found[rows[0].long()] = True
    return found


class Broken(NamedTuple):
    """Broken vases as the input, the coordinates of the whole ones, and their key."""

    x: ME.SparseTensor
    whole: torch.Tensor
    truth: ME.CoordinateMapKey


def batch_of(vases: list[Cells], azimuths: np.ndarray, device) -> Broken:
    parts = [seen_of(cells, azimuth) for cells, azimuth in zip(vases, azimuths, strict=True)]
    seen = ME.utils.batched_coordinates(parts)
    x = ME.SparseTensor(torch.ones(len(seen), 1), seen, device=device)
    whole = ME.utils.batched_coordinates(vases).to(device)
    truth, _ = x.coordinate_manager.insert_and_map(whole, string_id="truth")
    return Broken(x, whole, truth)


def overlap(found: torch.Tensor, truth: torch.Tensor) -> float:
    """Intersection over union of two sets of coordinates."""
    found, truth = (set(map(tuple, rows.tolist())) for rows in (found, truth))
    return len(found & truth) / len(found | truth)


def missing_found(found: torch.Tensor, truth: torch.Tensor, seen: torch.Tensor) -> float:
    """The share of the truth that the input lacks and the network found."""
    found, truth, seen = (set(map(tuple, rows.tolist())) for rows in (found, truth, seen))
    return len(found & truth - seen) / len(truth - seen)


@torch.no_grad()
def complete(model: Completion, x: ME.SparseTensor) -> list[ME.SparseTensor]:
    model.eval()
    kept, _ = model(x)
    model.train()
    return kept


COLOURS = {"seen": "#8fa3bf", "grown, right": "#2f7fd6", "grown, wrong": "#f0a020"}


def draw(args, scan: Broken, levels: list[ME.SparseTensor], mean: float) -> None:
    """The first vase: completed, as it was given, as it is, and level by level."""
    seen, truth = scan.x.C, scan.whole
    title = f"mean IoU {mean:.2f} of completed vases that it has not seen ({args.model} network)"
    figure = new_figure((15, 19), title)
    rows = [["result", "result", "input"], ["result", "result", "truth"], ["8", "4", "2"]]
    panels = figure.subplot_mosaic(rows)
    score, alone = overlap(levels[-1].C, truth), overlap(seen, truth)
    seen, truth = seen.cpu().numpy()[:, 1:], truth.cpu().numpy()[:, 1:]
    everything = np.concatenate([levels[-1].C.cpu().numpy()[:, 1:], truth])
    ends = np.stack([everything.min(0), everything.max(0)])
    corners = np.stack(np.meshgrid(*ends.T), -1).reshape(-1, 3)

    def panel(axes, cells: Cells, stride: int, title: str) -> None:
        rows = cells // stride
        of_seen, of_truth = ({*map(tuple, c // stride)} for c in (seen, truth))
        kinds = [
            "seen" if row in of_seen else "grown, right" if row in of_truth else "grown, wrong"
            for row in map(tuple, rows)
        ]
        colours = np.array([to_rgb(COLOURS[kind]) for kind in kinds])
        title = f"{title}: {len(rows):,}"
        draw_voxels(axes, rows, colours, title, window=corners // stride, elevation=30)

    panel(panels["result"], levels[-1].C.cpu().numpy()[:, 1:], 1, f"completed, IoU {score:.2f}; voxels")
    panel(panels["input"], seen, 1, f"input, IoU {alone:.2f}; voxels")
    panel(panels["truth"], truth, 1, "truth; voxels")
    for level in levels[:-1]:
        stride = level.tensor_stride[0]
        panel(panels[str(stride)], level.C.cpu().numpy()[:, 1:], stride, f"{stride} cells wide")
    legend(figure, COLOURS, loc="outside lower center", ncols=len(COLOURS))
    save(figure, args.picture)


def metrics_of(levels: list[list[ME.SparseTensor]], scans: list[Broken]) -> dict[str, float]:
    """Means over the vases."""
    ends = [kept[-1].C for kept in levels]
    pairs = list(zip(ends, scans, strict=True))
    grown = [missing_found(end, one.whole, one.x.C) for end, one in pairs]
    return {
        "IoU of the input": float(np.mean([overlap(one.x.C, one.whole) for one in scans])),
        "share of the missing part that was found": float(np.mean(grown)),
        "mean IoU": float(np.mean([overlap(end, one.whole) for end, one in pairs])),
    }


def experiment(args, size: int, vases: int) -> Outcome:
    rng = np.random.default_rng(args.seed)
    model = (PublicCompletion() if args.model == "public" else Completion()).to(args.device)
    shapes = [vase(np.random.default_rng(1000 + number), size) for number in range(vases)]
    scans = [batch_of([one], np.array([AWAY]), args.device) for one in shapes]
    before = [complete(model, one.x) for one in scans]
    optimiser = torch.optim.AdamW(model.parameters(), 5e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 5e-3, total_steps=args.steps + 1)
    count = 3 if args.quick else 4
    for _, show in training(args.steps):
        azimuths = AWAY + rng.uniform(-0.5, 0.5, count)
        batch = batch_of([vase(rng, size) for _ in range(count)], azimuths, args.device)
        optimiser.zero_grad()
        loss = model(batch.x, batch.truth)[1]
        loss.backward()
        optimiser.step(), schedule.step()
        show(loss.detach())
    after = [complete(model, one.x) for one in scans]
    first, last = metrics_of(before, scans), metrics_of(after, scans)
    return Outcome(first, last, partial(draw, args, scans[0], after[0], last["mean IoU"]))


def main() -> None:
    args = parse(__doc__.splitlines()[0], "generation", steps=130, quick=16, public_steps=300)
    size, vases = (16, 1) if args.quick else (32, 8)
    over_seeds(args, partial(experiment, size=size, vases=vases), f"{vases} vase(s)")


if __name__ == "__main__":
    main()
