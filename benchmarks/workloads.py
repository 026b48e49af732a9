"""Inputs of the benchmarks: scans given by path, the built-in street, shells and sheets.

| source | what it is |
|---|---|
| `street`, `street:0.2` | the demo's ray-cast street, at 5 cm or the given voxel size in metres |
| `shell:RES` | a spherical shell about 1.25 voxels thick on a RES^3 grid (FlexGEMM's workload) |
| `sheet:N` | a rolling surface of exactly N voxels, for curves over the number of voxels |
| a path | `.npz` with `coords` [N, 3] and `feats`; or points: what the demo's `load_points` reads |
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

VOXEL_SIZE = 0.05  # metres, for points


@dataclasses.dataclass(frozen=True)
class Scan:
    """One input.

    Attributes:
        name: for tables.
        coords: int32 [N, 4], (batch, x, y, z).
        feats: float32 [N, 4].
        shape: cells in x, y, z.
        batch_size: batch items.
    """

    name: str
    coords: torch.Tensor
    feats: torch.Tensor
    shape: tuple[int, int, int]
    batch_size: int

    def to(self, device: str | torch.device) -> Scan:
        return dataclasses.replace(self, coords=self.coords.to(device), feats=self.feats.to(device))

    def zyx(self) -> tuple[torch.Tensor, tuple[int, ...]]:
        """Coordinates and shape with the axes reversed: what SECOND takes."""
        return self.coords[:, [0, 3, 2, 1]].contiguous(), self.shape[::-1]


def scene_name(source: str, batch: int = 1) -> str:
    """How tables call a source: no folders, no suffix."""
    if "+" in source:
        name = "+".join(scene_name(one) for one in source.split("+"))
        return name if batch == 1 else f"{name}_x{batch}"
    built_in = source.partition(":")[0] in ("street", "shell", "sheet")
    name = source.replace(":", "_") if built_in else Path(source).name.partition(".")[0]
    return name if batch == 1 else f"{name}_x{batch}"


def load(source: str, batch: int = 1, voxel_size: float = VOXEL_SIZE, device: str | torch.device = "cpu") -> Scan:
    """Read or make an input.

    Args:
        source: see the table above.
        batch: items; each is a mirror image of the scan, so that each has another row order.
        voxel_size: metres, for files that hold points.

    Raises:
        SparseBridgeError: the file cannot be read; says why.
        ValueError: a shell or sheet without a usable number.
    """
    kind, _, number = source.partition(":")
    name = scene_name(source, batch)
    if kind == "street":
        from sparse_bridge.tools.demo.scene import street_scan

        cells, feats = _voxelize(street_scan(), float(number or VOXEL_SIZE))
    elif kind == "shell":
        return shell(int(number), device)
    elif kind == "sheet":
        cells, feats = _sheet(int(number))
    elif source.endswith(".npz") and "coords" in (archive := np.load(source)):
        cells, feats = archive["coords"], archive["feats"]
    else:
        from sparse_bridge.tools.demo.points import load_points

        cells, feats = _voxelize(load_points(source).points, voxel_size)
    return _batched(name, cells, feats, batch).to(device)


def _voxelize(points: np.ndarray, size: float) -> tuple[np.ndarray, np.ndarray]:
    """Cells [V, 3] and the first point of each [V, F], in the order of the points [N, F]."""
    cells = np.floor((points[:, :3] - points[:, :3].min(0)) / size).astype(np.int64)
    extent = cells.max(0) + 1
    key = (cells[:, 0] * extent[1] + cells[:, 1]) * extent[2] + cells[:, 2]
    first = np.sort(np.unique(key, return_index=True)[1])
    return cells[first], points[first]


def _batched(name: str, cells: np.ndarray, feats: np.ndarray, batch: int) -> Scan:
    base = torch.from_numpy(np.ascontiguousarray(cells, dtype=np.int32))
    values = torch.zeros(len(base), 4)
    width = min(4, feats.shape[1])
    values[:, :width] = torch.from_numpy(feats[:, :width].astype(np.float32))
    # Room for strided layers, in a multiple of what the networks divide by.
    x, y, z = (math.ceil((int(top) + 17) / 32) * 32 for top in base.max(0).values)
    items = []
    for item in range(batch):
        mirrored = base.clone()
        for axis, extent in enumerate((x, y)):
            if item >> axis & 1:
                mirrored[:, axis] = extent - 1 - mirrored[:, axis]
        column = torch.full((len(base), 1), item, dtype=torch.int32)
        items.append(torch.cat([column, mirrored], 1))
    coords = torch.cat(items).contiguous()
    return Scan(name, coords, values.repeat(batch, 1), (x, y, z), batch)


def shell(res: int, device: str | torch.device = "cpu") -> Scan:
    """A spherical shell on a res^3 grid; exact integer arithmetic, so equal on every device."""
    line = (2 * torch.arange(res, device=device, dtype=torch.int64) + 1 - res) ** 2
    outer, inner = res**2, max(2 * res - 5, 0) ** 2  # squared diameters; the inner one times 4
    found = []
    for x in range(res):
        square = line[x] + line[:, None] + line[None, :]
        cells = ((square <= outer) & (4 * square >= inner)).nonzero().int()
        found.append(torch.cat([cells.new_tensor([[0, x]]).expand(len(cells), 2), cells], 1))
    coords = torch.cat(found).contiguous()
    feats = torch.ones(len(coords), 4, device=device)
    return Scan(scene_name(f"shell:{res}"), coords, feats, (res, res, res), 1)


def _sheet(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """One voxel per column of a square, on a surface of slope 1 at most, row after row."""
    side = math.ceil(math.sqrt(rows))
    x, y = np.divmod(np.arange(rows, dtype=np.int32), side)
    z = np.rint(20 + 8 * np.sin(x / 11) + 7 * np.cos(y / 9)).astype(np.int32)
    feats = np.stack([x / side, y / side, z / 40, np.ones(rows)], 1)
    return np.stack([x, y, z], 1), feats


def stream(scans: Sequence[Scan], batch: int = 1, fixed: bool = False) -> Iterator[Scan]:
    """Inputs as a data loader gives them, without end and the same in every process: new tensors,
    another crop, other rows; the scans (on their device) take turns.

    fixed: every input has its scan's shape, as detectors have it. Otherwise the shape follows from
    the data, as segmentation code computes it: largest coordinate + 96.
    """
    random = np.random.default_rng(0)
    for number in itertools.count():
        scan = scans[number % len(scans)]
        items = [_crop(scan, random, fixed) for _ in range(batch)]
        columns = [coords.new_full((len(coords), 1), i) for i, (coords, _) in enumerate(items)]
        coords = torch.cat([torch.cat([b, c], 1) for b, (c, _) in zip(columns, items, strict=True)])
        shape = scan.shape if fixed else tuple((coords[:, 1:].amax(0) + 96).tolist())
        feats = torch.cat([feats for _, feats in items])
        yield Scan(scan.name, coords.contiguous(), feats, shape, batch)


def _crop(scan: Scan, random: np.random.Generator, fixed: bool) -> tuple[torch.Tensor, ...]:
    """int32 [M, 3] and its features: 60 to 100 % of one axis, 85 to 100 % of the rows there, every
    other time mirrored."""
    extent = scan.coords[:, 1:].amax(0).tolist()
    axis, keep = int(random.integers(0, 2)), random.uniform(0.6, 1.0)
    start = int(random.integers(0, max(1, int(extent[axis] * (1 - keep))) + 1))
    line = scan.coords[:, 1 + axis]
    inside = (line >= start) & (line < start + int(extent[axis] * keep))
    kept = torch.from_numpy(random.random(len(line)) < random.uniform(0.85, 1))
    inside &= kept.to(line.device)
    coords = scan.coords[inside, 1:].clone()
    if random.integers(0, 2):
        coords[:, 0] = extent[0] - coords[:, 0]
    return coords if fixed else coords - coords.amin(0), scan.feats[inside].clone()


def pair_count(scan: Scan) -> int:
    """Pairs (input row, output row) of a 3x3x3 submanifold layer: its multiply-adds per channel
    pair."""
    extent = [size + 2 for size in scan.shape]
    item, x, y, z = scan.coords.long().unbind(1)
    key = ((item * extent[0] + x + 1) * extent[1] + y + 1) * extent[2] + z + 1
    ordered = key.sort().values
    steps = [(i * extent[1] + j) * extent[2] + k for i in (-1, 0, 1) for j in (-1, 0, 1) for k in (-1, 0, 1)]
    found = 0
    for step in steps[14:]:  # the other half mirrors it
        wanted = ordered + step
        place = torch.searchsorted(ordered, wanted).clamp_(max=len(ordered) - 1)
        found += int((ordered[place] == wanted).sum())
    return len(ordered) + 2 * found
