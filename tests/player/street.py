"""Scenes of a street for networks of `zoo`, and networks over them."""

from __future__ import annotations

import functools

import torch

from sparse_bridge import settings
from sparse_bridge.export.player import stand_in
from sparse_bridge.export.player.record import record
from sparse_bridge.tools.demo.voxels import street_voxels

from . import zoo

ROWS, SCENES = 160_000, 40  # of the street; its middle has fewer rows


@functools.cache
def middle():
    """(coordinates, grid, batch items) of the middle of the street."""
    coords, (z, y, x), n_items = street_voxels(ROWS)
    grid = (z, y // 64 * 16, x // 64 * 16)
    coords = coords - torch.tensor([0, 0, 3 * y // 8, 3 * x // 8], dtype=torch.int32)
    return coords[((coords >= 0) & (coords < torch.tensor([n_items, *grid]))).all(1)], grid, n_items


def scenes_for(own_grid, dtype):
    """(features, coordinates) of scenes, the largest first: all rows, and parts of them of any size. own_grid: of a
    network, perhaps with the height last."""
    coords, grid, _ = middle()
    if tuple(own_grid) != tuple(grid):
        coords = coords[:, [0, 2, 3, 1]]
    generator, scenes = torch.Generator().manual_seed(0), []
    for i in range(SCENES):
        n_rows = len(coords) if i == 0 else int(len(coords) * (0.2 + 0.8 * i / SCENES))
        rows = torch.randperm(len(coords), generator=generator)[:n_rows]
        features = torch.randn(n_rows, 4, generator=generator).to(dtype)
        scenes.append((features, coords[rows].contiguous()))
    return scenes


def recorded(name, dtype, target, compute_units, wide=True):
    """The program of a network, in a process of its own or not, with tiles by rule, as packages have them."""
    stand_in.COMPUTE_UNITS = compute_units
    _, grid, n_items = middle()
    with zoo.network(name, wide, grid, n_items) as own, settings.override(tune="off"), torch.no_grad():
        scene = scenes_for(own.grid, dtype)[0]
        return record(own.model.to(dtype), own.inputs(*scene), len(scene[0]), target)
