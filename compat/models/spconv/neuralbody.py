"""Neural Body's latent volume (spconv 1.2): codes of body vertices, dense at four scales."""

from __future__ import annotations

from typing import Any

import spconv

if not hasattr(spconv, "SubMConv3d"):  # 2.x keeps the same names one level down
    import spconv.pytorch as spconv
import torch
import torch.nn.functional as F
from torch import nn

from .blocks import BatchNorm, zyx

VERTICES = 6890


def convs(count: int, c_in: int, c_out: int, indice_key: str) -> Any:
    """Submanifold layers without bias, each with norm and ReLU."""
    layers: list[nn.Module] = []
    for i in range(count):
        layer = spconv.SubMConv3d(c_in if i == 0 else c_out, c_out, 3, bias=False, indice_key=indice_key)
        layers += [layer, BatchNorm(c_out), nn.ReLU()]
    return spconv.SparseSequential(*layers)


def stride_conv(c_in: int, c_out: int, indice_key: str) -> Any:
    return spconv.SparseSequential(
        spconv.SparseConv3d(c_in, c_out, 3, 2, padding=1, bias=False, indice_key=indice_key),
        BatchNorm(c_out),
        nn.ReLU(),
    )


class SparseConvNet(nn.Module):
    """Dense volumes [B, C, Z, Y, X] of strides 2, 4, 8, 16."""

    def __init__(self) -> None:
        super().__init__()
        self.conv0 = convs(2, 16, 16, "subm0")
        widths = (16, 32, 64, 128, 128)
        for i, (c_in, c_out, count) in enumerate(zip(widths[:-1], widths[1:], (2, 3, 3, 3), strict=True)):
            setattr(self, f"down{i}", stride_conv(c_in, c_out, f"down{i}"))
            setattr(self, f"conv{i + 1}", convs(count, c_out, c_out, f"subm{i + 1}"))

    def forward(self, x: Any) -> list[torch.Tensor]:
        net, volumes = self.conv0(x), []
        for i in range(4):
            net = getattr(self, f"conv{i + 1}")(getattr(self, f"down{i}")(net))
            volumes.append(net.dense())
        return volumes


class NeuralBody(nn.Module):
    """Features of query points, read from the volumes and run through the density layers."""

    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Embedding(VERTICES, 16)
        self.xyzc_net = SparseConvNet()
        self.fc_0 = nn.Conv1d(352, 256, 1)
        self.alpha_fc = nn.Conv1d(256, 1, 1)

    def forward(
        self, vertex: torch.Tensor, coord: torch.Tensor, out_sh: list[int], batch_size: int, grid_coords: torch.Tensor
    ) -> torch.Tensor:
        code = self.c(vertex)
        x = spconv.SparseConvTensor(code, coord, out_sh, batch_size)
        volumes = self.xyzc_net(x)
        where = grid_coords[:, None, None].to(code.dtype)
        features = [F.grid_sample(volume, where, padding_mode="zeros", align_corners=True) for volume in volumes]
        features = torch.cat(features, dim=1).flatten(2)
        return self.alpha_fc(F.relu(self.fc_0(features)))


def build() -> nn.Module:
    return NeuralBody()


def batch(scene: Any, device: Any, dtype: torch.dtype) -> tuple:
    """The voxels of each item as a body's vertices; the grid rounded up to a multiple of 32."""
    coord = zyx(scene, device)
    out_sh = [-(-(int(size) + 1) // 32) * 32 for size in coord[:, 1:].max(0).values]
    vertex = torch.arange(len(coord), device=device) % VERTICES
    rng = torch.Generator().manual_seed(0)
    queries = torch.rand(scene.batch_size, 256, 3, generator=rng) * 2 - 1
    return vertex, coord, out_sh, scene.batch_size, queries.to(device)
