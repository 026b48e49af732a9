"""One small network per way into the engine: build(), inputs and results as plain tensors.

`run(points, device)` gives the output rows and the gradients of every parameter and of the input.
All frameworks compute on the same cloud: `coords` int32 [N, 4] (batch, x, y, z), `x` [N, 4].
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import nn

from sparse_bridge.core import functional as sparse

SHAPE = (16, 16, 16)


def cloud(seed: int, rows: int = 300) -> tuple[torch.Tensor, torch.Tensor]:
    """Coordinates [N, 4] int32 of two batch items, sorted, each once; features [N, 4]. The
    networks take up to four items."""
    generator = torch.Generator().manual_seed(seed)
    low, high = torch.zeros(4, dtype=torch.long), torch.tensor([2, *SHAPE])
    coords = (torch.rand(rows, 4, generator=generator) * (high - low)).long()
    coords = torch.unique(coords, dim=0).int()
    return coords, torch.randn(len(coords), 4, generator=generator)


class Functional(nn.Module):
    """The engine without a framework."""

    def __init__(self) -> None:
        super().__init__()
        self.same = nn.Parameter(torch.randn(27, 4, 8) * 0.1)
        self.down = nn.Parameter(torch.randn(8, 8, 8) * 0.1)
        self.up = nn.Parameter(torch.randn(8, 8, 8) * 0.1)

    def forward(self, coords: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        voxels = sparse.coordinate_map(coords, spatial_shape=SHAPE, batch_size=4)
        same = sparse.submanifold(voxels, sparse.kernel_offsets((3, 3, 3)))
        pair = sparse.kernel_offsets((2, 2, 2), padding=0)
        _, down = sparse.strided(voxels, pair, stride=2)
        x = sparse.conv(x, self.same, None, same).relu()
        y = sparse.conv(x, self.down, None, down).relu()
        return sparse.conv(y, self.up, None, sparse.inverse(down))


class Spconv(nn.Module):
    def __init__(self) -> None:
        import spconv.pytorch as spconv

        super().__init__()
        self.net = spconv.SparseSequential(
            spconv.SubMConv3d(4, 8, 3, indice_key="same"),
            nn.ReLU(),
            spconv.SparseConv3d(8, 8, 2, 2, indice_key="down"),
            nn.ReLU(),
            spconv.SparseInverseConv3d(8, 8, 2, indice_key="down"),
            spconv.SubMConv3d(8, 8, 3, indice_key="same"),
        )

    def forward(self, coords: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        import spconv.pytorch as spconv

        return self.net(spconv.SparseConvTensor(x, coords, list(SHAPE), 4)).features


class Torchsparse(nn.Module):
    def __init__(self) -> None:
        from torchsparse import nn as spnn

        super().__init__()
        self.net = nn.Sequential(
            spnn.Conv3d(4, 8, 3),
            spnn.ReLU(True),
            spnn.Conv3d(8, 8, 3, stride=2),
            spnn.ReLU(True),
            spnn.Conv3d(8, 8, 3, stride=2, transposed=True),
        )

    def forward(self, coords: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        from torchsparse import SparseTensor

        return self.net(SparseTensor(x, coords)).F


class Minkowski(nn.Module):
    def __init__(self) -> None:
        import MinkowskiEngine as ME

        super().__init__()
        self.net = nn.Sequential(
            ME.MinkowskiConvolution(4, 8, kernel_size=3, dimension=3),
            ME.MinkowskiReLU(),
            ME.MinkowskiConvolution(8, 8, kernel_size=2, stride=2, dimension=3),
            ME.MinkowskiReLU(),
            ME.MinkowskiConvolutionTranspose(8, 8, kernel_size=2, stride=2, dimension=3),
        )

    def forward(self, coords: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        import MinkowskiEngine as ME

        return self.net(ME.SparseTensor(x, coords)).F


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "functional": Functional,
    "spconv": Spconv,
    "torchsparse": Torchsparse,
    "minkowski": Minkowski,
}


def run(
    network: nn.Module, points: tuple[torch.Tensor, torch.Tensor], device: torch.device | str
) -> list[torch.Tensor]:
    """Output, input gradient and parameter gradients of a copy of `network`, on `device`."""
    network = copy.deepcopy(network).to(device)
    coords, x = (part.to(device) for part in points)
    x.requires_grad_()
    y = network(coords, x)
    weight = torch.linspace(-1, 1, y.numel(), device=y.device).view_as(y)
    (y * weight).sum().backward()
    return [y.detach(), x.grad, *(parameter.grad for parameter in network.parameters())]
