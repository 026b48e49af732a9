"""Small networks of every framework, of any width, and scenes of any size for them."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.clouds import cloud

__all__ = ["FRAMEWORKS", "Scene", "features_of", "network", "scene", "tensor_of"]

FRAMEWORKS = ("spconv", "torchsparse", "minkowski")


@dataclasses.dataclass
class Scene:
    """coords int32 [N, 4] (batch, x, y, z), x [N, C] on one device."""

    coords: torch.Tensor
    x: torch.Tensor
    shape: tuple[int, int, int]
    batch_size: int


def scene(seed: int, channels: int, device: str, largest: int = 14, full: bool = False) -> Scene:
    """A scene of a shape, batch size and density of its own; full: the largest there is."""
    draw = random.Random(seed)
    shape = (largest,) * 3 if full else tuple(draw.randint(3, largest) for _ in range(3))
    batch_size = 3 if full else draw.randint(1, 3)
    share = 0.5 if full else draw.choice((0.02, 0.1, 0.25, 0.5))
    coords = cloud(shape, batch_size, share, seed)
    if not len(coords):
        coords = torch.zeros((1, 4), dtype=torch.int32)
    x = torch.randn(len(coords), channels, generator=torch.Generator().manual_seed(seed))
    return Scene(coords.to(device), x.to(device), shape, batch_size)  # type: ignore[arg-type]


def _spconv(c_in: int, c: int) -> nn.Module:
    import spconv.pytorch as spconv

    return spconv.SparseSequential(
        spconv.SubMConv3d(c_in, c, 3, indice_key="same"),
        nn.ReLU(),
        spconv.SparseConv3d(c, 2 * c, 2, 2, padding=1, indice_key="down"),
        nn.ReLU(),
        spconv.SparseMaxPool3d(2, 1, padding=1),
        spconv.SparseConvTranspose3d(2 * c, c, 2, 1, padding=1),
        spconv.SparseConv3d(c, c, 2, 1, padding=1, indice_key="coarse"),
        spconv.SparseInverseConv3d(c, c_in, 2, indice_key="coarse"),
    )


def _torchsparse(c_in: int, c: int) -> nn.Module:
    from torchsparse import nn as spnn

    return nn.Sequential(
        spnn.Conv3d(c_in, c, 3),
        spnn.ReLU(True),
        spnn.Conv3d(c, 2 * c, 2, stride=2),
        spnn.ReLU(True),
        spnn.Conv3d(2 * c, 2 * c, 3, stride=2),
        spnn.Conv3d(2 * c, c, 3, stride=2, transposed=True),
        spnn.Conv3d(c, c_in, 2, stride=2, transposed=True),
    )


def _minkowski(c_in: int, c: int) -> nn.Module:
    import MinkowskiEngine as ME

    return nn.Sequential(
        ME.MinkowskiConvolution(c_in, c, kernel_size=3, dimension=3),
        ME.MinkowskiReLU(),
        ME.MinkowskiConvolution(c, 2 * c, kernel_size=2, stride=2, dimension=3),
        ME.MinkowskiReLU(),
        ME.MinkowskiMaxPooling(kernel_size=2, stride=2, dimension=3),
        ME.MinkowskiGenerativeConvolutionTranspose(2 * c, c, kernel_size=2, stride=2, dimension=3),
        ME.MinkowskiConvolutionTranspose(c, c_in, kernel_size=2, stride=2, dimension=3),
    )


_BUILD: dict[str, Callable[[int, int], nn.Module]] = {
    "spconv": _spconv,
    "torchsparse": _torchsparse,
    "minkowski": _minkowski,
}


def network(framework: str, c_in: int, c: int, device: str, layers: int | None = None) -> nn.Module:
    """Down and up again: submanifold, strided, pooled, generative or inverse layers; the first
    `layers` of them."""
    made = _BUILD[framework](c_in, c)
    if layers is not None:
        made = type(made)(*list(made.children())[:layers])
    return made.to(device)


def tensor_of(framework: str, scene: Scene, x: torch.Tensor) -> Any:
    """The framework's sparse tensor of features `x` at the scene's coordinates."""
    if framework == "spconv":
        import spconv.pytorch as spconv

        return spconv.SparseConvTensor(x, scene.coords, list(scene.shape), scene.batch_size)
    if framework == "torchsparse":
        from torchsparse import SparseTensor

        return SparseTensor(x, scene.coords)
    import MinkowskiEngine as ME

    return ME.SparseTensor(x, scene.coords)


def features_of(out: Any) -> torch.Tensor:
    """The features of a framework's sparse tensor."""
    return out.features if hasattr(out, "features") else out.F
