"""Encoders of two published detectors, layer by layer, as they are deployed: tensors in and out."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def with_statistics(net: nn.Module, seed: int = 0) -> nn.Module:
    """In eval mode, with norms as of a trained network: none is the identity."""
    generator = torch.Generator().manual_seed(seed)
    for norm in net.modules():
        if isinstance(norm, nn.modules.batchnorm._BatchNorm):
            norm.running_mean.uniform_(-0.2, 0.2, generator=generator)
            norm.running_var.uniform_(0.5, 2, generator=generator)
            if norm.affine:
                norm.weight.data.uniform_(0.5, 1.5, generator=generator)
                norm.bias.data.uniform_(-0.2, 0.2, generator=generator)
    return net.eval()


def _norm(width: int) -> nn.BatchNorm1d:
    return nn.BatchNorm1d(width, eps=1e-3, momentum=0.01)


def basic_block(sp: Any, width: int, key: str | None, bias: bool) -> nn.Module:
    """Two submanifold layers with norms, and their input added before the last ReLU."""

    class SparseBasicBlock(sp.SparseModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            layer = {"kernel_size": 3, "padding": 1, "bias": bias, "indice_key": key}
            self.conv1, self.bn1 = sp.SubMConv3d(width, width, **layer), _norm(width)
            self.conv2, self.bn2 = sp.SubMConv3d(width, width, **layer), _norm(width)
            self.relu = nn.ReLU()

        def forward(self, x: Any) -> Any:
            y = self.conv1(x)
            y = y.replace_feature(self.relu(self.bn1(y.features)))
            y = self.conv2(y)
            y = y.replace_feature(self.bn2(y.features))
            return y.replace_feature(self.relu(y.features + x.features))

    return SparseBasicBlock()


def _unit(sp: Any, conv: nn.Module, width: int) -> nn.Module:
    unit: nn.Module = sp.SparseSequential(conv, _norm(width), nn.ReLU())
    return unit


class VoxelResBackBone8x(nn.Module):
    """OpenPCDet's: voxel features and coordinates -> bird's-eye view, and the stages' features."""

    def __init__(self, sp: Any, grid: tuple[int, int, int], channels: int = 4) -> None:
        super().__init__()
        self._sp, self._grid = sp, list(grid)
        stem = sp.SubMConv3d(channels, 16, 3, padding=1, bias=False, indice_key="subm1")
        self.conv_input = _unit(sp, stem, 16)
        stages, before = [self._blocks(16, 1)], 16
        for number, (width, padding) in enumerate([(32, 1), (64, 1), (128, (0, 1, 1))], 2):
            down = sp.SparseConv3d(
                before, width, 3, stride=2, padding=padding, bias=False, indice_key=f"spconv{number}"
            )
            stages.append(sp.SparseSequential(_unit(sp, down, width), self._blocks(width, number)))
            before = width
        self.stages = nn.ModuleList(stages)
        last = sp.SparseConv3d(128, 128, (3, 1, 1), stride=(2, 1, 1), bias=False, indice_key="spconv_down2")
        self.conv_out = _unit(sp, last, 128)

    def _blocks(self, width: int, number: int) -> Any:
        key = f"res{number}"
        return self._sp.SparseSequential(*(basic_block(self._sp, width, key, True) for _ in "ab"))

    def forward(self, features: torch.Tensor, coords: torch.Tensor) -> list[torch.Tensor]:
        x = self.conv_input(self._sp.SparseConvTensor(features, coords, self._grid, 1))
        kept = []
        for stage in self.stages:
            x = stage(x)
            kept.append(x.features)
        return [self.conv_out(x).dense().flatten(1, 2), *kept]


class SparseEncoder(nn.Module):
    """BEVFusion's: axes x, y, z; no layer of a block has a key."""

    WIDTHS = (16, 16, 32), (32, 32, 64), (64, 64, 128), (128, 128)
    PADDINGS = (1, 1, (1, 1, 0))

    def __init__(self, sp: Any, grid: tuple[int, int, int], channels: int = 5) -> None:
        super().__init__()
        self._sp, self._grid = sp, list(grid)
        stem = sp.SubMConv3d(channels, 16, 3, padding=1, bias=False, indice_key="subm1")
        self.conv_input = _unit(sp, stem, 16)
        layers: list[nn.Module] = []
        for number, widths in enumerate(self.WIDTHS):
            layers += [basic_block(sp, width, None, False) for width in widths[:2]]
            if len(widths) == 3:
                down = sp.SparseConv3d(
                    widths[1],
                    widths[2],
                    3,
                    stride=2,
                    padding=self.PADDINGS[number],
                    bias=False,
                    indice_key=f"spconv{number + 1}",
                )
                layers.append(_unit(sp, down, widths[2]))
        self.encoder_layers = sp.SparseSequential(*layers)
        last = sp.SparseConv3d(128, 128, (1, 1, 3), stride=(1, 1, 2), bias=False, indice_key="spconv_down2")
        self.conv_out = _unit(sp, last, 128)

    def forward(self, features: torch.Tensor, coords: torch.Tensor) -> torch.Tensor:
        x = self.conv_input(self._sp.SparseConvTensor(features, coords, self._grid, 1))
        dense = self.conv_out(self.encoder_layers(x)).dense()
        return dense.permute(0, 1, 4, 2, 3).flatten(1, 2)
