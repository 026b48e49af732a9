"""What scenes are made of: a street seen by a lidar, a room, closed shells, tracks, clusters."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

__all__ = ["cluster", "room", "shell", "street", "tracks"]

Voxels = npt.NDArray[np.int64]


def street(
    grid: tuple[int, ...],
    voxel_size: tuple[float, ...],
    seed: int,
    low: float,
    ahead: float | None = None,
    azimuths: float = 2000,
) -> Voxels:
    """Voxels [n, 3], repeated and out of the grid where they fall so, of a ray-cast street.

    Args:
        grid: extents (X, Y, Z).
        voxel_size: metres.
        seed: which street.
        low: height of the grid's floor over the sensor, metres.
        ahead: x at which the grid begins, metres; None centres it on the sensor.
        azimuths: firings of the sensor per revolution.
    """
    from sparse_bridge.tools.demo.scene import street_scan

    size = np.array(voxel_size)
    start = -0.5 * np.array(grid) * size
    start[2] = low
    if ahead is not None:
        start[0] = ahead
    points = street_scan(seed, int(azimuths))[:, :3]
    return np.floor((points - start) / size).astype(np.int64)


def room(
    grid: tuple[int, ...],
    voxel_size: tuple[float, ...],
    seed: int,
    width: float,
    depth: float,
    points: float | None = None,
) -> Voxels:
    """Voxels [n, 3] of a furnished room as a hand-held scanner sees it, with holes.

    Args:
        grid: extents (X, Y, Z), the room stands in its middle.
        voxel_size: metres.
        seed: which room.
        width, depth: of the room, metres.
        points: samples over all surfaces; None for four to a voxel face.
    """
    rng = np.random.default_rng((seed, 7))
    high = 2.4
    faces = [((0.0, 0.0, 0.0), (width, 0.0, 0.0), (0.0, depth, 0.0))]
    faces.append(((0.0, 0.0, 0.0), (width, 0.0, 0.0), (0.0, 0.0, high)))
    faces.append(((0.0, 0.0, 0.0), (0.0, depth, 0.0), (0.0, 0.0, high)))
    for _ in range(int(width * depth / 2.5) + 2):
        size = rng.uniform((0.4, 0.4, 0.35), (1.6, 0.9, 1.3))
        corner = np.append(rng.uniform((0.1, 0.1), (width - 0.5, depth - 0.5)), 0.0)
        x, y, z = np.diag(np.minimum(size, (width, depth, high) - corner))
        faces += [(corner + z, x, y), (corner + y, x, z), (corner + x, y, z)]
    areas = np.array([math.sqrt((np.cross(u, v) ** 2).sum()) for _, u, v in faces])
    density = 4 / (voxel_size[0] * voxel_size[1]) if points is None else points / areas.sum()
    hits = [_patch(np.array(f), int(a * density), rng) for f, a in zip(faces, areas, strict=True)]
    cloud = np.concatenate(hits)
    cloud += rng.normal(0, 0.25 * voxel_size[0], cloud.shape)
    middle = (np.array(grid[:2]) * voxel_size[:2] - (width, depth)) / 2
    return np.floor((cloud + [*middle, 3 * voxel_size[2]]) / voxel_size).astype(np.int64)


def _patch(face: npt.NDArray[np.float64], count: int, rng: np.random.Generator) -> npt.NDArray[np.float64]:
    """Points [n, 3] on the parallelogram (corner, edge, edge), missing where nobody scanned."""
    corner, u, v = face
    at = rng.random((count, 2))
    missed = np.zeros(count, bool)
    for _ in range(4):
        missed |= ((at - rng.random(2)) ** 2).sum(1) < rng.uniform(0, 0.18) ** 2
    at = at[~missed]
    return corner + at[:, :1] * u + at[:, 1:] * v


def shell(grid: tuple[int, ...], rng: np.random.Generator, radius: float, layers: float = 1) -> Voxels:
    """Voxels [n, 3] of closed, uneven surfaces around the middle of the grid.

    Args:
        grid: extents (X, Y, Z).
        rng: shape and samples.
        radius: mean radius of the outermost, voxels; it varies by a sixth over the surface.
        layers: how many, each 0.7 times as wide as the one around it.
    """
    count = int(9 * 4 * math.pi * radius**2)
    # Directions spread evenly over the sphere: a Fibonacci spiral.
    height = 1 - (2 * np.arange(count) + 1) / count
    angle = np.arange(count) * (math.pi * (3 - math.sqrt(5)))
    ring = np.sqrt(1 - height**2)
    unit = np.stack([ring * np.cos(angle), ring * np.sin(angle), height], 1)
    bumps = np.zeros(count)
    for _ in range(4):
        bumps += np.sin(unit @ rng.normal(0, 2.2, 3) + rng.uniform(0, 2 * math.pi))
    outer = unit * (radius * (1 + 0.04 * bumps))[:, None]
    surfaces = [np.array(grid) / 2 + 0.7**layer * outer for layer in range(int(layers))]
    return np.floor(np.concatenate(surfaces)).astype(np.int64)


def tracks(grid: tuple[int, ...], rng: np.random.Generator, count: float, length: float) -> Voxels:
    """Voxels [n, 3], repeated, of charged particles that scatter as they cross the grid.

    Args:
        grid: extents (X, Y, Z).
        rng: where particles start, where they go.
        count: particles.
        length: the longest, voxels; the shortest has a quarter of it.
    """
    steps = 2 * int(length)  # half a voxel each
    shape = (int(count), steps, 3)
    turned = rng.normal(0, 1, (shape[0], 1, 3)) + np.cumsum(rng.normal(0, 0.03, shape), 1)
    unit = turned / np.linalg.norm(turned, axis=2, keepdims=True)
    start = rng.uniform(0.2, 0.8, (shape[0], 1, 3)) * np.array(grid)
    path = start + np.cumsum(0.5 * unit, 1) + rng.normal(0, 0.7, shape)  # charge diffuses
    lives = rng.uniform(0.25, 1, (shape[0], 1)) * steps > np.arange(steps)
    return np.floor(path[lives]).astype(np.int64)


def cluster(grid: tuple[int, ...], count: int, rng: np.random.Generator) -> Voxels:
    """Up to `count` (at least min(count, 2)) distinct neighbouring voxels [n, 3] anywhere."""
    side = np.minimum(max(2, math.ceil((3 * count) ** (1 / 3))), grid)
    corner = rng.integers(0, np.array(grid) - side + 1)
    cells = rng.permutation(int(side.prod()))[:count]
    return corner + np.stack(np.unravel_index(cells, tuple(side)), 1)
