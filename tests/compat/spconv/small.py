"""Small scenes, and model files run on them."""

from __future__ import annotations

import importlib

import torch

from compat import scenes


def module_of(name):
    return importlib.import_module(f"compat.models.spconv.{name}")


def blob(grid, features, rows=160, batch_size=2, seed=0):
    """A scene of two crowded corners, so that deep levels still have neighbours."""
    generator = torch.Generator().manual_seed(seed)
    near = torch.tensor([min(extent, 8) for extent in grid])
    items = []
    for item in range(batch_size):
        cells = torch.randperm(int(near.prod()), generator=generator)[: rows // batch_size]
        sites = torch.stack(torch.unravel_index(cells, tuple(near.tolist())), 1)
        sites[::2] += torch.tensor(grid) - near
        sites = torch.unique(sites, dim=0)
        items.append(torch.nn.functional.pad(sites, (1, 0), value=item))
    coords = torch.cat(items).int()
    size = (0.1,) * len(grid)
    points = (coords[:, 1:] + 0.5) * torch.tensor(size)
    values = torch.randn(len(coords), features, generator=generator)
    return scenes.Scene(coords, values, points, tuple(grid), size, batch_size)


def run(name, scene, dtype=torch.float32, train=True, **options):
    """(module, network, result) of a model file on a scene."""
    module = module_of(name)
    torch.manual_seed(0)
    network = module.build(**options).to(dtype).train(train)
    return module, network, network(*module.batch(scene, "cpu", dtype))
