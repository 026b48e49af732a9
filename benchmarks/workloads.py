"""Inputs of the benchmarks: recorded scans given by path, the built-in street scene, spherical
shells."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import torch


@dataclasses.dataclass(frozen=True)
class Scan:
    """name; coords int32 [N, 4] (batch, x, y, z); feats float32 [N, 4]; shape: cells in x, y, z;
    batch items."""

    name: str
    coords: torch.Tensor
    feats: torch.Tensor
    shape: tuple[int, int, int]
    batch_size: int

    def to(self, device: str) -> Scan:
        return dataclasses.replace(self, coords=self.coords.to(device), feats=self.feats.to(device))

    def zyx(self) -> tuple[torch.Tensor, tuple[int, ...]]:
        """(coords with the axes reversed, shape reversed): what SECOND takes."""
        return self.coords[:, [0, 3, 2, 1]].contiguous(), self.shape[::-1]


def _scan(name: str, voxels: np.ndarray, feats: np.ndarray, batch_size: int) -> Scan:
    """Batch items are mirror images of the scan, so that each has another row order."""
    base = torch.from_numpy(voxels.astype(np.int32))
    values = torch.zeros(len(base), 4)
    width = min(4, feats.shape[1])
    values[:, :width] = torch.from_numpy(feats[:, :width].astype(np.float32))
    shape = tuple((int(s) + 17 + 31) // 32 * 32 for s in base.max(0).values)
    items = []
    for item in range(batch_size):
        cells = base.clone()
        for axis in (0, 1):
            if item >> axis & 1:
                cells[:, axis] = shape[axis] - 1 - cells[:, axis]
        items.append(torch.cat([torch.full((len(cells), 1), item, dtype=torch.int32), cells], 1))
    return Scan(
        name, torch.cat(items).contiguous(), values.repeat(batch_size, 1), shape, batch_size
    )


def load(spec: str, batch_size: int = 1) -> Scan:
    """`street`, `shell:RES`, or the path of an .npz with integer `coords` [N, 3] and `feats` [N,
    F]."""
    if spec == "street":
        return street(batch_size=batch_size)
    if spec.startswith("shell:"):
        return shell(int(spec.split(":")[1]))
    with np.load(spec) as data:
        return _scan(Path(spec).stem, data["coords"], data["feats"], batch_size)


def street(voxel_size: float = 0.05, batch_size: int = 1) -> Scan:
    """The demo's ray-cast street at `voxel_size` metres, one row per voxel in scan order."""
    from sparse_bridge.demo.scene import street_scan

    points = street_scan()
    cells = np.floor((points[:, :3] - points[:, :3].min(0)) / voxel_size).astype(np.int64)
    _, first = np.unique(cells, axis=0, return_index=True)
    first.sort()
    return _scan(f"street_{round(voxel_size * 100):03d}cm", cells[first], points[first], batch_size)


def shell(res: int) -> Scan:
    """A spherical shell about 1.25 voxels thick on a res^3 grid (the workload of the FlexGEMM
    benchmark)."""
    line = (torch.arange(res, dtype=torch.float32) - res / 2 + 0.5) ** 2
    found = []
    for x in range(res):
        radius = (line[x] + line[:, None] + line[None, :]).sqrt()
        cells = ((radius <= res / 2) & (radius >= res / 2 - 1.25)).nonzero().int()
        found.append(torch.cat([cells.new_tensor([[0, x]]).expand(len(cells), 2), cells], 1))
    coords = torch.cat(found).contiguous()
    return Scan(f"shell{res}", coords, torch.ones(len(coords), 4), (res, res, res), 1)
