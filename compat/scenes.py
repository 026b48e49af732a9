"""Synthetic inputs of the matrix, with the grids, voxel counts and surfaces of public data sets."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import numpy.typing as npt
import torch

from . import surfaces

__all__ = ["PRESETS", "SIZES", "Preset", "Scene", "make"]

SIZES = ("tiny", "small", "full")
_SMALL = 2400  # voxels of a small scene, all batch items together
_PATCHES = 3  # places per batch item from which a small scene takes its voxels

Voxels = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class Preset:
    """What a data set looks like after voxelisation.

    grid: extents (X, Y, Z) in voxels; voxel_size: edge lengths, metres; kind: which surfaces of
    `compat.surfaces`; batch_size: that of size "full"; options: arguments of the surfaces.
    """

    grid: tuple[int, ...]
    voxel_size: tuple[float, ...]
    kind: str
    batch_size: int
    options: dict[str, float] = dataclasses.field(default_factory=dict)


PRESETS = {
    "kitti": Preset((1408, 1600, 41), (0.05, 0.05, 0.1), "street", 4, {"ahead": 0, "low": -3}),
    "nuscenes075": Preset((1440, 1440, 41), (0.075, 0.075, 0.2), "street", 4, {"low": -5, "azimuths": 4200}),
    "waymo": Preset((1504, 1504, 41), (0.1, 0.1, 0.15), "street", 2, {"low": -2, "azimuths": 11000}),
    "semantickitti": Preset((2000, 2000, 100), (0.05, 0.05, 0.05), "street", 2, {"low": -2.5, "azimuths": 2600}),
    "scannet02": Preset((400, 400, 150), (0.02,) * 3, "room", 4, {"width": 6, "depth": 5}),
    "fcaf01": Preset((800, 800, 300), (0.01,) * 3, "room", 8, {"width": 2.6, "depth": 2.4, "points": 1e5}),
    "slat": Preset((64, 64, 64), (1 / 64,) * 3, "shell", 1, {"radius": 27, "layers": 2}),
    "vae1024": Preset((1024, 1024, 1024), (1 / 1024,) * 3, "shell", 1, {"radius": 390}),
    "codec": Preset((1024, 1024, 1024), (1.0,) * 3, "shell", 1, {"radius": 190}),
    "lartpc": Preset((768, 768, 768), (0.003,) * 3, "tracks", 4, {"count": 120, "length": 500}),
    "tiny": Preset((128, 128, 128), (0.02,) * 3, "cluster", 64),
}


@dataclasses.dataclass(frozen=True)
class Scene:
    """One batch of voxelised point clouds, on the CPU.

    coords: int32 [N, 1 + D], columns (batch, x, y, z[, t]), distinct, batch items in order,
    inside `grid`; features: float32 [N, C]; points: float32 [N, D], a metric position inside
    each voxel; grid: extents (X, Y, Z[, T]); voxel_size: edge lengths, metres (t: 1).
    """

    coords: torch.Tensor
    features: torch.Tensor
    points: torch.Tensor
    grid: tuple[int, ...]
    voxel_size: tuple[float, ...]
    batch_size: int


def make(
    preset: str,
    size: str = "small",
    features: int = 4,
    dimension: int = 3,
    batch_size: int | None = None,
    seed: int = 0,
) -> Scene:
    """A scene of a preset; equal arguments give equal scenes.

    Args:
        preset: a name of `PRESETS`.
        size: "tiny" (2 to 50 voxels and one empty batch item), "small" (about 2,400 voxels in
            all: patches of the full scene, in the full grid), "full" (the preset's own count).
        features: channels C.
        dimension: 3; 2 leaves z out; 4 stacks scans of a moving sensor (t last); 6 pairs every
            voxel with one of a displaced copy, as registration does.
        batch_size: batch items; by default 3 for tiny, 2 for small, the preset's for full.
        seed: chooses scene, features and row order.

    Raises:
        ValueError: unknown preset, size or dimension.
    """
    if preset not in PRESETS or size not in SIZES or dimension not in (2, 3, 4, 6):
        raise ValueError(
            f"got preset {preset!r}, size {size!r}, dimension {dimension}; expected one of "
            f"{', '.join(PRESETS)}; {', '.join(SIZES)}; 2, 3, 4 or 6."
        )
    facts = PRESETS[preset]
    batch_size = _batch_size(facts, size) if batch_size is None else batch_size
    grid, voxel_size = _extents(facts, size, dimension)
    items = []
    for item in range(batch_size):
        rng = np.random.default_rng((seed, item))
        voxels = _item(facts, size, dimension, batch_size, item, seed, rng)
        voxels = _unique(_lift(voxels, facts, grid, rng), grid)
        items.append(np.insert(rng.permutation(voxels), 0, item, axis=1))
    coords = np.concatenate(items)
    return _scene(coords, grid, voxel_size, batch_size, features, seed)


def _batch_size(facts: Preset, size: str) -> int:
    if facts.kind == "cluster" and size != "tiny":
        return facts.batch_size
    return {"tiny": 3, "small": 2}.get(size, facts.batch_size)


def _extents(facts: Preset, size: str, dimension: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
    grid, edges = facts.grid, facts.voxel_size
    if dimension == 2:
        return grid[:2], edges[:2]
    if dimension == 4:
        return (*grid, 10 if size == "full" else 5), (*edges, 1.0)
    if dimension == 6:
        return grid * 2, edges * 2
    return grid, edges


def _item(
    facts: Preset, size: str, dimension: int, batch_size: int, item: int, seed: int, rng: np.random.Generator
) -> Voxels:
    """Voxels [n, 3] of one batch item, before any further axes."""
    if size == "tiny":
        empty = item == batch_size // 2 and batch_size > 1
        share = 50 // batch_size // (5 if dimension == 4 else 1)
        return surfaces.cluster(facts.grid, 0 if empty else max(share, 2), rng)
    if facts.kind == "cluster":
        return surfaces.cluster(facts.grid, int(rng.integers(2, 51)), rng)
    wanted = _SMALL // batch_size // (4 if dimension == 4 else 1)
    if facts.kind == "shell":
        # A small shell is a whole one, of few voxels: 1.5 voxels cover a unit of surface.
        small = {"radius": math.sqrt(wanted / 1.5 / 4 / math.pi)}
        options = facts.options if size == "full" else small
        return _unique(surfaces.shell(facts.grid, rng, **options), facts.grid)
    if facts.kind == "tracks":
        few = {"count": 6, "length": wanted / 10}
        options = facts.options if size == "full" else few
        return _unique(surfaces.tracks(facts.grid, rng, **options), facts.grid)
    scene_seed = 1000 * seed + item
    draw = surfaces.street if facts.kind == "street" else surfaces.room
    voxels = _unique(draw(facts.grid, facts.voxel_size, scene_seed, **facts.options), facts.grid)
    return voxels if size == "full" else _patches(voxels, wanted)


def _patches(voxels: Voxels, wanted: int) -> Voxels:
    """The voxels around the busiest places: those with walls and objects, not bare ground."""
    column = voxels[:, 0] // 32 * 100_000 + voxels[:, 1] // 32
    places, counts = np.unique(column, return_counts=True)
    chosen = np.zeros(len(voxels), bool)
    for place in places[np.argsort(-counts, kind="stable")[:: max(len(places) // 16, 1)]][:_PATCHES]:
        center = voxels[column == place].mean(0)
        distance = ((voxels - center) ** 2).sum(1)
        chosen[np.argsort(distance, kind="stable")[: wanted // _PATCHES]] = True
    return voxels[chosen]


def _lift(voxels: Voxels, facts: Preset, grid: tuple[int, ...], rng: np.random.Generator) -> Voxels:
    """The voxels with the axes that `grid` asks for."""
    if len(grid) == 4:  # the sensor moves on by half a metre per scan and misses a fifth
        scans = []
        for t in range(grid[3]):
            seen = voxels[rng.random(len(voxels)) < 0.8]
            moved = seen - [round(0.5 * t / facts.voxel_size[0]) % facts.grid[0], 0, 0]
            scans.append(np.insert(np.where(moved < 0, 0, moved), 3, t, axis=1))
        return np.concatenate(scans)
    if len(grid) == 6:
        partner = voxels + [5, -3, 2] + rng.integers(-1, 2, voxels.shape)
        return np.concatenate([voxels, np.clip(partner, 0, np.array(facts.grid) - 1)], 1)
    return voxels[:, : len(grid)]


def _unique(voxels: Voxels, grid: tuple[int, ...]) -> Voxels:
    """The distinct voxels inside the grid, in row-major order."""
    inside = ((voxels >= 0) & (voxels < np.array(grid))).all(1)
    keys = np.ravel_multi_index(tuple(voxels[inside].T), grid)
    return np.stack(np.unravel_index(np.unique(keys), grid), 1).astype(np.int64)


def _scene(
    coords: Voxels, grid: tuple[int, ...], voxel_size: tuple[float, ...], batch_size: int, channels: int, seed: int
) -> Scene:
    """Attach positions, and features that vary smoothly over the scene plus noise."""
    rng = torch.Generator().manual_seed(seed)
    sites = torch.from_numpy(coords).int().contiguous()
    within = torch.rand(len(sites), len(grid), generator=rng) * 0.999
    points = (sites[:, 1:] + within) * torch.tensor(voxel_size)
    waves = torch.randn(len(grid), channels, generator=rng) * 0.15
    phase = torch.rand(channels, generator=rng) * 2 * math.pi
    smooth = torch.sin(sites[:, 1:].float() @ waves + phase)
    noise = torch.randn(len(sites), channels, generator=rng)
    return Scene(sites, smooth + 0.5 * noise, points, grid, voxel_size, batch_size)
