"""A learned lossless codec of voxels in the API of torchsparse, which is the argument `ts`.

The architecture, the names of the parameters and the stream are those of RENO (You et al., CVPR
2025; MIT licence), whose published weights it loads. A level says of every cell, in one byte, which
of its eight children are occupied; the network predicts the bytes of a level from the next coarser
one, in two halves, and an arithmetic coder writes them. Encoder and decoder run the same network
over the same voxels in different orders, so all depends on equal bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

SYMBOLS = 16
"""Of half a byte."""
_FEWEST = 64  # rows below which a level is written as it is
_CHILDREN = [[n & 1, n >> 1 & 1, n >> 2] for n in range(8)]  # x, y, z; child n is bit n

Level = tuple[torch.Tensor, torch.Tensor]
"""(cells int32 [N, 4], their occupancy int64 [N])."""


class Residual(nn.Module):
    """Two convolutions and a skip."""

    def __init__(self, ts: Any, width: int, kernel_size: int) -> None:
        super().__init__()
        self.conv0 = ts.nn.Conv3d(width, width, kernel_size)
        self.conv1 = ts.nn.Conv3d(width, width, kernel_size)
        self.relu = ts.nn.ReLU(True)

    def forward(self, x: Any) -> Any:
        return self.relu(self.conv1(self.relu(self.conv0(x))) + x)


class Occupancy(nn.Module):
    """Voxels to cells of twice their size: a convolution of ones adds up the bits of the children.

    Voxels may repeat: a look-up finds one of them.
    """

    def __init__(self, ts: Any) -> None:
        super().__init__()
        config = ts.nn.functional.conv_config.get_default_conv_config().copy()
        config.kmap_mode = "hashmap"  # keeps the cells at the far ends of the scan
        self.conv = ts.nn.Conv3d(1, 1, 2, stride=2, config=config)
        self.conv.kernel.requires_grad_(False).fill_(1.0)

    def forward(self, x: Any) -> Any:
        x.feats = (1 << child_of(x.coords)).float().unsqueeze(1)
        return self.conv(x)


class Position(nn.Module):
    """Adds what tells the eight children of a cell apart."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.target_res_embedding = nn.Embedding(8, width)

    def forward(self, feats: torch.Tensor, coords: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = self.target_res_embedding(child_of(coords))
        return feats + embedded


def child_of(coords: torch.Tensor) -> torch.Tensor:
    """int64 [N]: which child of its cell each voxel [b, x, y, z] is."""
    x, y, z = (coords[:, 1:].long() & 1).unbind(1)
    return x + 2 * y + 4 * z


def occupied_children(coords: torch.Tensor, codes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(the occupied children int32 [M, 4] of cells, the cell of each), by z, then y, then x."""
    cells, children = (codes[:, None] >> torch.arange(8, device=codes.device) & 1).nonzero().t()
    steps = torch.tensor(_CHILDREN, dtype=torch.int32, device=coords.device)
    voxels = coords.index_select(0, cells)
    voxels[:, 1:] = 2 * voxels[:, 1:] + steps.index_select(0, children)
    order = canonical(voxels)
    return voxels.index_select(0, order), cells.index_select(0, order)


def canonical(coords: torch.Tensor) -> torch.Tensor:
    """int64 [N]: the order in which voxels are written: by batch item, z, y, x."""
    order = torch.arange(len(coords), device=coords.device)
    for column in (1, 2, 3, 0):
        values = coords[:, column].index_select(0, order)
        order = order.index_select(0, torch.sort(values, stable=True).indices)
    return order


class OccupancyCodec(nn.Module):
    """Probabilities of the occupancy of a level, given the next coarser one."""

    def __init__(self, ts: Any, width: int = 32, kernel_size: int = 3) -> None:
        super().__init__()
        self._tensor = ts.SparseTensor

        def trunk() -> nn.Sequential:
            first = ts.nn.Conv3d(width, width, kernel_size)
            blocks = (Residual(ts, width, kernel_size) for _ in range(2))
            return nn.Sequential(first, ts.nn.ReLU(True), *blocks)

        def head() -> nn.Sequential:
            last = nn.Linear(width, SYMBOLS)
            return nn.Sequential(nn.Linear(width, width), nn.ReLU(True), last, nn.Softmax(dim=-1))

        self.prior_embedding = nn.Embedding(256, width)
        self.prior_resnet = trunk()
        self.target_embedding = Position(width)
        self.target_resnet = trunk()
        self.pred_head_s0 = head()
        self.pred_head_s1_emb = nn.Embedding(SYMBOLS, width)
        self.pred_head_s1 = head()
        self.fog = Occupancy(ts)

    def levels(self, voxels: torch.Tensor) -> list[Level]:
        """The cells above voxels int32 [N, 4], which may repeat, from the coarsest level on."""
        coarser: list[Level] = []
        x = self._tensor(feats=voxels.new_ones((len(voxels), 1)).float(), coords=voxels)
        while not coarser or len(x.coords) >= _FEWEST:
            x = self.fog(x)
            coarser.append((x.coords, x.feats[:, 0].round().long()))
        return coarser[::-1]

    def expand(self, coords: torch.Tensor, codes: torch.Tensor) -> Level:
        """(the occupied children of cells in `canonical` order, features [M, width] of each)."""
        prior = self._tensor(feats=self.prior_embedding(codes), coords=coords)
        feats = self.prior_resnet(prior).feats
        voxels, cells = occupied_children(coords, codes)
        placed = self.target_embedding(feats.index_select(0, cells), voxels)
        return voxels, self.target_resnet(self._tensor(feats=placed, coords=voxels)).feats

    def low(self, feats: torch.Tensor) -> torch.Tensor:
        """Probabilities [M, 16] of the four lower bits of each child's byte."""
        probabilities: torch.Tensor = self.pred_head_s0(feats)
        return probabilities

    def high(self, feats: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
        """Those of the four upper bits, given the lower ones, int64 [M]."""
        probabilities: torch.Tensor = self.pred_head_s1(feats + self.pred_head_s1_emb(low))
        return probabilities
